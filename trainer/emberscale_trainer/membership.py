"""A process's tie to its job's master: registration, heartbeats, and calls that outlive a master's restart."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import psutil
import structlog

from emberscale_api.environment import TLS_FOLDER, ProcessIdentity
from emberscale_api.errors import UnavailableError
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_api.rpc.tls import handshake_problem
from emberscale_api.rpc.token import open_channel


def routing_from_proto(routing: master_pb2.Routing) -> RoutingTable:
    """The routing table of a message."""
    return RoutingTable(
        generation=routing.generation,
        version=routing.version,
        servers=tuple(
            PsAddress(server.index, server.incarnation, server.data_address, server.control_address)
            for server in routing.servers
        ),
        bucket_owners=tuple(routing.bucket_owners),
        piece_owners=tuple(routing.piece_owners),
    )


_log = structlog.get_logger()

_Reply = TypeVar("_Reply")
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_CALL_SECONDS = 10.0
_LEAVING_CALL_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LOOK_SECONDS = 10.0


class SupersededError(Exception):
    """Another process has this one's role and index now."""


class JobOverError(Exception):
    """The job has ended, or this process is told to stop."""


class NoHandshakeError(UnavailableError):
    """The master and this process differ about TLS or the token, and will until one of them is started otherwise."""


class MasterClient:
    """The master as one member of the job sees it.

    A call is repeated until the master answers: it may be restarted at any time, and its state outlives it. Only the
    end of this process, by `close`, ends the waiting, with JobOverError; and so does, with NoHandshakeError, a master
    that never answered and differs about TLS or the token.
    """

    def __init__(self, identity: ProcessIdentity) -> None:
        self._channel = open_channel(identity.master_address, identity.token, identity.authority)
        self._address, self._authority = identity.master_address, identity.authority
        self._look_due = 0.0
        self._answered = False
        self.stub = master_pb2_grpc.MasterStub(self._channel)
        roles = {"ps": master_pb2.PS, "worker": master_pb2.WORKER}
        self.member = master_pb2.Member(
            role=roles[identity.role], index=identity.index, incarnation=identity.incarnation
        )
        self._registration: master_pb2.RegisterRequest | None = None
        self._adopted: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._closed = threading.Event()
        self._under_way: set[grpc.Future[Any]] = set()

    def register(
        self,
        data_address: str = "",
        control_address: str = "",
        metrics_address: str = "",
        adopted: Callable[[], tuple[int, int]] = lambda: (0, 0),
        stopping: threading.Event | None = None,
        most_parity: int = 0,
        knows_async_parity: bool = False,
        adopts_rows: bool = False,
        rebuilds_on_demand: bool = False,
    ) -> master_pb2.RegisterReply:
        """Joins the job; `adopted` is (generation, version) of the table that a parameter server adopted last.

        `most_parity` is the largest parity that this server can keep when it is told to; `knows_async_parity` says that
        it can answer pushes before other servers hold their deltas, and `adopts_rows` that it can take over the rows of
        a lost server while it has rows of its own, and `rebuilds_on_demand` that it can serve rebuilt rows that have
        yet to arrive.

        If a master has lost its ledger, later calls register this process again. Raises SupersededError and
        NoHandshakeError, and JobOverError once `stopping` is set before the master has answered.
        """
        self._adopted = adopted
        self._registration = master_pb2.RegisterRequest(
            member=self.member,
            data_address=data_address,
            control_address=control_address,
            metrics_address=metrics_address,
            pid=os.getpid(),
            host=socket.gethostname(),
            most_parity=most_parity,
            knows_async_parity=knows_async_parity,
            adopts_rows=adopts_rows,
            rebuilds_on_demand=rebuilds_on_demand,
        )
        return self.call(self.stub.Register, self._registration, stopping=stopping)

    def call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Any, _Reply]",
        request: Any,
        waits: float = 0.0,
        stopping: threading.Event | None = None,
    ) -> _Reply:
        """Makes a call, and repeats it while the master is away; the master itself may take `waits` seconds to answer.

        Raises SupersededError, JobOverError, NoHandshakeError, or grpc.RpcError for any other answer of the master.
        """
        pause = _FIRST_PAUSE
        while not self._closed.is_set() and not (stopping is not None and stopping.is_set()):
            try:
                reply = self._answer(method.future(request, timeout=waits + _CALL_SECONDS))
                self._answered = True
                return reply
            except grpc.FutureCancelledError:
                continue
            except grpc.RpcError as error:
                self._consider(error)
            self._closed.wait(pause * random.uniform(0.5, 1.5))
            pause = min(_LONGEST_PAUSE, pause * 2)
        raise JobOverError("the process is stopping")

    def _answer(self, call: "grpc.Future[_Reply]") -> _Reply:
        """Waits for the answer to a call, which `close` ends whenever it comes."""
        self._under_way.add(call)
        try:
            if self._closed.is_set():
                call.cancel()
            return call.result()
        finally:
            self._under_way.discard(call)

    def leave(self, seconds: float) -> bool:
        """Has this parameter server drained; returns whether it owns nothing any more, within so many seconds.

        A master that refuses is not waited for, and one that is away only for a quarter of that time: it may restart,
        or the job may be gone.
        """
        began = answered = time.monotonic()
        while not self._closed.is_set() and (left := began + seconds - time.monotonic()) > 0:
            request = master_pb2.DrainRequest(
                index=self.member.index,
                incarnation=self.member.incarnation,
                reason="its process was told to end",
                wait_seconds=min(left, _LEAVING_CALL_SECONDS),
            )
            try:
                if self.stub.Drain(request, timeout=min(left, _LEAVING_CALL_SECONDS) + 1.0).may_go:
                    return True
                answered = time.monotonic()
            except grpc.RpcError as error:
                if error.code() not in _AWAY or time.monotonic() - answered > seconds / 4:
                    _log.warning("not_drained", problem=error.details())
                    return False
            self._closed.wait(_FIRST_PAUSE)
        return False

    def _consider(self, error: grpc.RpcError) -> None:
        """Returns for what passes by itself, and raises for everything else."""
        code = error.code()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise SupersededError(error.details()) from error
        if code is grpc.StatusCode.NOT_FOUND and self._registration is not None:
            _log.warning("unknown_to_master", problem=error.details())
            self._register_anew(self._registration)
        elif code is grpc.StatusCode.UNAVAILABLE:
            self._look_into_tls()
        elif code is grpc.StatusCode.UNAUTHENTICATED and not self._answered:
            raise NoHandshakeError(f"the master at {self._address} refuses: {error.details()}") from error
        elif code not in _AWAY:
            raise error

    def _look_into_tls(self) -> None:
        """Detects a master that differs about TLS. Unlike its absence this does not pass; gRPC reports both alike."""
        if time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + _LOOK_SECONDS
        problem = handshake_problem(self._address, self._authority, TLS_FOLDER)
        if problem is None:
            return
        if not self._answered:
            raise NoHandshakeError(f"the master at {problem}")
        _log.error("no_handshake", problem=problem)

    def _register_anew(self, registration: master_pb2.RegisterRequest) -> None:
        registration.generation, registration.routing_version = self._adopted()
        try:
            self.stub.Register(registration, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() not in _AWAY:
                raise

    def close(self) -> None:
        """Ends all waiting. The channel stays open: gRPC ends the process where a call begins on a closed one.

        A handler of a signal may call this, anywhere in the thread that waits.
        """
        self._closed.set()
        for call in list(self._under_way):
            call.cancel()


class Heartbeat:
    """Sends a heartbeat every `interval` seconds, and at once when `beat_now` is called.

    `fill` completes the request and `accepted` sees the reply; both run in the heartbeat's thread. `stopping` is set
    when the master says that the job is over, or that another process has taken this one's place.
    """

    def __init__(
        self,
        master: MasterClient,
        interval: float,
        fill: Callable[[master_pb2.HeartbeatRequest], None],
        accepted: Callable[[master_pb2.HeartbeatReply], None],
        stopping: threading.Event,
    ) -> None:
        self._master = master
        self._interval = interval
        self._fill = fill
        self._accepted = accepted
        self._wake = threading.Event()
        self._process = psutil.Process()
        self._peak = 0
        self._stopping = stopping
        self.superseded = False

    def start(self) -> None:
        """Begins, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def beat_now(self) -> None:
        """Something worth telling has happened."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            request = self._request()
            try:
                reply = self._master.call(self._master.stub.Heartbeat, request)
            except SupersededError as error:
                _log.warning("superseded", problem=str(error))
                self.superseded = True
                self._stopping.set()
                return
            except JobOverError:
                return
            except grpc.RpcError as error:
                _log.error("heartbeat_refused", status=error.code().name, problem=error.details())
            else:
                self._accepted(reply)
                if reply.stop:
                    self._stopping.set()
                    return
            self._wake.wait(self._interval)
            self._wake.clear()

    def _request(self) -> master_pb2.HeartbeatRequest:
        memory = self._process.memory_info().rss
        self._peak = max(self._peak, memory)
        times = self._process.cpu_times()
        request = master_pb2.HeartbeatRequest(
            member=self._master.member,
            memory_bytes=memory,
            peak_memory_bytes=self._peak,
            cpu_seconds=times.user + times.system,
        )
        self._fill(request)
        return request
