"""One server's part in a parity group: the real cores, also those of streams, over rows that are sets of batches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from tests.simulation.network import BrokenError, End, Hello
from tests.simulation.parity_sets import PLACES, SLOT_BITS, TABLE, Block, Columns, Deltas, ParitySets, columns_of
from tests.simulation.units import Batch, Unit
from tests.simulation.world import Condition, Signal, Task

from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_api.wire import Status
from emberscale_trainer.parity import Holding, ParityLayout
from emberscale_trainer.parity.withdrawals import SlotNumbers, Withdrawals
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.group import GroupCore, parity_stream
from emberscale_trainer.server.lag import ParityLag
from emberscale_trainer.stream.core import SendWindow, StreamLostError

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

_EVERY_SLOT = 1 << 40
_UNBOUNDED = 1 << 62
_PAUSE_SECONDS = 0.1
_SLOW_SECONDS = 5.0
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Open:
    """Opens or resumes the stream of a server's deltas."""

    stream: int
    generation: int


@dataclass(frozen=True)
class Refused:
    """Ends a stream for good."""

    reason: str


class Sent(NamedTuple):
    """An item of a stream. `base`: all batches so far. `marks`: the marks of the lost members.

    * `half`: the sender's part of a stripe and `place`, for the member that decodes it; None: there are no more.
    * `columns`: by holder, the columns of the sender's segment in a stripe.
    * `end`: the slot from which on the sender has withdrawn all; None: it does not say so.
    * `places`: where the sender has withdrawn its rows: each `stripe << SLOT_BITS | place`.
    """

    kind: Literal["base", "deltas", "withdrawal", "withdrawn", "half", "columns", "told", "places"]
    stored: int = 0
    batches: tuple[Batch, ...] = ()
    deltas: Deltas = ()
    base: AppliedBatches | None = None
    marks: Mapping[int, int] = {}
    place: tuple[int, int] = (0, 0)
    half: "Block | None" = None
    columns: Mapping[int, tuple[int, Columns]] = {}
    end: int | None = None
    places: tuple[int, ...] = ()


@dataclass
class _PeerStream:
    """The stream to one other member. `over`: it was refused or closed for good. `problem`: why it was refused.

    `waits_since`: since when items have been waiting for an acknowledgement.
    """

    window: SendWindow[Sent] = field(default_factory=lambda: SendWindow(_UNBOUNDED))
    end: End | None = None
    over: bool = False
    problem: str = ""
    waits_since: float = 0.0

    def acknowledged(self, number: int, now: float) -> None:
        """The other member has all items up to this number."""
        self.window.acknowledged(number)
        self.waits_since = now


