"""Parity between parameter servers: each logs what changes in its rows, and sends it to those that hold parity of them.

The servers of a routing table are a group. A push is answered once all of them have its deltas, so what is answered is
never lost with one server. When one is lost, the others *withdraw* their own rows from the parity: what remains in it
are the rows of the lost server, which each holder then sends to the process that takes its place. Nobody else changes,
and nothing rolls back. With the new routing table a new group begins, and the rows are filled in behind training.

Lock order: that of the state, then that of a group.
"""

import ssl
import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.routing import RoutingTable
from emberscale_trainer.parity import Holding, ParityBlocks, ParityLayout, SourceOverError, TableShape
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.group import GroupCore, parity_stream, source_of
from emberscale_trainer.server.reports import ParityFigures, ParityTotals
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamSender
from emberscale_trainer.stream.receiver import Deliver
from emberscale_trainer.table import DeltaLog
from emberscale_trainer.transport import ConnectionLostError

log = structlog.get_logger()

_FILL_BYTES = 256 << 10
_UNBOUNDED = 1 << 62
_WAIT_SECONDS = 5.0
_NOTHING = np.zeros((0, 8), np.uint8)


class Group:
    """One server's part in the group of one routing table, until another table or assignment ends it."""

    def __init__(
        self,
        state: ServerState,
        table: RoutingTable,
        index: int,
        token: str,
        context: ssl.SSLContext | None,
        totals: ParityTotals,
    ) -> None:
        """The caller holds the lock of the state, which serves rows under this table."""
        members = tuple(server.index for server in table.owners)
        self.table = table
        self.members = members
        self.me = members.index(index)
        self.changed = threading.Condition()
        self._state = state
        self._totals = totals
        self._withdrawing = threading.Lock()
        self._rest: AppliedBatches | None = None
        tables = state.tables
        layout = ParityLayout(len(members))
        self._log: DeltaLog = tables.log_deltas(
            len(members), lambda number, segment: layout.lane(self.me, number, segment)
        )
        shapes = [TableShape(one) for one in tables.layouts]
        self.blocks = ParityBlocks(layout, self.me, shapes)
        self._core = GroupCore(self.me, len(members), Holding(self.blocks, self.me, len(members)))
        stream = parity_stream(table.version, index)
        self._senders = {
            member: StreamSender(
                server.data, server.incarnation, token, stream, table.generation, context, window_bytes=_UNBOUNDED
            )
            for member, server in enumerate(table.owners)
            if member != self.me
        }
        self._send(Item(ItemKind.BASE, 0, _NOTHING, _flat(state.applied)) for _ in members)
        threading.Thread(target=self._fill, name="parity", daemon=True).start()

    @property
    def is_whole(self) -> bool:
        """Whether all rows of this server are protected."""
        return self._core.is_whole

    @property
    def lag(self) -> int:
        """How many of its items the holder that is furthest behind has yet to acknowledge."""
        return self._core.put_count - self._core.settled(self._acknowledged())

    @property
    def holding(self) -> Holding[NDArray[np.uint8]]:
        """What this server holds for the others."""
        return self._core.holding

    # What this server sends

    def pushed(self, epoch: int, batch: int) -> None:
        """Sends what a push has changed. The caller holds the lock of the state."""
        self._send_deltas(ItemKind.DELTA, epoch, batch)

    def settle(self) -> None:
        """Returns when all that was pushed until now is stored by all holders that live, or the group is over."""
        number = self._core.put_count
        while waits_for := self._core.waits_for(number, self._acknowledged()):
            try:
                self._senders[waits_for[0]].reach(number, _WAIT_SECONDS)
            except TimeoutError:
                continue
            except StreamLostError:  # the holder is lost, or takes this server for lost: the master will tell
                with self.changed:
                    self.changed.wait(_WAIT_SECONDS)

    def end(self) -> None:
        """Another group, or none, comes after this one; whoever waits for it goes on."""
        self._log.stop()
        with self.changed:
            self._core.end()
            self.changed.notify_all()
        for sender in self._senders.values():
            sender.close()

    def _send_deltas(self, kind: ItemKind, epoch: int = 0, batch: int = 0) -> None:
        settled = np.array([self._core.settled(self._acknowledged())], np.int64)
        deltas = [one.reshape(1, -1) if len(one) else _NOTHING for one in self._log.take()]
        self._send(Item(kind, 0, records, settled, epoch, batch) for records in deltas)

    def _send(self, items: Iterable[Item]) -> None:
        """One item for each member, in their order."""
        self._core.put()
        holders = self._core.holders
        for member, item in enumerate(items):
            if member in holders:
                try:
                    self._senders[member].put(item, _WAIT_SECONDS)
                    self._totals.items += 1
                    self._totals.bytes += item.nbytes
                except StreamLostError:
                    continue  # `settle` waits for the master

    def _acknowledged(self) -> dict[int, int]:
        """How many items each other member has."""
        return {member: sender.acknowledged_count for member, sender in self._senders.items()}

    def _fill(self) -> None:
        """Protects the rows that were there before, piece by piece."""
        whole = False
        while not whole:
            with self._state.lock:
                if not self._core.is_filling:
                    return
                self._log.fill(_FILL_BYTES)
                self._send_deltas(ItemKind.FILL)
                whole = self._log.is_whole
            self.settle()
        self._core.filled()
        log.info("rows_protected", version=self.table.version, servers=len(self.members))

    # What others send

    def receive(self, source: int, item: Item) -> None:
        """Takes an item of another member. Raises StreamLostError, and ValueError for what makes no sense."""
        with self.changed:
            try:
                self._take(source, item)
            except SourceOverError as error:
                raise StreamLostError(str(error)) from error
            self.changed.notify_all()

    def _take(self, source: int, item: Item) -> None:
        keys = item.keys.tolist()
        match item.kind:
            case ItemKind.BASE:
                self._core.begin(source, _from_flat(item.keys))
            case ItemKind.DELTA:
                self._core.take(source, keys[0], (item.epoch, item.batch), item.records.reshape(-1).copy())
            case ItemKind.FILL:
                self._core.take(source, keys[0], None, item.records.reshape(-1).copy())
            case ItemKind.WITHDRAWN:
                self._core.withdrawn(source, keys[0], keys[1])
            case _:
                raise ValueError(f"an item of kind {item.kind} in a stream of parity")

    # The loss of a member

    def rebuild(self, lost: int) -> AppliedBatches:
        """Leaves nothing in the parity but the rows of a lost member; returns the batches in them.

        Takes as long as all other members need for it. Raises NotHeldError where this group cannot.
        """
        with self._withdrawing:
            mark = self._begin_rebuild(lost)
            if self._rest is None:
                self._withdraw(mark)
                self._rest = self._agreed()
            return self._rest

    def rest(self) -> Iterator[tuple[int, bool, NDArray[np.uint8]]]:
        """The rows of the member that was rebuilt, as far as their parity is here.

        Yields tables, whether each is the dense one, and uint8[n, stride].
        """
        tables = self._state.tables
        for table, (spec, layout) in enumerate(zip(tables.specs, tables.layouts, strict=True)):
            for block in self.blocks.blocks(table):
                records = block[layout.fields(block)["pushes"] != 0]
                if len(records):
                    yield table, spec.column < 0, records

    def _begin_rebuild(self, lost: int) -> tuple[int, int]:
        with self._state.lock, self.changed:
            mark = self._core.lose(lost)
            self.changed.notify_all()
        self._senders[lost].close()
        return mark

    def _withdraw(self, mark: tuple[int, int]) -> None:
        empty = False
        while not empty:
            with self._state.lock:
                self._core.require()
                self._log.withdraw(_FILL_BYTES)
                self._send_deltas(ItemKind.FILL)
                empty = self._log.is_empty
            self.settle()
        said = np.array(mark, np.int64)
        with self._state.lock:
            self._core.require()
            self._send(Item(ItemKind.WITHDRAWN, 0, _NOTHING, said) for _ in self.members)
        self.settle()

    def _agreed(self) -> AppliedBatches:
        """Waits for all others; the batches that the rows of the lost server have in all parity of them."""
        with self.changed:
            while (agreed := self._core.agreed()) is None:
                self.changed.wait()
            return agreed


