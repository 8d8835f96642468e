"""Moves on one parameter server: the real core decides; units travel in place of rows, in rounds and in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.network import UnavailableError
from tests.simulation.protection import SimulatedRebuild
from tests.simulation.units import UNITS, Batch, Unit, owner
from tests.simulation.world import Condition, Task

from emberscale_api.routing import RoutingTable
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import HandedOver
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

_ROUND_SECONDS = 0.25
_COPY_SECONDS = (0.02, 0.2, 0.2, 1.0)
"""The seconds that the first round may take, chosen at random."""


class MoveError(Exception):
    """A move has failed on this server."""


@dataclass
class _Outgoing:
    """What a server sends in a move: the rounds done, and the rounds asked for within a barrier."""

    move: int
    rounds: int = 0
    asked: int = 0
    answered: int = 0
    sequence: int = 0
    problem: str = ""
    changed: Condition = field(default_factory=Condition)


class DamagedError(Exception):
    """A file fails its checksum."""


@dataclass
class Loading:
    """The loading of a lost server's rows."""

    done: bool = False
    error: DamagedError | None = None


class SimulatedMover:
    """The moves of one server."""

    def __init__(self, server: "ParameterServer") -> None:
        self._server = server
        self.dirty: set[Unit] = set()
        """Units changed since the last round sent them."""
        self._staged: dict[Unit, set[Batch]] = {}
        self._heard: dict[int, int] = {}
        """By sender, the number of the last message that was taken."""
        self._outgoing: _Outgoing | None = None
        self._loading: Loading | None = None
        self._rebuild: SimulatedRebuild | None = None

    # What the master asks for

    def prepare(self, move: int, since: int, table: RoutingTable, checkpoint: str, lost: tuple[int, ...]) -> bool:
        """Takes part in a move; returns whether it has the rows that it needs. Raises as the core does."""
        server, before = self._server, self._server.core.transfer
        transfer = server.core.prepare(
            move, since, table, server.index, server.world.now, replaces=bool(checkpoint), lost=lost
        )
        if transfer is not before:
            self._staged, self._heard, self._loading = {}, {}, None
            if not server.core.serving:
                server.protection.drop()
        if not (checkpoint and transfer.joins):
            return True
        if self._loading is None:
            self._loading = Loading()
            server.spawn(self._load(transfer, checkpoint, self._loading))
        if self._loading.error is not None:
            raise self._loading.error
        return self._loading.done

    def _load(self, transfer: Transfer, checkpoint: str, loading: "Loading") -> Task[None]:
        server = self._server
        own = {unit for unit in UNITS if owner(transfer.table, unit) == server.index}
        try:
            rows, _ = yield from server.load(checkpoint, own)
        except DamagedError as error:
            loading.error = error
            return
        if self._loading is loading:
            self._staged = rows
            loading.done = True

    def copy(self, move: int, wait: float) -> Task[tuple[bool, int, Mapping[int, AppliedBatches]]]:
        """Sends what is given away; returns whether little is left, and the rounds so far. Raises NotHeldError.

        If lost servers' rows are rebuilt here, it also returns the batches in these rows once they are sent.
        """
        world = self._server.world
        transfer = self._server.core.wanted(move, world.now)
        if transfer.lost:
            applied = {} if transfer.joins else (yield from self._rebuilding(transfer).progress(wait))
            return transfer.joins or bool(applied), 0, applied
        outgoing = self._sending(transfer)
        deadline = world.now + wait
        if outgoing is not None:
            self._server.after(wait, outgoing.changed.notify)
        while outgoing is not None and outgoing.rounds < 2 and not outgoing.problem and world.now < deadline:
            yield outgoing.changed
        self._check(outgoing)
        return outgoing is None or outgoing.rounds >= 2, 0 if outgoing is None else outgoing.rounds, {}

    def _rebuilding(self, transfer: Transfer) -> SimulatedRebuild:
        rebuild, group = self._rebuild, self._server.protection.group
        if rebuild is None or rebuild.transfer.number < transfer.number:
            if group is None:
                raise NotHeldError("no parity is held here")
            if rebuild is not None:
                rebuild.close()
            rebuild = self._rebuild = SimulatedRebuild(self._server, group, transfer)
        return rebuild

    def hand_over(self, generation: int, barrier: int, seconds: float, move: int, wait: float) -> Task[HandedOver]:
        """Sends the last changes within a barrier. Raises NotHeldError and TimeoutError."""
        world, core = self._server.world, self._server.core
        core.hand_over(generation, barrier, move, seconds, world.now)
        outgoing = self._sending(core.wanted(move, world.now))
        if outgoing is not None:
            outgoing.asked += 1
            mine, deadline = outgoing.asked, world.now + wait
            outgoing.changed.notify()
            self._server.after(wait, outgoing.changed.notify)
            while outgoing.answered < mine and not outgoing.problem:
                if world.now >= deadline:
                    raise TimeoutError("the last changes were not sent")
                yield outgoing.changed
        self._check(outgoing)
        return core.hand_over(generation, barrier, move, seconds, world.now)

    def switch(
        self,
        generation: int,
        barrier: int,
        move: int,
        settled: AppliedBatches,
        pulls: tuple[OutstandingPull, ...] = (),
        rebuilt: Mapping[int, AppliedBatches] | None = None,
    ) -> AppliedBatches:
        """Adopts the table of a move. Raises as the core does."""
        server, bound = self._server, None
        transfer = server.core.transfer
        if transfer is not None and transfer.orders:
            spec = server.cluster.spec.training
            count = sum(stop - first for epoch in settled.epochs() for first, stop in settled.ranges(epoch))
            bound = StalenessBound(spec.max_staleness, spec.staleness_warmup, count)
            bound.take_over(pulls)
        rebuilt, before = rebuilt or {}, server.table
        adopted = [(Ownership.of(before, lost), record) for lost, record in rebuilt.items() if before is not None]
        outcome, switched = server.core.switch(generation, barrier, move, settled, bound, server.world.now, adopted)
        if switched is not None:
            kept = {} if switched.joins else server.rows
            rows = {**kept, **self._staged}
            if switched.replaces and switched.joins:
                server.cluster.model.reloaded(server, switched.table, settled, rows)
            if switched.lost and switched.joins:
                server.cluster.model.rebuilt(server, switched.table, switched.table, {server.index: settled}, rows)
            elif rebuilt and before is not None:
                server.cluster.model.rebuilt(server, before, switched.table, rebuilt, self._staged)
            server.rows = {unit: rows[unit] for unit in rows if owner(switched.table, unit) == server.index}
            server.table = switched.table
            self._staged = {}
            server.cluster.model.switched(server, switched.table)
            server.protection.form(switched.table)
        server.notify()
        return outcome.applied

    def abandon(self, move: int) -> None:
        """Gives up moves up to this number."""
        if self._server.core.abandon(move) is not None:
            self._staged = {}
        if self._outgoing is not None and self._outgoing.move <= move:
            self._outgoing.problem = self._outgoing.problem or "it was abandoned"
            self._outgoing.changed.notify()
        if self._rebuild is not None and self._rebuild.transfer.number <= move:
            self._rebuild.close()

    def lapse(self) -> None:
        """Gives up a move that the master has not mentioned for long."""
        if self._server.core.lapse(self._server.world.now) is not None:
            self._staged = {}

    # What other servers send

    def receive(self, move: int, source: int, sequence: int, rows: dict[Unit, frozenset[Batch]]) -> Task[None]:
        """Takes rows that another server gives away, each message once and in order. Raises MoveError."""
        yield from ()
        try:
            self._server.core.moving(move)
        except NotHeldError as error:
            raise MoveError(str(error)) from error
        if sequence <= self._heard.get(source, 0):
            return
        self._heard[source] = sequence
        for unit, batches in rows.items():
            self._staged[unit] = set(batches)

    # Its own sending

    def _check(self, outgoing: _Outgoing | None) -> None:
        if outgoing is not None and outgoing.problem:
            raise NotHeldError(f"move {outgoing.move} has failed here: {outgoing.problem}")

    def _sending(self, transfer: Transfer) -> _Outgoing | None:
        if self._outgoing is not None and self._outgoing.move == transfer.number:
            return self._outgoing
        self._outgoing = None
        if transfer.given():
            self._outgoing = _Outgoing(transfer.number)
            self._server.spawn(self._send_rounds(transfer, self._outgoing))
        return self._outgoing

    def _send_rounds(self, transfer: Transfer, outgoing: _Outgoing) -> Task[None]:
        server = self._server
        given = {unit: owner(transfer.table, unit) for unit in UNITS if owner(transfer.table, unit) != server.index}
        try:
            while self._outgoing is outgoing:
                server.core.moving(transfer.number)
                asked = outgoing.asked
                first = not outgoing.rounds
                taken = set(UNITS) if first else self.dirty
                self.dirty = set()
                moved = [unit for unit in given if unit in taken and unit in server.rows]
                rows = {unit: frozenset(server.rows[unit]) for unit in moved}
                if first:
                    yield server.sleep(server.world.random.choice(_COPY_SECONDS))
                for peer in sorted(set(given.values())):
                    outgoing.sequence += 1
                    moving = {unit: batches for unit, batches in rows.items() if given[unit] == peer}
                    yield from self._deliver(transfer, peer, outgoing.sequence, moving)
                outgoing.rounds += 1
                outgoing.answered = asked
                outgoing.changed.notify()
                if outgoing.asked == outgoing.answered:
                    server.after(_ROUND_SECONDS, outgoing.changed.notify)
                    yield outgoing.changed
        except (MoveError, NotHeldError) as error:
            outgoing.problem = str(error)
            outgoing.changed.notify()

    def deliver_rebuilt(self, transfer: Transfer, rows: dict[Unit, frozenset[Batch]]) -> Task[None]:
        """Sends rows of lost servers to their new owners, one by one. Raises NotHeldError."""
        try:
            for sequence, unit in enumerate(sorted(rows), start=1):
                peer, moving = owner(transfer.table, unit), {unit: rows[unit]}
                if peer == self._server.index:
                    yield from self.receive(transfer.number, peer, sequence, moving)
                else:
                    yield from self._deliver(transfer, peer, sequence, moving)
        except MoveError as error:
            raise NotHeldError(str(error)) from error

    def _deliver(self, transfer: Transfer, peer: int, sequence: int, rows: dict[Unit, frozenset[Batch]]) -> Task[None]:
        """Sends a message until it is taken. Raises MoveError and NotHeldError."""
        server, target = self._server, transfer.table.servers[peer]
        find = lambda: server.cluster.server_of(target.incarnation)  # noqa: E731
        while True:
            server.core.moving(transfer.number)
            try:
                yield server.cluster.network.call(
                    server,
                    find,
                    lambda found: found.mover.receive(transfer.number, server.index, sequence, rows),
                    5.0,
                )
            except UnavailableError:
                yield server.sleep(0.2)
            else:
                return
