"""Transitions between stages: what follows when a stage is done, and what a lost parameter server undoes."""

from emberscale_api.checkpoint import is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.origin import changed_file
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.chains import Chain
from emberscale_jobmaster.forgetting import forgotten_by
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import MemberId
from emberscale_jobmaster.operations import CheckpointPhase, CheckpointPurpose, Reload, ReloadPhase, Restored, Source
from emberscale_jobmaster.placement import NOBODY, placed
from emberscale_jobmaster.ranges import normalised
from emberscale_jobmaster.recovery import (
    Decode,
    Estimates,
    Failure,
    Parity,
    Partial,
    Protection,
    Rebuilding,
    RollBack,
    choose,
)
from emberscale_jobmaster.state import (
    PREPARATION,
    JobEnd,
    JobState,
    Routing,
    Stage,
    allowed_pls,
    applied_batches,
    batches_of,
    limits_of,
    live_servers,
    phase_of,
    routed_servers,
    servers_missing,
    sizes_of,
    switching_move,
    switching_reload,
    wanted_shares,
    with_scaling,
)
from emberscale_jobmaster.statistics import Tally

_LOST_NUMBERS = 10_000
LOST_CHECKPOINTS = _LOST_VERSIONS = 100
"""More than a master gives while the store loses what it was given last."""


def initial(wall: float) -> JobState:
    """Returns a job with nothing done; `wall` is the present, in seconds since 1970."""
    fresh = with_fresh_numbers(JobState(), wall)
    generation = max(1, int(wall * 1_000_000))  # servers may be left over from a job whose store was lost
    return replace(
        fresh, routing=Routing(_unowned(generation, fresh.routing.table.version)), next_generation=generation + 1
    )


def advance(before: JobState, state: JobState, spec: TrainingJobSpec) -> JobState:
    """Applies all automatic transitions to `state`; `before` is the state before the event."""
    while (following := _following(state, spec)) is not state:
        state = following
    told = (phase_of(before, spec), before.members.given_up(), routed_servers(before, spec))
    if told != (phase_of(state, spec), state.members.given_up(), routed_servers(state, spec)):
        state = replace(state, plan_version=state.plan_version + 1)
    return state


def fail(state: JobState, reason: str, message: str) -> JobState:
    """The job is Failed; the first reason stands."""
    if state.over:
        return state
    return _ended(state, JobEnd(JobPhase.FAILED, reason, message))


def begin_suspension(state: JobState, now: float) -> JobState:
    """The job is to rest at a checkpoint of now."""
    return state if state.over or state.suspending else replace(state, suspending_since=now)


def suspend(state: JobState, spec: TrainingJobSpec) -> JobState:
    """The job rests at its last checkpoint, and counts what that holds."""
    if state.stage not in PREPARATION:
        state = _at_checkpoint(state, spec)
    where = f"checkpoint {state.checkpoint}" if state.checkpoint else "the start: no checkpoint was taken"
    return _ended(
        replace(state, suspending_since=None), JobEnd(JobPhase.SUSPENDED, "Suspended", f"resumes from {where}")
    )


def complete(state: JobState) -> JobState:
    """The job is Complete."""
    return _ended(state, JobEnd(JobPhase.COMPLETE, "Completed", "every sample of every epoch is trained"))


def on_takeover(state: JobState, spec: TrainingJobSpec, wall: float, alone: bool = False) -> JobState:
    """Continues a job under a new master; `wall` is the present, in seconds since 1970.

    A suspended job is active again: its processes were told to go, so it waits for new ones and assigns those. So does
    a job whose master is `alone`: all processes ended with the master before, and so did a suspension that it began.
    """
    state = replace(
        state,
        next_token=state.next_token + _LOST_NUMBERS,
        next_barrier=state.next_barrier + _LOST_NUMBERS,
    )
    state = with_fresh_numbers(state, wall)
    if state.members.slots:  # else no master before had any server to assign
        state = _with_fresh_generation(state, wall)
    holds_rows = state.routing.ready or state.reload is not None
    if holds_rows and not state.over:  # else a restore looks which checkpoints there are
        state = replace(
            state,
            next_checkpoint=state.next_checkpoint + LOST_CHECKPOINTS,
            next_version=state.next_version + _LOST_VERSIONS,
        )
    if state.outcome is None and alone:
        state = replace(state, suspending_since=None, troubles={})
    elif state.outcome is None or state.outcome.phase is not JobPhase.SUSPENDED:
        return state
    scaling = replace(state.scaling, target=None)
    return unroute(replace(state, outcome=None, members=state.members.silenced(), scaling=scaling), spec)


