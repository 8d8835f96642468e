"""The routing tables of one generation, as the master publishes them while a pipeline lives."""

import threading
import time

from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2
from emberscale_trainer.membership import JobOverError, MasterClient, routing_from_proto
from emberscale_trainer.worker.channel import ChannelClosedError

_WAIT_SECONDS = 1.0


class Routes:
    """The newest `table` that this process knows, and the way to newer ones. Any thread may call in."""

    def __init__(self, master: MasterClient, stopping: threading.Event) -> None:
        """Waits for a table that every server has adopted. Raises JobOverError once `stopping` is set."""
        self._master = master
        self._stopping = stopping
        self._closed = threading.Event()
        self._fetching = threading.Lock()
        self.table = self._fetch(0)

    def newer(self, version: int) -> RoutingTable | None:
        """Waits for a table newer than `version`; None once the generation has changed.

        Raises ChannelClosedError after `close`, and JobOverError once the process is told to stop.
        """
        with self._fetching:
            if self.table.version <= version:
                table = self._fetch(version)
                if table.generation != self.table.generation:
                    return None
                self.table = table
            return self.table

    def pause(self, seconds: float) -> None:
        """Waits for `seconds`, or until there is a newer table. Raises JobOverError as `newer` does."""
        ends = time.monotonic() + seconds
        reply = self._ask(self.table.version, seconds, self._stopping)
        if reply.version <= self.table.version:  # the wait is over, or the job is
            self._stopping.wait(ends - time.monotonic())

    def in_force(self) -> bool:
        """Asks the master whether the newest known table still is the newest of all."""
        reply = self._ask()
        return bool(reply.ready and (reply.generation, reply.version) == (self.table.generation, self.table.version))

    def _fetch(self, newer_than: int) -> RoutingTable:
        while not self._closed.is_set():
            if self._stopping.is_set():
                raise JobOverError("the process is told to stop")
            reply = self._ask(newer_than, _WAIT_SECONDS)
            if reply.ready and reply.version > newer_than:
                return routing_from_proto(reply)
        raise ChannelClosedError

    def _ask(
        self, newer_than: int = 0, seconds: float = 0.0, stopping: threading.Event | None = None
    ) -> master_pb2.Routing:
        """Asks the master for a newer table, which answers after `seconds` at most, with the newest one there is."""
        request = master_pb2.GetRoutingRequest(
            member=self._master.member, newer_than=newer_than, max_wait_seconds=seconds
        )
        return self._master.call(self._master.stub.GetRouting, request, waits=seconds, stopping=stopping)

    def close(self) -> None:
        """Ends all waiting."""
        self._closed.set()
