"""One server's part in a rebuild of lost ones: it sends their rows to the new owners, and asks others for its own."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tests.simulation.network import UnavailableError
from tests.simulation.units import Batch, Unit, owner
from tests.simulation.withdrawing import SimulatedWithdrawing
from tests.simulation.world import Condition, Task

from emberscale_trainer.parity import SourceOverError
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.missing import MissingRows
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.stream.core import StreamLostError

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

_STALLED_SECONDS = 30.0
_REST_SECONDS = (0.0, 0.02, 0.5, 3.0)
"""How long the rest of the rows waits after a piece: one of these for each rebuild."""


class SimulatedRebuild:
    """One server's part in a rebuild of lost servers. `over`: it has done all that it will do."""

    def __init__(self, server: "ParameterServer", withdrawing: SimulatedWithdrawing, transfer: Transfer) -> None:
        self._server = server
        self._withdrawing = withdrawing
        self._group = withdrawing.group
        self.transfer = transfer
        self.over = False
        self.problem = ""
        self._applied: Mapping[int, AppliedBatches] | None = None
        self._changed = Condition()
        self._wanted: deque[tuple[int, ...]] = deque()
        self._goes_on = False
        self._sequence = 0
        if not set(transfer.lost) <= set(self._group.members):
            raise NotHeldError("the lost servers are not of this group")
        server.spawn(self._run())

    def close(self) -> None:
        """Ends the rebuild; waiting calls fail."""
        self._end("it is over")

    def go_on(self) -> None:
        """Sends the rows that follow on demand."""
        self._goes_on = True
        self._group.changed.notify()

    def want(self, places: tuple[int, ...]) -> None:
        """Sends the rows at these places before others."""
        self._wanted.append(places)
        self.go_on()

    def progress(self, wait: float) -> Task[Mapping[int, AppliedBatches] | None]:
        """Returns the batches in the rebuilt rows once all are sent, or their keys; None after the wait.

        There are none of lost servers of which this one held no parity.

        Raises NotHeldError.
        """
        deadline = self._server.world.now + wait
        self._server.after(wait, self._changed.notify)
        while self._applied is None and not self.problem and self._server.world.now < deadline:
            yield self._changed
        if self.problem:
            raise NotHeldError(f"the rebuild of move {self.transfer.number} has failed here: {self.problem}")
        return self._applied

    def _run(self) -> Task[None]:
        members = {self._group.members.index(server): server for server in self.transfer.lost}
        try:
            if self.transfer.on_demand:
                ((member, lost),) = members.items()
                yield from self._follow(member, lost)
            else:
                applied = yield from self._withdrawing.decode(frozenset(members))
                for member, lost in members.items():
                    yield from self._send(lost, self._group.decoded(member))
                self._ready({members[member]: applied[member] for member in applied})
        except (NotHeldError, ValueError, StreamLostError, SourceOverError) as error:
            self._end(str(error))
        self.over = True

    def _ready(self, applied: Mapping[int, AppliedBatches]) -> None:
        self._applied = applied
        for lost, batches in applied.items():
            self._server.cluster.model.agreed(self._server, self.transfer, lost, batches)
        self._changed.notify()

    def _end(self, problem: str) -> None:
        self.problem = self.problem or problem
        self._changed.notify()
        self._group.changed.notify()

    def _follow(self, member: int, lost: int) -> Task[None]:
        """Sends the keys of a lost member's rows, and then the rows."""
        server, group, withdrawing = self._server, self._group, self._withdrawing
        found = yield from withdrawing.find_keys(member)
        keys = {unit: place for unit, place in withdrawing.keys.items() if owner(group.table, unit) == lost}
        for peer in sorted({owner(self.transfer.table, unit) for unit in keys}):
            mine = {unit: place for unit, place in keys.items() if owner(self.transfer.table, unit) == peer}
            yield from self._give(peer, keys=mine)
        self._ready({lost: found[member]} if member in found else {})
        while not self._goes_on and not self.problem:
            group.core.require()
            yield group.changed
        rest, next_at, withdrew = server.world.random.choice(_REST_SECONDS), 0.0, False
        while not self.problem:
            is_last = withdrew and group.core.has_only_lost_rows()
            while self._wanted:
                numbers = self._wanted.popleft()
                withdrawing.want(numbers)
                if not withdrew:
                    group.withdraw_places(numbers)
            if not withdrew and server.world.now >= next_at:
                yield from withdrawing.withdraw_next()
                withdrew = group.is_empty
                next_at = server.world.now + rest
                server.after(rest, group.changed.notify)
                if withdrew:
                    yield from withdrawing.end()
            yield from self._send(lost, withdrawing.take_decoded())
            if is_last and not group.withdrawals.decodable.has_more:
                return
            while not self._has_work() and not (group.core.has_only_lost_rows() if withdrew else self._is_due(next_at)):
                yield group.changed
        raise StreamLostError("the rebuild is over")

    def _has_work(self) -> bool:
        return bool(self._wanted or self._group.withdrawals.decodable.has_more or self.problem)

    def _is_due(self, at: float) -> bool:
        self._group.core.require()
        return self._server.world.now >= at

    def _send(self, lost: int, rows: Mapping[Unit, frozenset[Batch]]) -> Task[None]:
        """Sends the rows that a lost server owned to their new owners, one by one."""
        for unit in sorted(rows):
            if owner(self._group.table, unit) == lost:
                yield from self._give(owner(self.transfer.table, unit), {unit: rows[unit]})

    def _give(
        self, peer: int, rows: Mapping[Unit, frozenset[Batch]] | None = None, keys: Mapping[Unit, int] | None = None
    ) -> Task[None]:
        """Sends rows or keys until they are taken. Raises NotHeldError and StreamLostError."""
        server, table, move = self._server, self.transfer.table, self.transfer.number
        self._sequence += 1
        sequence, deadline = self._sequence, server.world.now + _STALLED_SECONDS
        if peer == server.index:
            server.mover.receive_now(move, peer, sequence, rows or {}, keys or {})
            return
        while not self.problem:
            try:
                yield server.cluster.network.call(
                    server,
                    lambda: server.cluster.server_of(table.servers[peer].incarnation),
                    lambda found: found.mover.receive(move, server.index, sequence, rows or {}, keys or {}),
                    5.0,
                )
            except UnavailableError:
                if server.world.now >= deadline:
                    raise StreamLostError("the receiver makes no progress") from None
                yield server.sleep(0.2)
            else:
                return
        raise StreamLostError("the rebuild is over")


