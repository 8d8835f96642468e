"""Why jobs have the plans that they have."""

from dataclasses import replace

from emberscale_brain.planner.types import JobId, PlannedShape

_CHOICE = 3
"""Points of a front from which on there was something to choose from."""


class Reasons:
    """The reasons of the last round, and of the last with a choice: at its end no other shape pays off for a job."""

    def __init__(self) -> None:
        self._latest: dict[JobId, PlannedShape] = {}
        self._chosen: dict[JobId, PlannedShape] = {}

    def give(self, job: JobId, planned: PlannedShape) -> None:
        """A round's reasons."""
        self._latest[job] = planned
        if len(planned.explanation.front) >= _CHOICE:
            self._chosen[job] = planned

    def latest(self, job: JobId) -> PlannedShape | None:
        """Those of the last round; None before the first."""
        return self._latest.get(job)

    def end(self, job: JobId) -> PlannedShape | None:
        """What stays to be told of a job that is over: the last choice, with what was known in the end."""
        latest, chosen = self._latest.pop(job, None), self._chosen.pop(job, None)
        if latest is None or chosen is None or chosen.shape != latest.shape:
            return latest
        last = latest.explanation
        known = replace(chosen.explanation, fit=last.fit, memory=last.memory, fault_tolerance=last.fault_tolerance)
        return replace(chosen, explanation=known)
