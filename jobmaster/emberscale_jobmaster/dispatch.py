"""Hands what concerns an operation to the module of its kind, and asks that module for the calls to make.

Events name the operation and the call that they answer. An answer that no operation waits for is ignored: it belongs to
an earlier call, or to an operation that was given up.
"""

from emberscale_api.job import TrainingJobSpec
from emberscale_jobmaster import checkpointing, moving, reloading, restoring
from emberscale_jobmaster.effects import Effect, LogEvent
from emberscale_jobmaster.events import (
    AppliedReport,
    CheckpointFound,
    Loaded,
    ManifestWritten,
    Prepared,
    PruningDone,
    Saved,
    ServerAnswered,
    ServerFailed,
    StorageFailed,
)
from emberscale_jobmaster.operations import (
    STORAGE,
    Checkpointing,
    CheckpointPhase,
    CopyReport,
    Move,
    MovePhase,
    Operation,
    Pruning,
    Reload,
    ReloadPhase,
    Restore,
)
from emberscale_jobmaster.state import JobState

Dispatched = tuple[JobState, tuple[Effect, ...]]


def on_takeover(job: JobState) -> JobState:
    """Repeats the calls that operations wait for: an earlier master may have received the answers."""
    for operation in job.operations:
        match operation:
            case Checkpointing():
                job = checkpointing.on_takeover(job, operation)
            case Move():
                job = moving.on_takeover(job, operation)
            case Reload():
                job = reloading.on_takeover(job, operation)
            case _:
                job = job.asking(operation, *{*operation.pending, *operation.again_at})
    return job


