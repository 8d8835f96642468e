"""What becomes of a round of planning, job by job; pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from emberscale_brain.fault_tolerance.advice import FaultToleranceAdvice
from emberscale_brain.history.changes import JobSubmitted, PlanMade
from emberscale_brain.planner.types import JobId, PlannedShape
from emberscale_brain.service.acceptance import beside_newcomers, unacceptable
from emberscale_brain.service.state import BrainState, Conditions


class UnacceptablePlanError(Exception):
    """A round that plans what cannot be; the text says what."""


def acceptable(
    state: BrainState,
    conditions: Conditions,
    planned: Mapping[JobId, PlannedShape],
    shown: AbstractSet[JobId],
    now: float,
) -> Mapping[JobId, PlannedShape]:
    """What of a round may be adopted; `shown` are the jobs that the planner knew of. Raises UnacceptablePlanError."""
    problem = unacceptable(state, conditions, planned, shown, now)
    if problem is not None:
        raise UnacceptablePlanError(problem)
    return beside_newcomers(state, conditions, planned, shown, now)


@dataclass(frozen=True, slots=True)
class Adopted:
    """A job's part of a round: the reasons of now, and a new version where the shape is another."""

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
    """The plan of one job, with how it recovers best; a job that is fixed gets no plan."""
    if submitted.fixed or planned is None:
        return Adopted(None, None)
    planned = replace(planned, explanation=replace(planned.explanation, fault_tolerance=advice))
    if last is not None and last.planned.shape == planned.shape:
        return Adopted(planned, None)
    version = (submitted.last_plan if last is None else last.version) + 1
    return Adopted(planned, PlanMade(submitted.job, version, now, planner, planned))
