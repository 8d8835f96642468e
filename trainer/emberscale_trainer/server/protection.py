"""Parity between parameter servers, where a job wants any: which group a server is in, and what reaches it.

With each routing table a new group begins, and the rows that were there before are filled in behind training.

Lock order: that of the state, then this one's.
"""

import ssl
import threading
import time
import weakref

from emberscale_api.job import takes_parity
from emberscale_api.routing import ParityTrouble, RoutingTable
from emberscale_trainer.server.group import source_of
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.server.reports import ParityTotals
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, StreamLostError
from emberscale_trainer.stream.receiver import Deliver
from emberscale_trainer.transport import ConnectionLostError

_WAIT_SECONDS = 5.0


class RowProtection:
    """The parity of one server, where its job wants any. Any thread may call in."""

    def __init__(self, state: ServerState, token: str, context: ssl.SSLContext | None = None) -> None:
        """With a context, streams to other machines go over TLS."""
        self._state = state
        self._token = token
        self._context = context
        self._changed = threading.Condition()
        self._group: Group | None = None
        self.totals = ParityTotals()

    @property
    def version(self) -> int:
        """The version of the routing table under which all rows of this server are protected; 0: they are not."""
        group = self._group
        return group.table.version if group is not None and group.is_whole else 0

    @property
    def group(self) -> Group | None:
        """The group of the newest table; None where no parity is kept."""
        return self._group

    @property
    def trouble(self) -> ParityTrouble | None:
        """As `Group.trouble`, of the newest table's group."""
        group = self._group
        return None if group is None else group.trouble

    def form(self, table: RoutingTable, index: int, parity: int = 1) -> None:
        """Begins the group of a table that is in force here, unless it or a later one has begun.

        Any `parity` of the servers may be lost, if that goes with their number. With 0, no group begins, and the blocks
        of the one before are freed.
        """
        with self._state.lock, self._changed:
            if not self._state.serves(table.generation, table.version) or self._is_current(table):
                return
            owners = [server.index for server in table.owners]
            self._group = None
            if parity and index in owners and takes_parity(len(owners), parity):
                self._group = Group(self._state, table, index, self._token, self._context, self.totals, parity)
            self._state.protect_by(self._group)
            self._changed.notify_all()

    def stop(self) -> None:
        """The rows are served no more: a group that is over keeps neither them nor parity in memory."""
        with self._changed:
            if self._group is not None and self._group.is_over:
                self._group = None

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
        group, member = weakref.ref(found[0]), found[1]  # a stopped peer keeps its connection open, but not the group

        def deliver(item: Item) -> None:
            if (living := group()) is None:
                raise StreamLostError("the group of that stream is over")
            living.receive(member, item)

        return deliver

    def _member_of(self, stream: int, generation: int) -> tuple[Group, int] | None:
        group = self._group
        if group is None:
            return None
        member = source_of(stream, generation, (group.table.generation, group.table.version), group.members)
        return None if member is None else (group, member)