def on_time_passed(job: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Ends operations past their deadline, and repeats calls that are due."""
    for number in [operation.id for operation in job.operations]:
        match _operation(job, number):
            case Restore() as operation:
                job = restoring.on_time_passed(job, spec, operation, now)
            case Reload() as operation:
                job = reloading.on_time_passed(job, spec, operation, now)
            case Checkpointing() as operation:
                job = checkpointing.on_time_passed(job, spec, operation, now)
            case Move() as operation:
                job = moving.on_time_passed(job, spec, operation, now)
            case Pruning() as operation if now >= operation.deadline:
                job = job.without(operation)
    return job


def on_server_answered(job: JobState, event: ServerAnswered, spec: TrainingJobSpec, now: float) -> Dispatched:
    """Takes the answer of a server to a call of an operation."""
    operation = _waiting(job, event.operation, event.server, event.serial)
    match operation, event.answer:
        case Restore(), Loaded() as answer:
            return restoring.on_loaded(job, operation, event.server, answer, now), ()
        case Reload(phase=ReloadPhase.LOAD), Prepared() as answer:
            return reloading.on_prepared(job, operation, event.server, answer, now), ()
        case Reload(phase=ReloadPhase.BARRIER), AppliedReport() as answer:
            return reloading.on_applied(job, spec, operation, event.server, answer, now), ()
        case Reload(phase=ReloadPhase.SWITCH), AppliedReport():
            return reloading.on_switched(job, spec, operation, event.server, now)
        case Checkpointing(phase=CheckpointPhase.BARRIER), AppliedReport() as answer:
            return checkpointing.on_applied(job, spec, operation, event.server, answer, now), ()
        case Checkpointing(phase=CheckpointPhase.SAVE), Saved() as answer:
            return checkpointing.on_saved(job, operation, event.server, answer, now), ()
        case Move(phase=MovePhase.PREPARE), Prepared() as answer:
            return moving.on_prepared(job, operation, event.server, answer, now), ()
        case Move(phase=MovePhase.COPY), CopyReport() as answer:
            return moving.on_copied(job, spec, operation, event.server, answer, now), ()
        case Move(phase=MovePhase.BARRIER), AppliedReport() as answer:
            return moving.on_applied(job, spec, operation, event.server, answer, now), ()
        case Move(phase=MovePhase.SWITCH), AppliedReport():
            return moving.on_switched(job, operation, event.server, now)
        case _:
            return job, ()


def on_server_failed(job: JobState, event: ServerFailed, spec: TrainingJobSpec, now: float) -> JobState:
    """Takes a failed call to a server."""
    operation = _waiting(job, event.operation, event.server, event.serial)
    match operation:
        case Restore():
            return restoring.on_server_failed(job, spec, operation, event.server, event.code, event.problem, now)
        case Reload():
            return reloading.on_server_failed(job, spec, operation, event.server, event.code, event.problem, now)
        case Checkpointing():
            return checkpointing.on_server_failed(job, spec, operation, event.server, event.code, event.problem, now)
        case Move():
            return moving.on_server_failed(job, spec, operation, event.server, event.code, event.problem, now)
        case _:
            return job


def on_checkpoint_found(job: JobState, event: CheckpointFound, spec: TrainingJobSpec, now: float) -> Dispatched:
    """Takes the newest sound checkpoint, and reports damaged ones."""
    operation = _waiting(job, event.operation, STORAGE, event.serial)
    damaged = tuple(LogEvent("checkpoint_refused", *refused) for refused in sorted(event.damaged.items()))
    match operation:
        case Restore():
            return restoring.on_checkpoint_found(job, spec, operation, event, now), damaged
        case Reload():
            return reloading.on_checkpoint_found(job, spec, operation, event, now), damaged
        case _:
            return job, ()


def on_manifest_written(job: JobState, event: ManifestWritten, spec: TrainingJobSpec, now: float) -> Dispatched:
    """Completes a checkpoint."""
    operation = _waiting(job, event.operation, STORAGE, event.serial)
    if not isinstance(operation, Checkpointing):
        return job, ()
    return checkpointing.on_manifest_written(job, spec, operation, now)


def on_pruning_done(job: JobState, event: PruningDone) -> JobState:
    """Ends the removal of old checkpoints."""
    operation = _waiting(job, event.operation, STORAGE, event.serial)
    return job.without(operation) if isinstance(operation, Pruning) else job


def on_storage_failed(job: JobState, event: StorageFailed, spec: TrainingJobSpec, now: float) -> Dispatched:
    """Takes a failed call to the storage."""
    operation = _waiting(job, event.operation, STORAGE, event.serial)
    match operation:
        case Restore():
            job = restoring.try_again(job, spec, "CheckpointUnreachable", event.problem, now)
        case Reload():
            job = reloading.on_storage_failed(job, spec, operation, event.problem, now)
        case Checkpointing():
            job = checkpointing.on_storage_failed(job, spec, operation, event.problem, now)
        case Pruning():
            job = job.without(operation)
        case _:
            return job, ()
    return job, (LogEvent("storage_failed", type(operation).__name__, event.problem),)


def effects_between(before: JobState, after: JobState, spec: TrainingJobSpec) -> list[Effect]:
    """Returns the new calls that operations wait for, and the clean-up of operations that were given up."""
    effects: list[Effect] = []
    if before is after:
        return effects
    earlier = {operation.id: operation for operation in before.operations}
    left = {operation.id for operation in after.operations}
    for operation in before.operations:
        if operation.id not in left and isinstance(operation, Checkpointing):
            effects += checkpointing.clean_up(operation)
    if before.move is not None and before.move is not after.move:
        effects += moving.clean_up(before.move, after)
    for operation in after.operations:
        known = earlier.get(operation.id)
        for whom, serial in operation.pending.items():
            if known is None or known.pending.get(whom) != serial:
                effects += _calls(after, spec, operation, whom, serial)
    return effects


def _operation(job: JobState, number: int) -> Operation | None:
    return next((one for one in job.operations if one.id == number), None)


def _waiting(job: JobState, number: int, whom: int, serial: int) -> Operation | None:
    """Returns the operation that waits for this answer, or None."""
    operation = _operation(job, number)
    return operation if operation is not None and operation.pending.get(whom) == serial else None


def _calls(job: JobState, spec: TrainingJobSpec, operation: Operation, whom: int, serial: int) -> tuple[Effect, ...]:
    match operation:
        case Restore():
            return restoring.effects_of(job, operation, whom, serial)
        case Reload():
            return reloading.effects_of(job, operation, whom, serial)
        case Checkpointing():
            return checkpointing.effects_of(job, operation, whom, serial)
        case Move():
            return moving.effects_of(job, operation, whom, serial)
        case Pruning():
            return (checkpointing.prune_effect(job, spec, operation, serial),)
