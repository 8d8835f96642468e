"""The calls of one parameter server: carries out what its core decides about its rows, under one lock."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.readable import duration_text
from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Header, Status
from emberscale_trainer.checkpoint import PushWatch
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.arriving import ArrivingRows
from emberscale_trainer.server.barrier import Outcome
from emberscale_trainer.server.core import Assigning, Assignment, Decision, HandedOver, ServerCore
from emberscale_trainer.server.missing import MissingRows
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.reports import Figures, Totals
from emberscale_trainer.server.served import Protector, ServedRows
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.waiting import WaitingRequests
from emberscale_trainer.stream import Item, ItemKind
from emberscale_trainer.table import NonFiniteGradientError, Reader, Scan, TableStore, require_finite
from emberscale_trainer.table.snapshot import Lock

_log = structlog.get_logger()

Clock = Callable[[], float]

TakeRows = Callable[[TableStore, Lock, Outcome], None]
"""Takes the rows as of a barrier that has just ended; the lock guards the tables and is held."""

Fatal = Callable[[BaseException], None]
"""Ends the process, because its state is half changed."""

_RECEIVED_ROWS = 2048
"""The rows to receive before the lock is released."""

_FIGURES_SECONDS = 0.1
"""The time that a report waits for the lock before it repeats its previous figures."""


class NotSettledError(Exception):
    """A batch that other servers have applied did not arrive in time."""


def end_process(cause: BaseException) -> None:
    """Ends the process at once, without an answer to anyone: the job recovers as from any lost parameter server."""
    try:
        _log.critical("push_half_applied", problem=repr(cause))
    finally:  # even logging may fail without memory
        os._exit(1)


class ServerState:
    """Carries out the decisions of `core`. Any thread may call, and waits here while the core says Wait.

    Others only read the core, and hold the lock while they read the batches that are applied.
    """

    def __init__(
        self, clock: Clock = time.monotonic, fatal: Fatal = end_process, core: ServerCore | None = None
    ) -> None:
        self._fatal = fatal
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self.core = ServerCore() if core is None else core
        self._served = ServedRows(lock, self._changed, lambda: self.core.transfer is not None, fatal)
        self._arriving = ArrivingRows(self.core, self._changed, self._served, clock)
        self._requests = WaitingRequests(self._changed, clock)
        self._requested_at = clock()
        self._totals = Totals()
        self._figures = Figures({}, 0)

    @property
    def totals(self) -> Totals:
        """Counters since the start of the process."""
        return replace(self._totals)

    def figures(self) -> Figures:
        """Returns the present figures, or those of the last call if the lock is not free soon."""
        if self._changed.acquire(timeout=_FIGURES_SECONDS):
            try:
                self._figures = self._figures_now()
            finally:
                self._changed.release()
        return self._figures

    def _figures_now(self) -> Figures:
        # a move brings rows before the switch, and rows that it takes away stay until they are removed
        return self._served.figures(self.core.owned if self.core.serving else Ownership.of_nothing())

    def look_at_memory(self, used: int, limit: int | None) -> None:
        """As `MemoryPressure.look`."""
        with self._changed:
            pressure = self.core.pressure
            before, told = pressure.delay, pressure.delays
            pressure.look(used, limit, self._clock())
            if before and not pressure.delay:
                self._changed.notify_all()
            if told != pressure.delays:
                _log.info("memory_pressure", delays=pressure.delays, used_bytes=used, limit_bytes=limit)

    # Assignment

    def assign(self, assignment: Assignment) -> Assigning:
        """As `ServerCore.assign`; if rows must be loaded, drops the served ones, and serves nothing."""
        with self._changed:
            assigning = self.core.assign(assignment)
            if assigning is Assigning.LOAD:
                self._drop_rows()
                self._arriving.staged = None
            return assigning

    def _drop_rows(self) -> None:
        if self._served.tables is not None:
            self._served.tables.readers.abandon()
        self._serve(None)
        self._changed.notify_all()

    @property
    def lock(self) -> Lock:
        """Guards the rows, and all decisions about them."""
        return self._changed

    @property
    def tables(self) -> TableStore:
        """The rows that are served; the caller holds the lock. Raises NotHeldError."""
        return self._served.require()

    def serves(self, generation: int, version: int) -> bool:
        """Whether rows are served under exactly this table."""
        return self.core.serving and self.core.known == (generation, version)

    def protect_by(self, protector: Protector | None) -> None:
        """Replaces the protector of the rows; the caller holds the lock."""
        self._served.protect_by(protector)

    def watched_by(self, watch: PushWatch | None) -> None:
        """Calls `watch` for each push from now on, under the lock."""
        with self._changed:
            self._served.watch = watch

    def _serve(self, tables: TableStore | None) -> None:
        self._arriving.forget()
        self._served.serve(tables)

    def adopt(
        self,
        assignment: Assignment,
        tables: TableStore,
        owned: Ownership,
        applied: AppliedBatches,
        bound: StalenessBound | None,
    ) -> bool:
        """As `ServerCore.adopt`: serves these rows from now on, unless another assignment has replaced this one."""
        with self._changed:
            adopted = self.core.adopt(assignment, owned, applied, bound)
            if adopted:
                self._serve(tables)
                self._changed.notify_all()
            return adopted

    def give_up(self, assignment: Assignment) -> None:
        """As `ServerCore.give_up`."""
        with self._changed:
            self.core.give_up(assignment)

    # Sessions and leases

    def disconnected(self, session: int) -> None:
        """As `ServerCore.disconnected`; waiting requests of the session are given up."""
        with self._changed:
            self.core.disconnected(session)
            self._requests.give_up(session)
            self._changed.notify_all()

    def hear_generation(self, generation: int) -> None:
        """As `ServerCore.hear_generation`."""
        with self._changed:
            self.core.hear_generation(generation)
            self._changed.notify_all()

    def hear_leases(self, generation: int, live: Iterable[int], next_token: int) -> None:
        """As `ServerCore.hear_leases`."""
        with self._changed:
            self.core.hear_leases(generation, live, next_token)
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        """Ends the process, because its state is half changed."""
        self._fatal(cause)

    # Requests

    def complete(self, session: int, header: Header) -> None:
        """Notes that all servers have applied a batch."""
        with self._changed:
            self.core.complete(session, header)
            self._changed.notify_all()

    def pull(
        self,
        session: int,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        room: Callable[[int], NDArray[np.float32]],
    ) -> tuple[Status, NDArray[np.float32] | None, int]:
        """Returns OK and the rows of the keys, float32, in the memory that `room` provides; or another status.

        A row has its weights, and for a round its state as well. The last value is the number of batches that the
        session's next round may have.

        Waits until the staleness bound admits a pull for training, and for a switch to a newer version.
        Raises ValueError for a request that does not fit the tables, and SessionEndedError.
        """
        arrived = self._clock()
        with self._changed:
            status = self._decided(
                session, counts, keys, lambda now: self.core.pull(session, header, counts, keys, arrived, now)
            )
            tables = self._served.tables
            if status is not Status.OK or tables is None:
                return status, None, 1
            began = self._clock()
            state = header.is_round
            values = room(tables.values_per_request(counts, state=state))
            self._check_pieces(counts, keys)
            tables.pull(counts, keys, values, state=state)
            self._totals.pulls += 1
            self._totals.pull_seconds += self._clock() - began
            return status, values, self.core.round_limit(session)

    def push(
        self,
        session: int,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> Status:
        """Applies a batch unless it is applied already; waits while a barrier or the staleness bound holds it.

        `values` are the gradients of the batch, or the changes of a round to weights and state. Returns once the
        protector, if any, has made the batch as safe as it must be; REFRESH if it ended before that, with its rows.

        A batch is applied completely or not at all: everything that can fail precedes its record, and a later failure
        is fatal. Raises NonFiniteGradientError, ValueError, MemoryError and SessionEndedError; the state is then
        unchanged.
        """
        status = self._push(session, header, counts, keys, values)
        if status in (Status.OK, Status.REPEATED):
            self._served.await_pushes()
            with self._changed:
                if not self.core.trains(header.generation):
                    return Status.REFRESH
        return status

    def _push(
        self,
        session: int,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
    ) -> Status:
        arrived = self._clock()
        changes_of = header.batches if header.is_round else 0
        if header.batches > 1 and not changes_of:
            raise ValueError("only the changes of a round are of several batches")
        problem = _not_finite(values)
        with self._changed:
            status = self._decided(session, counts, keys, lambda now: self.core.push(session, header, arrived, now))
            tables = self._served.tables
            if status is not Status.OK or tables is None:
                self._totals.repeated += status is Status.REPEATED
                self._changed.notify_all()  # the refusal may have ended what others wait for
                return status
            if problem is not None:
                raise problem
            began = self._clock()
            self._served.eviction.finish()
            push = tables.reserve(counts, keys, values, changes_of=changes_of)
            self._check_pieces(counts, keys)
            if (lacking := self.core.lacking(header)) is not None:
                counts, keys, values = tables.part_of(counts, keys, values, lacking.of_request(counts, keys))
                push = tables.reserve(counts, keys, values)
            self.core.make_room(header)
            self.core.record(session, header, began)
            try:
                self._served.apply(push, header, counts, keys, self.core.applied.total, self.core.owned.buckets)
            except BaseException as error:
                self._fatal(error)
                raise
            self._totals.pushes += 1
            self._totals.push_seconds += self._clock() - began
            self._changed.notify_all()
            return status

    # Barriers

    def hold(self, generation: int, version: int, number: int, seconds: float, checkpoint: int = 0) -> AppliedBatches:
        """Holds pushes, and returns all applied batches. Raises LaterError and NotHeldError, as do the calls below."""
        with self._changed:
            return self.core.hold(generation, version, number, seconds, self._clock(), checkpoint)

    def settle(
        self,
        generation: int,
        number: int,
        batches: Sequence[tuple[int, int, int]],
        seconds: float,
        wait_seconds: float,
    ) -> AppliedBatches:
        """Admits batches that other servers have applied, waits for them, and returns all applied batches.

        Rows that were given away need not be gone. Raises NotSettledError after `wait_seconds`.
        """
        with self._changed:
            deadline = self._clock() + wait_seconds
            self.core.settle(generation, number, batches, seconds, self._clock())
            self._changed.notify_all()
            while True:
                now = self._clock()
                applied = self.core.settled(generation, number, now)
                if applied is not None:
                    return applied
                if now >= deadline:
                    waited = duration_text(wait_seconds)
                    raise NotSettledError(f"a batch that others have applied did not come within {waited}")
                self._changed.wait(deadline - now)

    def snapshot(self, generation: int, number: int, take: TakeRows) -> Outcome:
        """Ends a barrier; `take` is called once, even if the call is made again."""
        with self._changed:
            outcome = self.core.snapshot(generation, number, self._clock())
            self._changed.notify_all()  # the barrier has ended even if `take` raises
            if self._served.tables is not None and not outcome.repeated:
                self._served.eviction.finish()
                take(self._served.tables, self._changed, outcome)
            return outcome

    # Moves

    def prepare(
        self,
        number: int,
        since: int,
        table: RoutingTable,
        index: int,
        *,
        replaces: bool = False,
        lost: tuple[int, ...] = (),
        on_demand: bool = False,
    ) -> Transfer:
        """As `ServerCore.prepare`. Drops the remains of an earlier move; `prepared` waits until they are gone."""
        with self._changed:
            before = self.core.transfer
            transfer = self.core.prepare(
                number, since, table, index, self._clock(), replaces=replaces, lost=lost, on_demand=on_demand
            )
            if transfer is not before:
                self._drop_received(before)
                self._arriving.expect(transfer)
                if self._served.tables is not None and not self.core.serving:
                    self._drop_rows()
                self._served.retirement.hurry(transfer.gained)
                if self._served.protector is not None:
                    self._served.protector.presume_lost(lost)
                self._changed.notify_all()  # whoever waits for the move before
            return transfer

    def prepared(self, number: int, wait_seconds: float) -> bool:
        """Whether rows of a move may arrive: those that an earlier move has left in their buckets are gone.

        Waits up to `wait_seconds`. Raises NotHeldError.
        """
        with self._changed:
            deadline = self._clock() + wait_seconds
            while not self._arriving.has_room(self.core.moving(number)):
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def stage(self, number: int, tables: TableStore) -> None:
        """Provides the tables of a server that joins by a move. Raises NotHeldError."""
        with self._changed:
            self.core.moving(number)
            self._arriving.staged = tables

    def renew_move(self, number: int) -> Transfer:
        """As `ServerCore.renew_move`."""
        with self._changed:
            return self.core.renew_move(number, self._clock())

    def receive(self, number: int, item: Item) -> None:
        """Takes over rows of a move that is `prepared`, or rows that are missing since; or notes rows that follow.

        Raises NotHeldError, and ValueError for rows that do not fit the tables.
        """
        with self._changed:
            if item.kind is ItemKind.KEYS:
                self._arriving.tell(number, item)
                return
            if self._arriving.has_all_of(number):  # its sender does not know yet that they arrived
                return
            self._arriving.retire(number, item.table, item.keys)
        for first in range(0, len(item.records), _RECEIVED_ROWS):
            with self._changed:
                self._arriving.take(number, item.table, item.records[first : first + _RECEIVED_ROWS])
            self._served.catch_up()

    @property
    def idle_seconds(self) -> float:
        """The time since the last request for rows."""
        return self._clock() - self._requested_at

    @property
    def missing(self) -> MissingRows | None:
        """The served rows that have yet to arrive; None if all are there."""
        return self._arriving.missing

    @property
    def followed(self) -> Transfer | None:
        """The move whose table is in force, if its rows follow on demand or have done so."""
        return self._arriving.followed

    def await_wanted(self, missing: MissingRows) -> NDArray[np.int64] | None:
        """Waits until requests wait for missing rows; returns their places, or None once none are missing any more."""
        with self._changed:
            while missing is self._arriving.missing:
                if len(wanted := missing.take_wanted()):
                    self._totals.wanted_rows += len(wanted)
                    return wanted
                self._changed.wait()
            return None

    def moved_rows(self, number: int, *, whole: bool) -> tuple[Scan, TableStore]:
        """Returns all rows, and records changes from now on; or the rows that changed since the previous call.

        Raises NotHeldError and MemoryError. After a MemoryError, or a scan that is not read to its end, the caller must
        request all rows again.
        """
        with self._changed:
            self.core.moving(number)
            tables = self.tables
            self._served.eviction.finish()
            if whole:
                tables.readers.untrack(Reader.MOVE)
                tables.readers.track(Reader.MOVE)
            return tables.readers.scan(Reader.MOVE, self._changed), tables

    def hand_over(self, generation: int, number: int, move: int, seconds: float) -> HandedOver:
        """As `ServerCore.hand_over`."""
        with self._changed:
            return self.core.hand_over(generation, number, move, seconds, self._clock())

    def switch(
        self,
        generation: int,
        number: int,
        move: int,
        settled: AppliedBatches,
        bound: StalenessBound | None = None,
        rebuilt: Sequence[tuple[Ownership, AppliedBatches]] = (),
    ) -> Outcome:
        """As `ServerCore.switch`, of a move that is `prepared`.

        Retires the rows that are given away: dense pieces at once, the rest bucket by bucket, and before any row of
        these buckets returns.
        """
        with self._changed:
            if (current := self.core.transfer) is not None and current.number == move:
                self._arriving.require_room(current)
                self._served.eviction.finish()  # first: it may lack memory, and the switch is made only once
            outcome, transfer = self.core.switch(generation, number, move, settled, bound, self._clock(), rebuilt)
            if transfer is not None:
                if transfer.joins:
                    self._serve(self._arriving.staged)
                elif self._served.tables is not None:
                    self._served.tables.readers.untrack(Reader.MOVE)
                    self._served.retirement.begin(transfer.before.without(transfer.after))
                self._arriving.switched(transfer)
                self._make_due(transfer, rebuilt)
                self._changed.notify_all()
            return outcome

    def _make_due(self, transfer: Transfer, rebuilt: Sequence[tuple[Ownership, AppliedBatches]]) -> None:
        """Makes due what the last batch of lost servers had made due: they may have been lost before they swept it.

        A server that joins has no `rebuilt`: all its rows have the batches that it starts with.
        """
        if transfer.lost:
            for owned, applied in rebuilt or [(transfer.after, self.core.applied)]:
                self._served.eviction.applied(applied.total, owned.buckets & transfer.gained.buckets)

    def abandon(self, number: int) -> None:
        """Gives up all moves up to this number, and drops what was received."""
        with self._changed:
            self._drop_received(self.core.abandon(number))
            self._changed.notify_all()

    def lapse(self) -> None:
        """Gives up a move that the master has not mentioned for too long."""
        with self._changed:
            self._drop_received(self.core.lapse(self._clock()))

    def _drop_received(self, transfer: Transfer | None) -> None:
        if transfer is None:
            return
        self._arriving.drop()
        if self._served.tables is not None and not transfer.joins:
            self._served.tables.readers.untrack(Reader.MOVE)
            self._served.retirement.begin(transfer.gained)

    def resume(self, generation: int, number: int) -> None:
        """Releases a barrier; held pushes continue."""
        with self._changed:
            self.core.resume(generation, number)
            self._changed.notify_all()

    def _decided(
        self,
        session: int,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        decide: Callable[[float], Decision],
    ) -> Status:
        """Waits until a request is decided about, and none of its rows is missing. Raises SessionEndedError."""
        self._requested_at = self._clock()
        status, seconds = self._requests.decided(session, self._arriving.once_there(counts, keys, decide))
        self._totals.hold_seconds += seconds
        return status

    def _check_pieces(self, counts: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        pieces = keys[len(keys) - int(counts[-1]) :]
        if not self.core.owned.owns_pieces(pieces):
            raise ValueError(f"the request names dense pieces of which this server does not own all: {pieces.tolist()}")


def _not_finite(gradients: NDArray[np.float32]) -> NonFiniteGradientError | None:
    """Returns the error of gradients that are not finite; the caller raises it only if they are to be applied."""
    try:
        require_finite(gradients, "push")
    except NonFiniteGradientError as error:
        return error
    return None