class SimulatedDemand:
    """Asks the servers that rebuild rows for those that requests of this server wait for."""

    def __init__(self, server: "ParameterServer", missing: MissingRows, own: SimulatedRebuild | None) -> None:
        self.move = missing.transfer.number
        self._server = server
        self._missing = missing
        self._own = own
        self._refused: set[int] = set()
        server.spawn(self._run())

    def _run(self) -> Task[None]:
        transfer = self._missing.transfer
        rebuilding = [
            one.index for one in transfer.table.owners if one.index != transfer.index and one.index not in transfer.lost
        ]
        while (places := (yield from self._server.await_wanted(self._missing))) is not None:
            if self._own is not None:
                self._own.want(places)
            for peer in rebuilding:
                self._server.spawn(self._ask(peer, places))

    def _ask(self, peer: int, places: tuple[int, ...]) -> Task[None]:
        """Asks until it is heard, or refused: all rows come in time, also those that nobody asks for."""
        server, target = self._server, self._missing.transfer.table.servers[peer]
        while peer not in self._refused and server.missing is self._missing:
            try:
                yield server.cluster.network.call(
                    server,
                    lambda: server.cluster.server_of(target.incarnation),
                    lambda found: found.mover.want(self.move, places),
                    5.0,
                )
            except UnavailableError:
                yield server.sleep(0.2)
            except StreamLostError:
                self._refused.add(peer)
            else:
                return


def numbers_of(units: Collection[Unit]) -> dict[int, list[int]]:
    """Returns the keys of units by the number of their table: keys, and dense pieces."""
    numbers: dict[int, list[int]] = {}
    for kind, number in sorted(units):
        numbers.setdefault(int(kind == "piece"), []).append(number)
    return numbers
