"""Why jobs have the plans that they have."""

from dataclasses import replace

from emberscale_brain.planner.types import JobId, PlannedShape

_CHOICE = 3
"""Points of a front from which on there was something to choose from."""


class Reasons:
    """The reasons of the last round, and of the last with a wide choice: at a job's end no other shape pays off."""

    def __init__(self) -> None:
        self._latest: dict[JobId, PlannedShape] = {}
        self._chosen: dict[JobId, PlannedShape] = {}

    def give(self, job: JobId, planned: PlannedShape) -> None:
        """A round's reasons. A choice is wide if it has half the points of the one before, or more."""
        self._latest[job] = planned
        chosen, choice = self._chosen.get(job), len(planned.explanation.front)
        least = len(chosen.explanation.front) / 2 if chosen is not None and chosen.shape == planned.shape else 0
        if choice >= max(_CHOICE, least):
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
