"""Takes a checkpoint: servers take a snapshot within a barrier and write it to files; the manifest is written last.

`due_checkpoints` begins it.

    BARRIER -> SAVE -> WRITE -> done
       a server that fails or disagrees -> the barrier is released, the files are removed, another begins later
       a manifest that cannot be written -> retried: the files are there
       a later one that is complete first -> given up: it would take the job back
       failing for too long -> a final checkpoint fails the job, a suspension rests at the previous checkpoint

The next master undoes a barrier, and continues the phases after it.
"""

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import CheckpointCost
from emberscale_api.readable import duration_text
from emberscale_api.routing import PsAddress
from emberscale_jobmaster import flash, retry
from emberscale_jobmaster.barrier import BarrierPhase, VoidError
from emberscale_jobmaster.chains import COSTS_KEPT, Chain
from emberscale_jobmaster.effects import (
    CallServer,
    CheckpointTaken,
    DeleteCheckpoint,
    Effect,
    HoldCall,
    ResumeCall,
    SavedCall,
    ServerRequest,
    SettleCall,
    SnapshotCall,
    WriteManifest,
)
from emberscale_jobmaster.events import AppliedReport, Saved
from emberscale_jobmaster.figures import checkpoint_interval, leaves
from emberscale_jobmaster.operations import (
    CHECKPOINT_NOT_WRITTEN,
    STORAGE,
    Checkpointing,
    CheckpointPhase,
    CheckpointPurpose,
    Pruning,
    Restored,
    answered,
    asking_later,
)
from emberscale_jobmaster.progress import fail, suspend
from emberscale_jobmaster.state import JobState

HOLD_SECONDS = 10.0
"""How long a server holds pushes without hearing more of a barrier."""
SETTLE_SECONDS = 2.0
"""How long servers wait for the batches that others have applied."""
BARRIER_SECONDS = 15.0
SAVE_SECONDS = 60.0
"""How long a server may write its snapshot without any progress."""
WRITE_SECONDS = 15.0
PRUNE_SECONDS = 30.0
WAIT_SECONDS = 2.0
CALL_SECONDS = 8.0
AGAIN_SECONDS = 1.0
SLOWED = 0.1
"""The share of training that is assumed lost while a checkpoint is written; a writer that waits takes none."""

_PERSISTENT = (CheckpointPurpose.PERIODIC, CheckpointPurpose.SUSPENSION, CheckpointPurpose.FINAL)


def effects_of(state: JobState, operation: Checkpointing, whom: int, serial: int) -> tuple[Effect, ...]:
    """Returns the call that the operation waits for."""
    if whom == STORAGE:
        return (
            WriteManifest(
                operation=operation.id,
                serial=serial,
                checkpoint=operation.checkpoint,
                image=operation.image,
                servers=len(operation.servers),
                applied=operation.barrier.settled,
                files=operation.all_files,
                training_records=state.training_records,
                training_files=tuple((file.uri, file.bytes) for file in state.read_files),
                evaluation_files=tuple((file.uri, file.bytes) for file in state.evaluation_files),
                partial_rows=operation.since if operation.is_for_priority else "",
            ),
        )
    server = next(one for one in operation.servers if one.index == whom)
    return (CallServer(operation.id, serial, server, _request(state, operation, server), CALL_SECONDS),)


def clean_up(operation: Checkpointing, after: JobState) -> tuple[Effect, ...]:
    """Returns the effects that clean up after an operation that was given up.

    The servers build on what they have written of a flash checkpoint, or remove it. Redis may have been full of what
    servers have left that are gone.
    """
    if operation.phase is CheckpointPhase.WRITE:
        return ()  # if the manifest exists, the checkpoint is complete; otherwise it is pruned later
    if not operation.is_flash:
        return (*_resume(operation), DeleteCheckpoint(operation.checkpoint))
    known = {slot.index for slot in after.members.slots.values() if slot.role is Role.PS}
    gone = known - {server.index for server in (*operation.servers, *after.routing.table.owners)}
    return (*_resume(operation), *([DeleteCheckpoint(operation.checkpoint, tuple(sorted(gone)))] if gone else ()))


