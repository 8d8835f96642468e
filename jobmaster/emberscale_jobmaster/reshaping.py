"""A change of shape as people follow it: planned, started, copied, held, switched, ended, each step with its duration.

The steps are part of the plan, so that the operator and the command line report each of them once.
"""

from collections.abc import Iterable

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role, slot_name
from emberscale_api.job.running import ScalingStep
from emberscale_api.readable import bytes_text
from emberscale_jobmaster.figures import wanted_sizes
from emberscale_jobmaster.sizes import Reshaping, RoleShapes, Scaling, describe_change
from emberscale_jobmaster.state import JobState, with_scaling

KEPT_STEPS = 12
"""A change has six steps; a drain and the return of the share have ten."""


def with_step(scaling: Scaling, reason: str, message: str, seconds: float) -> Scaling:
    """Adds a step; drops the oldest ones."""
    number = max(scaling.next_step, scaling.steps[-1].number + 1 if scaling.steps else 1)
    step = ScalingStep(number, reason, message, round(max(0.0, seconds), 3))
    return replace(scaling, steps=(*scaling.steps, step)[-KEPT_STEPS:], next_step=number + 1)


def note_step(state: JobState, reason: str, message: str, seconds: float) -> JobState:
    """Notes a step, which is reported to people once."""
    return with_scaling(state, with_step(state.scaling, reason, message, seconds))


def begin(scaling: Scaling, before: RoleShapes, after: RoleShapes, why: str, now: float) -> Scaling:
    """Begins a change of shape, which replaces one that has not ended."""
    change = describe_change(before, after)
    return replace(
        with_step(scaling, "PlannedScaling", f"{change}: {why}", 0.0), reshaping=Reshaping(before, after, now)
    )


def note_copied(state: JobState, servers: int, copied_bytes: int, rounds: int, seconds: float) -> JobState:
    """Notes that the new owners have all rows but the last changes."""
    message = f"{bytes_text(copied_bytes)} of rows went to {servers} parameter servers in {rounds} rounds"
    scaling = state.scaling
    if scaling.steps and scaling.steps[-1].reason == "CopiedRows":  # a barrier failed, and more was copied
        *earlier, last = scaling.steps
        step = replace(last, message=message, seconds=round(seconds, 3))
        return with_scaling(state, replace(scaling, steps=(*earlier, step)))
    return note_step(state, "CopiedRows", message, seconds)


def note_switched(state: JobState, servers: int, version: int, paused: float, seconds: float) -> JobState:
    """Notes for how long pushes waited, and that the new routing table is in force."""
    held = with_step(state.scaling, "HeldPushes", "pushes waited for their new owners", paused)
    message = f"rows are on {servers} parameter servers, by routing table {version}"
    return with_scaling(state, with_step(held, "SwitchedServers", message, seconds))


def give_up(scaling: Scaling, message: str, now: float) -> Scaling:
    """Notes why the number of parameter servers stays; waits for no new member any more."""
    change = scaling.reshaping
    if change is None:
        return with_step(scaling, "GaveUpScaling", message, 0.0)
    told = with_step(scaling, "GaveUpScaling", message, now - change.began_at)
    return replace(told, reshaping=replace(change, joined=frozenset({Role.PS, Role.WORKER})))


def note_members(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Notes when all new members have joined, and later when all superfluous ones have ended."""
    change = state.scaling.reshaping
    if change is None or state.over:
        return state
    scaling = state.scaling
    moves = scaling.target is not None or state.move is not None
    if moves and len(change.joined) == 2:
        return state
    wanted = wanted_sizes(state, spec)
    seconds = now - change.began_at
    for role in (Role.PS, Role.WORKER):
        if role in change.joined:
            continue
        new = [member for member in _beyond(wanted, change.before) if member[0] is role]
        if any(state.members.slot(*member).process is None for member in new):
            continue
        change = replace(change, joined=change.joined | {role})
        scaling = replace(scaling, reshaping=change)
        if new:
            scaling = with_step(scaling, "StartedMembers", f"{_names(new)} joined", seconds)
    state = with_scaling(state, scaling)
    if moves or len(change.joined) < 2:
        return state
    superfluous = _beyond(change.before, wanted) + _beyond(change.after, wanted)
    if any(state.members.slot(role, index).process is not None for role, index in superfluous):
        return state
    scaling = replace(scaling, reshaping=None)
    gone = [(role, index) for role, index in superfluous if state.members.slot(role, index).registrations]
    if gone and scaling.steps[-1].reason != "GaveUpScaling":  # keeps the reason for giving up visible
        scaling = with_step(scaling, "EndedMembers", f"{_names(gone)} ended", seconds)
    return with_scaling(state, scaling)


def _beyond(more: RoleShapes, less: RoleShapes) -> list[tuple[Role, int]]:
    """Returns the members of one shape that the other lacks."""
    servers, workers = range(less.ps.replicas, more.ps.replicas), range(less.worker.replicas, more.worker.replicas)
    return [*((Role.PS, index) for index in servers), *((Role.WORKER, index) for index in workers)]


def _names(members: Iterable[tuple[Role, int]]) -> str:
    return ", ".join(dict.fromkeys(slot_name(role, index) for role, index in members))
