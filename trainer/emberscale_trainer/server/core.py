"""The pure core of a parameter server: every decision about requests and control calls, without rows.

The core has no clock, no thread and no I/O. The caller supplies the time, carries out the decisions, and repeats
waiting requests after every event that may change the decision, and at the time in `Wait.until`.

A push takes three steps, and nothing else may happen in between: `push` answers OK, `record` notes the batch as
applied, and the caller steps the rows. An error between the second and the third step must end the process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from emberscale_api.readable import count_text
from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Header, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.adoption import PartlyApplied, combined
from emberscale_trainer.server.barrier import Barrier, NotHeldError, Outcome
from emberscale_trainer.server.fencing import LeaseFence
from emberscale_trainer.server.moves import Moves, Transfer
from emberscale_trainer.server.pressure import MemoryPressure
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound, Ticket

SWITCH_SECONDS = 10.0
"""The time for which a request of a newer version waits for the switch to it."""

_ENDED_SESSIONS = 1024
"""More sessions than can have requests in flight."""


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no decision yet. `until` is the latest time to ask again; None: only after another event."""

    until: float | None


Decision = Status | Wait


class LaterError(Exception):
    """The server has a later generation or version than the call."""


class Assigning(Enum):
    """What an assignment still requires: to load rows, to wait for rows that are being loaded, or nothing."""

    LOAD = 1
    LOADING = 2
    DONE = 3


@dataclass(frozen=True)
class Assignment:
    """The master's assignment of a server. `checkpoint` is empty to start from nothing.

    `servers` are the incarnations in the table, as two masters that began from the same ledger may give different
    tables the same version.
    """

    generation: int
    version: int
    checkpoint: str
    servers: tuple[str, ...] = ()


@dataclass(frozen=True)
class HandedOver:
    """All batches in the rows, and the outstanding pulls if another server will order the staleness of all."""

    applied: AppliedBatches
    pulls: tuple[OutstandingPull, ...] = ()


@dataclass(slots=True)
class _Serving:
    """The served rows. `version` and `owned` change with a switch, `applied` with every push.

    * `trained`: a batch was applied since the rows were loaded.
    * `ordered_since`: the version with which the server began or ceased to order the staleness of all.
    * `handed_over`: the move with which another server begins to order.
    * `whole_since`: the version that replaced lost servers. An earlier table names servers that may still serve
      outdated rows.
    * `knows_pulls`: False if another server ordered before, and may have admitted pulls that were not handed over.
    * `partly`: batches that only a part of the rows has; they are not among `applied`.
    """

    generation: int
    version: int
    owned: Ownership
    applied: AppliedBatches
    bound: StalenessBound | None
    trained: bool = False
    ordered_since: int = 0
    handed_over: int = 0
    whole_since: int = 0
    knows_pulls: bool = True
    partly: PartlyApplied = field(default_factory=PartlyApplied)