def on_applied(
    state: JobState, spec: TrainingJobSpec, operation: Checkpointing, server: int, answer: AppliedReport, now: float
) -> JobState:
    """Handles a server's answer that it has held pushes, settled them, or taken its snapshot."""
    try:
        barrier = operation.barrier.answered(server, answer.applied)
    except VoidError as error:
        return give_up(state, spec, operation, str(error), now)
    operation = replace(
        answered(operation, server),
        barrier=barrier,
        held_seconds=max(operation.held_seconds, answer.held_seconds),
        deadline=operation.deadline if barrier.phase is operation.barrier.phase else now + BARRIER_SECONDS,
    )
    if barrier.done:
        operation = replace(operation, phase=CheckpointPhase.SAVE, deadline=now + SAVE_SECONDS)
    if operation.pending:
        return state.having(operation)
    return state.asking(operation, *(server.index for server in operation.servers))


def on_saved(state: JobState, operation: Checkpointing, server: int, answer: Saved, now: float) -> JobState:
    """Handles a server's progress in writing its snapshot."""
    written, examined = operation.written.get(server, -1), operation.examined.get(server, 0)
    gets_on = answer.done or answer.written_bytes > written or answer.examined_rows > examined
    operation = replace(
        answered(operation, server),
        written={**operation.written, server: max(answer.written_bytes, written)},
        examined={**operation.examined, server: max(answer.examined_rows, examined)},
        problems={**operation.problems, server: answer.problem},
        waited_seconds=max(operation.waited_seconds, answer.waited_seconds),
        deadline=now + SAVE_SECONDS if gets_on else operation.deadline,
    )
    if not answer.done:
        return state.asking(operation, server)
    operation = replace(operation, files={**operation.files, server: answer.files})
    if len(operation.files) < len(operation.servers):
        return state.having(operation)
    operation = replace(operation, phase=CheckpointPhase.WRITE, deadline=now + WRITE_SECONDS)
    return state.asking(operation, STORAGE)


def on_manifest_written(
    state: JobState, operation: Checkpointing, now: float
) -> tuple[JobState, tuple[CheckpointTaken, ...]]:
    """Completes the checkpoint, whose manifest is written, and continues with its purpose."""
    if operation.is_for_priority:
        return _with_priority_rows(state, operation), ()
    seconds, held_seconds = now - operation.began_at, operation.held_seconds
    cost = held_seconds + SLOWED * max(0.0, seconds - held_seconds - operation.waited_seconds)
    if operation.is_flash:
        written = sum(operation.written.values())
        taken = CheckpointTaken(operation.checkpoint, cost, written, seconds, held_seconds)
        return _with_flash(state, operation, taken), (taken,)
    written = sum(file.bytes for file in operation.all_files if not file.checkpoint)
    taken = CheckpointTaken(operation.checkpoint, cost, written, seconds, held_seconds, operation.weight_bits)
    return _with_persistent(state, operation, taken, now), (taken,)


def _with_flash(state: JobState, operation: Checkpointing, taken: CheckpointTaken) -> JobState:
    """Records a complete flash checkpoint."""
    newest = replace(
        state.flash,
        checkpoint=operation.checkpoint,
        taken_at=operation.began_at,
        counted_from=operation.began_at,
        seconds=taken.seconds,
        held_seconds=taken.held_seconds,
        cost_seconds=taken.cost_seconds,
        written_bytes=taken.bytes,
        bytes=sum(file.bytes for file in operation.all_files),
    )
    return replace(state.without(operation).untroubled(operation.purpose), flash=newest)


