"""A live move: rows go to other owners while training continues; only the last changes need a barrier.

    PREPARE -> COPY -> BARRIER -> SWITCH -> done
       before SWITCH: a failure undoes the move, which is tried again later or given up
       a barrier that fails -> COPY, which continues where it was
       from SWITCH on: the next master finishes it; a server that refuses the switch -> the job recovers
       rows of lost servers, rebuilt for their new owners (`rebuilding`): from COPY to SWITCH, without a barrier

SWITCH is durable before any server adopts the new table, so the ledger knows of every table that a server may have. A
server holds the barrier of a move long enough for the next master to take over. If even that hold lapses, the receivers
lack some of the pushes, and only a roll-back is safe.
"""

from emberscale_api.frozen import replace
from emberscale_api.job import Durability, TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster import parity, rebuilding, reshaping, retry, scaling
from emberscale_jobmaster.barrier import BarrierPhase, DrivenBarrier, VoidError
from emberscale_jobmaster.effects import (
    AbandonCall,
    CallServer,
    CopyCall,
    Effect,
    HandOverCall,
    HoldCall,
    Moved,
    PrepareCall,
    ResumeCall,
    ServerRequest,
    SettleCall,
    StartedUp,
    SwitchCall,
)
from emberscale_jobmaster.events import AppliedReport, Prepared
from emberscale_jobmaster.figures import limits_of, servers_wanted, sizes_of, wanted_shares
from emberscale_jobmaster.losses import recover
from emberscale_jobmaster.operations import CheckpointPhase, CopyReport, Move, MovePhase, answered, asking_later
from emberscale_jobmaster.placement import placed
from emberscale_jobmaster.ranges import on_all
from emberscale_jobmaster.recovery import Failure
from emberscale_jobmaster.state import JobState, Routing, Stage

KIND = "Move"
HOLD_SECONDS = 10.0
"""How long a server holds pushes without hearing more of the barrier, before it has handed over."""
HANDED_OVER_SECONDS = 30.0
"""How long it does so after it has handed over: long enough for another master to take over."""
PREPARE_SECONDS = 180.0
"""How long servers without rows may take to build the model and its tables."""
SPARE_SECONDS = 30.0
"""How long servers may rest while they copy if the move is not urgent, so that training keeps its cores."""
COPY_SECONDS = 60.0
"""How long servers may copy without any progress."""
BARRIER_SECONDS = 15.0
SETTLE_SECONDS = 2.0
HAND_OVER_SECONDS = 5.0
WAIT_SECONDS = 1.0
CALL_SECONDS = 8.0
AGAIN_SECONDS = 0.25
KEPT_SECONDS = 2.0
"""How often the master tells a ready server that the move is still wanted."""


