"""A member's connection to the master, whose calls a test makes one by one."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from tests.jobmaster.fake_ps import FakePs
from tests.jobmaster.small_job import TOKEN

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import open_channel


class Caller:
    """One member's connection to the master; it repeats no call."""

    def __init__(self, address: str, role: pb.Role.ValueType, index: int, incarnation: str | None = None) -> None:
        self.member = pb.Member(role=role, index=index, incarnation=incarnation or uuid.uuid4().hex)
        self._channel = open_channel(address, TOKEN)
        self.stub = rpc.MasterStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def register(
        self,
        generation: int = 0,
        routing_version: int = 0,
        most_parity: int = 0,
        *,
        knows_async_parity: bool = False,
        adopts_rows: bool = False,
        rebuilds_on_demand: bool = False,
        **addresses: str,
    ) -> pb.RegisterReply:
        """Waits until the master listens, since all channels of this process share the state of an address."""
        request = pb.RegisterRequest(
            member=self.member,
            pid=1,
            host="h",
            generation=generation,
            routing_version=routing_version,
            most_parity=most_parity,
            knows_async_parity=knows_async_parity,
            adopts_rows=adopts_rows,
            rebuilds_on_demand=rebuilds_on_demand,
            **addresses,
        )
        return self.stub.Register(request, timeout=60, wait_for_ready=True)

    def acquire(self, *finished: pb.TaskResult, wait: float = 5.0) -> pb.AcquireTaskReply:
        request = pb.AcquireTaskRequest(member=self.member, finished=finished, max_wait_seconds=wait)
        return self.stub.AcquireTask(request, timeout=60)

    def heartbeat(self, **fields: Any) -> pb.HeartbeatReply:
        return self.stub.Heartbeat(pb.HeartbeatRequest(member=self.member, **fields), timeout=60)

    def status(self) -> pb.JobStatus:
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=60)

    def report_exit(self, member: pb.Member, code: int = 1, reason: str = "Error") -> None:
        self.stub.ReportExit(pb.ReportExitRequest(member=member, exit_code=code, reason=reason), timeout=60)


@contextmanager
def heartbeats(caller: Caller, interval: float = 0.2, server: FakePs | None = None) -> Iterator[None]:
    """Keeps a member alive while the body runs and the master answers; `server` says which table it has."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(interval):
            with suppress(grpc.RpcError):
                if server is None:
                    caller.heartbeat()
                else:
                    report = pb.PsReport(generation=server.generation, routing_version=server.version)
                    server.live = caller.heartbeat(ps=report).leases

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