def _with_persistent(state: JobState, operation: Checkpointing, taken: CheckpointTaken, now: float) -> JobState:
    """Records a complete persistent checkpoint, and begins to remove older ones.

    It ends those that began before it. The storage may still write their manifests: the folder then has another older
    checkpoint, or pruning has removed theirs, and nothing is written.
    """
    listed = operation.all_files
    spent = CheckpointCost(
        checkpoint=operation.checkpoint,
        seconds=taken.seconds,
        held_seconds=taken.held_seconds,
        written_bytes=taken.bytes,
        bytes=sum(file.bytes for file in listed),
    )
    pruning = Pruning(state.next_operation, deadline=now + PRUNE_SECONDS)
    state = replace(
        state,
        checkpoint=operation.checkpoint,
        chain=state.chain.followed_by(operation.checkpoint, listed),
        checkpoint_costs=(*state.checkpoint_costs, spent)[-COSTS_KEPT:],
        most_written=operation.most_written if operation.bytes_per_second else state.most_written,
        checkpointed_at=now,
        cut_at=operation.began_at,
        restored=_held(state, operation),
        next_operation=pruning.id + 1,
        ends_with=state.ends_with if operation.purpose is CheckpointPurpose.PERIODIC else operation.purpose,
    )
    for taking in state.checkpointings:
        is_older = not taking.is_flash and taking.id < operation.id  # its late manifest would take the job back
        if taking.is_for_priority or is_older:  # saved rows complete an older checkpoint, and pruning removes them
            state = state.without(taking)
    return state.without(operation).untroubled(*_PERSISTENT, CheckpointPurpose.PRIORITY).asking(pruning, STORAGE)


def _with_priority_rows(state: JobState, operation: Checkpointing) -> JobState:
    """Records saved priority rows; changes nothing if their checkpoint is no longer the newest."""
    state = state.without(operation).untroubled(operation.purpose)
    if operation.since != state.checkpoint:
        return state
    settled, generation = operation.barrier.settled, operation.image.generation
    rows = state.priority.followed_by(operation.checkpoint, operation.since, generation, settled)
    return replace(state, priority=rows)


def on_server_failed(
    state: JobState, spec: TrainingJobSpec, operation: Checkpointing, server: int, code: str, problem: str, now: float
) -> JobState:
    """Handles a failed call. The server may have done its part of the barrier, so the barrier is void."""
    if operation.phase is CheckpointPhase.SAVE and code in retry.PASSING_CODES:
        return state.having(asking_later(operation, server, now + AGAIN_SECONDS))
    return give_up(state, spec, operation, f"ps-{server}: {problem}", now)


def on_storage_failed(
    state: JobState, spec: TrainingJobSpec, operation: Checkpointing, problem: str, now: float
) -> JobState:
    """Handles a manifest that could not be written."""
    trouble = _trouble(state, spec, operation, problem, now)
    if operation.is_flash or retry.exhausted(trouble, now, _patience(operation)):
        return give_up(state, spec, operation, problem, now)
    operation = asking_later(replace(operation, deadline=trouble.next_at + WRITE_SECONDS), STORAGE, trouble.next_at)
    return state.having(operation).troubled(operation.purpose, trouble)


def give_up(state: JobState, spec: TrainingJobSpec, operation: Checkpointing, problem: str, now: float) -> JobState:
    """Gives up the checkpoint. Another begins later; a purpose that cannot wait any longer ends without one."""
    trouble = _trouble(state, spec, operation, problem, now)
    state = state.without(operation).troubled(operation.purpose, trouble)
    if operation.phase is CheckpointPhase.WRITE and operation.since and not operation.is_for_priority:
        state = replace(state, chain=Chain())  # what it builds on may be missing
    if not retry.exhausted(trouble, now, _patience(operation)):
        return state
    match operation.purpose:
        case CheckpointPurpose.SUSPENSION:
            return suspend(state, spec)
        case CheckpointPurpose.FINAL:
            return fail(state, trouble.reason, problem)
        case _:
            return state


