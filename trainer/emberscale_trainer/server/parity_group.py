"""A server's part in a group of servers that hold parity of each other's rows: the threads and streams around `group`.

The servers of a routing table form a group. With `durability: Sync`, a push is answered once all holders of the
server's parity have its deltas, so losing as many servers as the parity covers never loses an answered push. With
`Async` it is answered at once, unless the parity lags too far behind (`lag`), and the deltas of several pushes are sent
together. Changes without a push (a move, eviction, compaction) are sent later. When servers are lost, the others
*withdraw* their own rows from the parity, which then has only the rows of the lost servers. If two rows of a stripe are
lost, one of its holders sends its parity to the other, which decodes both. The holders then send the rows to the
successors of the lost servers. Nobody else changes, and nothing rolls back.

A group whose live servers have parted, such as when one of them was declared lost and returns, does not reunite: pushes
wait until another group begins. `trouble` reports this to the master, which recovers the job.

Lock order: the lock of the state, then the lock of a group.
"""

import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.errors import problem_of
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.parity import Holding, ParityBlocks, ParityLayout, SourceOverError
from emberscale_trainer.parity.withdrawals import SlotNumbers, Withdrawals
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.group import GroupCore, parity_stream
from emberscale_trainer.server.lag import LagBound, ParityLag
from emberscale_trainer.server.parity_items import ItemTaker, base_item, delta_items, withdrawal_items
from emberscale_trainer.server.reports import ParityTotals
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamSender
from emberscale_trainer.table import DeltaLog

_log = structlog.get_logger()