def _with_fresh_generation(state: JobState, wall: float) -> JobState:
    """Generations that no master before began: none begins one each microsecond, and what the last one wrote is lost.

    One that has no servers yet may have been assigned by it, to others than the ledger will choose now.
    """
    state = replace(state, next_generation=max(state.next_generation, int(wall * 1_000_000)))
    if state.routing.table.servers:
        return state
    following = _unowned(max(state.next_generation, state.routing.table.generation + 1), state.next_version)
    return replace(state, routing=Routing(following), next_generation=following.generation + 1)


def unroute(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Discards the servers' rows: all leases end, and the servers are assigned again.

    The ledger stays, without leases, until the state that the servers restore is known. Without rows to move, a job
    that is to have fewer servers has them at once: nobody may start the others any more.
    """
    target = state.scaling.target
    if target is not None and target.ps.replicas <= sizes_of(state, spec).ps.replicas:
        state = with_scaling(state, replace(state.scaling, sizes=target, target=None))
    generation = max(state.next_generation, state.routing.table.generation + 1)
    state = replace(
        state,
        routing=Routing(_unowned(generation, state.next_version)),
        next_generation=generation + 1,
        next_version=state.next_version + 1,
        chain=Chain(),
        restore=None,
        reload=None,
        checkpointings=(),
        move=None,
        ends_with=None,
        parity=Parity(),
        rebuilding=None,
    )
    if state.stage in PREPARATION or state.stage is Stage.READY:
        return state
    if state.stage is Stage.TRAIN:
        return replace(state, stage=Stage.READY, ledger=state.ledger.revoke_all())
    batches = batches_of(state.training_records, spec.training.batch_size)
    return replace(state, stage=Stage.READY, tally=None, ledger=Ledger.fresh(batches, ((0, batches),)))


def on_server_lost(state: JobState, lost: MemberId, spec: TrainingJobSpec) -> JobState:
    """Handles the loss of a parameter server and its rows."""
    if state.over or (lost.index, lost.incarnation) not in _holders(state):
        return state
    known = state.rebuilding
    if known is not None and (known.server, known.incarnation) == (lost.index, lost.incarnation):
        return state
    if state.stage in PREPARATION or not (state.routing.ready or state.reload is not None):
        return unroute(state, spec)  # no row has changed since it was assigned
    if state.reload is not None and lost.incarnation in {server.incarnation for server in state.reload.lost}:
        return state
    if switching_move(state) is not None or switching_reload(state) is not None:
        return recover(state, spec, Failure((lost.index,), f"{lost.slot} is lost while servers change their table"))
    return recover(state, spec, Failure((lost.index,), f"{lost.slot} is lost", is_loss=True))


def recover(state: JobState, spec: TrainingJobSpec, failure: Failure) -> JobState:
    """Starts the recovery that costs least."""
    newest = state.flash.taken_at if state.flash.checkpoint else 0.0
    is_flash_newest = newest > state.checkpointed_at
    since = state.clock.active_seconds - max(state.checkpointed_at, newest)
    survivors = _survivors(state, failure)
    pls = state.pls
    if not is_flash_newest:  # of a flash checkpoint, its manifest will tell
        lost = {server.index for server in state.routing.table.owners} - survivors
        newest_persistent = Source(state.checkpoint, state.restored)
        pls += forgotten_by(state, spec, lost, applied_batches(state, spec), newest_persistent).pls
    protection = Protection(
        state.flash.checkpoint if is_flash_newest else state.checkpoint,
        len(survivors),
        allowed_pls(state, spec),
        in_parity(state),
    )
    estimates = Estimates(since, pls)
    match choose(failure, protection, estimates):
        case Decode(server):
            return _degraded(state, server, failure.reason)
        case Partial():
            return _await_successors(state, failure)
        case RollBack(why=why) if why:
            return roll_back(state, spec, failure.reason, why)
        case RollBack():
            return _roll_back(state, spec)


def roll_back(state: JobState, spec: TrainingJobSpec, reason: str, why: str) -> JobState:
    """All servers go back to the newest checkpoint, of a job that may recover partially; `why` it does not is told."""
    told = reshaping.note_step(state, "RolledBack", f"{reason}; the whole job goes back to a checkpoint: {why}", 0.0)
    return _roll_back(told, spec)


def _roll_back(state: JobState, spec: TrainingJobSpec) -> JobState:
    scaling = replace(state.scaling, sizes=sizes_of(state, spec))  # whatever the manifest says meanwhile
    return unroute(replace(state, recoveries=state.recoveries + 1, scaling=scaling), spec)


def _survivors(state: JobState, failure: Failure) -> frozenset[int]:
    """The indexes of the servers whose rows are as the routing table says."""
    present = (
        (server, state.members.process(Role.PS, server.index))
        for server in state.routing.table.owners
        if server.index not in failure.servers
    )
    return frozenset(
        server.index for server, process in present if process is not None and process.incarnation == server.incarnation
    )


def _await_successors(state: JobState, failure: Failure) -> JobState:
    """Begins a reload, or begins it again where another server is lost meanwhile. Checkpoints and moves end."""
    before = state.reload
    lost = tuple(server for server in state.routing.table.owners if server.index in failure.servers)
    operation = Reload(
        state.next_operation if before is None else before.id,
        ReloadPhase.WAIT,
        failure.reason if before is None else f"{before.reason}, {failure.reason}",
        state.clock.active_seconds if before is None else before.began_at,
        lost=lost if before is None else (*before.lost, *lost),
    )
    return replace(
        state,
        next_operation=max(state.next_operation, operation.id + 1),
        routing=replace(state.routing, ready=False),
        reload=operation,
        checkpointings=(),
        move=None,
    )


def in_parity(state: JobState) -> frozenset[int]:
    """The servers of which the others can rebuild any one now."""
    table, parity = state.routing.table, state.parity
    owners = frozenset(server.index for server in table.owners)
    whole = (parity.generation, parity.version, parity.servers) == (table.generation, table.version, owners)
    trains = state.stage in (Stage.TRAIN, Stage.EVALUATE) and state.routing.ready
    return owners if whole and trains and switching_move(state) is None and state.rebuilding is None else frozenset()


def is_protected(state: JobState) -> bool:
    """Whether nothing is lost with any one server now."""
    return bool(in_parity(state)) and not state.parity.troubles


def _degraded(state: JobState, server: int, reason: str) -> JobState:
    """The rows of a server are to be rebuilt. What the others do for anything else ends, as it needs all of them."""
    incarnation = state.routing.table.servers[server].incarnation
    lost = Rebuilding(server, incarnation, reason, state.clock.active_seconds)
    written = tuple(taking for taking in state.checkpointings if taking.phase is CheckpointPhase.WRITE)
    return replace(state, rebuilding=lost, move=None, checkpointings=written)


def surpass_history(
    state: JobState, server: MemberId, generation: int, version: int, spec: TrainingJobSpec
) -> JobState:
    """A parameter server has adopted a table of this generation and version; (0, 0): none.

    A table that this ledger does not know of means that it is old, or new: the store has lost the last of it, or
    all. What was granted under that table must not count, so the job recovers, under numbers beyond it.
    """
    table = state.routing.table
    switching = _next_table(state)
    newest = table.version if switching is None else switching.version
    left = {(one.index, one.incarnation) for one in state.routing.left}
    known = (server.index, server.incarnation) in _holders(state) | left
    surpassed = (generation, version) > (table.generation, newest)
    foreign = not known and generation == table.generation
    if state.over or generation == 0 or not (surpassed or foreign):
        return state
    reason = f"{server.slot} holds rows that the ledger does not know"
    state = recover(state, spec, Failure((server.index,), reason))
    beyond = state.routing.table
    following = _unowned(max(beyond.generation, generation + 1), max(beyond.version, version + 1))
    return replace(state, routing=Routing(following), next_version=following.version + 1)


def surpass_numbers(state: JobState, generation: int, next_token: int, next_barrier: int) -> JobState:
    """A server has heard of these numbers, from a master whose ledger the store has lost.

    It fences what has a lower token, unless it is told that the lease lives, and refuses barriers with lower numbers:
    the leases begin anew, beyond them.
    """
    if state.over or generation != state.routing.table.generation:
        return state
    if next_token > state.next_token:
        ledger = state.ledger.revoke_all() if state.stage is Stage.TRAIN else state.ledger
        state = replace(state, next_token=next_token + _LOST_NUMBERS, ledger=ledger)
    if next_barrier > state.next_barrier:
        state = replace(state, next_barrier=next_barrier + _LOST_NUMBERS)
    return state


def surpass_checkpoints(state: JobState, next_checkpoint: int) -> JobState:
    """A server has heard of all checkpoints below this number, perhaps from a master whose ledger the store has lost.

    It begins none of them again: their files may be those of a complete checkpoint.
    """
    if state.over or next_checkpoint <= state.next_checkpoint:
        return state
    return replace(state, next_checkpoint=next_checkpoint)


def begin_assignment(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Begins to assign the rows to the live servers; returns the same state while one is missing."""
    if servers_missing(state, spec):
        return state
    servers = live_servers(state, spec)
    addresses = tuple(
        PsAddress(index, server.incarnation, server.data_address, server.control_address)
        for index, server in enumerate(servers)
    )
    shares = wanted_shares(state, len(addresses))
    table = replace(
        state.routing.table,
        servers=addresses,
        bucket_owners=placed([NOBODY] * BUCKETS, len(addresses), limits=limits_of(shares)),
        piece_owners=placed([NOBODY] * DENSE_PIECES, len(addresses), limits=limits_of(shares)),
    )
    return replace(state, routing=Routing(table, shares=shares))


def complete_assignment(state: JobState, restored: Restored, checkpoint: str) -> JobState:
    """Notes that every server of the routing table holds what `restored` says."""
    routing = replace(state.routing, ready=True)
    from_flash = is_flash(checkpoint)
    clock = replace(state.clock, training_seconds=max(state.clock.training_seconds, restored.training_seconds))
    return replace(
        state,
        routing=routing,
        restored=restored,
        checkpoint=checkpoint,
        clock=clock,
        checkpointed_at=state.checkpointed_at if from_flash else clock.active_seconds,
        flash=state.flash.restarted(checkpoint if from_flash else "", clock.active_seconds),
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
                return fail(state, "DataEmpty", "spec.data.train: the checkpoint has trained all files; add new ones")
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
    """Whether the checkpoint that the job starts from is not known yet: it says which files are trained already."""
    return spec.checkpoint.initial_from is not None and not state.routing.ready


def _indexing(state: JobState) -> JobState:
    """Indexes the files that are read. Those that were trained before the job must be as they were."""
    origin, present = state.restored.origin, {file.uri: file.bytes for file in state.training_files}
    if origin is not None and (changed := changed_file(origin, present)):
        advice = "restore it, or give the new data under another name"
        return fail(state, "DataChanged", f"{changed}; data.continuation Append trains new files only: {advice}")
    before = set() if origin is None else {file.uri for file in origin.trained}
    files = tuple(
        replace(file, records=0, trained=True) if file.uri in before else file for file in state.training_files
    )
    done = normalised((number, number + 1) for number, file in enumerate(files) if file.trained)
    ledger = Ledger.fresh(len(files) + len(state.evaluation_files), done)
    return replace(state, stage=Stage.INDEX, training_files=files, ledger=ledger)


def _ended_by(state: JobState, spec: TrainingJobSpec, purpose: CheckpointPurpose) -> JobState:
    """A checkpoint of this purpose is complete, and old ones are removed."""
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
    """The ledgers as `state.restored` has them."""
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
    """Describes how the data differs from the checkpoint's; empty if it does not, or without a checkpoint."""
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


def with_fresh_numbers(state: JobState, wall: float) -> JobState:
    """Tokens, barrier numbers and scaling steps that no master before gave, even one whose last writes were lost.

    `wall` is in seconds since 1970. No master gives a token or a number each microsecond, or a step each second: where
    two take over from the same ledger, since what the first wrote is lost, the second begins beyond those of the first.
    """
    first = int(wall * 1_000_000)
    scaling = replace(state.scaling, next_step=max(state.scaling.next_step, int(wall)))
    return replace(
        state,
        next_token=max(state.next_token, first),
        next_barrier=max(state.next_barrier, first),
        scaling=scaling,
    )


def may_own(state: JobState, index: int, incarnation: str) -> bool:
    """Whether this parameter server owns something, or takes part in a move."""
    moving = () if state.move is None else state.move.parties
    return (index, incarnation) in _holders(state) | {(one.index, one.incarnation) for one in moving}


def _holders(state: JobState) -> set[tuple[int, str]]:
    """The servers that may own rows, by index and incarnation."""
    moving, reloading = switching_move(state), switching_reload(state)
    servers = state.routing.table.owners
    if moving is not None or reloading is not None:
        servers = moving.parties if moving is not None else reloading.parties if reloading is not None else ()
    return {(server.index, server.incarnation) for server in servers}


def _next_table(state: JobState) -> RoutingTable | None:
    """The table that some servers may have adopted, and not all."""
    moving, reloading = switching_move(state), switching_reload(state)
    if moving is not None:
        return moving.table
    return None if reloading is None else reloading.table


def _unowned(generation: int, version: int) -> RoutingTable:
    return RoutingTable(generation=generation, version=version, servers=(), bucket_owners=(), piece_owners=())


def _ended(state: JobState, outcome: JobEnd) -> JobState:
    return replace(
        state,
        outcome=outcome,
        ledger=state.ledger.revoke_all(),
        restore=None,
        reload=None,
        checkpointings=(),
        move=None,
        rebuilding=None,
        prunings=(),
        troubles={},
        ends_with=None,
    )
