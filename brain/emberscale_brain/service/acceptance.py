"""What there is room for, and what a plan must not do, whoever made it; pure."""

from collections.abc import Mapping

from emberscale_brain.planner.room import Room
from emberscale_brain.planner.types import GIB, ClusterCapacity, JobId, JobShape, PlannedShape
from emberscale_brain.service.state import BrainState, Conditions


def free_room(state: BrainState, conditions: Conditions, owner: str, now: float) -> ClusterCapacity:
    """What one more job of the owner may have beside all others, in all and for each process."""
    room = Room(conditions.capacity, conditions.quotas)
    for job, known in state.jobs.items():
        room.take(known.submitted.owner, state.view(job, now, conditions.settle_seconds).current)
    return room.left(owner)


def missing_room(shape: JobShape, free: ClusterCapacity, whole: ClusterCapacity) -> str:
    """Why a shape that does not fit into what is free does not."""
    if shape.cpu > free.cpu:
        return f"{shape.cpu:g} cores are wanted and {free.cpu:g} of {whole.cpu:g} are free"
    if shape.memory > free.memory:
        return (
            f"{shape.memory / GIB:.1f} GiB are wanted and {free.memory / GIB:.1f} of {whole.memory / GIB:.1f} are free"
        )
    cores, memory = max(shape.worker_cpu, shape.ps_cpu), max(shape.worker_memory, shape.ps_memory)
    if cores > whole.largest_node_cpu:
        return f"{cores:g} cores are wanted for one process and the largest node has {whole.largest_node_cpu:g}"
    has = whole.largest_node_memory / GIB
    return f"{memory / GIB:.1f} GiB are wanted for one process and the largest node has {has:.1f} GiB"


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
