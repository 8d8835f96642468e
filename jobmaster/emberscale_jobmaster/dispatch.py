"""Hands events about an operation to the module of its kind, and asks that module for the calls to make.

Events name the operation and the call that they answer. An answer that no operation waits for is ignored: it belongs to
an earlier call, or to an operation that was given up.
"""

from emberscale_api.job import TrainingJobSpec
from emberscale_jobmaster import checkpointing, moving, reloading, restoring
from emberscale_jobmaster.effects import Effect, LogEvent, PruneCheckpoints
from emberscale_jobmaster.events import (
    AppliedReport,
    CallAnswer,
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


def on_takeover(job: JobState, spec: TrainingJobSpec) -> JobState:
    """Repeats the calls that operations wait for: an earlier master may have received the answers."""
    for operation in job.operations:
        if operation not in job.operations:  # a roll-back has ended it
            continue
        match operation:
            case Checkpointing():
                job = checkpointing.on_takeover(job, operation)
            case Move():
                job = moving.on_takeover(job, spec, operation)
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


def on_answer(job: JobState, event: CallAnswer, spec: TrainingJobSpec, now: float) -> Dispatched:
    """Takes the answer to a call of an operation, or the failure of that call."""
    server = event.server if isinstance(event, ServerAnswered | ServerFailed) else STORAGE
    operation = _waiting(job, event.operation, server, event.serial)
    match operation, event:
        case Restore(), ServerAnswered(answer=Loaded() as answer):
            return restoring.on_loaded(job, operation, server, answer, now), ()
        case Reload(phase=ReloadPhase.LOAD), ServerAnswered(answer=Prepared() as answer):
            return reloading.on_prepared(job, operation, server, answer, now), ()
        case Reload(phase=ReloadPhase.BARRIER), ServerAnswered(answer=AppliedReport() as answer):
            return reloading.on_applied(job, spec, operation, server, answer, now), ()
        case Reload(phase=ReloadPhase.SWITCH), ServerAnswered(answer=AppliedReport()):
            return reloading.on_switched(job, spec, operation, server, now)
        case Checkpointing(phase=CheckpointPhase.BARRIER), ServerAnswered(answer=AppliedReport() as answer):
            return checkpointing.on_applied(job, spec, operation, server, answer, now), ()
        case Checkpointing(phase=CheckpointPhase.SAVE), ServerAnswered(answer=Saved() as answer):
            return checkpointing.on_saved(job, operation, server, answer, now), ()
        case Move(phase=MovePhase.PREPARE), ServerAnswered(answer=Prepared() as answer):
            return moving.on_prepared(job, operation, server, answer, now), ()
        case Move(phase=MovePhase.COPY), ServerAnswered(answer=CopyReport() as answer):
            return moving.on_copied(job, spec, operation, server, answer, now), ()
        case Move(phase=MovePhase.BARRIER), ServerAnswered(answer=AppliedReport() as answer):
            return moving.on_applied(job, spec, operation, server, answer, now), ()
        case Move(phase=MovePhase.SWITCH), ServerAnswered(answer=AppliedReport()):
            return moving.on_switched(job, operation, server, now)
        case Restore(), ServerFailed():
            return restoring.on_server_failed(job, spec, operation, event, now), ()
        case Reload(), ServerFailed(code=code, problem=problem):
            return reloading.on_server_failed(job, spec, operation, server, code, problem, now), ()
        case Checkpointing(), ServerFailed(code=code, problem=problem):
            return checkpointing.on_server_failed(job, spec, operation, server, code, problem, now), ()
        case Move(), ServerFailed(code=code, problem=problem):
            return moving.on_server_failed(job, spec, operation, server, code, problem, now), ()
        case Restore(), CheckpointFound():
            return restoring.on_checkpoint_found(job, spec, operation, event, now), _refused(event)
        case Reload(), CheckpointFound():
            return reloading.on_checkpoint_found(job, spec, operation, event, now), _refused(event)
        case Checkpointing(), ManifestWritten():
            return checkpointing.on_manifest_written(job, operation, now)
        case Pruning(), PruningDone():
            return job.without(operation), ()
        case Restore(), StorageFailed():
            return restoring.on_storage_failed(job, spec, event, now), _failed(operation, event)
        case Reload(), StorageFailed():
            return reloading.on_storage_failed(job, operation, event.problem, now), _failed(operation, event)
        case Checkpointing(), StorageFailed():
            return checkpointing.on_storage_failed(job, spec, operation, event.problem, now), _failed(operation, event)
        case Pruning(), StorageFailed():
            return job.without(operation), _failed(operation, event)
        case _:
            return job, ()


def _refused(event: CheckpointFound) -> tuple[LogEvent, ...]:
    """Logs damaged checkpoints."""
    return tuple(
        LogEvent("checkpoint_refused", {"checkpoint": checkpoint, "problem": problem})
        for checkpoint, problem in sorted(event.damaged.items())
    )


def _failed(operation: Operation, event: StorageFailed) -> tuple[LogEvent, ...]:
    """Logs what the storage could not do for an operation."""
    return (LogEvent("storage_failed", {"operation": type(operation).__name__, "problem": event.problem}),)


def effects_between(before: JobState, after: JobState, spec: TrainingJobSpec) -> list[Effect]:
    """Returns new calls that operations wait for, and the clean-up after operations that were given up."""
    effects: list[Effect] = []
    operations_before, operations = before.operations, after.operations
    if operations_before == operations:
        return effects
    earlier = {operation.id: operation for operation in operations_before}
    left = {operation.id for operation in operations}
    for operation in operations_before:
        if operation.id not in left and isinstance(operation, Checkpointing):
            effects += checkpointing.clean_up(operation, after)
    if before.move is not None and before.move is not after.move:
        effects += moving.clean_up(before.move, after)
    for operation in operations:
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
            return (PruneCheckpoints(operation.id, serial, spec.checkpoint.keep, tuple(sorted(job.damaged))),)
