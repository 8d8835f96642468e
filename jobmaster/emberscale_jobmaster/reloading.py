"""Partial recovery (CPR section 2.3): the successors of lost servers load the lost rows, all others keep theirs.

    WAIT -> FIND -> LOAD -> BARRIER -> SWITCH -> done
       another loss, a new master, a damaged checkpoint -> WAIT
       a barrier that fails -> LOAD, where nothing is left to load
       no sound checkpoint, too many lost samples, what cannot be finished -> the job rolls back

The barrier settles nothing: without the lost servers no worker can finish a batch. Instead, a successor counts as
applied what all survivors have applied. Its rows have forgotten the batches after the checkpoint. A batch that only
some survivors have applied is retried by its worker, and applied on the servers that lack it.

SWITCH is durable before any server adopts the new table, as in a move.
"""

from collections.abc import Mapping

from emberscale_api.checkpoint import ForgottenShare, is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.readable import duration_text
from emberscale_api.routing import PsAddress
from emberscale_jobmaster import parity, reshaping, retry
from emberscale_jobmaster.chains import Chain
from emberscale_jobmaster.effects import (
    CallServer,
    Effect,
    FindCheckpoint,
    HoldCall,
    PrepareCall,
    Reloaded,
    ServerRequest,
    SettleCall,
    SwitchCall,
)
from emberscale_jobmaster.events import AppliedReport, CheckpointFound, Prepared
from emberscale_jobmaster.figures import applied_batches, newest_flash
from emberscale_jobmaster.forgetting import contradicts, forgotten_by
from emberscale_jobmaster.losses import roll_back
from emberscale_jobmaster.operations import STORAGE, Reload, ReloadPhase, answered, asking_later
from emberscale_jobmaster.priority import PriorityRows
from emberscale_jobmaster.progress import fail
from emberscale_jobmaster.ranges import Applied, differing, minus, on_all
from emberscale_jobmaster.recovery import NO_SURVIVOR, too_much_lost
from emberscale_jobmaster.state import JobState, Routing

KIND = "Reload"
FIND_SECONDS = 60.0
LOAD_SECONDS = 180.0
"""How long a successor may load without any progress; before the first row it builds the model and compiles kernels."""
HOLD_SECONDS = 10.0
"""How long a survivor holds pushes without hearing more of the barrier."""
HELD_SECONDS = 30.0
"""How long it does so once it only waits for the switch: long enough for another master to take over."""
BARRIER_SECONDS = 15.0
UNREACHABLE = "CheckpointUnreachable"
ATTEMPTS = 3
"""The number of failed barriers, or of refused calls, at which the job rolls back."""
WAIT_SECONDS = 1.0
CALL_SECONDS = 8.0
AGAIN_SECONDS = 0.25
KEPT_SECONDS = 2.0
"""How often the master tells a ready server that the change of table is still wanted."""


