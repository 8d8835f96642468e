"""Moves rows between parameter servers: a thread sends the rows to give away, the data plane receives others.

The first round sends all rows, every later round those that changed since the previous one; rows that change during a
round are left for the next. Training continues meanwhile, so the rounds get short but never end by themselves: the last
one is sent within a barrier.

If the move is not urgent, the first round rests most of the time, for as long as the master says. On busy cores, its
work is lost to training: resting does not lower the total cost, but spreads it.
"""

import ssl
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from emberscale_api.errors import problem_of
from emberscale_api.readable import count_text, duration_text
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.demand import RowDemand
from emberscale_trainer.server.group import is_parity_stream
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.server.moves import Transfer, asks_for_rows, move_of
from emberscale_trainer.server.protection import RowProtection
from emberscale_trainer.server.rebuild import Rebuild
from emberscale_trainer.server.sending import CopyProgress, RowSending
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.server.withdrawing import Withdrawing
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamReceivers
from emberscale_trainer.stream.receiver import Deliver
from emberscale_trainer.table import Scan, SnapshotAbandonedError, TableStore

_log = structlog.get_logger()

SHORT_SECONDS = 0.1
"""A round that takes no longer fits into a barrier."""
MOST_ROUNDS = 12
"""After this many rounds, the barrier sends the rest."""
_SHRINKS = 0.8
"""A round that sends more than this part of what the one before sent: rows change about as fast as they are copied, and
more rounds would leave no less to the barrier. Time would say less than bytes: on busy cores, it varies."""
_LONG_ROUNDS = 2
"""The first round sends all rows, and the second those that have changed during its rests: often all again."""
_PAUSE_SECONDS = 0.1
_REST = 1.0
"""How long the first round rests after a piece of work, as a multiple of its duration: pushes have priority."""
_SPARING_REST = 300.0
"""The rest while it spares training, as a multiple of the piece's CPU time. The receiver takes about as much again."""
_LONGEST_REST_SECONDS = 1.0
_MISSING_SECONDS = 30.0
"""The time without the arrival of a missing row after which the master is told."""


