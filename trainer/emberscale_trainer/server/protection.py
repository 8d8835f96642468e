"""Parity between parameter servers, if a job wants parity: manages the server's group and routes streams to it.

Each routing table begins a new group; earlier rows are sent to it in the background while training continues.

Lock order: the lock of the state, then the lock of this module.
"""

import ssl
import threading
import time
import weakref

from emberscale_api.job import can_keep_parity
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.server.group import source_of
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.server.reports import ParityTotals
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, StreamLostError
from emberscale_trainer.stream.receiver import Deliver
from emberscale_trainer.transport import ConnectionLostError

_WAIT_SECONDS = 5.0


class RowProtection:
    """The parity of one server, if its job wants parity. Any thread may call in.

    `group` is that of the newest table; None without parity.
    """

    def __init__(self, state: ServerState, token: str, context: ssl.SSLContext | None = None) -> None:
        """With a context, streams to other machines go over TLS."""
        self._state = state
        self._token = token
        self._context = context
        self._changed = threading.Condition()
        self.group: Group | None = None
        self.totals = ParityTotals()

    @property
    def version(self) -> int:
        """The version of the routing table under which all rows of this server are protected; 0: none."""
        group = self.group
        return group.table.version if group is not None and group.core.is_whole else 0

    @property
    def trouble(self) -> ParityTrouble | None:
        """As `Group.trouble`, of the newest table's group."""
        group = self.group
        return None if group is None else group.trouble

    def form(self, table: RoutingTable, index: int, parity: int = 1, lag: LagBound | None = None) -> None:
        """Begins the group of a table that is in force here, unless that group or a later one has begun.

        Any `parity` of the servers may be lost, if their number allows it. With 0, no group begins, and the blocks of
        the previous group are freed. With a bound on the `lag`, pushes wait for the others only beyond it. Raises
        MemoryError; the previous group has ended then, too.
        """
        with self._state.lock, self._changed:
            if not self._state.serves(table.generation, table.version) or self._is_current(table):
                return
            owners = [server.index for server in table.owners]
            self.group = None
            self._state.protect_by(None)  # first: pushes must not wait for it if there is no memory for the next
            if parity and index in owners and can_keep_parity(len(owners), parity):
                self.group = Group(self._state, table, index, self._token, self._context, self.totals, parity, lag=lag)
                self._state.protect_by(self.group)
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the group, as the rows are no longer served, so that it keeps neither rows nor parity in memory."""
        with self._changed:
            if self.group is not None and self.group.core.is_over:
                self.group = None

    def _is_current(self, table: RoutingTable) -> bool:
        group = self.group
        return group is not None and (group.table.generation, group.table.version) == (table.generation, table.version)

    def accept(self, stream: int, generation: int) -> Deliver:
        """Accepts the deltas of another server, once this one has the same table.

        Raises StreamLostError for a stream of an earlier table.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        with self._changed:
            while (found := self._member_of(stream, generation)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ConnectionLostError("the group of that stream has yet to begin here")
        group, member = weakref.ref(found[0]), found[1]  # a stopped peer keeps its connection open, but not the group

        def deliver(item: Item) -> None:
            if (living := group()) is None:
                raise StreamLostError("the group of that stream is over")
            living.receive(member, item)

        return deliver

    def _member_of(self, stream: int, generation: int) -> tuple[Group, int] | None:
        group = self.group
        if group is None:
            return None
        member = source_of(stream, generation, (group.table.generation, group.table.version), group.members)
        return None if member is None else (group, member)
