"""Rebuilds the rows of lost parameter servers from the parity that the others hold, for their new owners.

    lost -> (all successors have joined) -> a move with `lost`: PREPARE -> COPY -> SWITCH -> over
       one server is lost, and all know how -> over once the keys of its rows are known: the rows follow, on demand
       they have not after some seconds -> the same move, in which the survivors adopt the rows
       the survivors cannot, for want of memory -> the successors are waited for
       another server is lost before COPY, and the parity covers all -> lost, with one more server
       another server is lost otherwise, or attempts keep failing -> the job rolls back
       a lost server returns before COPY -> over, or only the others are lost
       a successor is lost -> the next attempt, from what is already rebuilt

In COPY, the survivors take their own rows out of the parity, which covers none of them from then on.

The survivors keep their rows, the generation stays, and nobody holds a barrier: neither the survivors' rows nor the
lost servers' rows change. Workers retry a batch that only some servers have applied. A survivor that has adopted rows
applies such a batch to those of its rows that lack it. The successor of a server whose rows others have adopted gets
its share by a live move.

With `durability: Async`, rebuilt rows may lack the latest pushes that their server had answered. The ledger decides
which batches they have forgotten: those that are done as SWITCH begins, and count as applied to these rows from then
on. All leases end with that, so a batch that a worker believes done, and has yet to report, is leased again: servers
that have applied it ignore it, and the successors apply it. Nobody gets a lease before all servers have adopted the
table, as a lost server may still live, and answer those that have yet to hear of its successor.
"""

from collections.abc import Mapping, Sequence

from emberscale_api.frozen import replace
from emberscale_api.job import Durability, TrainingJobSpec, resolve_model
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import Rebuilds
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.figures import applied_batches, limits_of, sizes_of, switching
from emberscale_jobmaster.forgetting import forgotten_by
from emberscale_jobmaster.losses import recover
from emberscale_jobmaster.operations import Move, MovePhase, Restored, Source
from emberscale_jobmaster.parity import heeds_that_none_is_kept, note_parting
from emberscale_jobmaster.placement import NOBODY, placed
from emberscale_jobmaster.ranges import Applied, count, minus, on_any
from emberscale_jobmaster.recovery import Failure, ParityGroup, Rebuilding, names_of
from emberscale_jobmaster.reports import ServerReport
from emberscale_jobmaster.state import JobState, Routing, Stage

MOST_ATTEMPTS = 5
AGAIN_SECONDS = 1.0
ADOPT_SECONDS = 3.0
"""How long lost servers may lack a successor before the survivors adopt their rows: that costs another move later."""
PREPARE_SECONDS = 180.0
"""How long the successor may take to build the model and its tables."""
PARTED_SECONDS = 5.0
"""How long servers that have parted may take to learn of another table, or the master to learn of a lost server."""
SILENT_SECONDS = 30.0
"""How long a server may acknowledge nothing; twice the lease timeout if that is longer."""


def trouble_of(state: JobState, member: MemberId, generation: int, report: ServerReport) -> ParityTrouble | None:
    """Returns the trouble that a server reports with the parity of its rows under the present table.

    Returns None while a server is lost.
    """
    trouble, table = report.parity_trouble, state.routing.table
    if not _is_served_by(state, member, generation) or state.rebuilding is not None:
        return None
    return trouble if trouble is not None and trouble.version == table.version else None


def note_parity(
    state: JobState,
    spec: TrainingJobSpec,
    member: MemberId,
    generation: int,
    report: ServerReport,
    troubled_seconds: float,
) -> JobState:
    """Takes a server's report of the table under which others hold parity of all its rows, and of trouble with that.

    Live servers that do not reach each other again cannot recover by themselves, so the job recovers.
    `troubled_seconds` is how long this master has heard of the trouble. Older trouble may have begun while others still
    loaded, or while the master was stopped; in that case a silent server is declared lost first.
    """
    if not _is_served_by(state, member, generation):
        return state
    table, group = state.routing.table, state.parity_group
    if (group.generation, group.version) != (generation, table.version):
        group = ParityGroup(generation, table.version)
    if report.protected_version == table.version:
        group = replace(group, protected=group.protected | {member.index})
    troubles = {index: told for index, told in group.troubles.items() if index != member.index}
    trouble = trouble_of(state, member, generation, report)
    if trouble is not None:
        troubles[member.index] = trouble.message
    group = replace(group, troubles=troubles)
    if group != state.parity_group and (group.protected or group.troubles):
        state = replace(state, parity_group=group)
    is_over = bool(state.forgone) and heeds_that_none_is_kept(state)
    if trouble is None or is_over or not _is_broken(state, spec, trouble, troubled_seconds):
        return state
    state = note_parting(state, f"{member.slot}: {trouble.message}")
    return recover(state, spec, Failure((), f"{member.slot} cannot protect its rows: {trouble.message}"))


