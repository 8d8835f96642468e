"""Handles lost parameter servers: determines what is lost and what protects the rows, and begins a recovery."""

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec, can_keep_parity
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.job.status import ROLLED_BACK_STEP
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.figures import allowed_pls, applied_batches, due_parity, newest_flash, sizes_of, switching
from emberscale_jobmaster.forgetting import forgotten_by
from emberscale_jobmaster.operations import CheckpointPhase, Reload, ReloadPhase, Source
from emberscale_jobmaster.progress import unroute
from emberscale_jobmaster.recovery import (
    Decode,
    Failure,
    ParityGroup,
    Partial,
    Protection,
    Rebuilding,
    RollBack,
    choose,
    names_of,
)
from emberscale_jobmaster.state import PREPARATION, JobState


def on_server_lost(state: JobState, lost: MemberId, spec: TrainingJobSpec) -> JobState:
    """Handles the loss of a parameter server and its rows."""
    if state.over or (lost.index, lost.incarnation) not in holders(state):
        return state
    before = {} if state.rebuilding is None else state.rebuilding.lost
    if before.get(lost.index) == lost.incarnation:
        return state
    if state.stage in PREPARATION or not (state.routing.ready or state.reload is not None):
        return unroute(state, spec)  # no row has changed since the assignment
    if state.reload is not None and lost.incarnation in {server.incarnation for server in state.reload.lost}:
        return state
    if switching(state) is not None:
        return recover(state, spec, Failure((lost.index,), f"{lost.slot} is lost while servers change their table"))
    servers = (*sorted(before), lost.index)
    reason = f"{names_of(servers)} {'are' if before else 'is'} lost"
    return recover(state, spec, Failure(servers, reason, is_loss=True))


def recover(state: JobState, spec: TrainingJobSpec, failure: Failure) -> JobState:
    """Starts the cheapest recovery."""
    is_flash_newest = bool(newest_flash(state))
    survivors, allowed = _survivors(state, failure), allowed_pls(state, spec)
    pls = state.pls
    if allowed and not is_flash_newest:  # the manifest of a flash checkpoint says this later
        lost = {server.index for server in state.routing.table.owners} - survivors
        newest_persistent = Source(state.checkpoint, state.restored)
        pls += forgotten_by(state, spec, lost, applied_batches(state, spec), newest_persistent).pls
    protection = Protection(
        is_flash_newest or bool(state.checkpoint),
        len(survivors),
        pls,
        allowed,
        protected_servers(state),
        due_parity(state, spec),
        _uncovered(state, spec, failure),
    )
    match choose(failure, protection):
        case Decode(servers):
            return _degraded(state, servers, failure.reason)
        case Partial():
            return _await_successors(state, failure)
        case RollBack(why=why) if why:
            return roll_back(state, spec, failure.reason, why)
        case RollBack():
            return _roll_back(state, spec)


def _uncovered(state: JobState, spec: TrainingJobSpec, failure: Failure) -> str:
    """Explains to people why parity does not cover a failure, if it does not; empty if the job keeps none."""
    parity = due_parity(state, spec)
    if not parity:
        return ""
    if failure.is_loss and len(failure.servers) > parity:
        return f"parity {parity} covers the loss of {parity} at a time"
    return (failure.is_loss and unprotected_reason(state, spec)) or failure.reason


def roll_back(state: JobState, spec: TrainingJobSpec, reason: str, why: str) -> JobState:
    """Rolls back to the newest checkpoint, and reports `why` the job does not recover otherwise."""
    message = f"{reason}; the whole job goes back to a checkpoint" + (f": {why}" if why != reason else "")
    told = reshaping.note_step(state, ROLLED_BACK_STEP, message, 0.0)
    return _roll_back(told, spec)


def _roll_back(state: JobState, spec: TrainingJobSpec) -> JobState:
    scaling = replace(state.scaling, sizes=sizes_of(state, spec))  # also if the manifest was edited meanwhile
    return unroute(replace(state, recoveries=state.recoveries + 1, scaling=scaling), spec)


