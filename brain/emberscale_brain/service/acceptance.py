"""What a plan must not do, whoever made it; pure."""

from collections.abc import Mapping

from emberscale_brain.planner.types import JobId, JobShape, PlannedShape
from emberscale_brain.service.state import BrainState, Conditions


def missing_room(state: BrainState, conditions: Conditions, shape: JobShape, now: float) -> str | None:
    """Why there is no room for one more job of this shape; None if there is."""
    taken = [state.view(job, now, conditions.settle_seconds).current for job in state.jobs]
    cpu = sum(other.cpu for other in taken if other is not None)
    memory = sum(other.memory for other in taken if other is not None)
    capacity = conditions.capacity
    if cpu + shape.cpu > capacity.cpu:
        return f"{shape.cpu:g} cores are wanted and {max(0.0, capacity.cpu - cpu):g} of {capacity.cpu:g} are free"
    if memory + shape.memory > capacity.memory:
        free = max(0, capacity.memory - memory) / 2**30
        return f"{shape.memory / 2**30:.1f} GiB are wanted and {free:.1f} GiB are free"
    return None


def unacceptable(
    state: BrainState, conditions: Conditions, planned: Mapping[JobId, PlannedShape], now: float
) -> str | None:
    """What is wrong with a round of planning: a shape beyond its job's bounds, or more than the cluster has."""
    cpu, present = 0.0, 0.0
    for job, known in state.jobs.items():
        view = state.view(job, now, conditions.settle_seconds)
        had = 0.0 if view.current is None else view.current.cpu
        shape = planned[job].shape if job in planned else view.current
        if shape is not None and shape != view.current and not known.submitted.bounds.contains(shape):
            return f"{shape.describe()} for job {job} is beyond its bounds"
        cpu += 0.0 if shape is None else shape.cpu
        present += had
    if cpu > max(conditions.capacity.cpu, present) * (1 + 1e-9):
        return f"{cpu:g} cores in all, of {conditions.capacity.cpu:g}"
    return None
