"""The parity of one parameter server, around the group of its table."""

from typing import TYPE_CHECKING

from tests.simulation.group import Open, Refused, SimulatedGroup
from tests.simulation.network import End
from tests.simulation.units import Unit
from tests.simulation.world import Condition, Task

from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.parity import SourceOverError
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.group import source_of
from emberscale_trainer.stream.core import ReceiveOrder, StreamLostError

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer

_GROUP_SECONDS = 5.0


class SimulatedProtection:
    """The parity of one server."""

    def __init__(self, server: "ParameterServer") -> None:
        self._server = server
        self._slots: dict[Unit, int] = {}
        self._protector: SimulatedGroup | None = None
        self._orders: dict[tuple[int, int], ReceiveOrder] = {}
        self._formed = Condition()
        self.group: SimulatedGroup | None = None
        self.is_forgone = False
        self.is_async = False

    @property
    def version(self) -> int:
        """The version of the table under which all rows are protected; 0 if they are not."""
        return self.group.table.version if self.group is not None and self.group.core.is_whole else 0

    @property
    def trouble(self) -> ParityTrouble | None:
        """What keeps rows unprotected, or None."""
        return None if self.group is None else self.group.trouble

    @property
    def protector(self) -> SimulatedGroup | None:
        """The group that gets the changes of the served rows."""
        return self._protector

    @property
    def last_slot(self) -> int:
        """The highest slot in use; -1 without rows."""
        return max((self.slot(unit) for unit in self._server.rows), default=-1)

    def slot(self, unit: Unit) -> int:
        """Returns a row's slot, which it assigns if necessary."""
        if unit not in self._slots:
            taken = set(self._slots.values())
            self._slots[unit] = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return self._slots[unit]

    def drop(self) -> None:
        """Ends the protection: the rows are no longer served."""
        if self._protector is not None:
            self._protector.end()
        self._protector = None

    def form(self, table: RoutingTable) -> None:
        """Forms the group of a table that is in force here."""
        server = self._server
        if not server.cluster.scenario.parity:
            return
        if not server.core.serving or server.core.known != (table.generation, table.version):
            return
        if self.group is not None and _of(self.group.table) == _of(table):
            return
        self.drop()
        self._slots = {unit: slot for unit, slot in self._slots.items() if unit in server.rows}
        owners = [one.index for one in table.owners]
        self.group = None
        if server.index in owners and len(owners) > server.cluster.scenario.parity and not self.is_forgone:
            self.group = SimulatedGroup(server, table)
        self._protector = self.group
        self._formed.notify()

    def serve(self, end: End, opened: Open) -> Task[None]:
        """Takes another server's deltas, once both have the same table. Raises BrokenError."""
        deadline = self._server.world.now + _GROUP_SECONDS
        self._server.after(_GROUP_SECONDS, self._formed.notify)
        try:
            while (found := self._member_of(opened)) is None:
                if self._server.world.now >= deadline:
                    end.close()
                    return
                yield self._formed
            order = self._orders.setdefault((opened.stream, opened.generation), ReceiveOrder())
            mine = order.connect()
            end.send(order.delivered_count)
            while True:
                number, item = yield end.receive()
                if order.is_new(mine, number):
                    if isinstance(found, StreamLostError):
                        raise found
                    group, member = found
                    group.receive(member, item)
                    order.delivered()
                end.send(order.delivered_count)
        except (StreamLostError, SourceOverError, NotHeldError) as error:
            end.send(Refused(str(error)))

    def _member_of(self, opened: Open) -> tuple[SimulatedGroup, int] | StreamLostError | None:
        """Returns the group and the member that sends; an error if the group is over, but items of it were taken."""
        group = self.group
        if group is None:
            return None
        try:
            member = source_of(opened.stream, opened.generation, _of(group.table), group.members)
        except StreamLostError as error:
            order = self._orders.get((opened.stream, opened.generation))
            if order is None or not order.delivered_count:
                raise
            return error
        return None if member is None else (group, member)


def _of(table: RoutingTable) -> tuple[int, int]:
    return table.generation, table.version