class RowMover:
    """One server's sender and receiver of moves. Any thread may call in."""

    def __init__(self, state: ServerState, token: str, context: ssl.SSLContext | None = None) -> None:
        """With a context, streams to other machines go over TLS."""
        self._state = state
        self._token = token
        self._context = context
        self._lock = threading.Lock()
        self._sending: _MoveSending | None = None
        self._rebuild: Rebuild | None = None
        self._withdrawing: Withdrawing | None = None
        self._demand: RowDemand | None = None
        self._to_protect: tuple[RoutingTable, Callable[[], None]] | None = None
        self.protection = RowProtection(state, token, context)
        self.streams = StreamReceivers(self._accept)

    def copy(self, move: int, wait_seconds: float, spare_seconds: float = 0.0) -> CopyProgress:
        """Begins to send what this server gives away, or attaches to that; returns the progress.

        The sending rests most of the time for its first `spare_seconds`. Raises NotHeldError for a move that is not
        under way, and for one that has failed.
        """
        transfer = self._state.renew_move(move)
        if transfer.lost:
            return CopyProgress(ready=True) if transfer.joins else self._rebuild_of(transfer).progress(wait_seconds)
        sending = self._sending_of(transfer, spare_seconds)
        if sending is None:
            return CopyProgress(ready=True)
        sending.spare(spare_seconds)
        return sending.progress(wait_seconds)

    def hand_over(self, move: int, wait_seconds: float) -> None:
        """Sends all changes up to now, and returns once the receivers have them. The caller is within a barrier.

        Raises NotHeldError as `copy` does, and TimeoutError.
        """
        sending = self._sending_of(self._state.renew_move(move))
        if sending is not None:
            sending.send_now(wait_seconds)

    def abandon(self, move: int) -> None:
        """Gives up all moves up to this number; calls that wait for one of them fail."""
        self._state.abandon(move)
        with self._lock:
            for sending in (self._sending, self._rebuild):
                if sending is not None and sending.move <= move and not self._outlives(sending, move):
                    sending.close("it was abandoned")

    def _outlives(self, sending: RowSending, move: int) -> bool:
        """Whether this is the rebuild of a table in force, and only a later move is abandoned."""
        return sending is self._rebuild and sending.move < move and self._rebuild.goes_on

    def switched(self, move: int) -> None:
        """Has rows that follow on demand sent, and asked for: their new owners serve them."""
        missing = self._state.missing
        with self._lock:
            if self._rebuild is not None and self._rebuild.move == move:
                self._rebuild.go_on()
            is_asked_for = self._demand is not None and self._demand.move == move
            if missing is not None and missing.transfer.number == move and not is_asked_for:
                want = None if self._rebuild is None else self._rebuild.want
                self._demand = RowDemand(self._state, missing, want, self._token, self._context)

    def protect(self, table: RoutingTable, index: int, parity: int = 1, lag: LagBound | None = None) -> None:
        """As `RowProtection.form`, once the rebuild that led to this table is over here and all its rows are there.

        `look` sees to that. Until then the group before serves the rebuild.
        """
        with self._lock:
            self._to_protect = table, lambda: self.protection.form(table, index, parity, lag)
        self._protect_if_due()

    def _protect_if_due(self) -> None:
        with self._lock:
            waiting = self._to_protect
            if waiting is None or self._state.missing is not None or self._rebuilds_for(waiting[0]):
                return
            self._to_protect = self._withdrawing = None
        try:
            waiting[1]()
        except MemoryError as error:
            _log.warning("rows_not_protected", version=waiting[0].version, problem=problem_of(error))
            with self._lock:
                self._to_protect = self._to_protect or waiting

    def _rebuilds_for(self, table: RoutingTable) -> bool:
        """Whether the rebuild that led to this table goes on here, or has failed, so that others wait for it."""
        rebuild = self._rebuild
        return rebuild is not None and rebuild.table == table and (not rebuild.over or bool(rebuild.problem))

    @property
    def trouble(self) -> ParityTrouble | None:
        """As `Group.trouble`; after a rebuild, also what keeps missing rows from arriving, or pushes waiting."""
        missing, rebuild, waiting = self._state.missing, self._rebuild, self._to_protect
        if waiting is None:
            return self.protection.trouble
        version, now = waiting[0].version, time.monotonic()
        if rebuild is not None and rebuild.table == waiting[0] and rebuild.problem:
            return ParityTrouble(
                version, f"it no longer rebuilds rows: {rebuild.problem}", _MISSING_SECONDS, broken=True
            )
        if missing is not None and now - missing.changed_at >= _MISSING_SECONDS:
            problem = f"{count_text(missing.count, 'row', 'rows')} that are rebuilt from parity do not arrive"
            return ParityTrouble(version, problem, now - missing.changed_at, broken=True)
        group = self.protection.group
        return None if group is None else group.trouble_of_rebuild(version)

    def stop(self) -> None:
        """Ends all sending, as the rows are no longer served, so that no sender keeps them in memory."""
        with self._lock:
            for sending in (self._sending, self._rebuild):
                if sending is not None:
                    sending.close("the rows are served no more")
            self._to_protect = self._withdrawing = None
        self.protection.stop()

    def look(self) -> None:
        """Gives up a move that the master has not mentioned for too long, and protects rows that are rebuilt by now.

        The caller repeats this regularly.
        """
        self._state.lapse()
        self._protect_if_due()

    def _rebuild_of(self, transfer: Transfer) -> Rebuild:
        """Begins to rebuild the rows of lost servers for their new owners, or attaches to that."""
        with self._lock:
            rebuild = self._rebuild
            if rebuild is not None and rebuild.move >= transfer.number:
                return rebuild
            group = self.protection.group
            if group is None:
                raise NotHeldError("no parity is held here")
            if rebuild is not None:
                rebuild.close("a later move has begun")
            if self._withdrawing is None or self._withdrawing.group is not group:
                self._withdrawing = Withdrawing(group)
            self._rebuild = Rebuild(
                self._withdrawing,
                transfer,
                lambda item: self._state.receive(transfer.number, item),
                self._token,
                self._context,
            )
            return self._rebuild

    def _sending_of(self, transfer: Transfer, spare_seconds: float = 0.0) -> "_MoveSending | None":
        with self._lock:
            newest = 0 if self._sending is None else self._sending.move
            if transfer.number < newest:
                raise NotHeldError(f"move {transfer.number} is over")
            if self._sending is not None and transfer.number > newest:
                self._sending.close("a later move has begun")
                self._sending = None
            if self._sending is None and (given := transfer.given()):
                self._sending = _MoveSending(self._state, transfer, given, spare_seconds, self._token, self._context)
            return self._sending

    def _accept(self, stream: int, generation: int) -> Deliver:
        if is_parity_stream(stream):
            return self.protection.accept(stream, generation)
        move = move_of(stream)
        if asks_for_rows(stream):
            return self._accept_wants(move)
        try:
            transfer = self._state.renew_move(move)
        except NotHeldError as error:
            followed = self._state.followed
            if followed is None or followed.number != move:
                raise StreamLostError(str(error)) from error
            transfer = followed
        if transfer.table.generation != generation:
            raise StreamLostError(f"move {move} is of generation {transfer.table.generation}")

        def deliver(item: Item) -> None:
            try:
                self._state.receive(move, item)
            except (NotHeldError, MemoryError) as error:
                raise StreamLostError(problem_of(error)) from error

        return deliver

    def _accept_wants(self, move: int) -> Deliver:
        rebuild = self._rebuild
        if rebuild is None or rebuild.move != move or rebuild.over:
            raise StreamLostError(f"the rebuild of move {move} is over here")

        def deliver(item: Item) -> None:
            if item.kind is not ItemKind.WANTED:
                raise ValueError(f"an item of kind {item.kind} in a stream that asks for rows")
            rebuild.want(item.keys.copy())

        return deliver