def begin_if_due(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Begins a move to the wanted servers and shares, and its barrier; drops a move that is no longer wanted."""
    move = state.move
    if move is not None and move.lost:
        is_void = _gone(state, move.parties) and not move.holds
        return rebuilding.failed(state, spec, move, "a server is gone", now) if is_void else state
    if state.rebuilding is not None:
        return rebuilding.begin_if_due(state, spec, now)
    if move is not None:
        if move.phase in (MovePhase.PREPARE, MovePhase.COPY) and not _is_wanted(state, spec, move):
            return state.without(move)
        return _barrier_begun(state, move, now) if _may_hold(state, move, now) else state
    if state.misses_rows:
        return state
    target, servers = state.scaling.target, servers_wanted(state, spec)
    if target is None and KIND in state.troubles and _follows_shares(state, servers):
        return state.untroubled(KIND)  # a recovery or an edit has made the move unnecessary
    due = scaling.move_due(state) if target is not None else _shares_due(state, servers)
    return _begun(state, spec, servers, now) if due and not state.rests(KIND, now) else state


def _begun(state: JobState, spec: TrainingJobSpec, servers: int, now: float) -> JobState:
    """Begins a move to this number of servers, unless one of them is missing."""
    all_servers = _all_servers(state, servers)
    if len(all_servers) < servers:
        return state
    planned = _planned(state, servers)
    owning = {one.index for table in (state.routing.table, planned) for one in table.owners}
    move = Move(
        id=state.next_operation,
        number=state.next_barrier,
        phase=MovePhase.PREPARE,
        began_at=now,
        deadline=now + PREPARE_SECONDS,
        sizes=state.scaling.target or sizes_of(state, spec),
        table=planned,
        servers=all_servers,
        shares=wanted_shares(state, servers),
        members=tuple(sorted(owning)),
    )
    return state.beginning(move) if _is_wanted(state, spec, move) else state


def effects_of(state: JobState, operation: Move, whom: int, serial: int) -> tuple[Effect, ...]:
    """Returns the call that the operation waits for."""
    return (CallServer(operation.id, serial, operation.servers[whom], _request(state, operation, whom), CALL_SECONDS),)


def clean_up(before: Move, after: JobState) -> tuple[Effect, ...]:
    """Returns the effects that clean up after a move, or its barrier, was given up.

    Does not release a barrier from which a server may have switched: the next generation ends it. A released server
    that has not switched would train on rows that another server owns.
    """
    if after.routing.table == before.table:
        return ()
    now = after.move
    calls: list[ServerRequest] = []
    is_let_go = before.phase is MovePhase.BARRIER and (now is None or now.barrier is None)
    if before.barrier is not None and is_let_go:
        calls.append(ResumeCall(before.barrier.generation, before.barrier.number))
    if now is None or now.id != before.id:
        calls.append(AbandonCall(before.number))
    return tuple(CallServer(before.id, 0, server, call, CALL_SECONDS) for call in calls for server in before.parties)


def on_prepared(state: JobState, operation: Move, server: int, answer: Prepared, now: float) -> JobState:
    """Handles a server's answer that it is ready to receive, or not yet."""
    operation = answered(operation, server)
    if not answer.done:
        return state.asking(operation, server)
    operation = replace(operation, done=operation.done | {server})
    if len(operation.done) < len(operation.parties):
        return state.having(asking_later(operation, server, now + KEPT_SECONDS))
    if operation.lost:
        state = rebuilding.withdrawing(state)
    copying = replace(operation, phase=MovePhase.COPY, done=frozenset(), deadline=now + COPY_SECONDS)
    return state.asking(copying, *operation.everyone)


def on_copied(
    state: JobState, spec: TrainingJobSpec, operation: Move, server: int, answer: CopyReport, now: float
) -> JobState:
    """Handles a server's progress. Keeps asking: a server that hears no more of a move gives it up."""
    before = operation.copied.get(server)
    newly_ready = answer.ready and server not in operation.done
    gets_on = before is None or newly_ready or _reached(answer) != _reached(before)
    operation = replace(
        operation,
        copied={**operation.copied, server: answer},
        done=operation.done | {server} if answer.ready else operation.done,
        deadline=now + COPY_SECONDS if gets_on else operation.deadline,
    )
    if operation.lost and len(operation.done) == len(operation.parties):
        return rebuilding.copied(state, spec, answered(operation, server))
    if answer.ready:
        return state.having(asking_later(operation, server, now + KEPT_SECONDS))
    return state.asking(answered(operation, server), server)


def _reached(report: CopyReport) -> tuple[int, int]:
    """Returns what grows while a server makes progress: it sends rows, or first takes its own out of the parity."""
    return report.copied_bytes, report.rounds


def on_applied(
    state: JobState, spec: TrainingJobSpec, operation: Move, server: int, answer: AppliedReport, now: float
) -> JobState:
    """Handles a server's answer that it has held pushes, settled them, or handed over its last changes."""
    barrier = operation.barrier
    if barrier is None:
        return state
    try:
        after = barrier.answered(server, answer.applied)
    except VoidError as error:
        return _barrier_failed(state, spec, operation, str(error), now)
    operation = replace(answered(operation, server), barrier=after, pulls=operation.pulls + answer.pulls)
    if now >= operation.deadline:  # servers may have let pushes through
        return _barrier_failed(state, spec, operation, "the barrier took too long", now)
    if after.done and _gone(state, operation.parties):
        return _barrier_failed(state, spec, operation, "a server of the move is gone", now)
    if after.done:
        operation = replace(operation, phase=MovePhase.SWITCH, done=frozenset())
        return state.asking(operation, *operation.everyone)
    if operation.pending:
        return state.having(operation)
    operation = replace(operation, deadline=now + BARRIER_SECONDS)
    return state.asking(operation, *(one.index for one in after.servers))


def on_switched(state: JobState, operation: Move, server: int, now: float) -> tuple[JobState, tuple[Effect, ...]]:
    """Handles a server's adoption of the new table, which is in force once all servers have adopted it."""
    operation = answered(operation, server)
    operation = replace(operation, done=operation.done | {server})
    if len(operation.done) < len(operation.parties):
        return state.having(operation), ()
    if operation.lost:
        return _sized(rebuilding.completed(state, operation, now), operation), ()
    pause = now - operation.held_at
    asked_at = state.scaling.target_since if state.scaling.target is not None else operation.began_at
    copied_bytes, rounds = _copied(operation)
    moved = Moved(
        servers=len(operation.table.servers),
        seconds=now - operation.began_at,
        paused_seconds=pause,
        bytes=copied_bytes,
        rounds=rounds,
    )
    state = state.without(operation).untroubled(KIND)
    left = tuple(server for server in (*state.routing.left, *operation.leavers) if state.members.keeps(server))
    state = replace(state, routing=Routing(operation.table, True, left, operation.shares))
    started = StartedUp(Role.PS, max(0.0, now - asked_at - pause), pause)
    state = _sized(state, operation)
    table = operation.table
    return reshaping.note_switched(state, len(table.servers), table.version, pause, now - asked_at), (moved, started)


def _sized(state: JobState, operation: Move) -> JobState:
    """Records that the rows are on the servers of the move's shape, even if the target has changed."""
    scaled = state.scaling
    reached = operation.sizes == scaled.sizes and operation.sizes != scaled.target
    return state if reached else scaling.complete_move(state, operation.sizes)


def on_server_failed(
    state: JobState, spec: TrainingJobSpec, operation: Move, server: int, code: str, problem: str, now: float
) -> JobState:
    """Handles a failed call to a server."""
    if operation.phase is MovePhase.BARRIER:
        return _barrier_failed(state, spec, operation, f"ps-{server}: {problem}", now)
    if code in retry.PASSING_CODES:
        return state.having(asking_later(operation, server, now + AGAIN_SECONDS))
    if operation.phase is MovePhase.SWITCH:
        state = _given_up(state, spec, operation, f"ps-{server} refuses the switch: {problem}", now)
        return recover(state, spec, Failure((server,), f"ps-{server} may serve either routing table"))
    return _given_up(state, spec, operation, f"ps-{server}: {problem}", now)


def on_time_passed(state: JobState, spec: TrainingJobSpec, operation: Move, now: float) -> JobState:
    """Repeats calls that are due, and gives up a move without progress; never a switch, which may have happened."""
    if operation.phase is MovePhase.SWITCH and (gone := _gone(state, operation.parties)):
        return recover(state, spec, Failure(gone, f"ps-{gone[0]} is lost, and may have switched"))
    if now >= operation.deadline and operation.phase is not MovePhase.SWITCH and not operation.is_copied:
        waiting = {*operation.pending, *operation.again_at} - operation.done
        problem = f"{', '.join(f'ps-{server}' for server in sorted(waiting))} made no progress in {operation.phase}"
        if operation.phase is MovePhase.BARRIER:
            return _barrier_failed(state, spec, operation, problem, now)
        return _given_up(state, spec, operation, problem, now)
    return state.asking_due(operation, now)


def on_takeover(state: JobState, spec: TrainingJobSpec, operation: Move) -> JobState:
    """Finishes a switch under a new master, as a server may have switched; undoes any earlier phase.

    A master of an earlier version does not write what rebuilt rows lack, so the job rolls back.
    """
    if operation.phase is not MovePhase.SWITCH:
        return state.without(operation)
    if operation.lost and not operation.settled:
        reason = "a master of an earlier version began the switch to rebuilt rows"
        return recover(state, spec, Failure(operation.lost, reason))
    return state.asking(operation, *operation.pending, *operation.again_at)


def forget_barrier(state: JobState) -> JobState:
    """Lets the move's barrier lapse instead of releasing it.

    Redis may have lost the previous master's last second, including the switch. The versions that servers report reveal
    that before the barrier lapses. A released server would train on rows that another server owns.
    """
    move = state.move
    if move is None or move.phase is not MovePhase.BARRIER:
        return state
    return state.having(replace(move, barrier=None))


def _request(state: JobState, operation: Move, whom: int) -> ServerRequest:
    barrier, number = operation.barrier, operation.number
    if operation.phase is MovePhase.PREPARE:
        present = state.routing.table
        since = present.version if operation.servers[whom] in present.owners else 0
        return PrepareCall(
            number,
            since,
            operation.table,
            WAIT_SECONDS,
            lost=operation.lost,
            parity=parity.ordered(state, operation.table),
            knows_async_parity=state.chosen_durability is Durability.ASYNC,
            on_demand=operation.on_demand,
        )
    if operation.lost and operation.phase is MovePhase.SWITCH:
        adopted = operation.settled if operation.is_adoption else {}
        applied = on_all(adopted.values()) if adopted else operation.settled.get(whom, {})
        return SwitchCall(operation.table.generation, number, number, applied, rebuilt=adopted)
    if operation.phase is MovePhase.COPY or barrier is None:
        return CopyCall(number, WAIT_SECONDS, 0.0 if scaling.is_urgent(state) else SPARE_SECONDS)
    if operation.phase is MovePhase.SWITCH:
        return SwitchCall(barrier.generation, barrier.number, number, barrier.settled, operation.pulls)
    match barrier.phase:
        case BarrierPhase.HOLD:
            return HoldCall(barrier.generation, state.routing.table.version, barrier.number, HOLD_SECONDS)
        case BarrierPhase.SETTLE:
            settle = barrier.settling(whom)
            return SettleCall(barrier.generation, barrier.number, HOLD_SECONDS, settle, SETTLE_SECONDS)
        case _:
            return HandOverCall(barrier.generation, barrier.number, HANDED_OVER_SECONDS, number, HAND_OVER_SECONDS)


def _planned(state: JobState, servers: int) -> RoutingTable:
    table, limits = state.routing.table, limits_of(wanted_shares(state, servers))
    return RoutingTable(
        generation=table.generation,
        version=state.next_version,
        servers=_all_servers(state, servers)[:servers],
        bucket_owners=placed(table.bucket_owners, servers, limits=limits),
        piece_owners=placed(table.piece_owners, servers, limits=limits),
    )


def _shares_due(state: JobState, servers: int) -> bool:
    """Whether the routing table differs from the wanted servers and shares, and rows can move now."""
    if not scaling.may_move(state) or _follows_shares(state, servers):
        return False
    return not _gone(state, state.routing.table.owners)


def _follows_shares(state: JobState, servers: int) -> bool:
    """Whether the routing table was planned for this number of servers and the wanted shares."""
    return servers == len(state.routing.table.servers) and wanted_shares(state, servers) == state.routing.shares


def _all_servers(state: JobState, servers: int) -> tuple[PsAddress, ...]:
    """Returns the servers that serve now or will serve."""
    table = state.routing.table
    found = list(table.servers)
    for index in range(max(len(found), servers)):
        joining = state.members.server(index)
        if joining is not None and not (index < len(found) and table.servers[index] in table.owners):
            found[index : index + 1] = [joining]
    return tuple(found)


def _gone(state: JobState, servers: tuple[PsAddress, ...]) -> tuple[int, ...]:
    """Returns the indexes of the servers whose slots are empty or have another process."""
    return tuple(server.index for server in servers if not state.members.has(server))


def _is_wanted(state: JobState, spec: TrainingJobSpec, move: Move) -> bool:
    """Whether the job still wants these servers and shares, and all servers of the move are alive."""
    servers = servers_wanted(state, spec)
    if servers != len(move.table.servers) or wanted_shares(state, servers) != move.shares:
        return False
    if state.suspending or state.over:
        return False
    if state.stage not in (Stage.TRAIN, Stage.EVALUATE) or not state.routing.ready:
        return False
    return not _gone(state, move.parties)


def _may_hold(state: JobState, move: Move, now: float) -> bool:
    """Whether all rows are copied, and no checkpoint holds pushes or needs servers that are about to leave."""
    if not move.is_copied or state.rests(KIND, now):
        return False
    return not any(
        taking.phase is CheckpointPhase.BARRIER
        or any(taking.awaits_files_of(one.index, one.incarnation) for one in move.leavers)
        for taking in state.checkpointings
    )


def _barrier_begun(state: JobState, move: Move, now: float) -> JobState:
    table = state.routing.table
    move = replace(
        move,
        phase=MovePhase.BARRIER,
        pulls=(),
        barrier=DrivenBarrier(state.next_barrier, table.generation, table.owners),
        held_at=now,
        deadline=now + BARRIER_SECONDS,
        pending={},
        again_at={},
    )
    state = replace(state, next_barrier=state.next_barrier + 1)
    state = reshaping.note_copied(state, len(move.table.servers), *_copied(move), now - move.began_at)
    return state.asking(move, *(one.index for one in table.owners))


def _copied(move: Move) -> tuple[int, int]:
    """Returns the bytes that were copied, and the number of rounds."""
    reports = move.copied.values()
    return sum(one.copied_bytes for one in reports), max((one.rounds for one in reports), default=0)


def _barrier_failed(state: JobState, spec: TrainingJobSpec, operation: Move, problem: str, now: float) -> JobState:
    """Gives up the barrier: pushes and copying continue, and another barrier begins later."""
    trouble = retry.failed_again(state.troubles.get(KIND), now, "MoveHeldUp", problem)
    if retry.exhausted(trouble, now):
        return _given_up(state, spec, operation, problem, now)
    state = state.troubled(KIND, trouble)
    copying = replace(
        operation,
        phase=MovePhase.COPY,
        barrier=None,
        done=frozenset(),
        deadline=now + COPY_SECONDS,
    )
    return state.asking(copying, *operation.everyone)


def _given_up(state: JobState, spec: TrainingJobSpec, operation: Move, problem: str, now: float) -> JobState:
    """Gives up the move. Another begins later, unless moves have failed for too long."""
    if operation.lost:
        return rebuilding.failed(state, spec, operation, problem, now)
    trouble = retry.failed_again(state.troubles.get(KIND), now, "MoveFailed", problem)
    state = state.without(operation)
    if retry.exhausted(trouble, now):
        return scaling.give_up(state.untroubled(KIND), spec, f"the rows could not be moved: {problem}", now)
    return state.troubled(KIND, trouble)
