"""The plan that a job starts with: the shape of Algorithm 1, reduced to the free capacity."""

from emberscale_brain.history.changes import JobSubmitted, PlanMade
from emberscale_brain.planner.room import Room, cut_to, least_of
from emberscale_brain.planner.types import ClusterCapacity, Explanation, PlanAction, PlannedShape, ShapeBounds
from emberscale_brain.service.acceptance import free_room, missing_room
from emberscale_brain.service.state import BrainState, Conditions
from emberscale_brain.warm_start import WarmStart


def first_plan(
    state: BrainState, conditions: Conditions, submitted: JobSubmitted, started: WarmStart, now: float
) -> PlanMade:
    """Returns the first plan of a job that the state does not know; pure."""
    free, whole = free_room(state, conditions, submitted.owner, now), conditions.capacity
    unused = Room(whole, conditions.quotas).left(submitted.owner)
    if cut_to(started.shape, submitted.bounds, unused, keep_memory=False) is None:
        least = least_of(started.shape, submitted.bounds, unused, keep_memory=False)
        reason = f"even the smallest shape exceeds what the job may have: {missing_room(least, unused, whole)}"
        planned = PlannedShape(None, PlanAction.REFUSE, reason, Explanation(similar=started.similar))
    else:
        planned = _as_far_as_there_is_room(started, submitted.bounds, free, whole)
    return PlanMade(submitted.job, submitted.last_plan + 1, now, "warm start", planned)


def _as_far_as_there_is_room(
    started: WarmStart, bounds: ShapeBounds, free: ClusterCapacity, whole: ClusterCapacity
) -> PlannedShape:
    """Cuts the shape of a warm start to the free capacity.

    Memory that similar jobs needed is kept; without similar jobs it is a guess, and cut like the rest. Even memory that
    was needed is cut to what the whole cluster has.
    """
    explanation = Explanation(similar=started.similar)
    known = bool(started.similar)
    possible = cut_to(started.shape, bounds, whole, keep_memory=False)
    shape = None if possible is None else cut_to(possible, bounds, free, keep_memory=known)
    if shape is None:
        least = least_of(possible or started.shape, bounds, free, keep_memory=known and possible is not None)
        missing = missing_room(least, free, whole)
        reason = f"waits for the next round of planning: {missing}, for no more than {least.describe()}"
        return PlannedShape(None, PlanAction.WAIT, reason, explanation)
    if shape == started.shape:
        return PlannedShape(shape, PlanAction.START, started.reason, explanation)
    missing = missing_room(started.shape, free, whole)
    return PlannedShape(
        shape, PlanAction.START, f"{started.reason}; cut to {shape.describe()}, since {missing}", explanation
    )
