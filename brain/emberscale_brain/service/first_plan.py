"""The plan that a job starts with: Algorithm 1's shape, if there is room for it now; pure."""

from emberscale_brain.history.changes import JobSubmitted, PlanMade
from emberscale_brain.planner.types import Explanation, PlanAction, PlannedShape
from emberscale_brain.preferences import PlannerPreferences
from emberscale_brain.service.acceptance import missing_room
from emberscale_brain.service.state import BrainState, Conditions
from emberscale_brain.warm_start.similarity import HistoryIndex, NewJob
from emberscale_brain.warm_start.start import warm_start


def make_first_plan(
    submitted: JobSubmitted,
    state: BrainState,
    conditions: Conditions,
    index: HistoryIndex,
    preferences: PlannerPreferences,
    now: float,
) -> PlanMade:
    """`index` is of the history of `state`."""
    started = warm_start(
        NewJob(submitted.owner, submitted.metadata),
        submitted.bounds,
        index,
        preferences.neighbours,
        preferences.smoothing,
    )
    missing = missing_room(state, conditions, started.shape, now)
    planned = PlannedShape(
        shape=started.shape if missing is None else None,
        action=PlanAction.START if missing is None else PlanAction.WAIT,
        reason=started.reason if missing is None else f"waits for the next round of planning: {missing}",
        explanation=Explanation(similar=started.similar),
    )
    return PlanMade(submitted.job, submitted.last_plan + 1, now, "warm start", planned)