def on_time_passed(state: JobState, spec: TrainingJobSpec, operation: Checkpointing, now: float) -> JobState:
    """Repeats the calls that are due, and gives up a checkpoint that makes no progress."""
    if now < operation.deadline:
        return state.asking_due(operation, now)
    if operation.phase is CheckpointPhase.WRITE:
        problem = f"the manifest was not written within {duration_text(WRITE_SECONDS)}"
        return on_storage_failed(state, spec, operation, problem, now)
    waiting = sorted({*operation.pending, *operation.again_at})
    names = ", ".join(f"ps-{server}" for server in waiting)
    told = "; ".join(operation.problems[server] for server in waiting if operation.problems.get(server))
    what = "wrote nothing" if operation.phase is CheckpointPhase.SAVE else "did not answer"
    seconds = SAVE_SECONDS if operation.phase is CheckpointPhase.SAVE else BARRIER_SECONDS
    problem = f"{names} {what} for {duration_text(seconds)}"
    return give_up(state, spec, operation, f"{problem}: {told}" if told else problem, now)


def on_takeover(state: JobState, operation: Checkpointing) -> JobState:
    """Undoes a barrier under a new master, as it may have lapsed; continues any later phase."""
    if operation.phase is CheckpointPhase.BARRIER:
        return state.without(operation)
    return state.asking(operation, *operation.pending, *operation.again_at)


def _held(state: JobState, operation: Checkpointing) -> Restored:
    """Returns what the checkpoint holds, for the ledger of a job that goes back to it."""
    files = (*state.read_files, *state.evaluation_files)
    image = operation.image
    return Restored(
        operation.barrier.settled,
        image.evaluations,
        tuple((file.uri, file.bytes) for file in files),
        image.training_seconds,
        image.forgotten,
        image.restores,
        image.origin,
    )


def _resume(operation: Checkpointing) -> tuple[CallServer, ...]:
    barrier = operation.barrier
    request = ResumeCall(barrier.generation, barrier.number)
    return tuple(CallServer(operation.id, 0, server, request, CALL_SECONDS) for server in operation.servers)


def _request(state: JobState, operation: Checkpointing, server: PsAddress) -> ServerRequest:
    barrier = operation.barrier
    if operation.phase is CheckpointPhase.SAVE:
        return SavedCall(barrier.generation, barrier.number, WAIT_SECONDS, at_full_speed=leaves(state, server))
    match barrier.phase:
        case BarrierPhase.HOLD:
            version = operation.image.version
            return HoldCall(barrier.generation, version, barrier.number, HOLD_SECONDS, operation.checkpoint)
        case BarrierPhase.SETTLE:
            settle = barrier.settling(server.index)
            return SettleCall(barrier.generation, barrier.number, HOLD_SECONDS, settle, SETTLE_SECONDS)
        case _:
            return SnapshotCall(
                barrier.generation,
                barrier.number,
                HOLD_SECONDS,
                operation.checkpoint,
                operation.flash_bytes,
                operation.weight_bits,
                operation.tracked,
                operation.after or operation.since,
                operation.bytes_per_second,
            )


def _trouble(
    state: JobState, spec: TrainingJobSpec, operation: Checkpointing, problem: str, now: float
) -> retry.Trouble:
    """Returns the trouble after a failure.

    Periodic checkpoints and saves of priority rows are tried again only after a tenth of the interval, since each
    attempt may delay training.
    """
    before = state.troubles.get(operation.purpose)
    if operation.is_flash:
        pause = flash.pause(state.flash, spec, 0 if before is None else before.attempts)
        return retry.failed_again(before, now, "FlashCheckpointFailed", problem, at_least=pause)
    can_wait = operation.purpose in (CheckpointPurpose.PERIODIC, CheckpointPurpose.PRIORITY)
    pause = checkpoint_interval(state, spec) / 10 if can_wait else 0.0
    is_unwritten = can_wait and operation.phase is not CheckpointPhase.BARRIER
    reason = CHECKPOINT_NOT_WRITTEN if is_unwritten else "CheckpointFailed"
    return replace(retry.failed_again(before, now, reason, problem, at_least=pause), checkpoint=operation.checkpoint)


def _patience(operation: Checkpointing) -> float:
    suspends = operation.purpose is CheckpointPurpose.SUSPENSION
    return retry.SUSPENSION_PATIENCE_SECONDS if suspends else retry.PATIENCE_SECONDS