_FILL_BYTES = 2 << 20
"""Rows that are filled in at a time: each piece takes an item to every holder."""
_REMOVED_BYTES = 2 << 20
"""Changes of removed or moved rows that are gathered before they are sent. A push that comes before sends them, too."""
_UNBOUNDED = 1 << 62
_WAIT_SECONDS = 5.0
_SLOW_SECONDS = 5.0
"""How long a holder may acknowledge nothing before this is reported."""
_FLUSH_SECONDS = 0.2
"""How long changes may wait before they are sent with `Sync`."""
_GATHER_SECONDS = 2.0
"""How long they may wait with `Async`: large batches come a few times a second, and an item is to have several."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


class Group:
    """One server's part in the group of one routing table, until another table or assignment ends it.

    * `core` decides; only the group changes it.
    * `state`: the server's rows and their lock. `log`: the changes of the rows, which the lock guards.
    * `layouts`: those of the rows of each table.
    * `withdrawals`: what the others have taken out of the parity, which `changed` guards.
    """

    def __init__(
        self,
        state: ServerState,
        table: RoutingTable,
        index: int,
        token: str,
        context: ssl.SSLContext | None,
        totals: ParityTotals,
        parity: int = 1,
        *,
        lag: LagBound | None = None,
    ) -> None:
        """Any `parity` of the servers may be lost. With a bound on the `lag`, pushes wait for them only beyond it.

        The caller holds the lock of the state, which serves this table.
        """
        members = tuple(server.index for server in table.owners)
        self.table = table
        self.members = members
        self.me = me = members.index(index)
        self.changed = threading.Condition()
        self.state = state
        self._totals = totals
        self._withdraws = False  # deltas from now on may take rows out of the parity
        self._presumed_lost: frozenset[int] = frozenset()
        self._parted_at: float | None = None
        self._problem = ""
        self._sends_no_more = threading.Event()
        self._sent_at = time.monotonic()
        self._lag = ParityLag(lag)
        self._lagging = threading.Lock()  # held for moments, within any other lock
        tables = state.tables
        self.layouts = tables.layouts
        self.layout = layout = ParityLayout(len(members), parity)
        self.log: DeltaLog = tables.log_deltas(
            layout.width, lambda number, segment: layout.lane(me, number, segment), merges=lag is not None
        )
        self._lanes_to = {holder: layout.lanes_to(me, holder) for holder in layout.holders(me)}
        self.blocks = ParityBlocks(layout, self.me, tables.layouts)
        numbers = [SlotNumbers(one.slot_bits, one.segment_rows, one.stride) for one in tables.layouts]
        self.withdrawals = Withdrawals(layout, numbers)
        self.core = GroupCore(self.me, layout, Holding(self.blocks, self.me, len(members)))
        stream = parity_stream(table.version, index)
        self._senders = {
            member: StreamSender(
                server.data, server.incarnation, token, stream, table.generation, context, window_bytes=_UNBOUNDED
            )
            for member, server in enumerate(table.owners)
            if member != self.me
        }
        self._taker = ItemTaker(self.core, self.blocks, self.withdrawals, self.layouts)
        self.send(base_item(AppliedBatches()))
        threading.Thread(target=self._run, name="parity", daemon=True).start()

    @property
    def lag_items(self) -> int:
        """The number of items that the slowest holder has not acknowledged."""
        return self.core.put_count - self._stored()

    @property
    def is_async(self) -> bool:
        """Whether pushes are answered before all holders have stored them."""
        return self._lag.is_async

    @property
    def lag_pushes(self) -> int:
        """The number of pushes that not all holders have acknowledged."""
        with self._lagging:
            self._lag.stored(self._stored())
            return self._lag.pushes

    @property
    def lag_bytes(self) -> int:
        """The bytes of the deltas that not all holders have acknowledged."""
        with self._lagging:
            self._lag.stored(self._stored())
            return self._lag.nbytes

    @property
    def trouble(self) -> ParityTrouble | None:
        """What keeps rows of this server from being protected; None: nothing does."""
        if self.core.is_over:
            return None
        version = self.table.version
        if self._parted_at is not None:
            return ParityTrouble(version, self._problem, time.monotonic() - self._parted_at, broken=True)
        if (trouble := self._trouble_with(self._senders, version)) is not None:
            return trouble
        if self._problem:
            return ParityTrouble(version, self._problem)
        return self._trouble_of_distance()

    def _trouble_of_distance(self) -> ParityTrouble | None:
        """Names the member that was out of reach for longest, if long: no push may wait for it, but a rebuild would."""
        away = {member: self._senders[member].away_seconds for member in self.core.others}
        farthest = max(away, key=away.__getitem__, default=self.me)
        if not self.core.has_met or away.get(farthest, 0.0) < _SLOW_SECONDS:
            return None
        message = f"it no longer reaches {self._name(farthest)}, and both take part in the rebuild of a lost server"
        return ParityTrouble(self.table.version, message)

    def trouble_of_rebuild(self, version: int) -> ParityTrouble | None:
        """Returns what keeps pushes waiting while this group, of an earlier table, serves a rebuild, if anything.

        `version` is that of the table in force.
        """
        waiting = self.core.waits_for(self.core.put_count, self._reached, all_others=True)
        return self._trouble_with(waiting, version)

    def _trouble_with(self, members: Iterable[int], version: int) -> ParityTrouble | None:
        """Names a member that refuses changes, or else the slowest, if it has acknowledged none for long."""
        waiting, slowest = 0.0, ""
        for member in members:
            sender, name = self._senders[member], self._name(member)
            seconds = sender.waiting_seconds
            if problem := sender.problem:
                return ParityTrouble(version, f"{name} takes no more of its changes: {problem}", seconds, broken=True)
            waiting, slowest = max((waiting, slowest), (seconds, name))
        if waiting < _SLOW_SECONDS:
            return None
        if not self.core.has_met:
            return ParityTrouble(version, f"it has yet to reach {slowest}, and trains on without parity")
        return ParityTrouble(version, f"{slowest} does not acknowledge its changes", waiting)

    def rows_of(self, table: int, segment: int) -> NDArray[np.uint8]:
        """Returns the slots of a segment of this server's rows, uint8[n, stride]. The caller holds the state's lock."""
        return self.state.tables.slots[table].segments[segment].rows

    def _name(self, member: int) -> str:
        return f"ps-{self.members[member]}"

    # What this server sends

    def pushed(self, epoch: int, batch: int) -> None:
        """Sends what a push has changed, now or with that of later pushes. The caller holds the lock of the state."""
        with self._lagging:
            is_due = self._lag.pushed((epoch, batch), self.log.pending_bytes)
        if not is_due and self.core.sends_pushes:
            return
        if self._lag.is_async:
            self._try_to_send()
        else:
            self._send_deltas()

    def await_pushes(self) -> None:
        """Waits until a push that has come may be answered: with `Sync` as `await_holders`, with `Async` for the lag.

        Does not let the lag grow once others have refused an item: they may take this server for lost.
        """
        if not self._lag.is_async or self._has_parted():
            self.await_holders()
            return
        with self._lagging:
            self._lag.stored(self._stored())
            number = self._lag.must_store(self.core.put_count)
        self._await(number)
        while self._lag.gathers_too_much and self.core.sends_pushes and not self._sends_no_more.is_set():
            self._flush()
            if self._lag.gathers_too_much:
                self._sends_no_more.wait(_FIRST_PAUSE)

    def _has_parted(self) -> bool:
        return self._parted_at is not None or any(self._senders[one].problem for one in self.core.others)

    def await_holders(self, *, ahead: int = 0) -> None:
        """Waits until all live holders have stored all items but the last `ahead`, or none has to any more."""
        self._await(self.core.put_count - ahead)

    def await_others(self) -> None:
        """Waits until all other live members have all items that go to them, or none has to any more."""
        self._await(self.core.put_count, all_others=True)

    def send_queued(self) -> None:
        """Sends what is queued, without waiting for it."""
        for member in self.core.holders:
            self._senders[member].send_queued()

    def _await(self, number: int, but: Callable[[], frozenset[int]] = frozenset, *, all_others: bool = False) -> None:
        """Waits for all live holders, or all others, but these, which may change meanwhile."""

        def waiting() -> tuple[int, ...]:
            found = self.core.waits_for(number, self._reached, all_others=all_others)
            return tuple(one for one in found if one not in but()) if found else found

        waits_for = waiting()
        for member in waits_for:  # before any of them is waited for
            self._senders[member].send_queued()
        while waits_for:
            for member in waits_for:
                try:
                    self._senders[member].reach(self.core.sent_to(member, number), _WAIT_SECONDS)
                except TimeoutError:
                    break
                except StreamLostError:  # the holder is lost, or has declared this server lost: the master decides
                    with self.changed:
                        if member in waiting():
                            self.changed.wait(_WAIT_SECONDS)
                    break
            waits_for = waiting()

    def end(self) -> None:
        """Ends the group, and releases whoever waits for it."""
        self.log.stop()
        with self.changed:
            self.core.end()
            self._sends_no_more.set()
            self.changed.notify_all()
        for sender in self._senders.values():
            sender.close()

    def catch_up(self) -> None:
        """Sends pending changes if they are large, and waits as `await_holders` does, but for nobody presumed lost."""
        if self.log.pending_bytes >= _REMOVED_BYTES and self._send_pending():
            self._await(self.core.put_count, but=lambda: self._presumed_lost)

    def presume_lost(self, servers: Collection[int]) -> None:
        """Has `catch_up` no longer wait for these servers, by index.

        The master is about to have their rows rebuilt. Some may be coming here, and wait until rows of an earlier move
        are removed from their buckets; the removal must not wait in turn for a server that is gone. It notices within
        _WAIT_SECONDS.
        """
        self._presumed_lost = frozenset(member for member, one in enumerate(self.members) if one in servers)

    def _flush(self) -> None:
        """Sends pending changes, and waits as `await_holders` does; leaves them for later if memory is short."""
        if self._send_pending():
            self.await_holders()

    def _send_pending(self) -> bool:
        """Sends pending changes; returns False if there are none to send, or no memory for it."""
        with self.state.lock:
            return self.core.is_filling and self._has_pending() and self._try_to_send()

    def _has_pending(self) -> bool:
        return bool(self.log.pending_bytes) or self._lag.has_gathered

    def _try_to_send(self) -> bool:
        """Sends pending changes; returns False, and leaves them for later, if memory is short."""
        try:
            self._send_deltas()
        except MemoryError as error:
            _log.warning("changes_not_sent_for_parity", problem=problem_of(error))
            return False
        return True

    def withdraw(self, kind: ItemKind = ItemKind.WITHDRAWAL, what: Sequence[int] = ()) -> None:
        """Sends the pending deltas, which take rows out of the parity: `what` are the keys that say which.

        The caller holds the lock of the state. Raises MemoryError; the deltas then go with a later push or withdrawal.
        """
        self._withdraws = True
        self._send_deltas(kind, what)

    def _send_deltas(self, kind: ItemKind = ItemKind.WITHDRAWAL, what: Sequence[int] = ()) -> None:
        """Sends the pending deltas, with the batches that they are of. Raises MemoryError if it cannot take them.

        Any later error is fatal: what was taken cannot be put back, and the parity would be wrong without it. A server
        that withdraws its rows is not rebuilt, so nobody asks for the batches in them: its deltas are of this `kind`.
        """
        holders = self.core.holders
        taken = self.log.take([self._lanes_to[member] for member in holders])
        try:
            self._send_taken(holders, taken, kind, what)
        except BaseException as error:
            self.state.fail(error)
            raise

    def _send_taken(
        self, holders: Sequence[int], taken: Sequence[NDArray[np.uint8]], kind: ItemKind, what: Sequence[int]
    ) -> None:
        self._sent_at = time.monotonic()
        if not self.core.sends_pushes:
            with self._lagging:
                self._lag.drop()
            return
        number, size = self.core.put(), sum(map(len, taken))
        stored = self._stored()
        with self._lagging:
            self._lag.stored(stored)  # what is stored need not be remembered
            batches = self._lag.send(number, size)
        withdraws = self._withdraws
        items = withdrawal_items(taken, stored, kind, what) if withdraws else delta_items(taken, stored, batches)
        self._queue(zip(holders, items, strict=True))

    def send_to_holders(self, items: Mapping[int, Item], otherwise: Item) -> None:
        """Sends each holder its item of these, by member, or `otherwise`. The caller holds the lock of the state."""
        self.core.put()
        self._queue((member, items.get(member, otherwise)) for member in self.core.holders)

    def send(self, item: Item) -> None:
        """Sends all other members an item. The caller holds the lock of the state."""
        self.core.put(to_all=True)
        self._queue((member, item) for member in self.core.others)

    def _queue(self, items: Iterable[tuple[int, Item]]) -> None:
        """Queues items that are put, by member; `await_holders` sends them, or with `Async` the streams."""
        for member, item in items:
            try:
                self._senders[member].put(item, _WAIT_SECONDS, now=self._lag.is_async)
                self._totals.items += 1
                self._totals.bytes += item.nbytes
            except StreamLostError:
                continue  # `await_holders` waits for the master

    def _stored(self) -> int:
        return self.core.stored(self._reached)

    def _reached(self, member: int) -> int:
        return self.core.reached(member, self._senders[member].acknowledged_count)

    def _run(self) -> None:
        try:
            self._meet()
            self._fill()
            self._note_whole()
            while not self._sends_no_more.wait(_FLUSH_SECONDS):
                self.send_what_is_due(time.monotonic())
                self._note_whole()
        except BaseException as error:
            self._part(f"its changes can no longer be sent: {error!r}")
            _log.critical("protection_failed", version=self.table.version, problem=repr(error))
            raise

    def send_what_is_due(self, now: float) -> None:
        """Sends queued items, and changes that have waited long enough at this time; the group repeats this."""
        for sender in self._senders.values():  # the thread that queued its items may be waiting for another member
            sender.wake()
        wait = _GATHER_SECONDS if self._lag.is_async else 0.0
        if self._has_pending() and now >= self._sent_at + wait:
            self._flush()

    def _meet(self) -> None:
        """Waits until all others have answered, and then sends the batches in the rows so far."""
        while self.core.is_filling and (waits_for := self.core.yet_to_meet(self._reached)):
            for member in waits_for:
                self._senders[member].send_queued()
            try:
                self._senders[waits_for[0]].reach(1, _WAIT_SECONDS)
            except TimeoutError:
                continue
            except StreamLostError:
                self._sends_no_more.wait(_WAIT_SECONDS)
        with self.state.lock:
            if self.core.is_filling:
                self.core.meet()
                self.send(base_item(self.state.core.applied))

    def _part(self, problem: str) -> None:
        """Marks the group as parted for good, for the reason in `problem`."""
        with self.changed:
            self._problem, self._parted_at = problem, time.monotonic()
            self._sends_no_more.set()
            self.changed.notify_all()

    def _fill(self) -> None:
        """Protects earlier rows, piece by piece; tries again if there is no memory for a piece."""
        pause, whole = _FIRST_PAUSE, False
        while not whole:
            try:
                with self.state.lock:
                    if not self.core.is_filling:
                        return
                    self.log.fill(_FILL_BYTES)
                    self._send_deltas()
                    whole = self.log.is_whole
            except MemoryError as error:
                self._problem = "it has no memory to send its rows to their parity servers, and tries again"
                _log.warning("rows_not_protected", version=self.table.version, problem=problem_of(error))
                self._sends_no_more.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            self._problem = ""
            self.await_holders()

    def _note_whole(self) -> None:
        """Notes that all rows are protected, once they have the same batches and all holders know these.

        The record that others hold is of all rows: a batch that only a part of them has is not in it, and would be
        applied to that part again.
        """
        with self.state.lock:
            if not self.core.is_filling or self.core.is_whole or not self.state.core.is_uniform:
                return
            if self._has_pending() and not self._try_to_send():
                return
        self.await_holders()
        with self.changed:
            self.core.filled()
            self.changed.notify_all()
        _log.info("rows_protected", version=self.table.version, servers=self.members)

    # What others send

    def receive(self, source: int, item: Item) -> None:
        """Takes an item of another member. Raises StreamLostError, and ValueError for an item of another kind."""
        with self.changed:
            try:
                self._taker.take(source, item)
            except (SourceOverError, NotHeldError) as error:
                raise StreamLostError(str(error)) from error
            self.changed.notify_all()

    # The loss of members

    def lose(self, lost: frozenset[int]) -> dict[int, int]:
        """Declares members lost: nothing more of them is taken. Returns how many items came of each.

        Raises NotHeldError if this group cannot rebuild their rows.
        """
        with self.state.lock, self.changed:
            marks = self.core.lose(lost)
            if self._parted_at is None:
                names = " and ".join(self._name(member) for member in sorted(lost))
                self._part(f"{names} {'was' if len(lost) == 1 else 'were'} taken for lost, and nothing more is taken")
        for member in lost:
            self._senders[member].close()
        return marks
