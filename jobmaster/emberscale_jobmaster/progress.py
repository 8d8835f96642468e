"""Transitions between stages: the next stage, the end of a job, and the start of a restore."""

from emberscale_api.checkpoint import is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.status import JobPhase
from emberscale_api.origin import NOTHING_NEW, changed_file
from emberscale_api.routing import BUCKETS, DENSE_PIECES, RoutingTable
from emberscale_jobmaster.chains import Chain
from emberscale_jobmaster.figures import (
    awaits_servers,
    batches_of,
    drained_servers,
    limits_of,
    live_servers,
    phase_of,
    routed_servers,
    sizes_of,
    wanted_shares,
)
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.operations import CheckpointPurpose, Restored
from emberscale_jobmaster.placement import NOBODY, placed
from emberscale_jobmaster.ranges import normalised
from emberscale_jobmaster.recovery import ParityGroup
from emberscale_jobmaster.state import PREPARATION, JobEnd, JobState, Routing, Stage, with_scaling
from emberscale_jobmaster.statistics import Tally


def advance(before: JobState, state: JobState, spec: TrainingJobSpec) -> JobState:
    """Applies all automatic transitions to `state`; `before` is the state before the event."""
    while (following := _following(state, spec)) is not state:
        state = following
    if _plans_otherwise(before, state, spec):
        state = replace(state, plan_version=state.plan_version + 1)
    return state


def _plans_otherwise(before: JobState, after: JobState, spec: TrainingJobSpec) -> bool:
    """Whether the phase, the members to replace, or the servers that are drained or have rows changed.

    The operator must learn of that.
    """
    if phase_of(before, spec) is not phase_of(after, spec):
        return True
    if before.members is not after.members and before.members.given_up() != after.members.given_up():
        return True
    if before.drains is not after.drains and drained_servers(before) != drained_servers(after):
        return True
    return routed_servers(before, spec) != routed_servers(after, spec)


def fail(state: JobState, reason: str, message: str) -> JobState:
    """Ends the job as Failed; the first reason stands."""
    if state.over:
        return state
    return _ended(state, JobEnd(JobPhase.FAILED, reason, message))


def begin_suspension(state: JobState, now: float) -> JobState:
    """Begins to suspend the job at a checkpoint taken now."""
    return state if state.over or state.suspending else replace(state, suspending_since=now)


