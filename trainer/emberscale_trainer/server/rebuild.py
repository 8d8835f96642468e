"""Sends the rebuilt rows of lost servers to their new owners: their successors, or the servers that are left.

A server that is left may own some of the rows that it rebuilds itself; these need no stream.

The rows of several lost servers are all sent before the new owners serve them. Those of one follow *on demand*: first
their keys, with which the new owner can serve them, then the rows that it wants, and behind them, at a bounded rate,
the rest.
"""

import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.errors import problem_of
from emberscale_trainer.parity import SourceOverError
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.moves import Transfer, new_owners
from emberscale_trainer.server.sending import STALLED_SECONDS, CopyProgress, RowSending
from emberscale_trainer.server.withdrawing import Rows, Withdrawing, chosen
from emberscale_trainer.stream import NO_RECORDS, Item, ItemKind, StreamLostError
from emberscale_trainer.table import keys_of

_log = structlog.get_logger()

_REST = 2.0
"""The rest after a piece of rows that nobody waits for, as a multiple of its CPU time: training has priority. Holders
and new owners take about as much again."""
_IDLE_SECONDS = 1.0
"""Nobody trains if no request has come for so long, as at the end of a job: there is no rest then."""
_AGAIN_SECONDS = 0.5
"""The pause after a piece for which there was no memory."""


class _Pace:
    """Rests between pieces of work that nobody waits for, in proportion to their CPU time."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._next_at = 0.0

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Encloses a piece of work, in the thread that does it."""
        used = time.thread_time()
        yield
        self.rest(0.0 if self._is_idle() else _REST * (time.thread_time() - used))

    def rest(self, seconds: float) -> None:
        """Lets the next piece begin only so many seconds from now."""
        self._next_at = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds until the next piece; 0 or less: it is due."""
        return self._next_at - time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the next piece may begin."""
        return self.left <= 0


