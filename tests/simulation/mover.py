"""Moves on one parameter server: the real core decides; units travel in place of rows, in rounds and in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation.network import UnavailableError
from tests.simulation.rebuild import SimulatedDemand, SimulatedRebuild, numbers_of
from tests.simulation.units import UNITS, Batch, Unit, owner
from tests.simulation.withdrawing import SimulatedWithdrawing
from tests.simulation.world import Condition, Task

from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import HandedOver
from emberscale_trainer.server.missing import MissingRows
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.staleness import OutstandingPull
from emberscale_trainer.stream.core import StreamLostError

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

_ROUND_SECONDS = 0.25
_COPY_SECONDS = (0.02, 0.2, 0.2, 1.0)
"""The seconds that the first round may take, chosen at random."""
_MISSING_SECONDS = 30.0


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
        self._coming: MissingRows | None = None
        self._heard: dict[int, int] = {}
        """By sender, the number of the last message that was taken."""
        self._outgoing: _Outgoing | None = None
        self._loading: Loading | None = None
        self._rebuild: SimulatedRebuild | None = None
        self._withdrawing: SimulatedWithdrawing | None = None
        self._demand: SimulatedDemand | None = None
        self._to_protect: RoutingTable | None = None

    # What the master asks for

    def prepare(
        self, move: int, since: int, table: RoutingTable, checkpoint: str, lost: tuple[int, ...], on_demand: bool
    ) -> bool:
        """Takes part in a move; returns whether it has the rows that it needs. Raises as the core does."""
        server, before = self._server, self._server.core.transfer
        transfer = server.core.prepare(
            move,
            since,
            table,
            server.index,
            server.world.now,
            replaces=bool(checkpoint),
            lost=lost,
            on_demand=on_demand,
        )
        if transfer is not before:
            self._staged, self._heard, self._loading = {}, {}, None
            self._coming = MissingRows(transfer)
            if not server.core.serving:
                server.drop_rows()
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
            rows, _ = yield from server.saves.load(checkpoint, own)
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
        transfer = self._server.core.renew_move(move, world.now)
        if transfer.lost:
            applied = {} if transfer.joins else (yield from self._rebuilding(transfer).progress(wait))
            return applied is not None, 0, applied or {}
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
            if self._withdrawing is None or self._withdrawing.group is not group:
                self._withdrawing = SimulatedWithdrawing(group)
            rebuild = self._rebuild = SimulatedRebuild(self._server, self._withdrawing, transfer)
        return rebuild

    def want(self, move: int, places: tuple[int, ...]) -> Task[None]:
        """Sends rows that another server misses before others. Raises StreamLostError."""
        yield from ()
        if self._rebuild is None or self._rebuild.transfer.number != move or self._rebuild.over:
            raise StreamLostError(f"the rebuild of move {move} is over here")
        self._rebuild.want(places)

    # The protection of rows once those of lost servers are there

    def protect(self, table: RoutingTable) -> None:
        """Forms the group of a table once the rebuild that led to it is over here; `look` sees to that."""
        self._to_protect = table
        self._protect_if_due()

    def _protect_if_due(self) -> None:
        waiting = self._to_protect
        if waiting is not None and self._may_protect(waiting):
            self._to_protect = self._withdrawing = None
            self._server.protection.form(waiting)

    def _may_protect(self, table: RoutingTable) -> bool:
        rebuild = self._rebuild
        return self._server.missing is None and (rebuild is None or rebuild.transfer.table != table or rebuild.over)

    @property
    def trouble(self) -> ParityTrouble | None:
        """What keeps rows unprotected, or missing; or None."""
        missing, rebuild, waiting = self._server.missing, self._rebuild, self._to_protect
        if waiting is None:
            return self._server.protection.trouble
        if rebuild is not None and rebuild.transfer.table == waiting and rebuild.problem:
            problem = f"it no longer rebuilds rows: {rebuild.problem}"
            return ParityTrouble(waiting.version, problem, _MISSING_SECONDS, broken=True)
        seconds = 0.0 if missing is None else self._server.world.now - missing.changed_at
        if seconds >= _MISSING_SECONDS:
            return ParityTrouble(waiting.version, "rows do not arrive", seconds, broken=True)
        group = self._server.protection.group
        return None if group is None else group.trouble_of_rebuild(waiting.version)

    def look(self) -> None:
        """Gives up a move that the master has not mentioned for long, and protects rows that are rebuilt by now."""
        if self._server.core.lapse(self._server.world.now) is not None:
            self._drop_received()
        self._protect_if_due()

    def stop(self) -> None:
        """Ends all sending, as the rows are no longer served."""
        if self._rebuild is not None:
            self._rebuild.close()
        self._to_protect = self._withdrawing = None

    def _drop_received(self) -> None:
        self._staged, self._coming = {}, None

    def hand_over(self, generation: int, barrier: int, seconds: float, move: int, wait: float) -> Task[HandedOver]:
        """Sends the last changes within a barrier. Raises NotHeldError and TimeoutError."""
        world, core = self._server.world, self._server.core
        core.hand_over(generation, barrier, move, seconds, world.now)
        outgoing = self._sending(core.renew_move(move, world.now))
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
            bound = server.bound_after(settled)
            bound.take_over(pulls)
        rebuilt, before = rebuilt or {}, server.table
        adopted = [(Ownership.of(before, lost), record) for lost, record in rebuilt.items() if before is not None]
        outcome, switched = server.core.switch(generation, barrier, move, settled, bound, server.world.now, adopted)
        if switched is not None:
            kept = {} if switched.joins else server.rows
            rows = {**kept, **self._staged}
            if switched.replaces and switched.joins:
                server.cluster.model.reloaded(server, switched.table, settled, rows)
            coming, self._coming = self._coming, None
            if coming is not None and coming.transfer is switched:
                coming.begin(server.world.now)
                server.miss(coming if coming.count else None)
                server.trace(f"misses {coming.count} rows")
            model = server.cluster.model
            if switched.lost and switched.joins:
                model.rebuilt(server, switched, switched.table, {server.index: settled}, rows)
            elif rebuilt and before is not None:
                model.rebuilt(server, switched, before, rebuilt, self._staged)
            server.rows = {unit: rows[unit] for unit in rows if owner(switched.table, unit) == server.index}
            server.table = switched.table
            self._staged = {}
            model.switched(server, switched.table)
        if server.table is not None and server.core.known == (server.table.generation, server.table.version):
            self._switched(move)
            self.protect(server.table)
        server.notify()
        return outcome.applied

    def _switched(self, move: int) -> None:
        """Has rows that follow on demand sent, and asked for."""
        missing = self._server.missing
        if self._rebuild is not None and self._rebuild.transfer.number == move:
            self._rebuild.go_on()
        is_asked_for = self._demand is not None and self._demand.move == move
        if missing is not None and missing.transfer.number == move and not is_asked_for:
            self._demand = SimulatedDemand(self._server, missing, self._rebuild)

    def abandon(self, move: int) -> None:
        """Gives up moves up to this number."""
        if self._server.core.abandon(move) is not None:
            self._drop_received()
        if self._outgoing is not None and self._outgoing.move <= move:
            self._outgoing.problem = self._outgoing.problem or "it was abandoned"
            self._outgoing.changed.notify()
        if self._rebuild is not None and self._rebuild.transfer.number <= move:
            self._rebuild.close()

    # What other servers send

    def receive(
        self,
        move: int,
        source: int,
        sequence: int,
        rows: Mapping[Unit, frozenset[Batch]],
        keys: Mapping[Unit, int] | None = None,
    ) -> Task[None]:
        """As `receive_now`, from another server."""
        yield from ()
        self.receive_now(move, source, sequence, rows, keys or {})

    def receive_now(
        self,
        move: int,
        source: int,
        sequence: int,
        rows: Mapping[Unit, frozenset[Batch]],
        keys: Mapping[Unit, int],
    ) -> None:
        """Takes rows, or keys and places of rows that follow, each message once and in order. Raises NotHeldError."""
        if not self._misses(move):
            self._server.core.moving(move)
        if sequence <= self._heard.get(source, 0):
            return
        self._heard[source] = sequence
        for unit, place in keys.items():
            self._server.core.moving(move)
            if self._coming is not None:
                self._coming.tell(int(unit[0] == "piece"), np.array([unit[1], place], np.int64))
        if self._misses(move):
            self._take_missing(rows)
            return
        for unit, batches in rows.items():
            self._staged[unit] = set(batches)
        for table, numbers in numbers_of(rows).items():
            if self._coming is not None:
                self._coming.arrived(table, np.array(numbers, np.int64), self._server.world.now)

    def _misses(self, move: int) -> bool:
        missing = self._server.missing
        return missing is not None and missing.transfer.number == move

    def _take_missing(self, rows: Mapping[Unit, frozenset[Batch]]) -> None:
        server, missing = self._server, self._server.missing
        assert missing is not None
        for unit, batches in rows.items():
            table, keys = int(unit[0] == "piece"), np.array([unit[1]], np.int64)
            if missing.still_missing(table, keys).all():
                server.cluster.model.arrived(server, unit, batches)
                server.rows[unit] = set(batches)
                missing.arrived(table, keys, server.world.now)
        if not missing.count:
            server.miss(None)
        server.notify()

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
        except NotHeldError as error:
            outgoing.problem = str(error)
            outgoing.changed.notify()

    def _deliver(self, transfer: Transfer, peer: int, sequence: int, rows: dict[Unit, frozenset[Batch]]) -> Task[None]:
        """Sends a message until it is taken. Raises NotHeldError."""
        server, target = self._server, transfer.table.servers[peer]
        while True:
            server.core.moving(transfer.number)
            try:
                yield server.cluster.network.call(
                    server,
                    lambda: server.cluster.server_of(target.incarnation),
                    lambda found: found.mover.receive(transfer.number, server.index, sequence, rows),
                    5.0,
                )
            except UnavailableError:
                yield server.sleep(0.2)
            else:
                return