class RowProtection:
    """The parity of one server, where its job wants any. Any thread may call in."""

    def __init__(self, state: ServerState, token: str, context: ssl.SSLContext | None = None) -> None:
        """With a context, streams to other machines go over TLS."""
        self._state = state
        self._token = token
        self._context = context
        self._changed = threading.Condition()
        self._totals = ParityTotals()
        self._group: Group | None = None

    @property
    def version(self) -> int:
        """The version of the routing table under which all rows of this server are protected; 0: they are not."""
        group = self._group
        return group.table.version if group is not None and group.is_whole else 0

    @property
    def group(self) -> Group | None:
        """The group of the newest table."""
        return self._group

    def figures(self) -> ParityFigures | None:
        """The figures of this moment; None where no parity is kept."""
        group, totals = self._group, self._totals
        if group is None:
            return None
        return ParityFigures(group.lag, totals.items, totals.bytes, group.blocks.nbytes)

    def form(self, table: RoutingTable, index: int) -> None:
        """Begins the group of a table that is in force here, unless it or a later one has begun."""
        with self._state.lock, self._changed:
            if not self._state.serves(table.generation, table.version) or self._is_current(table):
                return
            owners = [server.index for server in table.owners]
            self._group = None
            if index in owners and len(owners) > 1:
                self._group = Group(self._state, table, index, self._token, self._context, self._totals)
            self._state.guarded_by(self._group)
            self._changed.notify_all()

    def _is_current(self, table: RoutingTable) -> bool:
        group = self._group
        return group is not None and (group.table.generation, group.table.version) == (table.generation, table.version)

    def accept(self, stream: int, generation: int) -> Deliver:
        """Takes the deltas of another server, once this one has the same table.

        Raises StreamLostError for a stream of an earlier table.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            while (found := self._member_of(stream, generation)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ConnectionLostError("the group of that stream has yet to begin here")
        group, member = found
        return lambda item: group.receive(member, item)

    def _member_of(self, stream: int, generation: int) -> tuple[Group, int] | None:
        group = self._group
        if group is None:
            return None
        member = source_of(stream, generation, (group.table.generation, group.table.version), group.members)
        return None if member is None else (group, member)


def _flat(applied: AppliedBatches) -> NDArray[np.int64]:
    """All runs of a record, as `epoch, first, stop, times` after each other."""
    runs = [(epoch, *run) for epoch in applied.epochs() for run in applied.runs(epoch)]
    return np.array(runs, np.int64).reshape(-1)


def _from_flat(keys: NDArray[np.int64]) -> AppliedBatches:
    return AppliedBatches.from_runs((epoch, [run]) for epoch, *run in keys.reshape(-1, 4).tolist())