def suspend(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Suspends the job at its last checkpoint, and counts only the batches in it."""
    where = _resting_place(state, spec)
    if state.stage not in PREPARATION:
        state = _at_checkpoint(state, spec)
    return _ended(
        replace(state, suspending_since=None), JobEnd(JobPhase.SUSPENDED, "Suspended", f"resumes from {where}")
    )


def _resting_place(state: JobState, spec: TrainingJobSpec) -> str:
    """Names for people where a suspended job resumes, as far as the job knows.

    A flash checkpoint may end with its Redis. Without a ledger of its past, a job looks for checkpoints as it restores.
    """
    if state.checkpoint and not is_flash(state.checkpoint):
        return f"checkpoint {state.checkpoint}"
    has_looked = state.stage not in PREPARATION and state.stage is not Stage.READY and not state.checkpoint
    if has_looked or spec.checkpoint.uri is None:
        return "the start: no checkpoint was taken"
    return "the newest checkpoint, or from the start if there is none"


def complete(state: JobState) -> JobState:
    """Ends the job as Complete."""
    return _ended(state, JobEnd(JobPhase.COMPLETE, "Completed", "every sample of every epoch is trained"))


def unroute(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Discards the servers' rows: all leases end, and the servers are assigned again.

    Forgets that a checkpoint has failed: often a lost server was the reason, and nobody tries it again soon. The next
    one is due an interval after the servers have loaded, and the status would tell of the trouble until then.

    The ledger stays, without leases, until the state that the servers restore is known. A pending target with fewer
    servers takes effect at once, since there are no rows to move, and nobody may start the other servers any more.
    """
    target = state.scaling.target
    if target is not None and target.ps.replicas <= sizes_of(state, spec).ps.replicas:
        state = with_scaling(state, replace(state.scaling, sizes=target, target=None))
    generation = max(state.next_generation, state.routing.table.generation + 1)
    state = replace(
        _without_operations(state),
        routing=Routing(unowned(generation, state.next_version)),
        next_generation=generation + 1,
        next_version=state.next_version + 1,
        chain=Chain(),
        parity_group=ParityGroup(),
    ).untroubled(CheckpointPurpose.PERIODIC, CheckpointPurpose.PRIORITY)
    if state.stage in PREPARATION or state.stage is Stage.READY:
        return state
    if state.stage is Stage.TRAIN:
        return replace(state, stage=Stage.READY, ledger=state.ledger.revoke_all())
    batches = batches_of(state.training_records, spec.training.batch_size)
    return replace(state, stage=Stage.READY, tally=None, ledger=Ledger.fresh(batches, ((0, batches),)))


def begin_assignment(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Begins to assign the rows to the live servers; returns the same state while one is missing."""
    if awaits_servers(state, spec):
        return state
    servers = live_servers(state, spec)
    shares = wanted_shares(state, len(servers))
    table = replace(
        state.routing.table,
        servers=servers,
        bucket_owners=placed((NOBODY,) * BUCKETS, len(servers), limits=limits_of(shares)),
        piece_owners=placed((NOBODY,) * DENSE_PIECES, len(servers), limits=limits_of(shares)),
    )
    return replace(state, routing=Routing(table, shares=shares))


def complete_assignment(state: JobState, restored: Restored, checkpoint: str) -> JobState:
    """Notes that every server of the routing table holds what `restored` says."""
    from_flash = is_flash(checkpoint)
    clock = replace(state.clock, training_seconds=max(state.clock.training_seconds, restored.training_seconds))
    return replace(
        state,
        routing=replace(state.routing, ready=True),
        restored=restored,
        checkpoint=checkpoint,
        clock=clock,
        checkpointed_at=state.checkpointed_at if from_flash else clock.active_seconds,
        cut_at=state.cut_at if from_flash else clock.active_seconds,
        flash=replace(state.flash, checkpoint=checkpoint if from_flash else "", counted_from=clock.active_seconds),
    )


def _following(state: JobState, spec: TrainingJobSpec) -> JobState:
    if state.over:
        return state
    if state.ends_with is not None and not state.prunings:
        return _ended_by(state, spec, state.ends_with)
    match state.stage:
        case Stage.DISCOVER if state.ledger.complete and not _awaits_origin(state, spec):
            return _indexing(state)
        case Stage.INDEX if state.ledger.complete:
            if not state.read_files:
                return fail(state, "DataEmpty", NOTHING_NEW)
            if not state.training_records:
                return fail(state, "DataEmpty", "spec.data.train: the files hold no records")
            return replace(state, stage=Stage.READY, ledger=Ledger.fresh(0))
        case Stage.READY if state.routing.ready:
            return _training_begun(state, spec)
        case Stage.TRAIN if state.ledger.complete:
            if not state.evaluation_records:
                return _epoch_after(state, spec)
            batches = batches_of(state.evaluation_records, spec.training.batch_size)
            return replace(state, stage=Stage.EVALUATE, ledger=Ledger.fresh(batches), tally=Tally())
        case Stage.EVALUATE if state.ledger.complete and state.tally is not None:
            results = (*state.evaluations, state.tally.result(state.epoch + 1))
            return _epoch_after(replace(state, evaluations=results, tally=None), spec)
        case Stage.SAVE if spec.checkpoint.uri is None:
            return complete(state)
    return state


def _awaits_origin(state: JobState, spec: TrainingJobSpec) -> bool:
    """Whether the initial checkpoint, which lists the files that are trained already, is not known yet."""
    return spec.checkpoint.initial_from is not None and not state.routing.ready


def _indexing(state: JobState) -> JobState:
    """Begins to index the files that the job reads. Files that were trained before the job must not have changed."""
    origin, present = state.restored.origin, {file.uri: file.bytes for file in state.training_files}
    if origin is not None and (changed := changed_file(origin, present)):
        return fail(state, "DataChanged", changed)
    before = set() if origin is None else {file.uri for file in origin.trained}
    files = tuple(
        replace(file, records=0, trained=True) if file.uri in before else file for file in state.training_files
    )
    done = normalised((number, number + 1) for number, file in enumerate(files) if file.trained)
    ledger = Ledger.fresh(len(files) + len(state.evaluation_files), done)
    return replace(state, stage=Stage.INDEX, training_files=files, ledger=ledger)


def _ended_by(state: JobState, spec: TrainingJobSpec, purpose: CheckpointPurpose) -> JobState:
    """Ends the job after a final checkpoint, or suspends it, now that old checkpoints are removed."""
    state = replace(state, ends_with=None)
    if purpose is CheckpointPurpose.FINAL and state.stage is Stage.SAVE:
        return complete(state)
    return suspend(state, spec) if state.suspending else state


def _training_begun(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Starts training from the servers' rows, in the first epoch with something left to do."""
    if changed := _changed_file(state):
        advice = "restore the files, or start a new job with checkpoint.initialFrom"
        return fail(state, "DataChanged", f"{changed}; a job cannot continue on changed or added data: {advice}")
    return _at_checkpoint(state, spec)


def _at_checkpoint(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Returns the state with the progress in `state.restored`."""
    batches = batches_of(state.training_records, spec.training.batch_size)
    ledgers = [Ledger.fresh(batches, state.restored.applied.get(epoch, ())) for epoch in range(spec.training.epochs)]
    evaluated = {result.epoch for result in state.restored.evaluations}
    epoch = next(
        (
            epoch
            for epoch, ledger in enumerate(ledgers)
            if not ledger.complete or (state.evaluation_records and epoch + 1 not in evaluated)
        ),
        None,
    )
    results = tuple(result for result in state.restored.evaluations if epoch is None or result.epoch <= epoch)
    state = replace(state, forgotten=state.restored.forgotten)
    if epoch is None:
        return replace(state, stage=Stage.SAVE, epoch=spec.training.epochs - 1, evaluations=results)
    return replace(state, stage=Stage.TRAIN, epoch=epoch, ledger=ledgers[epoch], evaluations=results)


def _changed_file(state: JobState) -> str:
    """Describes how the data differs from the checkpoint's; empty without a difference or a checkpoint."""
    if state.restored.data is None:
        return ""
    found = {file.uri: file.bytes for file in (*state.read_files, *state.evaluation_files)}
    seen = dict(state.restored.data)
    for uri in sorted(found.keys() | seen.keys()):
        if uri not in found:
            return f"{uri} is no longer among the data files"
        if uri not in seen:
            return f"{uri} was not among the data files of the checkpoint"
        if found[uri] != seen[uri]:
            return f"{uri} has {found[uri]} bytes, and had {seen[uri]}"
    return ""


def _epoch_after(state: JobState, spec: TrainingJobSpec) -> JobState:
    if state.epoch + 1 == spec.training.epochs:
        return replace(state, stage=Stage.SAVE, ledger=Ledger.fresh(0))
    batches = batches_of(state.training_records, spec.training.batch_size)
    return replace(state, stage=Stage.TRAIN, epoch=state.epoch + 1, ledger=Ledger.fresh(batches))


def unowned(generation: int, version: int) -> RoutingTable:
    """The table before rows are assigned."""
    return RoutingTable(generation=generation, version=version, servers=(), bucket_owners=(), piece_owners=())


def _ended(state: JobState, outcome: JobEnd) -> JobState:
    idle = _without_operations(state)
    return replace(idle, outcome=outcome, ledger=state.ledger.revoke_all(), prunings=(), troubles={})


def _without_operations(state: JobState) -> JobState:
    """Ends all operations on the servers."""
    return replace(state, restore=None, reload=None, checkpointings=(), move=None, rebuilding=None, ends_with=None)
