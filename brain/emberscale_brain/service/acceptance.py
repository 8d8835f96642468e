"""Checks capacity, and rejects unacceptable plans, whichever planner made them; pure."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from emberscale_api.readable import bytes_text
from emberscale_api.shape import JobShape
from emberscale_brain.planner.room import ROUNDING, Room, quota_of
from emberscale_brain.planner.types import ClusterCapacity, JobId, PlannedShape
from emberscale_brain.service.state import BrainState, Conditions


class UnacceptablePlanError(Exception):
    """The round contains an impossible plan; the text says which."""


def free_room(state: BrainState, conditions: Conditions, owner: str, now: float) -> ClusterCapacity:
    """Returns the room for one more job of the owner, in total and for each process."""
    room = Room(conditions.capacity, conditions.quotas)
    for job, known in state.jobs.items():
        room.take(known.submitted.owner, state.view(job, now, conditions.adoption_seconds).current)
    return room.left(owner)


def missing_room(shape: JobShape, free: ClusterCapacity, whole: ClusterCapacity) -> str:
    """Explains why a shape does not fit into the free capacity."""
    if shape.cpu > free.cpu * (1 + ROUNDING):
        return f"{shape.cpu:g} cores are needed and {free.cpu:g} of {whole.cpu:g} are free"
    if shape.memory > free.memory:
        has = f"{bytes_text(free.memory)} of {bytes_text(whole.memory)}"
        return f"{bytes_text(shape.memory)} are needed and {has} are free"
    cores, memory = max(shape.worker_cpu, shape.ps_cpu), max(shape.worker_memory, shape.ps_memory)
    if cores > whole.largest_node_cpu:
        return f"{cores:g} cores are wanted for one process and the largest node has {whole.largest_node_cpu:g}"
    has = bytes_text(whole.largest_node_memory)
    return f"{bytes_text(memory)} are wanted for one process and the largest node has {has}"


def unacceptable(
    state: BrainState,
    conditions: Conditions,
    planned: Mapping[JobId, PlannedShape],
    shown: AbstractSet[JobId],
    now: float,
) -> str | None:
    """Names what is wrong with a round: a shape beyond its job's bounds or any node, or more than the capacity.

    Only jobs that the planner was `shown` count, since it knew no others. Their present shapes are never too large.
    """
    had, wanted = (Room(conditions.capacity, conditions.quotas) for _ in range(2))
    for job in shown & state.jobs.keys():
        submitted, view = state.jobs[job].submitted, state.view(job, now, conditions.adoption_seconds)
        shape = None if submitted.fixed or job not in planned else planned[job].shape
        shape = shape or view.current
        if shape is not None and shape != view.current:
            if not submitted.bounds.contains(shape):
                return f"{shape.describe()} for job {job} is beyond its bounds"
            if _beyond_nodes(shape, view.current, conditions.capacity):
                return f"{shape.describe()} for job {job}: no node is so large"
        had.take(submitted.owner, view.current)
        wanted.take(submitted.owner, shape)
    capacity = conditions.capacity
    problem = _too_much(wanted.taken, had.taken, capacity.cpu, capacity.memory, "in all")
    for owner in wanted.owners:
        quota = quota_of(owner, conditions.quotas)
        problem = problem or _too_much(
            wanted.taken_by(owner), had.taken_by(owner), quota.cpu, quota.memory, f"for the jobs of {owner}"
        )
    return problem


def beside_newcomers(
    state: BrainState,
    conditions: Conditions,
    planned: Mapping[JobId, PlannedShape],
    shown: AbstractSet[JobId],
    now: float,
) -> Mapping[JobId, PlannedShape]:
    """Returns the part of a round that still fits once jobs submitted meanwhile are counted; the rest waits."""
    if state.jobs.keys() <= shown:
        return planned
    room = Room(conditions.capacity, conditions.quotas)
    views = {job: state.view(job, now, conditions.adoption_seconds) for job in state.jobs}
    for view in views.values():
        room.take(view.owner, view.current)
    still = dict(planned)
    changes = [
        (job, one.shape or views[job].current, views[job])
        for job, one in planned.items()
        if job in views and not state.jobs[job].submitted.fixed
    ]
    for job, shape, view in sorted(changes, key=lambda change: _cpu(change[1]) - _cpu(change[2].current)):
        room.give_back(view.owner, view.current)
        if _grows(shape, view.current) and shape is not None and not room.fits(view.owner, shape):
            room.take(view.owner, view.current)
            del still[job]
        else:
            room.take(view.owner, shape)
    return still


def _too_much(
    wanted: tuple[float, float], had: tuple[float, float], cpu: float, memory: float, whose: str
) -> str | None:
    if wanted[0] > max(cpu, had[0]) * (1 + ROUNDING):
        return f"{wanted[0]:g} cores {whose}, of {cpu:g}"
    if wanted[1] > max(memory, had[1]):
        return f"{bytes_text(wanted[1])} {whose}, of {bytes_text(memory)}"
    return None


def _beyond_nodes(shape: JobShape, present: JobShape | None, capacity: ClusterCapacity) -> bool:
    cores, memory = capacity.largest_node_cpu, capacity.largest_node_memory
    if present is not None:
        cores = max(cores, present.worker_cpu, present.ps_cpu)
        memory = max(memory, present.worker_memory, present.ps_memory)
    return max(shape.worker_cpu, shape.ps_cpu) > cores or max(shape.worker_memory, shape.ps_memory) > memory


def _cpu(shape: JobShape | None) -> float:
    return 0.0 if shape is None else shape.cpu


def _grows(shape: JobShape | None, present: JobShape | None) -> bool:
    if shape is None or present is None:
        return shape is not None
    return shape.cpu > present.cpu or shape.memory > present.memory