def _survivors(state: JobState, failure: Failure) -> frozenset[int]:
    """Returns the indexes of the servers that still hold the rows that the routing table gives them."""
    kept = (server for server in state.routing.table.owners if server.index not in failure.servers)
    return frozenset(server.index for server in kept if state.members.has(server))


def _await_successors(state: JobState, failure: Failure) -> JobState:
    """Begins a reload, or restarts it if another server is lost meanwhile. Ends checkpoints and moves."""
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


def _degraded(state: JobState, servers: tuple[int, ...], reason: str) -> JobState:
    """Begins to rebuild the rows of servers. Ends operations that need all servers."""
    before = state.rebuilding or Rebuilding({}, reason, state.clock.active_seconds)
    incarnations = {server: state.routing.table.servers[server].incarnation for server in servers}
    lost = replace(before, lost=incarnations, reason=reason, told=False)
    written = tuple(taking for taking in state.checkpointings if taking.phase is CheckpointPhase.WRITE)
    return replace(state, rebuilding=lost, move=None, checkpointings=written)


def protected_servers(state: JobState) -> frozenset[int]:
    """Returns the servers of which the others can rebuild any `due_parity`: all with rows, or none.

    They include lost servers while the survivors have all rows in the parity.
    """
    table, group = state.routing.table, state.parity_group
    if (group.generation, group.version) != (table.generation, table.version):
        return frozenset()
    owners = frozenset(server.index for server in table.owners)
    serves = state.stage not in PREPARATION and state.routing.ready
    withdraws = state.rebuilding is not None and state.rebuilding.withdraws
    is_whole = group.protected == owners
    return owners if is_whole and serves and switching(state) is None and not withdraws else frozenset()


def is_protected(state: JobState) -> bool:
    """Whether the job can lose `due_parity` servers now without losing rows."""
    return state.rebuilding is None and bool(protected_servers(state)) and not state.parity_group.troubles


def may_own(state: JobState, index: int, incarnation: str) -> bool:
    """Whether this parameter server owns rows or dense pieces, or takes part in a move."""
    moving = () if state.move is None else state.move.parties
    return (index, incarnation) in holders(state) | {(one.index, one.incarnation) for one in moving}


def holders(state: JobState) -> set[tuple[int, str]]:
    """Returns the servers that may own rows, by index and incarnation."""
    operation = switching(state)
    servers = state.routing.table.owners if operation is None else operation.parties
    return {(server.index, server.incarnation) for server in servers}


def unprotected_reason(state: JobState, spec: TrainingJobSpec) -> str:
    """Explains to people why lost servers could not be rebuilt now; empty if they could."""
    if is_protected(state):
        return ""
    if state.rebuilding is not None:
        lost = state.rebuilding
        return f"{lost.names} {'is' if len(lost.lost) == 1 else 'are'} lost, and {lost.their} rows are being rebuilt"
    if state.stage in PREPARATION or not state.routing.ready:
        return "the job does not train"
    if state.forgone:
        return state.forgone
    owners, parity = len(state.routing.table.owners), due_parity(state, spec)
    if owners == 1:
        return "only one parameter server has rows"
    if not can_keep_parity(owners, parity):
        return f"only {owners} parameter servers have rows, and parity {parity} needs {parity + 1}"
    if state.misses_rows:
        return missing_rows(state)
    is_current = state.parity_group.version == state.routing.table.version
    group = state.parity_group if is_current else ParityGroup()
    if group.troubles:
        index, told = min(group.troubles.items())
        return f"{slot_name(Role.PS, index)}: {told}"
    waiting = sorted({one.index for one in state.routing.table.owners} - group.protected)
    names = ", ".join(slot_name(Role.PS, index) for index in waiting)
    return f"rows of {names} are still sent to their parity servers" if names else "rows change their servers"


def missing_rows(state: JobState) -> str:
    """Says to people where rows are still being rebuilt, if some are."""
    names = ", ".join(slot_name(Role.PS, index) for index in sorted(state.parity_group.missing))
    return f"rows on {names} are still being rebuilt from parity"
