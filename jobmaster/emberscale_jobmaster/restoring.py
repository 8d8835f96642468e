"""Restores a job: finds the newest sound checkpoint; all servers adopt the routing table and load their rows.

FIND -> LOAD -> done
   storage out of reach, a server that fails or makes no progress -> tried again, under a new generation
   a folder without the checkpoints that the job took -> the same: its volume may come back
   a checkpoint that fails its checksums -> refused, and the previous one is tried
   no checkpoint left, the manifest refused, or failing for too long -> the job fails
"""

from emberscale_api.checkpoint import is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.status import STARTED_STEP
from emberscale_api.origin import RefusedCheckpoint
from emberscale_api.readable import duration_text
from emberscale_jobmaster import parity, reshaping, retry
from emberscale_jobmaster.effects import AssignCall, CallServer, Effect, FindCheckpoint, InitialWanted
from emberscale_jobmaster.events import CheckpointFound, Loaded, ServerFailed, StorageFailed
from emberscale_jobmaster.figures import awaits_servers, newest_flash
from emberscale_jobmaster.operations import (
    STORAGE,
    Restore,
    Restored,
    RestorePhase,
    answered,
    asking_later,
)
from emberscale_jobmaster.progress import (
    begin_assignment,
    complete_assignment,
    fail,
    unroute,
)
from emberscale_jobmaster.ranges import on_all
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.takeover import LOST_CHECKPOINTS

FIND_SECONDS = 60.0
"""How long looking for a checkpoint may take."""
LOAD_SECONDS = 180.0
"""How long a server may load without any progress; before the first row it builds the model and compiles kernels."""
WAIT_SECONDS = 5.0
CALL_SECONDS = 20.0
AGAIN_SECONDS = 1.0
KIND = "Restore"