class _MoveSending(RowSending):
    """The rounds of one move, in a thread that ends with the move."""

    def __init__(
        self,
        state: ServerState,
        transfer: Transfer,
        given: Mapping[int, Ownership],
        spare_seconds: float,
        token: str,
        context: ssl.SSLContext | None,
    ) -> None:
        super().__init__("move", transfer, given, token, context)
        self._state = state
        self._given = given
        self._asked = self._answered = 0
        self._began = time.monotonic()
        self._spare_seconds = spare_seconds
        self._last_bytes = 0
        threading.Thread(target=self._run, name="move", daemon=True).start()

    def spare(self, seconds: float) -> None:
        """Rests most of the time, until `seconds` after the beginning."""
        with self._changed:
            self._spare_seconds = seconds
            self._changed.notify_all()

    def send_now(self, wait_seconds: float) -> None:
        """Sends a round of all changes before this call. Raises NotHeldError and TimeoutError."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._answered >= mine or self._problem, wait_seconds):
                raise TimeoutError(f"the last changes were not sent within {duration_text(wait_seconds)}")
            self._check()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._round()
        except NotHeldError as error:
            self._fail(str(error))
        except (StreamLostError, SnapshotAbandonedError, TimeoutError, MemoryError) as error:
            if not self._closed.is_set():
                problem = problem_of(error)
                _log.warning("move_failed", move=self.move, problem=problem)
                self._fail(problem)
        except BaseException as error:
            self._fail(repr(error))
            raise
        finally:
            self.close("it is over")
        progress = self._progress
        _log.info(
            "move_over",
            move=self.move,
            bytes=progress.copied_bytes,
            rounds=progress.rounds,
            seconds=round(time.monotonic() - self._began, 3),
        )

    def _round(self) -> None:
        with self._changed:
            before = self._progress
            if before.rounds:
                self._changed.wait_for(lambda: self._asked > self._answered or self._closed.is_set(), _PAUSE_SECONDS)
            asked = self._asked
        began, first = time.monotonic(), not before.rounds
        scan, tables = self._state.moved_rows(self.move, whole=first)
        self._send(scan, tables, rests=first)
        self._flush()
        with self._changed:
            rounds = before.rounds + 1
            is_short = not first and time.monotonic() - began <= SHORT_SECONDS
            copied = self._progress.copied_bytes - before.copied_bytes
            is_steady = rounds > _LONG_ROUNDS and copied > _SHRINKS * self._last_bytes
            self._last_bytes = copied
            ready = before.ready or is_short or is_steady or rounds >= MOST_ROUNDS
            self._progress = CopyProgress(ready, self._progress.copied_bytes, rounds)
            if not scan.postponed:  # else rows changed meanwhile, as they do not within a barrier
                self._answered = asked
            self._changed.notify_all()

    def _send(self, scan: Scan, tables: TableStore, *, rests: bool) -> None:
        """Sends the rows that are given away."""
        for table, spec in enumerate(tables.specs):
            dense, layout, retired = spec.column < 0, tables.layouts[table], scan.retired[table]
            for peer, owned in self._given.items():
                if len(gone := retired[owned.among(retired, dense)]):
                    self._put(peer, Item(ItemKind.CHANGES, table, layout.empty(0), gone))
            wanted = {peer: owned.pieces if dense else owned.buckets for peer, owned in self._given.items()}
            began, used = time.monotonic(), time.thread_time()
            for peer, records in scan.read(table, wanted):
                self._put(peer, Item(ItemKind.ROWS, table, records))
                if rests:
                    self._rest(time.monotonic() - began, time.thread_time() - used)
                began, used = time.monotonic(), time.thread_time()

    def _rest(self, worked: float, used: float) -> None:
        """Rests after a piece of work that took `worked` seconds, and `used` of CPU time. Raises StreamLostError."""
        now = time.monotonic()
        ends = now + _REST * worked
        longest = now + min(_SPARING_REST * used, _LONGEST_REST_SECONDS)
        with self._changed:
            while not self._closed.is_set():
                spared = min(longest, self._began + self._spare_seconds)  # a move may become urgent meanwhile
                left = max(ends, spared) - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)
        raise StreamLostError("the move is over")
