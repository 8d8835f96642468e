"""From stage to stage: what begins when something is done, and what a lost parameter server undoes."""

from dataclasses import replace
from types import MappingProxyType

from emberscale_api.job import TrainingJobSpec
from emberscale_api.routing import PsAddress, RoutingTable, spread_evenly
from emberscale_jobmaster.applied import Applied
from emberscale_jobmaster.evaluation import Tally
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import MemberId
from emberscale_jobmaster.sizes import within_manifest
from emberscale_jobmaster.state import (
    PREPARATION,
    Clock,
    Cut,
    JobState,
    Outcome,
    Phase,
    Restored,
    Routing,
    Stage,
    batches_of,
    live_servers,
    phase_of,
    servers_missing,
)


def initial(wall: float) -> JobState:
    """A job of which nothing is done; `wall` is now, in seconds since 1970."""
    return _with_fresh_tokens(JobState(clock=Clock(wall)))


def advance(before: JobState, state: JobState, spec: TrainingJobSpec) -> JobState:
    """Everything that follows by itself from `state`; `before` is what it came from."""
    while (following := _step(state, spec)) is not state:
        state = following
    if phase_of(before, spec) is not phase_of(state, spec):
        state = replace(state, plan_version=state.plan_version + 1)
    return state


def failed(state: JobState, reason: str, message: str) -> JobState:
    """The job is Failed; the first reason stands."""
    if state.over:
        return state
    return _ended(state, Outcome(Phase.FAILED, reason, message))


def suspension_begun(state: JobState) -> JobState:
    """The job is to rest at a checkpoint of now."""
    return state if state.over else replace(state, suspending=True)


def suspended(state: JobState) -> JobState:
    """The job rests at its last checkpoint."""
    where = f"checkpoint {state.checkpoint}" if state.checkpoint else "the start: no checkpoint was taken"
    return _ended(replace(state, suspending=False), Outcome(Phase.SUSPENDED, "Suspended", f"resumes from {where}"))


def completed(state: JobState) -> JobState:
    """The job is Complete."""
    return _ended(state, Outcome(Phase.COMPLETE, "Completed", "every sample of every epoch is trained"))


def taken_over(state: JobState, spec: TrainingJobSpec, wall: float) -> JobState:
    """A new master goes on; time without a master does not count.

    A suspended job is active again: its processes were told to go, so it waits for new ones and assigns those.
    """
    scaling = state.scaling
    if scaling.sizes is not None:  # the manifest may have been edited
        sizes = within_manifest(scaling.sizes, spec)
        if state.routing.table.servers and state.outcome is None:  # rows are spread over so many
            sizes = replace(sizes, ps=replace(sizes.ps, replicas=scaling.sizes.ps.replicas))
        scaling = replace(scaling, sizes=sizes, target=None)
    state = _with_fresh_tokens(replace(state, clock=replace(state.clock, wall=wall), scaling=scaling))
    if state.outcome is None or state.outcome.phase is not Phase.SUSPENDED:
        return state
    return unrouted(replace(state, outcome=None, members=state.members.silenced()), spec)


def unrouted(state: JobState, spec: TrainingJobSpec) -> JobState:
    """The rows that the servers hold no longer count: all leases end and the servers are assigned again.

    The ledger stays, without leases, until it is known what the servers go back to.
    """
    epoch = state.routing.table.epoch + 1
    state = replace(state, routing=Routing(RoutingTable(epoch=epoch, servers=(), owners=())), cut=None)
    if state.stage in PREPARATION or state.stage is Stage.READY:
        return state
    if state.stage is Stage.TRAIN:
        return replace(state, stage=Stage.READY, ledger=state.ledger.revoke_all())
    batches = batches_of(state.training_records, spec.training.batch_size)
    return replace(state, stage=Stage.READY, tally=None, ledger=Ledger.fresh(batches, ((0, batches),)))


def server_lost(state: JobState, lost: MemberId, spec: TrainingJobSpec) -> JobState:
    """A parameter server is gone, and its rows with it."""
    routed = ((server.index, server.incarnation) for server in state.routing.table.servers)
    if state.over or (lost.index, lost.incarnation) not in routed:
        return state
    rolls_back = state.routing.ready and state.stage not in PREPARATION
    return unrouted(replace(state, recoveries=state.recoveries + rolls_back), spec)


def epoch_surpassed(state: JobState, server: MemberId, epoch: int, spec: TrainingJobSpec) -> JobState:
    """A parameter server holds the rows of routing epoch `epoch`. A table that these books do not know of means that
    they are old, or new: the store has lost the last of them, or all. What was granted under that table must not count,
    so all go back to the last checkpoint, under an epoch beyond it.
    """
    table = state.routing.table
    known = any(routed.incarnation == server.incarnation for routed in table.servers)
    if state.over or epoch == 0 or epoch < table.epoch or (known and epoch == table.epoch):
        return state
    state = unrouted(replace(state, recoveries=state.recoveries + 1), spec)
    return replace(state, routing=Routing(RoutingTable(epoch=epoch + 1, servers=(), owners=())))


def assignment_begun(state: JobState, spec: TrainingJobSpec) -> JobState:
    """The table by which the live servers are to be assigned; the same state while one is missing."""
    if servers_missing(state, spec):
        return state
    servers = live_servers(state, spec)
    addresses = tuple(
        PsAddress(index, server.incarnation, server.data_address, server.control_address)
        for index, server in enumerate(servers)
    )
    table = RoutingTable(state.routing.table.epoch, addresses, spread_evenly(len(addresses)))
    return replace(state, routing=Routing(table))