class ServerCore:
    """One server's decisions, from the start of its process on. Times are in seconds, on one monotonic clock.

    `known` are generation and version of the newest table, as soon as rows are dropped for it; (0, 0) before the first.
    A server that has given everything away still reports the table under which it did so. `misses_rows`, which the
    caller sets: some rows have yet to arrive.
    """

    def __init__(self) -> None:
        self._assignment: Assignment | None = None
        self._serving: _Serving | None = None
        self.known = (0, 0)
        self._barrier = Barrier()
        self._moves = Moves()
        self._fence = LeaseFence()
        self._ended: dict[int, None] = {}  # sessions, the oldest first
        self._checkpoint = (0, 0)  # the newest that the server has heard of, and its barrier
        self._masters_generation = 0
        self.misses_rows = False
        self.pressure = MemoryPressure()

    @property
    def next_numbers(self) -> tuple[int, int]:
        """Numbers greater than all lease tokens and barrier numbers of this generation that the server knows."""
        return self._fence.next_token, max(self._barrier.newest, self._moves.newest) + 1

    @property
    def next_checkpoint(self) -> int:
        """A number greater than that of any checkpoint that the server knows, of any generation; 0 if it knows none."""
        return self._checkpoint[0] + 1 if self._checkpoint[0] else 0

    @property
    def _newest(self) -> tuple[int, int]:
        """Generation and version of the newest table, be it only assigned."""
        return self.known if self._assignment is None else max(self.known, _order(self._assignment))

    @property
    def serving(self) -> bool:
        """Whether rows are served."""
        return self._serving is not None

    @property
    def orders(self) -> bool:
        """Whether the server orders the staleness of all."""
        return self._serving is not None and self._serving.bound is not None

    @property
    def owned(self) -> Ownership:
        """What the server owns. Raises NotHeldError where nothing is served."""
        return self._require().owned

    @property
    def applied(self) -> AppliedBatches:
        """The batches that are applied; the next push changes it. Raises NotHeldError where nothing is served."""
        return self._require().applied

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same batches."""
        return self._serving is None or not self._serving.partly

    # Assignment

    def assign(self, assignment: Assignment) -> Assigning:
        """Begins an assignment, or attaches to it. LOAD drops the served rows. Raises LaterError.

        Rows that have trained since they were loaded are later than their assignment, too. Only a master that has lost
        the end of its ledger repeats such an assignment, and it must begin another generation.
        """
        newest = self._newest
        if _order(assignment) < newest:
            raise LaterError(f"generation {newest[0]}, version {newest[1]} is known here, which is later")
        if self._serving is not None and self._serving.trained and _order(assignment) == newest:
            raise LaterError(f"the rows of generation {newest[0]} have trained on since they were loaded")
        if assignment == self._assignment:
            return Assigning.LOADING if self._serving is None else Assigning.DONE
        self._assignment, self.known = assignment, _order(assignment)
        self._leave()
        return Assigning.LOAD

    def adopt(
        self, assignment: Assignment, owned: Ownership, applied: AppliedBatches, bound: StalenessBound | None
    ) -> bool:
        """Serves the loaded rows; `bound` is None on all servers but the first.

        Returns False, changing nothing, if another assignment has replaced this one.
        """
        if assignment != self._assignment or self._serving is not None:
            return False
        self._serving = _Serving(assignment.generation, assignment.version, owned, applied, bound)
        return True

    def give_up(self, assignment: Assignment) -> None:
        """Gives up an assignment whose loading failed; it may be requested again."""
        if assignment == self._assignment and self._serving is None:
            self._assignment = None

    def _leave(self) -> None:
        self._serving = None
        self._barrier = Barrier()
        self._moves.end()
        self._fence = LeaseFence()

    # Sessions and leases

    def disconnected(self, session: int) -> None:
        """Drops everything that a session has outstanding, because one of its connections ended.

        The worker closes its other connection, too. A request on that connection may wait here, perhaps for what the
        session itself has outstanding, and the server does not notice the end of the connection meanwhile. Later
        requests of the session are refused: nobody would complete them, and they would keep others waiting.
        """
        self._ended[session] = None
        if len(self._ended) > _ENDED_SESSIONS:
            del self._ended[next(iter(self._ended))]
        if self._serving is not None and self._serving.bound is not None:
            self._serving.bound.forget_session(session)

    def hear_generation(self, generation: int) -> None:
        """Takes the generation in force from the master. A server of an earlier generation applies no more pushes.

        Otherwise it might, as its barrier may lapse before its rows are replaced, even after it handed them over.
        """
        self._masters_generation = generation

    def hear_leases(self, generation: int, live: Iterable[int], next_token: int) -> None:
        """Takes the lease tokens in force from the master; all others below `next_token` are dead."""
        serving = self._serving
        if serving is None or serving.generation != generation or not self._fence.update(live, next_token):
            return
        if serving.bound is not None:
            serving.bound.forget_leases(self._fence.is_dead)

    # Requests

    def admit(self, session: int, header: Header, now: float) -> Decision:
        """Decides whether the staleness bound admits the pull of a batch. OK notes it as outstanding.

        Once the outstanding pulls are handed over, no new pull is admitted before the switch.
        """
        serving = self._serving
        if serving is None or serving.generation != header.generation:
            return Status.REFRESH
        if self._fence.refuses(header):
            return Status.FENCED
        if serving.bound is not None:
            if session in self._ended:
                return Status.REFRESH
            ticket, transfer = _ticket(session, header), self._moves.transfer
            if transfer is not None and transfer.number == serving.handed_over:
                until = self._barrier.held_until((header.epoch, header.batch), now)
                if until is not None and not serving.bound.is_outstanding(ticket):
                    return Status.LATER if serving.bound.is_ahead(ticket) else Wait(until)
            if not serving.bound.may_pull(ticket):
                if serving.bound.is_ahead(ticket):
                    return Status.LATER
                serving.bound.waits(ticket, header.token)
                return Wait(None)
            serving.bound.pulled(ticket, header.token)
        return Status.OK

    def round_limit(self, session: int) -> int:
        """Returns the most batches of this session's next round, as far as this server knows."""
        bound = None if self._serving is None else self._serving.bound
        return 1 if bound is None else bound.round_limit(session)

    def complete(self, session: int, header: Header) -> None:
        """Notes that all servers have applied a batch."""
        serving = self._serving
        if serving is not None and serving.generation == header.generation and serving.bound is not None:
            serving.bound.completed(_ticket(session, header))

    def pull(
        self,
        session: int,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        arrived: float,
        now: float,
    ) -> Decision:
        """Decides whether to serve the rows of a pull, if the server owns them.

        `counts` is uint32 [tables], the dense table last; `keys` is int64 [n]. A request of the server's own version is
        trusted to ask only for what the server owns. The first server serves a pull for training once the staleness
        bound admits it.
        """
        serving = self._serving
        if serving is None or serving.generation != header.generation:
            return Status.REFRESH
        training = not header.is_read_only
        if header.version != serving.version and (
            header.version < serving.whole_since
            or (training and header.version < serving.ordered_since)
            or not serving.owned
            or not serving.owned.owns(counts, keys)
        ):
            return _moved(header, serving, arrived, now)
        return self.admit(session, header, now) if training and serving.bound is not None else Status.OK

    def trains(self, generation: int) -> bool:
        """Whether rows are served under this generation, and the master is at no later one, as far as is known."""
        serving = self._serving
        return serving is not None and serving.generation == generation and generation >= self._masters_generation

    def push(self, session: int, header: Header, arrived: float, now: float) -> Decision:
        """Decides whether to apply a batch or a round now. The caller must follow OK with `record` at once."""
        serving = self._serving
        if serving is None or not self.trains(header.generation):
            return Status.REFRESH
        if serving.bound is not None and session in self._ended:
            return Status.REFRESH
        if serving.version != header.version:
            return _moved(header, serving, arrived, now)
        ticket, bound = _ticket(session, header), serving.bound
        if self._fence.refuses(header):
            if bound is not None:
                bound.forget(ticket)
            return Status.FENCED
        applied = sum((header.epoch, number) in serving.applied for number in header.numbers)
        repeated = applied == header.batches
        if bound is not None and not (serving.knows_pulls or bound.knows(ticket)):
            return Status.REFRESH  # its staleness is unknown, and others may lack even a batch that is applied here
        is_split = header.is_round and any((header.epoch, number) in serving.partly for number in header.numbers)
        if (applied and not repeated) or is_split:
            return Status.PARTIAL
        if not repeated:
            held = [self._barrier.held_until((header.epoch, number), now) for number in header.numbers]
            held_until = max((until for until in held if until is not None), default=None)
            if held_until is not None:
                return Wait(held_until) if None not in held else Status.PARTIAL
        if (delay := self.pressure.delay) and not repeated and now < arrived + delay and not self._barrier.is_held(now):
            return Wait(arrived + delay)  # a barrier that is held waits for the batches that it settles
        if bound is not None and not (repeated and bound.is_under_way(ticket)):
            if not bound.may_push(ticket):
                return Wait(None)
            if repeated:  # other servers may not have applied it yet
                bound.pushed(ticket, header.token)
        return Status.REPEATED if repeated else Status.OK

    def lacking(self, header: Header) -> Ownership | None:
        """Returns the part of the rows to which a push that was answered OK must be applied; None: all of them."""
        serving, batch = self._require(), (header.epoch, header.batch)
        return serving.partly.lacking(batch, serving.owned) if batch in serving.partly else None

    def make_room(self, header: Header) -> None:
        """Prepares to `record` batches, which then needs no memory. Raises MemoryError."""
        self._require().applied.make_room(header.epoch, header.numbers.stop)

    def record(self, session: int, header: Header, now: float) -> None:
        """Notes batches as applied to all rows.

        Raises RuntimeError if one is applied already or held, a defect of the caller.
        """
        serving = self._require()
        for number in header.numbers:
            batch = (header.epoch, number)
            if batch in serving.applied:
                raise RuntimeError(f"batch {batch} is applied already")
            self._barrier.applied(batch, now)
            serving.applied.record(*batch)
            serving.partly.complete(batch)
        serving.trained = True
        if serving.bound is not None:
            serving.bound.pushed(_ticket(session, header), header.token)

    # Barriers. All of them raise LaterError for an older generation, and NotHeldError for a barrier that is not held.

    def hold(
        self, generation: int, version: int, number: int, seconds: float, now: float, checkpoint: int = 0
    ) -> AppliedBatches:
        """Holds pushes from now on for `seconds`; returns all applied batches.

        All rows must have the same batches. The server must serve this version: a ledger that has lost a switch names
        only some of the servers that own rows now, and their snapshot would be incomplete. `checkpoint` is the number
        of the checkpoint that the barrier is for, 0: none. A server refuses a number that it knows from another
        barrier, as the files may belong to a complete checkpoint.
        """
        serving = self._of(generation)
        if version < serving.version:
            raise LaterError(f"version {serving.version} is served, and {version} is asked for")
        if version > serving.version:
            raise NotHeldError(f"version {version} is not served here")
        if serving.partly:
            batches = count_text(len(serving.partly), "batch", "batches")
            raise NotHeldError(f"some rows lack {batches} that others have, since they were adopted here")
        if self.misses_rows:
            raise NotHeldError("rows that are rebuilt from parity have yet to arrive here")
        if checkpoint and checkpoint <= self._checkpoint[0] and self._checkpoint != (checkpoint, number):
            raise LaterError(f"checkpoint {self._checkpoint[0]} was begun here, and {checkpoint} is not later")
        self._barrier.hold(number, seconds, now)
        if checkpoint:
            self._checkpoint = (checkpoint, number)
        return serving.applied.copy()

    def settle(
        self, generation: int, number: int, batches: Iterable[tuple[int, int, int]], seconds: float, now: float
    ) -> None:
        """Lets through the (epoch, first, stop) ranges of batches that other servers have applied."""
        serving = self._of(generation)
        self._barrier.settle(number, serving.applied.lacking(batches), seconds, now)

    def settled(self, generation: int, number: int, now: float) -> AppliedBatches | None:
        """Returns all applied batches once the batches to settle are among them; None before."""
        serving = self._of(generation)
        if not self._barrier.settled(number, now):
            return None
        return serving.applied.copy()

    def snapshot(self, generation: int, number: int, now: float) -> Outcome:
        """Releases a settled barrier; the snapshot has the rows as of now."""
        serving = self._of(generation)
        return self._barrier.again(number, "snapshot") or self._barrier.finish(number, "snapshot", serving.applied, now)

    # Moves. They raise as barriers do.

    @property
    def transfer(self) -> Transfer | None:
        """The server's part in the move under way, if there is one."""
        return self._moves.transfer

    def prepare(
        self,
        number: int,
        since: int,
        table: RoutingTable,
        index: int,
        now: float,
        *,
        replaces: bool = False,
        lost: tuple[int, ...] = (),
        on_demand: bool = False,
    ) -> Transfer:
        """Joins a move to a table of a later version, which replaces any move before; or attaches to it.

        The server must serve version `since`, or own nothing if that is 0: a master that has lost the end of its ledger
        plans from a table that is no longer in force. `replaces`: the table replaces lost servers. `lost` and
        `on_demand` are as in `Transfer`. No move begins while rows have yet to arrive.
        """
        current, serving = self._moves.transfer, self._serving
        if current is not None and current.number == number:
            return self._moves.renew(number, now)
        newest = self._newest
        if (table.generation, table.version) <= newest:
            raise LaterError(f"generation {newest[0]}, version {newest[1]} is known here, which is not earlier")
        if serving is None and self._assignment is not None:
            raise NotHeldError("this server is loading rows")
        before, serves = Ownership.of_nothing(), 0
        if serving is not None and serving.generation == table.generation:
            if self.misses_rows:
                raise NotHeldError("rows that are rebuilt from parity have yet to arrive here")
            before, serves = serving.owned, serving.version if serving.owned else 0
        if serves != since:
            raise NotHeldError(f"version {serves} is served here, and the move is from version {since}")
        if serving is not None and serving.generation < table.generation:  # rows of an earlier history are void
            self._leave()
            self._assignment = None
        transfer = Transfer(number, table, index, before, replaces, lost, on_demand)
        self._moves.begin(transfer, now)
        return transfer

    def moving(self, number: int) -> Transfer:
        """Returns the server's part in a move."""
        return self._moves.named(number)

    def renew_move(self, number: int, now: float) -> Transfer:
        """Returns the server's part in a move, and notes that the master still wants the move."""
        return self._moves.renew(number, now)

    def hand_over(self, generation: int, number: int, move: int, seconds: float, now: float) -> HandedOver:
        """Holds a settled barrier for `seconds` more; returns all applied batches, which do not change meanwhile."""
        serving = self._of(generation)
        transfer = self._moves.renew(move, now)
        self._barrier.renew(number, seconds, now)
        if serving.bound is None or transfer.orders:
            return HandedOver(serving.applied.copy())
        serving.handed_over = move
        return HandedOver(serving.applied.copy(), serving.bound.hand_over())

    def switch(
        self,
        generation: int,
        number: int,
        move: int,
        settled: AppliedBatches,
        bound: StalenessBound | None,
        now: float,
        rebuilt: Sequence[tuple[Ownership, AppliedBatches]] = (),
    ) -> tuple[Outcome, Transfer | None]:
        """Releases a settled barrier, and adopts the move's table; returns the finished move on the first call.

        A server without rows holds no barrier: it serves from now on, with `settled` as applied. Servers that keep what
        they own during a rebuild hold none either; `rebuilt` are the batches in the rows that such a server adopts. A
        server that begins to order the staleness of all uses `bound`.
        """
        call = f"switch {move}"
        if again := self._barrier.again(number, call):
            self._of(generation)
            return again, None
        transfer = self._moves.named(move)
        table = transfer.table
        if table.generation != generation:
            raise NotHeldError(f"move {move} is of generation {table.generation}")
        if transfer.joins:
            self._leave()
            self._assignment = None
            self._serving = serving = _Serving(generation, table.version, transfer.after, settled.copy(), None)
            outcome = self._barrier.finish_unheld(number, call, settled)
        else:
            serving = self._of(generation)
            if rebuilt or (transfer.lost and transfer.gained):
                self._adopt_rebuilt(serving, rebuilt)
            if transfer.lost:
                outcome = self._barrier.finish_unheld(number, call, serving.applied)
            else:
                outcome = self._barrier.finish(number, call, serving.applied, now)
            serving.version, serving.owned = table.version, transfer.after
        if transfer.orders != self.orders:
            serving.bound, serving.ordered_since = bound if transfer.orders else None, table.version
            serving.knows_pulls = False  # beyond those handed over: an earlier recovery may have lost others
            if serving.bound is not None:
                for session in self._ended:
                    serving.bound.forget_session(session)
        if transfer.replaces or transfer.lost:
            serving.whole_since = table.version
        self.known = (generation, table.version)
        self._moves.end()
        return outcome, transfer

    def _adopt_rebuilt(self, serving: _Serving, rebuilt: Sequence[tuple[Ownership, AppliedBatches]]) -> None:
        if not rebuilt:  # as by a master of an earlier version
            raise NotHeldError("the switch does not say which batches the adopted rows have")
        if serving.partly:  # a group that keeps parity never counts as whole meanwhile
            raise NotHeldError("batches are yet to be applied to rows that were adopted here before")
        serving.applied, serving.partly = combined([(serving.owned, serving.applied), *rebuilt])

    def abandon(self, number: int) -> Transfer | None:
        """Leaves all moves up to this number; returns the move under way if it is among them."""
        return self._moves.abandon(number)

    def lapse(self, now: float) -> Transfer | None:
        """Leaves a move that the master has not mentioned for too long; returns it."""
        transfer = self._moves.transfer
        return self._moves.abandon(transfer.number) if transfer is not None and self._moves.lapsed(now) else None

    def resume(self, generation: int, number: int) -> None:
        """Releases a barrier that has failed on some server."""
        if self._serving is not None and self._serving.generation == generation:
            self._barrier.resume(number)

    def _of(self, generation: int) -> _Serving:
        serving = self._require()
        if generation < serving.generation:
            raise LaterError(f"generation {serving.generation} is served, and {generation} is asked for")
        if generation > serving.generation:
            raise NotHeldError(f"generation {generation} is not served here")
        return serving

    def _require(self) -> _Serving:
        if self._serving is None:
            raise NotHeldError("nothing is served here")
        return self._serving


def _order(assignment: Assignment) -> tuple[int, int]:
    return (assignment.generation, assignment.version)


def _ticket(session: int, header: Header) -> Ticket:
    return Ticket(session, header.epoch, header.batch, header.batches, header.is_round)


def _moved(header: Header, serving: _Serving, arrived: float, now: float) -> Decision:
    """Decides about a request of another version. A newer one waits for the switch, which must be close."""
    until = arrived + SWITCH_SECONDS
    return Wait(until) if header.version > serving.version and now < until else Status.MOVED