def advance_if_due(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Looks for the checkpoint once the lost servers have successors; ends a reload that nobody needs any more."""
    operation = state.reload
    if operation is None and KIND in state.troubles:
        return state.untroubled(KIND)  # the job rolls back, or nobody was lost after all
    if operation is None or state.over:
        return state
    if operation.phase is not ReloadPhase.WAIT:
        return _waiting(state, operation) if _is_alone(state, operation) else state
    lost = tuple(server for server in state.routing.table.owners if not state.members.has(server))
    if not lost:  # the silent servers are back, and nothing has changed yet
        return replace(state.without(operation), routing=replace(state.routing, ready=True))
    if len(lost) == len(state.routing.table.owners):  # a server that was back is lost after all
        return roll_back(state, spec, operation.reason, NO_SURVIVOR)
    if state.rests(KIND, now) or any(_successor(state, server) is None for server in lost):
        return state
    found = replace(operation, phase=ReloadPhase.FIND, lost=lost, deadline=now + FIND_SECONDS)
    return state.asking(found, STORAGE)


def effects_of(state: JobState, operation: Reload, whom: int, serial: int) -> tuple[Effect, ...]:
    """Returns the call that the operation waits for."""
    if whom == STORAGE:
        return (FindCheckpoint(operation.id, serial, tuple(sorted(state.damaged)), newest_flash(state)),)
    server = next(one for one in operation.parties if one.index == whom)
    return (CallServer(operation.id, serial, server, _request(state, operation, server), CALL_SECONDS),)


def on_checkpoint_found(
    state: JobState, spec: TrainingJobSpec, operation: Reload, event: CheckpointFound, now: float
) -> JobState:
    """Has the successors load the checkpoint that was found, unless too much would be lost."""
    state, source = _refusing(state.untroubled(KIND), event.damaged), event.source
    if source is None or event.incompatible:
        return roll_back(state, spec, operation.reason, event.incompatible or "no checkpoint can be used")
    if state.checkpoint in state.damaged and not is_flash(source.checkpoint):
        # an older one, and nobody knows any more when it was taken
        state = replace(state, checkpoint=source.checkpoint, restored=source.restored, cut_at=0.0)
    saves = state.priority.over(source.checkpoint, state.routing.table.generation)
    operation = replace(answered(operation, STORAGE), source=source, priority=saves)
    if contradicts(state, {server.index for server in operation.lost}, source):
        why = f"checkpoint {source.checkpoint} has batches that these rows count as forgotten, or lacks others"
        return roll_back(state, spec, operation.reason, why)
    if why := _too_much(state, spec, operation, applied_batches(state, spec)):
        return roll_back(state, spec, operation.reason, why)
    table = state.routing.table
    servers = list(table.servers)
    for server in operation.lost:
        successor = _successor(state, server)
        if successor is None:
            return _waiting(state, operation)
        servers[server.index] = successor
    operation = replace(
        operation,
        phase=ReloadPhase.LOAD,
        number=state.next_barrier,
        table=replace(table, version=state.next_version, servers=tuple(servers)),
        deadline=now + LOAD_SECONDS,
    )
    state = replace(state, next_barrier=state.next_barrier + 1, next_version=state.next_version + 1)
    return state.asking(operation, *(server.index for server in operation.parties))


def on_prepared(state: JobState, operation: Reload, server: int, answer: Prepared, now: float) -> JobState:
    """Handles a successor's progress in loading, or a survivor's answer that it knows the next table."""
    before = operation.loaded.get(server, 0)
    gets_on = answer.loaded_bytes > before or (answer.done and server not in operation.done)
    if answer.problem:
        trouble = retry.failed_again(state.troubles.get(KIND), now, UNREACHABLE, f"ps-{server}: {answer.problem}")
        state = state.troubled(KIND, trouble)
    elif any(one.index == server for one in operation.successors) and gets_on:
        state = state.untroubled(KIND)
    operation = replace(
        answered(operation, server),
        loaded={**operation.loaded, server: max(answer.loaded_bytes, before)},
        deadline=now + LOAD_SECONDS if gets_on else operation.deadline,
    )
    if not answer.done:
        return state.asking(operation, server)
    operation = replace(operation, done=operation.done | {server})
    if len(operation.done) < len(operation.parties):
        return state.having(asking_later(operation, server, now + KEPT_SECONDS))
    holding = replace(
        operation,
        phase=ReloadPhase.BARRIER,
        done=frozenset(),
        barrier=state.next_barrier,
        held={},
        deadline=now + BARRIER_SECONDS,
        pending={},
        again_at={},
    )
    state = replace(state, next_barrier=state.next_barrier + 1)
    return state.asking(holding, *(one.index for one in operation.survivors))


def on_applied(
    state: JobState, spec: TrainingJobSpec, operation: Reload, server: int, answer: AppliedReport, now: float
) -> JobState:
    """Handles a survivor's answer that it holds pushes, or keeps holding them until the switch."""
    operation = answered(operation, server)
    if now >= operation.deadline:  # survivors may have let pushes through
        return _barrier_failed(state, spec, operation, "the barrier took too long", now)
    if server not in operation.held:
        operation = replace(operation, held={**operation.held, server: answer.applied})
        if len(operation.held) < len(operation.survivors):
            return state.having(operation)
        operation = replace(operation, deadline=now + BARRIER_SECONDS)
        return state.asking(operation, *operation.held)
    if difference := differing(operation.held[server], answer.applied):
        return _barrier_failed(state, spec, operation, f"ps-{server} applied {difference} in the barrier", now)
    operation = replace(operation, done=operation.done | {server})
    if len(operation.done) < len(operation.survivors):
        return state.having(operation)
    if not all(state.members.has(one) for one in operation.parties):
        return _waiting(state, operation)
    return _switching(state, spec, replace(operation, applied=on_all(list(operation.held.values()))))


def on_switched(
    state: JobState, spec: TrainingJobSpec, operation: Reload, server: int, now: float
) -> tuple[JobState, tuple[Effect, ...]]:
    """Handles a server's adoption of the new table. Training continues once all servers have adopted it."""
    operation = answered(operation, server)
    operation = replace(operation, done=operation.done | {server})
    if operation.table is None or len(operation.done) < len(operation.parties):
        return state.having(operation), ()
    lost = _forgotten(state, spec, operation, operation.applied)
    left = tuple(one for one in state.routing.left if state.members.keeps(one))
    state = replace(
        state.without(operation),
        routing=Routing(operation.table, True, left, state.routing.shares),
        forgotten=(*state.forgotten, lost),
    )
    if operation.source is not None and (bits := operation.source.weight_bits):
        state = replace(state, restores={**state.restores, bits: state.restores.get(bits, 0) + 1})
    seconds = max(0.0, now - operation.began_at)
    names = ", ".join(f"ps-{index}" for index in lost.servers)
    saves = f" with {lost.priority_saves} saves of priority rows" if lost.priority_saves else ""
    message = (
        f"{operation.reason}: {names} reloaded checkpoint {lost.checkpoint}{saves}, and no other server rolled back; "
        f"{lost.samples:,} samples are forgotten on {lost.share:.1%} of the rows, "
        f"portion of lost samples {state.pls:.4f} of {spec.fault_tolerance.allowed_pls:g}"
    )
    state = replace(state, reloads=state.reloads + 1)
    return reshaping.note_step(state, "RecoveredPartially", message, seconds), (Reloaded(lost, seconds),)


def on_server_failed(
    state: JobState, spec: TrainingJobSpec, operation: Reload, server: int, code: str, problem: str, now: float
) -> JobState:
    """Handles a failed call to a server."""
    if operation.phase is ReloadPhase.BARRIER:
        return _barrier_failed(state, spec, operation, f"ps-{server}: {problem}", now)
    if code in retry.PASSING_CODES:
        return state.having(asking_later(operation, server, now + AGAIN_SECONDS))
    if operation.phase is ReloadPhase.SWITCH:
        return roll_back(state, spec, operation.reason, f"ps-{server} refuses the switch: {problem}")
    if code == "INVALID_ARGUMENT":
        return fail(state, "ModelRefused", f"ps-{server}: {problem}")
    if code == "DATA_LOSS" and operation.priority:  # if the checkpoint itself is damaged, it will say so again
        return _waiting(replace(state, priority=PriorityRows()), operation)
    if code == "DATA_LOSS" and operation.source is not None:
        return _waiting(_refusing(state, {operation.source.checkpoint: problem}), operation)
    attempts = operation.attempts + 1
    if code == "FAILED_PRECONDITION" and attempts < ATTEMPTS:  # another process answers there, and will register
        return state.having(asking_later(replace(operation, attempts=attempts), server, now + KEPT_SECONDS))
    return roll_back(state, spec, operation.reason, f"ps-{server}: {problem}")


def on_storage_failed(state: JobState, operation: Reload, problem: str, now: float) -> JobState:
    """Tries an unreadable checkpoint folder again, since a roll-back needs it too; fails the job when patience ends."""
    trouble = retry.failed_again(state.troubles.get(KIND), now, UNREACHABLE, problem)
    if retry.exhausted(trouble, now):
        return fail(state, trouble.reason, trouble.message)
    return _waiting(state.troubled(KIND, trouble), operation)


def on_time_passed(state: JobState, spec: TrainingJobSpec, operation: Reload, now: float) -> JobState:
    """Repeats calls that are due, and gives up a phase without progress; never a switch, which may have happened."""
    if operation.phase is ReloadPhase.WAIT:
        return state
    if operation.phase is ReloadPhase.SWITCH:
        if gone := [one.index for one in operation.parties if not state.members.has(one)]:
            return roll_back(state, spec, operation.reason, f"ps-{gone[0]} is lost too, and may have switched")
    elif now >= operation.deadline:
        waiting = sorted({*operation.pending, *operation.again_at} - operation.done - {STORAGE})
        names = ", ".join(f"ps-{server}" for server in waiting)
        if operation.phase is ReloadPhase.FIND:
            limit = duration_text(FIND_SECONDS)
            problem = f"spec.checkpoint.uri ({spec.checkpoint.uri}) does not answer within {limit}"
            return on_storage_failed(state, operation, problem, now)
        if operation.phase is ReloadPhase.BARRIER:
            return _barrier_failed(state, spec, operation, f"{names} did not answer", now)
        trouble = state.troubles.get(KIND)
        if trouble is None:
            return roll_back(state, spec, operation.reason, f"{names} loaded nothing for {duration_text(LOAD_SECONDS)}")
        if retry.exhausted(trouble, now):
            return fail(state, trouble.reason, trouble.message)
        operation = replace(operation, deadline=now + AGAIN_SECONDS)  # the servers keep retrying the storage
        state = state.having(operation)
    return state.asking_due(operation, now)


def on_takeover(state: JobState, operation: Reload) -> JobState:
    """Finishes a switch under a new master, as a server may have switched; restarts any earlier phase."""
    if operation.phase is ReloadPhase.SWITCH:
        return state.asking(operation, *operation.pending, *operation.again_at)
    return _waiting(state, operation)


def _request(state: JobState, operation: Reload, server: PsAddress) -> ServerRequest:
    present, source = state.routing.table, operation.source
    assert operation.table is not None, "servers are asked from phase LOAD on"
    match operation.phase:
        case ReloadPhase.BARRIER if len(operation.held) < len(operation.survivors):
            return HoldCall(present.generation, present.version, operation.barrier, HOLD_SECONDS)
        case ReloadPhase.BARRIER:
            return SettleCall(present.generation, operation.barrier, HELD_SECONDS, {}, WAIT_SECONDS)
        case ReloadPhase.SWITCH:
            return SwitchCall(present.generation, operation.barrier, operation.number, operation.applied)
        case _:
            since = present.version if server in present.owners else 0
            checkpoint = source.checkpoint if source is not None else ""
            return PrepareCall(
                operation.number,
                since,
                operation.table,
                WAIT_SECONDS,
                checkpoint,
                priority=operation.priority,
                parity=parity.ordered(state, operation.table),
            )


def _switching(state: JobState, spec: TrainingJobSpec, operation: Reload) -> JobState:
    source = operation.source
    if operation.priority and differing(minus(state.priority.applied, operation.applied), {}):
        return _waiting(replace(state, priority=PriorityRows()), operation)
    foreign = differing(minus(source.restored.applied, operation.applied), {}) if source is not None else ""
    if foreign:
        why = f"the checkpoint holds {foreign}, which not all that kept their rows have applied"
        return roll_back(state, spec, operation.reason, why)
    if why := _too_much(state, spec, operation, operation.applied):
        return roll_back(state, spec, operation.reason, why)
    operation = replace(operation, phase=ReloadPhase.SWITCH, done=frozenset(), pending={}, again_at={})
    return state.asking(operation, *(server.index for server in operation.parties))


def _too_much(state: JobState, spec: TrainingJobSpec, operation: Reload, applied: Applied) -> str:
    """Explains why the reload would lose more than the job may lose, with `applied` on all survivors; else empty."""
    pls = state.pls + _forgotten(state, spec, operation, applied).pls
    return too_much_lost(pls, spec.fault_tolerance.allowed_pls)


def _forgotten(state: JobState, spec: TrainingJobSpec, operation: Reload, applied: Applied) -> ForgottenShare:
    """Returns the part of `applied` that the lost rows lack in the checkpoint."""
    assert operation.source is not None, "a checkpoint is found before anything is forgotten"
    lost = forgotten_by(state, spec, {server.index for server in operation.lost}, applied, operation.source)
    return lost.model_copy(update={"priority_saves": len(operation.priority)})


def _refusing(state: JobState, damaged: Mapping[str, str]) -> JobState:
    """Excludes `damaged` checkpoints, by id and problem, from loading; the next persistent one has all rows."""
    chain = state.chain if all(map(is_flash, damaged)) else Chain()
    return replace(state, damaged={**state.damaged, **damaged}, chain=chain)


def _barrier_failed(state: JobState, spec: TrainingJobSpec, operation: Reload, problem: str, now: float) -> JobState:
    """Begins another barrier, or rolls back once too many have failed."""
    if operation.attempts + 1 >= ATTEMPTS:
        return roll_back(state, spec, operation.reason, f"{ATTEMPTS} barriers failed, the last as {problem}")
    loaded = replace(
        operation,
        phase=ReloadPhase.LOAD,
        attempts=operation.attempts + 1,
        done=frozenset(),
        deadline=now + LOAD_SECONDS,
        pending={},
        again_at={server.index: now + AGAIN_SECONDS for server in operation.parties},
    )
    return state.having(loaded)


def _waiting(state: JobState, operation: Reload) -> JobState:
    """Restarts the operation; answers to calls under way no longer count."""
    before = operation
    return state.having(Reload(before.id, ReloadPhase.WAIT, before.reason, before.began_at, lost=before.lost))


def _is_alone(state: JobState, operation: Reload) -> bool:
    """Whether a successor was lost before the switch."""
    if operation.phase in (ReloadPhase.WAIT, ReloadPhase.SWITCH):
        return False
    return not all(state.members.has(server) for server in operation.successors)


def _successor(state: JobState, lost: PsAddress) -> PsAddress | None:
    """Returns the process that has replaced a lost server, or None."""
    return None if state.members.has(lost) else state.members.server(lost.index)
