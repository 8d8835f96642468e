"""The plans in force: adopts rounds of planning job by job, and keeps the reasons for each job's plan."""

from dataclasses import dataclass, replace

from emberscale_api.shape import JobProfile
from emberscale_brain.fault_tolerance import FaultToleranceAdvice
from emberscale_brain.history.changes import JobSubmitted, PlanMade
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.types import JobId, PlannedShape


@dataclass(frozen=True, slots=True)
class Adopted:
    """A job's part of a round: the present reasons, and a new version if the shape has changed."""

    planned: PlannedShape | None
    change: PlanMade | None


def adopt_one(
    submitted: JobSubmitted,
    last: PlanMade | None,
    planned: PlannedShape | None,
    advice: FaultToleranceAdvice | None,
    planner: str,
    now: float,
) -> Adopted:
    """Adopts the plan of one job, with the advice on recovery; a fixed job gets no plan."""
    if submitted.fixed or planned is None:
        return Adopted(None, None)
    planned = replace(planned, explanation=replace(planned.explanation, fault_tolerance=advice))
    if last is not None and last.planned.shape == planned.shape:
        return Adopted(planned, None)
    version = (submitted.last_plan if last is None else last.version) + 1
    return Adopted(planned, PlanMade(submitted.job, version, now, planner, planned))


_CHOICE = 3
"""The fewest points of a front that offer a choice."""


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A job's plan in force.

    * `made`: None before the first plan is in force. `advice`: the latest advice on recovery.
    * `stale_because`: why the plan is older than it should be; empty while it is current.
    """

    job: JobId
    made: PlanMade | None
    advice: FaultToleranceAdvice | None = None
    stale_because: str = ""

    @property
    def version(self) -> int:
        """The plan's version; 0 before the first plan."""
        return self.made.version if self.made is not None else 0

    @classmethod
    def of(cls, plan: PlanMade) -> "PlanInForce":
        """Returns a plan with its own advice."""
        return cls(plan.job, plan, plan.planned.explanation.fault_tolerance)


@dataclass(frozen=True, slots=True)
class ExplainedPlan:
    """The numbers behind a plan; with `constants`, also the fit's prediction for every measured shape.

    `made` is the plan with present knowledge; None before the first plan.
    """

    plan: PlanInForce
    made: PlanMade | None
    earlier: tuple[PlanMade, ...]
    remaining_samples: int = 0
    profiles: tuple[JobProfile, ...] = ()
    constants: ModelConstants | None = None


class PlansInForce:
    """The plans in force, and their reasons: those of the last round, and of the last round with a wide choice.

    Near a job's end no other shape pays off, so the last round explains little about the job's shape. `stale_because`
    says why the plans are older than they should be; empty while they are current.
    """

    def __init__(self) -> None:
        self.stale_because = ""
        self._plans: dict[JobId, PlanInForce] = {}
        self._latest: dict[JobId, PlannedShape] = {}
        self._chosen: dict[JobId, PlannedShape] = {}

    def put(self, plan: PlanMade) -> None:
        """Puts a new version in force."""
        self._plans[plan.job] = PlanInForce.of(plan)
        self._note_reasons(plan.job, plan.planned)

    def keep(self, job: JobId, planned: PlannedShape | None, advice: FaultToleranceAdvice | None) -> None:
        """Keeps the version in force, with new reasons or advice; None: unchanged."""
        if planned is not None:
            self._note_reasons(job, planned)
        if advice is not None:
            self._plans[job] = replace(self._plan(job), advice=advice)

    def _note_reasons(self, job: JobId, planned: PlannedShape) -> None:
        """Keeps a round's reasons. A choice is wide if it has at least half the points of the last wide choice."""
        self._latest[job] = planned
        chosen, choice = self._chosen.get(job), len(planned.explanation.front)
        least = len(chosen.explanation.front) / 2 if chosen is not None and chosen.shape == planned.shape else 0
        if choice >= max(_CHOICE, least):
            self._chosen[job] = planned

    def plan(self, job: JobId) -> PlanInForce:
        """Returns the job's plan in force."""
        return replace(self._plan(job), stale_because=self.stale_because)

    def _plan(self, job: JobId) -> PlanInForce:
        return self._plans.get(job) or PlanInForce(job, None)

    def latest(self, job: JobId) -> PlannedShape | None:
        """Returns the last round's plan for the job; None before the first round."""
        return self._latest.get(job)

    def end(self, job: JobId) -> PlannedShape | None:
        """Forgets a job that is over; returns its last wide choice with the final knowledge, for explanations."""
        self._plans.pop(job, None)
        latest, chosen = self._latest.pop(job, None), self._chosen.pop(job, None)
        if latest is None or chosen is None or chosen.shape != latest.shape:
            return latest
        last = latest.explanation
        known = replace(chosen.explanation, fit=last.fit, memory=last.memory, fault_tolerance=last.fault_tolerance)
        return replace(chosen, explanation=known)


def refreshed(plan: PlanMade, latest: PlannedShape | None) -> PlanMade:
    """Returns the plan with the findings of the last round; the same object if there are none."""
    if latest is None or latest is plan.planned:
        return plan
    kept = plan.kept if latest.reason == plan.planned.reason else latest.reason
    return replace(plan, planned=replace(plan.planned, explanation=latest.explanation), kept=kept)


def with_reasons(plan: PlanMade | None, latest: PlannedShape | None) -> list[PlanMade]:
    """Returns a plan with its latest reasons, or nothing if they are the original ones."""
    if plan is None or (now := refreshed(plan, latest)) is plan:
        return []
    return [now]