class Rebuild(RowSending):
    """One server's part in the rebuild of lost ones, in a thread that ends with it."""

    def __init__(
        self,
        withdrawing: Withdrawing,
        transfer: Transfer,
        receive: Callable[[Item], None],
        token: str,
        context: ssl.SSLContext | None,
    ) -> None:
        """`transfer` names the lost servers of the group, and their rows' new owners; `receive` takes this server's."""
        group = withdrawing.group
        if not transfer.lost or not set(transfer.lost) <= set(group.members):
            raise NotHeldError("the lost servers are not of this group")
        self._owned = {lost: new_owners(Ownership.of(group.table, lost), transfer.table) for lost in transfer.lost}
        peers = {peer for owned in self._owned.values() for peer in owned}
        super().__init__("the rebuild of move", transfer, peers - {transfer.index}, token, context)
        self.table = transfer.table
        self._me, self._receive, self._on_demand = transfer.index, receive, transfer.on_demand
        self._dense, self._strides = len(group.layouts) - 1, [layout.stride for layout in group.layouts]
        self._withdrawing: Withdrawing | None = withdrawing  # released at the end: old parity takes memory, as new does
        self._pieces = 0
        self._wanted: deque[NDArray[np.int64]] = deque()
        self._withdrawal_pace, self._sending_pace = _Pace(self._is_idle), _Pace(self._is_idle)
        self.goes_on = False
        """Whether the new owners of the rows serve them already."""
        self.over = False
        """Whether the thread has done all that it will do."""
        threading.Thread(target=self._run, args=(withdrawing,), name="rebuild", daemon=True).start()

    def progress(self, wait_seconds: float) -> CopyProgress:
        """As `RowSending.progress`; it is ready once all rows are sent, or on demand their keys."""
        progress, withdrawing = super().progress(wait_seconds), self._withdrawing
        return replace(progress, rounds=self._pieces if withdrawing is None else withdrawing.pieces)

    def go_on(self) -> None:
        """Sends the rows that follow on demand: their new owners serve them now."""
        self.goes_on = True
        self._notify()

    def want(self, places: NDArray[np.int64]) -> None:
        """Sends the rows at these places (`parity.places`) before others."""
        self._wanted.append(places)
        self.go_on()

    def _is_idle(self) -> bool:
        withdrawing = self._withdrawing
        return withdrawing is not None and withdrawing.group.state.idle_seconds >= _IDLE_SECONDS

    def close(self, why: str) -> None:
        """As `RowSending.close`."""
        super().close(why)
        self._notify()

    def _notify(self) -> None:
        if (withdrawing := self._withdrawing) is not None:
            withdrawing.notify()

    @property
    def problem(self) -> str:
        """Why the rows are no longer sent; empty if they are."""
        return self._problem

    def _run(self, withdrawing: Withdrawing) -> None:
        try:
            self._rebuild(withdrawing)
        finally:
            self._pieces, self._withdrawing = withdrawing.pieces, None
            for sender in self._senders.values():
                sender.close()
            self.over = True

    def _rebuild(self, withdrawing: Withdrawing) -> None:
        began = time.monotonic()
        try:
            members = {withdrawing.group.members.index(lost): lost for lost in self._owned}
            if self._on_demand:
                ((member, lost),) = members.items()
                rows = self._follow(withdrawing, member, lost)
            else:
                found = withdrawing.decode(frozenset(members))
                rows = sum(self._send(lost, withdrawing.decoded(member)) for member, lost in members.items())
                self._flush()
                self._ready({members[member]: applied for member, applied in found.items()})
        except (NotHeldError, StreamLostError, SourceOverError, TimeoutError, MemoryError, ValueError) as error:
            problem = problem_of(error)
            if not self._closed.is_set():
                _log.warning("rebuild_failed", move=self.move, problem=problem)
            self._fail(problem)
            return
        except BaseException as error:
            self._fail(repr(error))
            raise
        _log.info("rows_rebuilt", move=self.move, rows=rows, seconds=round(time.monotonic() - began, 3))

    def _ready(self, rebuilt: dict[int, AppliedBatches]) -> None:
        with self._changed:
            self._progress = replace(self._progress, ready=True, rebuilt=rebuilt)
            self._changed.notify_all()

    def _send(self, lost: int, some: Iterable[Rows]) -> int:
        """Sends the rows that a lost server owned. The parity may have more, left by an earlier or failed move."""
        rows = 0
        for table, found in some:
            for peer, owned in self._owned[lost].items():
                records = chosen(found, owned.among(keys_of(found), table == self._dense))
                if len(records):
                    item = Item(ItemKind.ROWS, table, records)
                    self._give(peer, item)
                    if not self._on_demand:  # else they were counted with their keys
                        self._count(item.nbytes)
                    rows += len(records)
        return rows

    def _give(self, peer: int, item: Item) -> None:
        """Sends an item to its server, which may be this one."""
        if peer == self._me:
            self._receive(item)
        else:
            self._senders[peer].put(item, STALLED_SECONDS)

    # Rows that follow on demand

    def _follow(self, withdrawing: Withdrawing, member: int, lost: int) -> int:
        """Sends the keys of a lost member's rows, and then the rows; returns how many."""
        found = withdrawing.find_keys(member)
        for table, keys, places in withdrawing.lost_keys():
            self._send_keys(lost, table, keys, places)
        self._flush()
        self._ready({lost: found[member]} if member in found else {})
        self._wait(withdrawing, lambda: self.goes_on)
        rows = 0
        while not (withdrawing.has_withdrawn and withdrawing.has_only_lost_rows() and not withdrawing.has_decodable()):
            self._prefer_wanted(withdrawing)
            if not withdrawing.has_withdrawn and self._withdrawal_pace.is_due:
                self._withdraw_next(withdrawing)
            if withdrawing.has_wanted():
                rows += self._send_decoded(withdrawing, lost)
            elif withdrawing.has_decodable() and self._sending_pace.is_due:
                with self._sending_pace.piece():
                    rows += self._send_decoded(withdrawing, lost)
            self._await_work(withdrawing)
        self._flush()
        return rows

    def _prefer_wanted(self, withdrawing: Withdrawing) -> None:
        """Withdraws and decodes rows that requests wait for before others."""
        try:
            while self._wanted:
                withdrawing.want(self._wanted[0])
                if not withdrawing.has_withdrawn:  # else only others have rows left to withdraw
                    withdrawing.withdraw_places(self._wanted[0])
                self._wanted.popleft()
        except MemoryError as error:
            self._pause(error)

    def _withdraw_next(self, withdrawing: Withdrawing) -> None:
        """Withdraws the next piece; tells the others after the last."""
        try:
            with self._withdrawal_pace.piece():
                is_empty = withdrawing.withdraw_next()
        except MemoryError as error:
            self._pause(error)
            return
        if is_empty:
            withdrawing.end()

    def _send_decoded(self, withdrawing: Withdrawing, lost: int) -> int:
        """Sends a few rows that can be decoded; returns how many."""
        try:
            found = withdrawing.take_decoded()
        except MemoryError as error:
            self._pause(error)
            return 0
        return self._send(lost, found)

    def _pause(self, error: MemoryError) -> None:
        _log.warning("rows_not_withdrawn", move=self.move, problem=problem_of(error))
        self._withdrawal_pace.rest(_AGAIN_SECONDS)
        self._closed.wait(_AGAIN_SECONDS)  # rows may be wanted, and would be tried again at once

    def _await_work(self, withdrawing: Withdrawing) -> None:
        """Waits until rows can be withdrawn or sent, or until all others have withdrawn theirs."""

        def has_work() -> object:
            if self._wanted or withdrawing.has_wanted():
                return True
            return withdrawing.has_withdrawn and withdrawing.has_only_lost_rows() and not withdrawing.has_decodable()

        def left() -> float | None:
            paces = [] if withdrawing.has_withdrawn else [self._withdrawal_pace]
            paces += [self._sending_pace] if withdrawing.has_decodable() else []
            return min((pace.left for pace in paces), default=None)

        self._wait(withdrawing, has_work, left)

    def _wait(
        self,
        withdrawing: Withdrawing,
        condition: Callable[[], object],
        left: Callable[[], float | None] = lambda: None,
    ) -> None:
        """As `Withdrawing.wait_for`. Raises StreamLostError once the rebuild is closed."""
        withdrawing.wait_for(lambda: self._closed.is_set() or condition(), left)
        if self._closed.is_set():
            raise StreamLostError("the rebuild is over")

    def _send_keys(self, lost: int, table: int, keys: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Sends keys that the lost server owned; their rows count as sent."""
        for peer, owned in self._owned[lost].items():
            mine = owned.among(keys, table == self._dense)
            if mine.any():
                pairs = np.stack([keys[mine], places[mine]], axis=1).reshape(-1)
                self._give(peer, Item(ItemKind.KEYS, table, NO_RECORDS, pairs))
                self._count(int(np.count_nonzero(mine)) * self._strides[table])
