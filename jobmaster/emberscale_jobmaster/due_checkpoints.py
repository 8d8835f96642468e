"""Begins the next checkpoint once one is due and nothing is in its way: of which purpose, and on what it builds."""

from emberscale_api.checkpoint import FLASH_PREFIX, PRIORITY_PREFIX, is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import IncrementalMode, TrainingJobSpec
from emberscale_jobmaster import chains, flash, priority, quantization, retry
from emberscale_jobmaster.barrier import DrivenBarrier
from emberscale_jobmaster.checkpointing import BARRIER_SECONDS, SAVE_SECONDS
from emberscale_jobmaster.figures import (
    allowed_pls,
    applied_batches,
    checkpoint_interval,
    committed_samples,
    newest_flash,
)
from emberscale_jobmaster.operations import Checkpointing, CheckpointPhase, CheckpointPurpose, Image
from emberscale_jobmaster.progress import suspend
from emberscale_jobmaster.ranges import minus
from emberscale_jobmaster.state import JobState, Stage

STALLED_SECONDS = 15.0
"""How long a server may write its snapshot without any progress if a checkpoint that the job waits for is due."""

_PREFIXES = {CheckpointPurpose.FLASH: FLASH_PREFIX, CheckpointPurpose.PRIORITY: PRIORITY_PREFIX}
"""Prefixes of the ids of checkpoints that do not count as checkpoints of the folder."""
_LIMITED = (CheckpointPurpose.PERIODIC, CheckpointPurpose.PRIORITY)
"""Purposes whose files are written at the bandwidth of the manifest; the job waits for those of other purposes.

A server that leaves writes at full speed.
"""
_TRAINED = (Stage.TRAIN, Stage.EVALUATE, Stage.SAVE)


