"""Calls to all parameter servers at once."""

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from emberscale_api.routing import PsAddress
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import open_channel

_LOOK_SECONDS = 0.2
_Reply = TypeVar("_Reply")


class ServerCallError(Exception):
    """A parameter server answered with an error, or not at all."""

    def __init__(self, server: PsAddress, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"ps-{server.index}: {details} ({code.name})")
        self.code = code
        self.details = details

    @property
    def away(self) -> bool:
        """Whether nobody answered: the server is down, and its silence will show."""
        return self.code is grpc.StatusCode.UNAVAILABLE

    @property
    def superseded(self) -> bool:
        """Whether the server has adopted a later table: it will say so itself."""
        return self.code is grpc.StatusCode.ABORTED


class AbandonedError(Exception):
    """The calls make no sense any more: the routing changed, or the master is going."""


class ParameterServers:
    """Channels to the parameter servers of a job, one an address, kept open."""

    def __init__(self, token: str, authority: bytes | None) -> None:
        self._token = token
        self._authority = authority
        self._channels: dict[str, grpc.Channel] = {}

    def call(
        self,
        method: Callable[[rpc.ParameterServerStub], Any],
        requests: Mapping[PsAddress, Any],
        reply: type[_Reply],
        abandoned: Callable[[], bool],
        seconds: float | None = None,
    ) -> dict[PsAddress, _Reply]:
        """Calls `method` of every server with its request, in parallel, and returns all answers.

        `seconds` limits each call. Raises ServerCallError for the first that fails and AbandonedError as soon as
        `abandoned` says so; calls under way are cancelled then.
        """
        done: queue.SimpleQueue[PsAddress] = queue.SimpleQueue()
        futures = {}
        for server, request in requests.items():
            future = method(self._stub(server)).future(request, timeout=seconds)
            future.add_done_callback(lambda _, server=server: done.put(server))
            futures[server] = future
        replies: dict[PsAddress, _Reply] = {}
        try:
            while len(replies) < len(futures):
                if abandoned():
                    raise AbandonedError
                try:
                    server = done.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    continue
                try:
                    replies[server] = futures[server].result()
                except grpc.RpcError as error:
                    raise ServerCallError(server, error.code(), error.details() or "") from error
        finally:
            for future in futures.values():
                future.cancel()
        return replies

    def forget(self, keep: Sequence[PsAddress]) -> None:
        """Closes the channels to all but these servers."""
        addresses = {server.control for server in keep}
        for address in self._channels.keys() - addresses:
            self._channels.pop(address).close()

    def _stub(self, server: PsAddress) -> rpc.ParameterServerStub:
        channel = self._channels.get(server.control)
        if channel is None:
            channel = open_channel(server.control, self._token, self._authority)
            self._channels[server.control] = channel
        return rpc.ParameterServerStub(channel)