def begin_if_due(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Begins a restore once all servers are there and none is under way."""
    is_under_way = state.restore is not None or state.reload is not None
    if state.over or state.routing.ready or is_under_way:
        return state
    if state.rests(KIND, now) or awaits_servers(state, spec):
        return state
    operation = Restore(state.next_operation, RestorePhase.FIND, deadline=now + FIND_SECONDS)
    state = replace(state, next_operation=state.next_operation + 1)
    if spec.checkpoint.uri is None and spec.checkpoint.initial_from is None:
        return _loading(state, spec, operation, now)
    return state.asking(operation, STORAGE)


def effects_of(state: JobState, operation: Restore, whom: int, serial: int) -> tuple[Effect, ...]:
    """The call that the operation waits for."""
    if whom == STORAGE:
        files = state.damaged_files
        refused = {uri: RefusedCheckpoint(why, files.get(uri, "")) for uri, why in state.damaged.items() if "/" in uri}
        initial = InitialWanted(state.restored.origin, refused)
        return (FindCheckpoint(operation.id, serial, tuple(sorted(state.damaged)), newest_flash(state), initial),)
    table, source = state.routing.table, operation.source
    checkpoint, anew = (source.checkpoint, source.anew) if source is not None else ("", False)
    request = AssignCall(table, checkpoint, WAIT_SECONDS, anew, parity.ordered(state, table))
    return (CallServer(operation.id, serial, table.servers[whom], request, CALL_SECONDS),)


def on_checkpoint_found(
    state: JobState, spec: TrainingJobSpec, operation: Restore, event: CheckpointFound, now: float
) -> JobState:
    """Loads the checkpoint that was found, or fails the job if it has none that it can use."""
    damaged = {**state.damaged, **event.damaged}
    state = replace(state, damaged=damaged)
    if event.newest >= state.next_checkpoint:  # an earlier master may still be writing newer ones
        state = replace(state, next_checkpoint=event.newest + LOST_CHECKPOINTS)
    if event.unusable:
        return fail(state, "InitialCheckpointUnusable", event.unusable)
    lasting = {checkpoint: problem for checkpoint, problem in damaged.items() if not is_flash(checkpoint)}
    if event.source is None and lasting:
        problems = "; ".join(f"{checkpoint}: {problem}" for checkpoint, problem in sorted(lasting.items()))
        return fail(state, "CheckpointDamaged", f"no checkpoint can be used: {problems}")
    if event.incompatible:
        return fail(state, "CheckpointIncompatible", event.incompatible)
    if state.checkpoint and not is_flash(state.checkpoint) and (event.source is None or event.source.initial):
        problem = f"spec.checkpoint.uri ({spec.checkpoint.uri}) holds no checkpoint, and held {state.checkpoint}"
        return try_again(state, spec, "CheckpointUnreachable", problem, now)
    return _loading(state, spec, replace(answered(operation, STORAGE), source=event.source), now)


def on_loaded(state: JobState, operation: Restore, server: int, answer: Loaded, now: float) -> JobState:
    """Handles a server's progress in loading."""
    progress = answer.loaded_bytes > operation.loaded.get(server, 0)
    operation = replace(
        answered(operation, server),
        loaded={**operation.loaded, server: max(answer.loaded_bytes, operation.loaded.get(server, 0))},
        problems={**operation.problems, server: answer.problem},
        deadline=now + LOAD_SECONDS if progress or answer.done else operation.deadline,
    )
    if not answer.done:
        return state.asking(operation, server)
    if operation.source is not None and operation.source.anew and any(answer.applied.values()):
        problem = f"ps-{server} counts the batches of another job as applied: it runs a version before initialFrom"
        return fail(state, "InitialCheckpointUnusable", problem)
    operation = replace(operation, applied={**operation.applied, server: answer.applied})
    if len(operation.applied) < len(state.routing.table.owners):
        return state.having(operation)
    source = operation.source
    held = Restored() if source is None else source.restored
    restored = replace(held, applied=on_all(list(operation.applied.values())))
    state = state.without(operation).untroubled(KIND)
    before = dict(held.restores)  # of the restored rows: later restores are undone with the roll-back
    if source is not None and (bits := source.weight_bits):
        before[bits] = before.get(bits, 0) + 1
    state = replace(state, restores=before)
    if source is not None and source.initial:
        state = _with_start_reported(state, restored)
    return complete_assignment(state, restored, source.own_checkpoint if source is not None else "")


def on_server_failed(
    state: JobState, spec: TrainingJobSpec, operation: Restore, event: ServerFailed, now: float
) -> JobState:
    """Handles a failed assignment. A server that knows a later table answers ABORTED; the next attempt surpasses it."""
    if event.code in retry.PASSING_CODES:
        return state.having(asking_later(operation, event.server, now + AGAIN_SECONDS))
    problem = f"ps-{event.server}: {event.problem}"
    if event.code == "INVALID_ARGUMENT":
        return fail(state, "ModelRefused", problem)
    if event.code == "DATA_LOSS" and operation.source is not None:
        refused = operation.source.checkpoint
        damaged = {**state.damaged, refused: event.problem}
        files = {**state.damaged_files, refused: event.damaged_file} if event.damaged_file else state.damaged_files
        return unroute(replace(state, damaged=damaged, damaged_files=files), spec)
    return try_again(state, spec, "AssignFailed", problem, now)


def on_storage_failed(state: JobState, spec: TrainingJobSpec, event: StorageFailed, now: float) -> JobState:
    """Handles an unreadable folder. A new job without credentials for the store soon fails.

    Later in a job, the service that issues credentials may only be unavailable, so the job waits as for any other
    failure.
    """
    if event.lacks_credentials and not state.recoveries and not state.checkpoint:
        patience = retry.CREDENTIALS_PATIENCE_SECONDS
        return try_again(state, spec, "CredentialsMissing", event.problem, now, patience)
    return try_again(state, spec, "CheckpointUnreachable", event.problem, now)


def try_again(
    state: JobState,
    spec: TrainingJobSpec,
    reason: str,
    problem: str,
    now: float,
    patience: float = retry.PATIENCE_SECONDS,
) -> JobState:
    """Gives up the restore. Another begins later, under a new generation; after `patience` seconds, the job fails."""
    trouble = retry.failed_again(state.troubles.get(KIND), now, reason, problem)
    if retry.exhausted(trouble, now, patience):
        return fail(state, reason, trouble.message)
    state = state.troubled(KIND, trouble)
    if state.routing.table.servers:
        return unroute(state, spec)
    return state.without(state.restore) if state.restore is not None else state


def on_time_passed(state: JobState, spec: TrainingJobSpec, operation: Restore, now: float) -> JobState:
    """Repeats the calls that are due, and gives up a restore that makes no progress."""
    if now >= operation.deadline:
        if operation.phase is RestorePhase.FIND:
            problem = f"{_folders(spec)} does not answer within {duration_text(FIND_SECONDS)}"
            return try_again(state, spec, "CheckpointUnreachable", problem, now)
        waiting = sorted({*operation.pending, *operation.again_at})
        said = "; ".join(operation.problems[server] for server in waiting if operation.problems.get(server))
        problem = f"{', '.join(f'ps-{server}' for server in waiting)} loaded nothing for {duration_text(LOAD_SECONDS)}"
        return try_again(state, spec, "AssignFailed", f"{problem}: {said}" if said else problem, now)
    return state.asking_due(operation, now)


def _with_start_reported(state: JobState, restored: Restored) -> JobState:
    """Reports once the checkpoint and the job from which this one starts."""
    origin = restored.origin
    if origin is None or state.restored.origin == origin:
        return state
    kept = "" if restored.data is None else ", and goes on where that stood"
    skipped = f"; files that count as trained: {len(origin.trained)}" if origin.trained else ""
    message = f"from {origin.checkpoint} of job {origin.job}, trained on {origin.samples:,} samples{kept}{skipped}"
    return reshaping.note_step(state, STARTED_STEP, message, 0.0)


def _folders(spec: TrainingJobSpec) -> str:
    """Names the folders that are searched for a checkpoint."""
    own, initial = spec.checkpoint.uri, spec.checkpoint.initial_from
    named = [f"spec.checkpoint.uri ({own})"] if own is not None else []
    named += [f"spec.checkpoint.initialFrom.uri ({initial.uri})"] if initial is not None else []
    return " or ".join(named)


def _loading(state: JobState, spec: TrainingJobSpec, operation: Restore, now: float) -> JobState:
    state = begin_assignment(state, spec)
    table = state.routing.table
    if not table.servers:
        return state.without(operation)
    state = parity.decide(state, spec)
    operation = replace(operation, phase=RestorePhase.LOAD, deadline=now + LOAD_SECONDS)
    return state.asking(operation, *(server.index for server in table.owners))