def assigned(state: JobState, epoch: int, restored: Restored, checkpoint: str) -> JobState:
    """Every server of routing epoch `epoch` holds what `restored` says. Ignored where the epoch is no longer ours."""
    if state.routing.table.epoch != epoch or state.over:
        return state
    routing = Routing(state.routing.table, ready=True)
    clock = replace(state.clock, training_seconds=max(state.clock.training_seconds, restored.training_seconds))
    return replace(state, routing=routing, restored=restored, checkpoint=checkpoint, clock=clock, trouble=None)


def cut_begun(state: JobState, number: int) -> JobState:
    """A checkpoint is being taken: no lease is granted until its cut is made. Not while the servers are not ready."""
    if state.over or not state.routing.ready:
        return state
    cut = Cut(number, freezing=True, final=state.stage is Stage.SAVE, suspends=state.suspending)
    return replace(state, cut=cut, next_cut=number + 1)


def cut_made(state: JobState, number: int) -> JobState:
    """The cut is in memory, leases are granted again."""
    if state.cut is None or state.cut.number != number:
        return state
    return replace(state, cut=replace(state.cut, freezing=False))


def cut_abandoned(state: JobState, number: int) -> JobState:
    """The checkpoint came to nothing."""
    if state.cut is None or state.cut.number != number:
        return state
    return replace(state, cut=None)


def cut_saved(state: JobState, number: int, checkpoint: str, applied: Applied = MappingProxyType({})) -> JobState:
    """The checkpoint is complete; `applied` are the batches that it holds. The final one ends the job, unless a server
    was lost meanwhile.

    A job that is to rest does so at a checkpoint that was begun after it was told to, or at the final one. What it has
    trained is then what the checkpoint holds: workers may not have told of the last batches, and will not.
    """
    state = replace(state, checkpoint=checkpoint)
    cut = state.cut
    if cut is None or cut.number != number:
        return state
    state = replace(state, cut=None, trouble=None)
    if cut.final and state.stage is Stage.SAVE:
        return completed(state)
    if not (cut.suspends and state.suspending):
        return state
    if state.stage is Stage.TRAIN:
        state = replace(state, ledger=Ledger.fresh(state.ledger.batches, applied.get(state.epoch, state.ledger.done)))
    return suspended(state)


def _step(state: JobState, spec: TrainingJobSpec) -> JobState:
    if state.over:
        return state
    match state.stage:
        case Stage.DISCOVER if state.ledger.complete:
            files = len(state.training_files) + len(state.evaluation_files)
            return replace(state, stage=Stage.INDEX, ledger=Ledger.fresh(files))
        case Stage.INDEX if state.ledger.complete:
            if not state.training_records:
                return failed(state, "DataEmpty", "spec.data.train: the files hold no records")
            return replace(state, stage=Stage.READY, ledger=Ledger.fresh(0))
        case Stage.READY if state.routing.ready:
            return _training_begun(state, spec)
        case Stage.TRAIN if state.ledger.complete:
            if not state.evaluation_records:
                return _epoch_after(state, spec)
            batches = batches_of(state.evaluation_records, spec.training.batch_size)
            return replace(state, stage=Stage.EVALUATE, ledger=Ledger.fresh(batches), tally=Tally())
        case Stage.EVALUATE if state.ledger.complete and state.tally is not None:
            results = (*state.evaluations, state.tally.result(state.epoch))
            return _epoch_after(replace(state, evaluations=results, tally=None), spec)
        case Stage.SAVE if spec.checkpoint.uri is None:
            return completed(state)
    return state


def _training_begun(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Training from what the servers hold: the first epoch with something left to do."""
    if changed := _changed_file(state):
        advice = "restore the files, or start a new job with the new ones"
        return failed(state, "DataChanged", f"{changed}; a job cannot continue on changed or added data yet: {advice}")
    batches = batches_of(state.training_records, spec.training.batch_size)
    books = [Ledger.fresh(batches, state.restored.applied.get(epoch, ())) for epoch in range(spec.training.epochs)]
    evaluated = {result.epoch for result in state.restored.evaluations}
    epoch = next(
        (
            epoch
            for epoch, ledger in enumerate(books)
            if not ledger.complete or (state.evaluation_records and epoch not in evaluated)
        ),
        None,
    )
    results = tuple(result for result in state.restored.evaluations if epoch is None or result.epoch < epoch)
    if epoch is None:
        return replace(state, stage=Stage.SAVE, epoch=spec.training.epochs - 1, evaluations=results)
    return replace(state, stage=Stage.TRAIN, epoch=epoch, ledger=books[epoch], evaluations=results)


def _changed_file(state: JobState) -> str:
    """How the data differs from what the checkpoint saw; empty where it does not, or where there is no checkpoint."""
    if state.restored.data is None:
        return ""
    found = {file.uri: file.bytes for file in (*state.training_files, *state.evaluation_files)}
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


def _with_fresh_tokens(state: JobState) -> JobState:
    """Tokens that no master before gave, even one whose last writes were lost: no lease takes a millisecond."""
    return replace(state, next_token=max(state.next_token, int(state.clock.wall * 1000)))


def _ended(state: JobState, outcome: Outcome) -> JobState:
    return replace(state, outcome=outcome, ledger=state.ledger.revoke_all(), cut=None, trouble=None)