class SimulatedGroup:
    """One server's part in the group of one table."""

    def __init__(self, server: "ParameterServer", table: RoutingTable) -> None:
        self.table = table
        self.members = tuple(one.index for one in table.owners)
        self.me = self.members.index(server.index)
        self._server = server
        scenario = server.cluster.scenario
        self._layout = ParityLayout(len(self.members), scenario.parity, scenario.most_width)
        self.parity = ParitySets(self._layout, self.me)
        self.withdrawals = Withdrawals(self._layout, [SlotNumbers(SLOT_BITS, PLACES, row_bytes=1)])
        self.core = GroupCore(self.me, self._layout, Holding(self.parity, self.me, len(self.members)))
        self._logged = 0
        self._lag = ParityLag(scenario.lag if server.protection.is_async else None)
        self._pending: Deltas = ()
        self._withdraws = False
        self._out: set[int] = set()
        """Slots below `_logged` whose rows are withdrawn."""
        self._needed_by = frozenset[int]()
        """The lost member whose rows follow on demand; else all rows are withdrawn."""
        self._parted_at: float | None = None
        self.changed = Condition()
        self._links = {member: _PeerStream() for member in range(len(self.members)) if member != self.me}
        self.send(Sent("base", base=AppliedBatches()))
        for member in self._links:
            server.spawn(self._stream(member))
        server.spawn(self._begin())
        if self._lag.is_async:
            server.spawn(self._flush())

    @property
    def trouble(self) -> ParityTrouble | None:
        """Returns what keeps this server's rows unprotected, or None."""
        version = self.table.version
        if self.core.is_over:
            return None
        if self._parted_at is not None:
            seconds = self._server.world.now - self._parted_at
            return ParityTrouble(version, "another was taken for lost", seconds, broken=True)
        return self._trouble_with(self._links, version)

    def trouble_of_rebuild(self, version: int) -> ParityTrouble | None:
        """What keeps pushes waiting while this group still serves a rebuild; `version` is of the table in force."""
        waiting = self.core.waits_for(self.core.put_count, self._reached, all_others=True)
        return self._trouble_with(waiting, version)

    def _trouble_with(self, members: Iterable[int], version: int) -> ParityTrouble | None:
        for member in members:
            link = self._links[member]
            waits = link.window.acknowledged_count < link.window.put_count
            seconds = self._server.world.now - link.waits_since if waits or link.problem else 0.0
            if link.problem:
                return ParityTrouble(version, link.problem, seconds, broken=True)
            if seconds >= _SLOW_SECONDS and not self.core.has_met:
                return ParityTrouble(version, "it has yet to reach another, and trains on without parity")
            if seconds >= _SLOW_SECONDS:
                return ParityTrouble(version, "another does not acknowledge its changes", seconds)
        return None

    # What this server sends

    def pushed(self, batch: Batch, units: tuple[Unit, ...]) -> None:
        """Sends the changes of a push, now or with those of later ones."""
        if not self.core.sends_pushes:
            return
        changed = tuple((self._server.protection.slot(unit), frozenset(((unit, batch),))) for unit in units)
        self._pending += tuple(one for one in changed if one[0] < self._logged and self._is_in(one[0]))
        if self._lag.pushed(batch, 0):
            self._send_deltas()
        self.changed.notify()

    def _send_deltas(self, deltas: Deltas = (), end: int | None = None, places: tuple[int, ...] = ()) -> None:
        """Sends pending changes with others; once rows are withdrawn, nobody asks for the batches in them."""
        deltas, self._pending = self._pending + deltas, ()
        if not self.core.sends_pushes:
            self._lag.drop()
            return
        number = self.core.put()
        batches = self._lag.send(number, 0)
        if not self._withdraws:
            self._queue(Sent("deltas", self._stored(), batches, deltas), self.core.holders)
        else:
            kind: Literal["places", "withdrawal"] = "places" if places else "withdrawal"
            self._queue(Sent(kind, self._stored(), deltas=deltas, end=end, places=places), self.core.holders)

    def _flush(self) -> Task[None]:
        while not self.core.is_over:
            yield self._server.sleep(_FLUSH_SECONDS)
            if self.core.is_filling and self._lag.has_gathered:
                self._send_deltas()

    def await_pushes(self) -> Task[None]:
        """Waits until a push may be answered, or until the group is over."""
        if self._parted_at is not None or any(self._links[member].problem for member in self.core.others):
            yield from self.await_holders()
        else:
            self._lag.stored(self._stored())
            yield from self._await(self._lag.must_store(self.core.put_count))

    def await_holders(self, ahead: int = 0) -> Task[None]:
        """Waits until all holders have what was sent, but for the last items, or until the group is over."""
        yield from self._await(self.core.put_count - ahead)

    def await_others(self) -> Task[None]:
        """Waits until all others have what was sent to them, or until the group is over."""
        yield from self._await(self.core.put_count, all_others=True)

    def _await(self, number: int, *, all_others: bool = False) -> Task[None]:
        while self.core.waits_for(number, self._reached, all_others=all_others):
            yield self.changed

    def end(self) -> None:
        """Ends the group: the server forms another one, or none."""
        self.core.end()
        for link in self._links.values():
            self._close(link)
        self.changed.notify()

    def send(self, item: Sent) -> None:
        """Sends an item to all others."""
        self.core.put(to_all=True)
        self._queue(item, self.core.others)

    def send_to_holders(self, item: Sent) -> None:
        """Sends an item to all holders."""
        self.core.put()
        self._queue(item, self.core.holders)

    def _queue(self, item: Sent, receivers: Iterable[int]) -> None:
        for member in receivers:
            link = self._links[member]
            mine = tuple(one for one in item.deltas if self._goes_to(member, one[0]))
            if not link.over:
                if link.window.acknowledged_count == link.window.put_count:
                    link.waits_since = self._server.world.now
                link.window.put(item._replace(deltas=mine), 1)
        self.changed.notify()

    def _goes_to(self, member: int, slot: int) -> bool:
        return self._layout.lane(self.me, TABLE, slot >> SLOT_BITS) in self._layout.lanes_to(self.me, member)

    def _reached(self, member: int) -> int:
        return self.core.reached(member, self._links[member].window.acknowledged_count)

    def _stored(self) -> int:
        return self.core.stored(self._reached)

    def _begin(self) -> Task[None]:
        while self.core.is_filling and self.core.yet_to_meet(self._reached):
            yield self.changed
        if self.core.is_filling:
            self.core.meet()
            self.send(Sent("base", base=self._server.core.applied.copy()))
        yield from self._fill()

    def _fill(self) -> Task[None]:
        while self._logged < _EVERY_SLOT:
            if not self.core.is_filling:
                return
            last = self._server.protection.last_slot
            until = self._logged + self._server.world.random.randint(1, 4)
            self._send_deltas(self._rows(self._logged, until))
            self._logged = until if until <= last else _EVERY_SLOT
            yield from self.await_holders()
        while not self._server.core.is_uniform:
            yield self.changed
            if not self.core.is_filling:
                return
        if self._lag.has_gathered:
            self._send_deltas()
        yield from self.await_holders()
        self.core.filled()

    def _rows(self, first: int, stop: int) -> Deltas:
        server = self._server
        slots = {server.protection.slot(unit): unit for unit in server.rows}
        found = ((slot, slots[slot]) for slot in sorted(slots) if first <= slot < stop)
        return tuple((slot, frozenset((unit, batch) for batch in server.rows[unit])) for slot, unit in found)

    # Streams

    def _close(self, link: _PeerStream) -> None:
        link.over = True
        if link.end is not None:
            link.end.close()

    def _refused(self, link: _PeerStream, error: StreamLostError) -> None:
        link.problem = link.problem or str(error)
        self._close(link)

    def _stream(self, member: int) -> Task[None]:
        server, link, target = self._server, self._links[member], self.table.owners[member]
        while not link.over:
            found = server.cluster.server_at(target.data)
            stream = None if found is None else server.cluster.network.connect(server, found, found.accept)
            if stream is not None:
                link.end = stream.client
                try:
                    yield from self._serve(link, stream.client, target.incarnation)
                except BrokenError:
                    pass
                except StreamLostError as error:
                    server.trace(f"sends no deltas to ps-{self.members[member]} any more: {error}")
                    self._refused(link, error)
            yield server.sleep(_PAUSE_SECONDS)

    def _serve(self, link: _PeerStream, end: End, incarnation: str) -> Task[None]:
        stream = parity_stream(self.table.version, self._server.index)
        end.send(Hello(stream, incarnation))
        if (yield end.receive()) is not Status.OK:
            raise StreamLostError("another server is there")
        end.send(Open(stream, self.table.generation))
        link.window.connected(_number((yield end.receive())))
        self.changed.notify()
        reading: Signal[None] = Signal()
        self._server.spawn(self._read(link, end, reading))
        while not reading.done:
            following = link.window.next()
            if following is None:
                yield self.changed
            else:
                end.send(following)
        if reading.done:
            raise BrokenError("the stream is broken")

    def _read(self, link: _PeerStream, end: End, reading: Signal[None]) -> Task[None]:
        try:
            while True:
                link.acknowledged(_number((yield end.receive())), self._server.world.now)
                self.changed.notify()
        except BrokenError:
            pass
        except StreamLostError as error:
            self._refused(link, error)
        reading.set()
        self.changed.notify()

    # What others send

    def receive(self, source: int, item: Sent) -> None:
        """Takes an item from another member. Raises SourceOverError and NotHeldError."""
        match item.kind:
            case "base":
                assert item.base is not None
                self.core.begin(source, item.base.copy())
            case "deltas":
                self.core.take(source, item.stored, item.batches, item.deltas)
            case "withdrawal":
                self.core.take_withdrawal(source, item.deltas)
                if item.end is not None:
                    self.withdrawals.withdrew_to(source, [item.end])
            case "places":
                self.core.take_withdrawal(source, item.deltas)
                for number in item.places:
                    place = np.array([number & (PLACES - 1)])
                    self.withdrawals.withdrew(source, TABLE, number >> SLOT_BITS, place)
            case "columns":
                self.core.take_columns(source)
                if self.me in item.columns:
                    self.withdrawals.tell_keys(TABLE, *item.columns[self.me])
            case "told":
                assert item.end is not None
                self.withdrawals.tell_ends(source, [item.end])
                self.core.marked(source, item.marks)
            case "withdrawn":
                self.core.withdrawn(source, item.marks)
            case "half" if item.half is not None:
                self.core.require()
                self.parity.halves[item.place] = item.half
            case "half":
                self.core.sent_halves(source)
        self.changed.notify()

    # The loss of members

    def lose(self, lost: frozenset[int]) -> dict[int, int]:
        """Declares members lost; returns how many items came of each. Raises NotHeldError."""
        marks = self.core.lose(lost)
        if self._parted_at is None:
            self._parted_at = self._server.world.now
        for member in lost:
            self._close(self._links[member])
        self.changed.notify()
        return marks

    @property
    def is_empty(self) -> bool:
        """Whether none of the rows is in the parity."""
        return not self._logged

    def begin_withdrawal(self, lost: int) -> int:
        """Lets rows that share parity with a lost member's be withdrawn; returns the slot after the last one."""
        self._withdraws, self._needed_by = True, frozenset((lost,))
        self._logged = min(self._logged, self._server.protection.last_slot + 1)
        self._send_deltas()
        return self._logged

    def columns(self, end: int) -> list[tuple[int, int, Columns]]:
        """Returns holder, stripe and columns of each segment that shares parity with rows of the lost member."""
        found = []
        for segment in range(-(-end // PLACES)):
            if self._is_needed(segment):
                stripe = self._layout.stripe(self.me, TABLE, segment)
                holder = self._layout.decoding_member(self.core.lost, TABLE, stripe)
                first = segment << SLOT_BITS
                rows = self._rows(first, min(end, first + PLACES))
                columns = columns_of((slot - first, element) for slot, row in rows for element in row)
                found.append((holder, stripe, columns[: min(end - first, PLACES)]))
        return found

    def _is_needed(self, segment: int) -> bool:
        stripe = self._layout.stripe(self.me, TABLE, segment)
        return not self._needed_by or bool(self._layout.lost_rows(self._needed_by, TABLE, stripe))

    def withdraw_next(self) -> None:
        """Withdraws the next rows, the last first; says so to the holders if others follow on demand."""
        self.core.require()
        self._withdraws = True
        end = min(self._logged, self._server.protection.last_slot + 1)
        while end and not self._is_needed(end - 1 >> SLOT_BITS):
            end = (end - 1 >> SLOT_BITS) << SLOT_BITS
        bottom = (end - 1 >> SLOT_BITS) << SLOT_BITS if self._needed_by else 0
        first = max(bottom, end - self._server.world.random.randint(1, 4)) if end else 0
        rows = tuple(one for one in self._rows(first, end) if self._is_in(one[0]))
        self._logged = first
        self._send_deltas(rows, self._logged if self._needed_by else None)

    def withdraw_places(self, numbers: Sequence[int]) -> None:
        """Withdraws the rows at these places of stripes that are still in the parity."""
        self.core.require()
        self._withdraws = True
        rows: Deltas = ()
        for number in sorted(set(numbers)):
            segment = self._layout.segment(self.me, TABLE, number >> SLOT_BITS)
            if segment is not None:
                slot = segment << SLOT_BITS | number & (PLACES - 1)
                if slot < self._logged and self._is_in(slot):
                    rows += self._rows(slot, slot + 1)
                    self._out.add(slot)
        self._send_deltas(rows, places=tuple(numbers))

    def _is_in(self, slot: int) -> bool:
        """Whether a slot's row was not withdrawn by its place."""
        return slot not in self._out

    def decoded(self, member: int) -> dict[Unit, frozenset[Batch]]:
        """Returns the rows of a lost member that this member decodes."""
        found: dict[Unit, set[Batch]] = {}
        for unit, batch in self.parity.decoded(self.core.lost, member):
            found.setdefault(unit, set()).add(batch)
        return {unit: frozenset(batches) for unit, batches in found.items()}


def _number(answer: int | Refused | Status) -> int:
    if isinstance(answer, Refused):
        raise StreamLostError(answer.reason)
    return int(answer)