def note_rows(state: JobState, member: MemberId, generation: int, version: int, report: ServerReport) -> JobState:
    """Takes a server's report, under the table of this version, of rows that it serves and that are being rebuilt."""
    group = state.parity_group
    if not (state.misses_rows and member.index in group.missing and version == state.routing.table.version):
        return state
    if report.missing_rows or not _is_served_by(state, member, generation):
        return state
    state = replace(state, parity_group=replace(group, missing=group.missing - {member.index}))
    if state.misses_rows:
        return state
    return reshaping.note_step(state, "RowsRebuilt", "all rows are rebuilt; their parity is computed again", 0.0)


def _is_served_by(state: JobState, member: MemberId, generation: int) -> bool:
    """Whether a server owns rows of the present table, and all servers have adopted that table."""
    table = state.routing.table
    if generation != table.generation or not state.routing.ready or state.over:
        return False
    return (member.index, member.incarnation) in {(one.index, one.incarnation) for one in table.owners}


def _is_broken(state: JobState, spec: TrainingJobSpec, trouble: ParityTrouble, troubled_seconds: float) -> bool:
    """Whether pushes or missing rows wait in vain. Servers that are changing their table may part briefly."""
    trains = state.stage in (Stage.TRAIN, Stage.EVALUATE) or state.misses_rows
    patience = PARTED_SECONDS if trouble.broken else max(SILENT_SECONDS, 2 * spec.sharding.lease_timeout)
    return trains and switching(state) is None and min(trouble.seconds, troubled_seconds) >= patience