def begin_if_due(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Begins a checkpoint if one is due and nothing is in its way; ends a suspension that cannot take one.

    If a periodic checkpoint or a save of priority rows would hold nothing new, the next interval begins instead. It
    would hold pushes for nothing, and pruning would remove an older checkpoint for it. Flash checkpoints are taken
    though nothing is new: Redis forgets them.
    """
    if state.over or state.ends_with is not None:
        return state
    is_whole = state.routing.ready and state.rebuilding is None and not state.misses_rows
    can_save = is_whole and state.stage in _TRAINED and spec.checkpoint.uri is not None
    if not can_save:
        since = state.suspending_since
        return state if since is None or _awaits_rows(state, spec, since, now) else suspend(state, spec)
    due = _due(state, spec, now)
    begun = _begun(state, spec, due, now)
    if begun is not state:
        if due is not CheckpointPurpose.PERIODIC or not _has_all(state, spec):
            return begun
        state = replace(state, checkpointed_at=now, cut_at=now)
    if state.stage is Stage.SAVE or state.suspending:
        return state
    if flash.is_due(state.flash, spec, now):
        begun = _begun(state, spec, CheckpointPurpose.FLASH, now)
        if begun is not state:
            return begun
    if _wants_priority(state, spec, now):
        begun = _begun(state, spec, CheckpointPurpose.PRIORITY, now)
        if begun is not state:
            return replace(state if _has_all(state, spec) else begun, priority=replace(state.priority, began_at=now))
    return state


def _awaits_rows(state: JobState, spec: TrainingJobSpec, since: float, now: float) -> bool:
    """Whether a suspension, wanted `since`, still waits for rows that are missing from its checkpoint."""
    if spec.checkpoint.uri is None or not _would_lose(state):
        return False
    is_rebuilt = state.rebuilding is not None and state.move is not None  # the move ends in any case
    is_rebuilt = is_rebuilt or state.misses_rows  # they come, or the job rolls back
    return is_rebuilt or now < since + retry.SUSPENSION_PATIENCE_SECONDS


def _wants_priority(state: JobState, spec: TrainingJobSpec, now: float) -> bool:
    """Whether to save priority rows: a partial recovery would start from the newest checkpoint in the folder."""
    if state.move is not None or not state.checkpoint or is_flash(state.checkpoint) or newest_flash(state):
        return False
    is_due = priority.is_due(state.priority, spec, state.checkpointed_at, checkpoint_interval(state, spec), now)
    return is_due and allowed_pls(state, spec) > 0


def _has_all(state: JobState, spec: TrainingJobSpec) -> bool:
    """Whether the newest checkpoint in the folder is this job's own and sound, and holds all that the job has done.

    Another job may remove its checkpoint at any time. This compares whole epochs, and is called once in an interval.
    """
    newest, held = state.checkpoint, state.restored
    if not newest or is_flash(newest) or newest in state.damaged:
        return False
    if (state.evaluations, state.forgotten) != (held.evaluations, held.forgotten):
        return False
    return not minus(applied_batches(state, spec), held.applied)


def _would_lose(state: JobState) -> bool:
    """Whether suspending now, while rows are missing, would lose more than waiting until the rows are complete.

    Survivors of a recovery hold more than the last persistent checkpoint. So does a flash checkpoint, which is lost
    with its Redis.
    """
    recovers = state.reload is not None or state.rebuilding is not None or state.misses_rows
    return recovers or bool(newest_flash(state)) or is_flash(state.checkpoint)


def _begun(state: JobState, spec: TrainingJobSpec, purpose: CheckpointPurpose | None, now: float) -> JobState:
    """Begins a checkpoint of this purpose, unless something is in the way."""
    if purpose is None or state.rests(purpose, now):
        return state
    if any(_is_in_the_way(state, taking, purpose, now) for taking in state.checkpointings):
        return state
    can_wait = purpose in (CheckpointPurpose.PERIODIC, CheckpointPurpose.FLASH, CheckpointPurpose.PRIORITY)
    move = state.move
    if move is not None and (move.holds or (can_wait and move.is_copied and move.leavers)):
        return state  # servers that leave wait for the files that they write
    is_for_flash = purpose is CheckpointPurpose.FLASH
    for taking in state.checkpointings:
        if taking.phase is CheckpointPhase.SAVE and taking.is_flash is is_for_flash:
            state = state.without(taking)
    table, mode = state.routing.table, spec.checkpoint.incremental
    weight_bits = _weight_bits(state, spec, purpose)
    operation = Checkpointing(
        id=state.next_operation,
        checkpoint=f"{_PREFIXES.get(purpose, '')}{state.next_checkpoint:08d}",
        purpose=purpose,
        phase=CheckpointPhase.BARRIER,
        began_at=now,
        deadline=now + BARRIER_SECONDS,
        barrier=DrivenBarrier(state.next_barrier, table.generation, table.owners),
        image=Image(
            state.epoch,
            state.evaluations,
            state.clock.training_seconds,
            table.generation,
            table.version,
            state.forgotten,
            state.restores,
            state.restored.origin,
        ),
        flash_bytes=spec.checkpoint.flash.bytes_limit // len(table.owners) if is_for_flash else 0,
        weight_bits=weight_bits,
        tracked=mode is not IncrementalMode.FULL and purpose not in _PREFIXES,
        since=_since(state, spec, purpose, weight_bits),
        after=_saved_last(state) if purpose is CheckpointPurpose.PRIORITY else "",
        bytes_per_second=spec.checkpoint.bytes_per_second if purpose in _LIMITED else 0,
    )
    state = replace(
        state,
        next_operation=state.next_operation + 1,
        next_checkpoint=state.next_checkpoint + 1,
        next_barrier=state.next_barrier + 1,
    )
    return state.asking(operation, *(server.index for server in table.owners))


def _since(state: JobState, spec: TrainingJobSpec, purpose: CheckpointPurpose, weight_bits: int) -> str:
    """Returns the checkpoint on which one of this purpose builds; empty: all rows. A final one needs no other."""
    if purpose is CheckpointPurpose.PRIORITY:
        return state.checkpoint
    if purpose in (CheckpointPurpose.FLASH, CheckpointPurpose.FINAL):
        return ""
    return chains.builds_on(state.chain, spec.checkpoint.incremental, weight_bits)


def _saved_last(state: JobState) -> str:
    """Returns the newest save of priority rows that counts, or else the checkpoint that the saves complete."""
    return (state.checkpoint, *state.priority.over(state.checkpoint, state.routing.table.generation))[-1]


def _weight_bits(state: JobState, spec: TrainingJobSpec, purpose: CheckpointPurpose) -> int:
    """Returns the number of bits in which weights are stored; 0: as float32.

    Only periodic checkpoints are quantised, since most of them are never read. Final checkpoints stay exact because
    people export and serve them, and those of a suspension because the job is sure to be restored from them.
    """
    if purpose is not CheckpointPurpose.PERIODIC:
        return 0
    done = committed_samples(state, spec)
    left = max(0, spec.training.epochs * state.training_records - done)
    seconds_left = state.clock.training_seconds * left / max(1, done)
    servers = len(state.routing.table.owners)
    expected = quantization.expected_restores(seconds_left, servers, state.between_failures)
    return quantization.weight_bits(spec.checkpoint.quantization, state.restores, expected)


def _due(state: JobState, spec: TrainingJobSpec, now: float) -> CheckpointPurpose | None:
    if state.stage is Stage.SAVE:
        return CheckpointPurpose.FINAL
    if state.suspending:
        return CheckpointPurpose.SUSPENSION
    return CheckpointPurpose.PERIODIC if now - state.checkpointed_at >= checkpoint_interval(state, spec) else None


def _is_in_the_way(state: JobState, taking: Checkpointing, purpose: CheckpointPurpose, now: float) -> bool:
    """Whether a checkpoint under way prevents one of this purpose from beginning.

    A checkpoint that the job waits for does not wait for a periodic one whose files or manifest make no progress, or
    whose files are written at a limited bandwidth. The two tiers share only the barrier. A save of priority rows waits
    for all persistent checkpoints; those wait at most for its barrier.
    """
    if taking.is_flash is not (purpose is CheckpointPurpose.FLASH):
        return taking.phase is CheckpointPhase.BARRIER
    if purpose is CheckpointPurpose.PRIORITY:
        return True
    if taking.is_for_priority:
        return taking.phase is CheckpointPhase.BARRIER
    if taking.is_flash:
        return True
    if purpose is CheckpointPurpose.PERIODIC or taking.purpose is not CheckpointPurpose.PERIODIC:
        return True
    match taking.phase:
        case CheckpointPhase.BARRIER:
            return True
        case CheckpointPhase.SAVE:
            return not taking.bytes_per_second and now < taking.deadline - SAVE_SECONDS + STALLED_SECONDS
        case CheckpointPhase.WRITE:
            return taking.purpose not in state.troubles
