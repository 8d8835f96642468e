"""One server's part in a parity group: the real cores, including those of streams, over rows that are sets of batches.

A parity block maps each batch of each row to a number: the sum of the factors under which the batch was added, which
is what the code makes of a byte 1. So parity shows which row and server each batch belongs to: a row that was not
withdrawn, or changed without a delta, leaves something behind in rebuilt rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from tests.simulation.network import BrokenError, End, Hello
from tests.simulation.units import Batch, Unit
from tests.simulation.world import Condition, Signal, Task

from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_api.wire import Status
from emberscale_trainer.parity import Holding, ParityLayout
from emberscale_trainer.parity.code import coefficient, decode_one, decode_two
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.group import GroupCore, parity_stream
from emberscale_trainer.server.lag import ParityLag
from emberscale_trainer.stream.core import SendWindow, StreamLostError

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

Element = tuple[Unit, Batch]
Block = dict[Element, int]
"""The non-zero numbers of a block."""

Deltas = tuple[tuple[int, frozenset[Element]], ...]
"""The changes to the row of each slot; a segment has one slot."""

_TABLE = 0
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
    """An item of a stream. `base`: all batches so far. `marks`: rows are withdrawn, and the marks of the lost members.

    `half`: the sender's part of a `stripe`, for the member that decodes it; None: there are no more.
    """

    kind: Literal["base", "deltas", "withdrawal", "withdrawn", "half"]
    stored: int = 0
    batches: tuple[Batch, ...] = ()
    deltas: Deltas = ()
    base: AppliedBatches | None = None
    marks: Mapping[int, int] = {}
    stripe: int = 0
    half: "Block | None" = None


class ParitySets:
    """A member's parity, by stripe."""

    def __init__(self, layout: ParityLayout, member: int) -> None:
        self._layout = layout
        self._member = member
        self._blocks: dict[int, Block] = {}
        self.halves: dict[int, Block] = {}

    def apply(self, source: int, deltas: Deltas) -> None:
        """Applies deltas. Raises ValueError if another member holds the row's parity."""
        for slot, changed in deltas:
            stripe = self._layout.stripe(source, _TABLE, slot)
            role = self._layout.role(self._member, _TABLE, stripe)
            if role is None:
                raise ValueError(f"member {source} sends deltas of slot {slot} to member {self._member}")
            block = self._blocks.setdefault(stripe, {})
            factor = coefficient(role, self._layout.position(source, _TABLE, stripe))
            for element in changed:
                block[element] = block.get(element, 0) ^ factor

    def halves_for_others(self, lost: frozenset[int]) -> Iterator[tuple[int, Block]]:
        """Yields what another holder needs to decode two lost rows, by stripe."""
        for stripe, block, role in self._held():
            if len(self._layout.lost_rows(lost, _TABLE, stripe)) > 1 and role != self._decoder(lost, stripe):
                yield stripe, dict(block)

    def decoded(self, lost: frozenset[int], member: int) -> Iterator[Element]:
        """Yields the content of a lost member's rows that this member decodes; a partial batch is another batch."""
        for stripe, block, role in self._held():
            rows_of = self._layout.lost_rows(lost, _TABLE, stripe)
            if member not in rows_of or role != self._decoder(lost, stripe):
                continue
            half = self.halves.get(stripe, {})
            elements = sorted(block.keys() | half.keys())
            p, q = (np.array([one.get(element, 0) for element in elements], np.uint8) for one in (half, block))
            positions = [self._layout.position(one, _TABLE, stripe) for one in rows_of]
            if len(rows_of) == 2:
                found = decode_two(p, q, *positions)[rows_of.index(member)]
            else:
                found = q if role == 0 else decode_one(q, positions[0])
            for (unit, (epoch, number)), value in zip(elements, found.tolist(), strict=True):
                if value:
                    yield unit, (epoch if value == 1 else -value, number)

    def _held(self) -> Iterator[tuple[int, Block, int]]:
        for stripe, block in sorted(self._blocks.items()):
            role = self._layout.role(self._member, _TABLE, stripe)
            assert role is not None
            yield stripe, block, role

    def _decoder(self, lost: frozenset[int], stripe: int) -> int:
        return self._layout.decoder(lost, _TABLE, stripe)


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
        parity = server.cluster.scenario.parity
        self._layout = ParityLayout(len(self.members), parity)
        self._parity = ParitySets(self._layout, self.me)
        self.core = GroupCore(self.me, len(self.members), Holding(self._parity, self.me, len(self.members)), parity)
        self._logged = 0
        self._lag = ParityLag(server.cluster.scenario.lag if server.protection.is_async else None)
        self._pending: Deltas = ()
        self._withdrawing = False
        self._parted_at: float | None = None
        self._rest: dict[int, AppliedBatches] | None = None
        self._changed = Condition()
        self._links = {member: _PeerStream() for member in range(len(self.members)) if member != self.me}
        self._send(Sent("base", base=AppliedBatches()))
        for member in self._links:
            server.spawn(self._stream(member))
        server.spawn(self._begin())
        if self._lag.is_async:
            server.spawn(self._flush())

    @property
    def trouble(self) -> ParityTrouble | None:
        """Returns what keeps this server's rows unprotected, or None."""
        version, now = self.table.version, self._server.world.now
        if self.core.is_over:
            return None
        if self._parted_at is not None:
            return ParityTrouble(version, "another was taken for lost", now - self._parted_at, broken=True)
        for link in self._links.values():
            waits = link.window.acknowledged_count < link.window.put_count
            seconds = now - link.waits_since if waits or link.problem else 0.0
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
        self._pending += tuple(one for one in changed if one[0] < self._logged)
        if self._lag.pushed(batch, 0):
            self._send_deltas()
        self._changed.notify()

    def _send_deltas(self, deltas: Deltas = (), *, withdraws: bool = False) -> None:
        number, deltas = self.core.put(), self._pending + deltas
        batches = self._lag.send(number, 0)
        self._pending = ()
        if withdraws:
            self._queue(Sent("withdrawal", self._stored(), deltas=deltas))
        else:
            self._queue(Sent("deltas", self._stored(), batches, deltas))

    def _flush(self) -> Task[None]:
        while not self.core.is_over:
            yield self._server.sleep(_FLUSH_SECONDS)
            if self.core.is_filling and self._lag.has_gathered:
                self._send_deltas()

    def await_pushes(self) -> Task[None]:
        """Waits until a push may be answered, or until the group is over."""
        if self._parted_at is not None or any(self._links[member].problem for member in self.core.holders):
            yield from self.await_holders()
        else:
            self._lag.stored(self._stored())
            yield from self._await(self._lag.must_store(self.core.put_count))

    def await_holders(self) -> Task[None]:
        """Waits until all holders have what was sent, or until the group is over."""
        yield from self._await(self.core.put_count)

    def _await(self, number: int) -> Task[None]:
        while self.core.waits_for(number, self._acknowledged()):
            yield self._changed

    def end(self) -> None:
        """Ends the group: the server forms another one, or none."""
        self.core.end()
        for link in self._links.values():
            self._close(link)
        self._changed.notify()

    def _send(self, item: Sent) -> None:
        self.core.put()
        self._queue(item)

    def _queue(self, item: Sent) -> None:
        for member in self.core.holders:
            link = self._links[member]
            mine = tuple(one for one in item.deltas if self._goes_to(member, one[0]))
            if not link.over:
                if link.window.acknowledged_count == link.window.put_count:
                    link.waits_since = self._server.world.now
                link.window.put(item._replace(deltas=mine), 1)
        self._changed.notify()

    def _goes_to(self, member: int, slot: int) -> bool:
        return self._layout.lane(self.me, _TABLE, slot) in self._layout.lanes_to(member)

    def _acknowledged(self) -> dict[int, int]:
        return {member: link.window.acknowledged_count for member, link in self._links.items()}

    def _stored(self) -> int:
        return self.core.stored(self._acknowledged())

    def _begin(self) -> Task[None]:
        while self.core.is_filling and self.core.yet_to_meet(self._acknowledged()):
            yield self._changed
        if self.core.is_filling:
            self.core.meet()
            self._send(Sent("base", base=self._server.core.applied.copy()))
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
            yield self._changed
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
        self._changed.notify()
        reading: Signal[None] = Signal()
        self._server.spawn(self._read(link, end, reading))
        while not reading.done:
            following = link.window.next()
            if following is None:
                yield self._changed
            else:
                end.send(following)
        if reading.done:
            raise BrokenError("the stream is broken")

    def _read(self, link: _PeerStream, end: End, reading: Signal[None]) -> Task[None]:
        try:
            while True:
                link.acknowledged(_number((yield end.receive())), self._server.world.now)
                self._changed.notify()
        except BrokenError:
            pass
        except StreamLostError as error:
            self._refused(link, error)
        reading.set()
        self._changed.notify()

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
                self.core.take_withdrawal(source, item.stored, item.deltas)
            case "withdrawn":
                self.core.withdrawn(source, item.marks)
            case "half" if item.half is not None:
                self.core.require()
                self._parity.halves[item.stripe] = item.half
            case "half":
                self.core.told(source)
        self._changed.notify()

    # The loss of members

    def rebuild(self, lost: frozenset[int]) -> Task[dict[int, AppliedBatches]]:
        """Reduces the parity to the rows of lost members; returns the batches in these rows. Raises NotHeldError."""
        marks = self.core.lose(lost)
        while self._withdrawing:
            yield self._changed
        if self._parted_at is None:
            self._parted_at = self._server.world.now
        for member in lost:
            self._close(self._links[member])
        self._changed.notify()
        if self._rest is None:
            self._withdrawing = True
            try:
                yield from self._withdraw(marks)
                while (agreed := self.core.agreed()) is None:
                    yield self._changed
                if len(lost) > 1:
                    yield from self._exchange_halves()
                self._rest = agreed
            finally:
                self._withdrawing = False
                self._changed.notify()
        return self._rest

    def rest(self, member: int) -> dict[Unit, frozenset[Batch]]:
        """Returns those rows of a lost member that this member decodes."""
        found: dict[Unit, set[Batch]] = {}
        for unit, batch in self._parity.decoded(self.core.lost, member):
            found.setdefault(unit, set()).add(batch)
        return {unit: frozenset(batches) for unit, batches in found.items()}

    def _exchange_halves(self) -> Task[None]:
        for stripe, half in self._parity.halves_for_others(self.core.lost):
            self.core.require()
            self._send(Sent("half", stripe=stripe, half=half))
            yield from self.await_holders()
        self.core.require()
        self._send(Sent("half"))
        while not self.core.has_all():
            yield self._changed

    def _withdraw(self, marks: dict[int, int]) -> Task[None]:
        while self._logged:
            self.core.require()
            end = min(self._logged, self._server.protection.last_slot + 1)
            first = max(0, end - self._server.world.random.randint(1, 4))
            self._send_deltas(self._rows(first, end), withdraws=True)
            self._logged = first
            yield from self.await_holders()
        self.core.require()
        self._send(Sent("withdrawn", marks=marks))
        self.core.withdrew()
        yield from self.await_holders()


def _number(answer: int | Refused | Status) -> int:
    if isinstance(answer, Refused):
        raise StreamLostError(answer.reason)
    return int(answer)