def begin_if_due(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Begins the move to the successors of lost servers once all have joined, or to survivors that adopt the rows."""
    lost = state.rebuilding
    if lost is None or state.over:
        return state
    if not lost.told:  # the loss was dated by the job's clock, which advances once a second
        return _announced(state, replace(lost, told=True, began_at=now))
    present = {server: state.members.server(server) for server in lost.servers}
    returned = [server for server, one in present.items() if one is not None and one.incarnation == lost.lost[server]]
    if returned:
        return _with_returned(state, spec, lost, returned)
    if now < lost.next_at:
        return state
    table = state.routing.table
    following = [present.get(one.index, one) for one in table.servers]  # None: a lost one has no successor yet
    servers = tuple(one for one in following if one is not None)
    if len(servers) == len(following):
        return _begun(state, spec, lost, replace(table, servers=servers), state.routing.shares, now)
    if now >= lost.began_at + ADOPT_SECONDS and _may_adopt(state, lost):
        shares = _shares_without(state, lost)
        return _begun(state, spec, lost, _adopted(table, lost, shares), shares, now)
    return state


def _announced(state: JobState, lost: Rebuilding) -> JobState:
    """Tells people who is lost, and what happens next."""
    succeeded = "it has a successor" if len(lost.lost) == 1 else "they have successors"
    if _may_adopt(state, lost):
        succeeded += f", or on the other servers after {duration_text(ADOPT_SECONDS)}"
    message = f"{lost.reason}: {lost.their} rows are rebuilt from parity once {succeeded}"
    return reshaping.note_step(replace(state, rebuilding=lost), "Degraded", message, 0.0)


def _with_returned(state: JobState, spec: TrainingJobSpec, lost: Rebuilding, returned: Sequence[int]) -> JobState:
    """Leaves servers that have returned out of the rebuild; rolls back once survivors withdraw their rows."""
    if lost.withdraws:
        return _roll_back(state, spec, f"ps-{returned[0]} answers again while its rows are rebuilt")
    rest = {server: incarnation for server, incarnation in lost.lost.items() if server not in returned}
    still = replace(lost, lost=rest) if rest else None
    message = f"{names_of(returned)} {'answers' if len(returned) == 1 else 'answer'} again"
    return reshaping.note_step(replace(state, rebuilding=still), "Returned", message, 0.0)


def _begun(
    state: JobState, spec: TrainingJobSpec, lost: Rebuilding, after: RoutingTable, shares: tuple[float, ...], now: float
) -> JobState:
    move = Move(
        id=state.next_operation,
        number=state.next_barrier,
        phase=MovePhase.PREPARE,
        began_at=now,
        deadline=now + PREPARE_SECONDS,
        sizes=sizes_of(state, spec),
        table=replace(after, version=state.next_version),
        servers=after.servers,
        shares=shares,
        members=tuple(one.index for one in after.owners),
        lost=lost.servers,
        on_demand=len(lost.lost) == 1 and not _evicts(spec) and _all_know_how(state, after),
    )
    return replace(state, rebuilding=replace(lost, attempts=lost.attempts + 1)).beginning(move)


def _may_adopt(state: JobState, lost: Rebuilding) -> bool:
    """Whether the survivors may take over the rows: all know how, and none has failed to."""
    left = [server.index for server in state.routing.table.owners if server.index not in lost.lost]
    processes = [state.members.process(Role.PS, index) for index in left]
    can_adopt = bool(processes) and all(process is not None and process.adopts_rows for process in processes)
    return can_adopt and not lost.awaits_successors


def _all_know_how(state: JobState, after: RoutingTable) -> bool:
    """Whether all owners under the next table can serve rows that have yet to be rebuilt, and rebuild those in time."""
    processes = [state.members.process(Role.PS, server.index) for server in after.owners]
    return all(process is not None and process.rebuilds_on_demand for process in processes)


def _evicts(spec: TrainingJobSpec) -> bool:
    """Whether servers remove rows: they would choose others while some have yet to arrive."""
    return any(table.eviction.removes_rows for table in resolve_model(spec).tables)


def _shares_without(state: JobState, lost: Rebuilding) -> tuple[float, ...]:
    """Returns the shares of the routing table, of which lost servers have none."""
    servers = len(state.routing.table.servers)
    shares = state.routing.shares or (1.0,) * servers
    return tuple(0.0 if index in lost.lost else share for index, share in enumerate(shares))


def _adopted(table: RoutingTable, lost: Rebuilding, shares: tuple[float, ...]) -> RoutingTable:
    """Returns the table in which the survivors own what the lost servers owned, and all else stays."""

    def after(owners: tuple[int, ...]) -> tuple[int, ...]:
        left = [NOBODY if owner in lost.lost else owner for owner in owners]
        given = placed(left, len(shares), limits_of(shares))
        return tuple(new if before == NOBODY else before for before, new in zip(left, given, strict=True))

    return replace(table, bucket_owners=after(table.bucket_owners), piece_owners=after(table.piece_owners))


def failed(state: JobState, spec: TrainingJobSpec, move: Move, problem: str, now: float) -> JobState:
    """Handles a failed move: another follows, or the job rolls back."""
    lost, state = state.rebuilding, state.without(move)
    if lost is None or lost.attempts >= MOST_ATTEMPTS:
        return _roll_back(state, spec, f"the rows could not be rebuilt: {problem}")
    if move.is_adoption:
        successors = "a successor" if len(lost.lost) == 1 else "successors"
        message = f"the other servers do not adopt the rows of {lost.names}, which wait for {successors}: {problem}"
        state = reshaping.note_step(state, "Degraded", message, 0.0)
    awaits_successors = lost.awaits_successors or move.is_adoption
    return replace(state, rebuilding=replace(lost, next_at=now + AGAIN_SECONDS, awaits_successors=awaits_successors))


def withdrawing(state: JobState) -> JobState:
    """Notes that the survivors begin to take their own rows out of the parity."""
    lost = state.rebuilding
    return state if lost is None else replace(state, rebuilding=replace(lost, withdraws=True))


def copied(state: JobState, spec: TrainingJobSpec, move: Move) -> JobState:
    """Switches once all holders have sent the rebuilt rows or their keys, if they agree on the batches in them."""
    found = rebuilt(move)
    if found is None:
        return _roll_back(state, spec, f"the servers do not agree on what {names_of(move.lost)} had applied")
    move = replace(move, phase=MovePhase.SWITCH, done=frozenset(), settled=found)
    if state.chosen_durability is Durability.ASYNC:
        state, move = _forgetting(state, spec, move)
    return state.asking(move, *move.everyone)


def _forgetting(state: JobState, spec: TrainingJobSpec, move: Move) -> tuple[JobState, Move]:
    """Counts all batches that are done as applied to the rebuilt rows, and ends all leases of training."""
    done = applied_batches(state, spec)
    lacking = {server: minus(done, has) for server, has in move.settled.items()}
    forgotten = [
        forgotten_by(state, spec, {server}, done, Source("", Restored(applied=move.settled[server])))
        for server in move.lost
        if lacking[server]
    ]
    if state.stage is Stage.TRAIN:
        state = replace(state, ledger=state.ledger.revoke_all())
    settled = {server: on_any([has, lacking[server]]) for server, has in move.settled.items()}
    return state, replace(move, settled=settled, forgotten=tuple(forgotten))


def rebuilt(move: Move) -> Mapping[int, Applied] | None:
    """Returns the batches in the rebuilt rows of each lost server, as the servers with parity of it have told.

    Returns None if they disagree, and if nobody had parity of a lost server.
    """
    said = [report.rebuilt for index, report in move.copied.items() if index not in move.lost]
    found = {server: applied for one in said for server, applied in one.items()}
    agree = all(found[server] == applied for one in said for server, applied in one.items())
    return found if agree and found.keys() == {*move.lost} else None


def completed(state: JobState, move: Move, now: float) -> JobState:
    """Completes a rebuild, now that all servers have adopted its table."""
    lost, sent = state.rebuilding, sum(report.copied_bytes for report in move.copied.values())
    seconds = now - (move.began_at if lost is None else lost.began_at)
    if lost is not None and move.is_adoption:
        state = _expelling(state, lost)
    rebuilds = Rebuilds(
        count=state.rebuilt.count + len(move.lost), server=names_of(move.lost), seconds=seconds, bytes=sent
    )
    state = replace(
        state.without(move),
        routing=Routing(move.table, True, state.routing.left, move.shares),
        rebuilding=None,
        parity_group=_missing(move),
        rebuilt=rebuilds,
        forgotten=(*state.forgotten, *move.forgotten),
    )
    return reshaping.note_step(state, "Recovered", _recovered(move, sent), seconds)


def _recovered(move: Move, sent: int) -> str:
    """Says for people where the rebuilt rows are, and what they lack."""
    names = names_of(move.lost)
    has = "has its" if len(move.lost) == 1 else "have their"
    back = f"{names} {has} {bytes_text(sent)} of rows again"
    if move.is_adoption:
        owners = names_of(server.index for server in move.table.owners)
        back = f"{bytes_text(sent)} of rows of {names} are on {owners}"
    if move.on_demand:
        back += ", those that are wanted first and the rest behind training"
    message = f"{back}, rebuilt from parity, by routing table {move.table.version}; nothing was rolled back"
    for share in move.forgotten:
        batches = sum(map(count, (part.ranges for part in share.epochs)))
        message += (
            f"; rows of {names_of(share.servers)}, {share.share:.1%} of all, have forgotten their latest "
            f"{batches:,} batches, {share.samples:,} samples"
        )
    return message


def _missing(move: Move) -> ParityGroup:
    """Returns the parity group of the table of a rebuild: who has yet to get rows."""
    if not move.on_demand:
        return ParityGroup()
    owners = frozenset(one.index for one in move.table.owners)
    missing = owners if move.is_adoption else owners & {*move.lost}
    return ParityGroup(move.table.generation, move.table.version, missing=missing)


def _expelling(state: JobState, lost: Rebuilding) -> JobState:
    """Expels lost servers that may speak again: others own their rows, and a share is for a server without rows."""
    for server, incarnation in lost.lost.items():
        process = state.members.slot(Role.PS, server).process
        if process is not None and process.incarnation == incarnation:
            state = replace(state, members=state.members.expelled(MemberId(Role.PS, server, incarnation)))
    return state


def _roll_back(state: JobState, spec: TrainingJobSpec, reason: str) -> JobState:
    lost = state.rebuilding
    return recover(state, spec, Failure(() if lost is None else lost.servers, reason))
