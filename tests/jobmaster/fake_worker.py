"""A worker in a thread that carries out the master's tasks without training a model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tests.jobmaster.caller import Caller
from tests.jobmaster.fake_ps import FakePs
from tests.jobmaster.small_job import BATCH, discovered, evaluated, indexed

from emberscale_api.rpc import master_pb2 as pb

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass
class FakeWorker:
    """A worker in a thread, which does what the master says, and repeats calls while the master is away.

    `records` and `evaluation` are what it claims to find in the data. Before the last batch of all `epochs` it waits
    for `last`, so that a job ends no sooner than the test lets it.
    """

    address: str
    index: int
    servers: Callable[[], list[FakePs]]
    records: int
    evaluation: int = 0
    pace: float = 0.0
    epochs: int = 1
    last: threading.Event | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    killed: threading.Event = field(default_factory=threading.Event)
    problem: BaseException | None = None
    _sequence: int = 0

    def __post_init__(self) -> None:
        self.caller = Caller(self.address, pb.WORKER, self.index)
        self._thread = threading.Thread(target=self._run, name=f"worker-{self.index}")

    def start(self) -> "FakeWorker":
        self._thread.start()
        return self

    def kill(self) -> None:
        """Stops it without notice to the master."""
        self.killed.set()
        self._thread.join()
        self.caller.close()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.caller.close()
        if self.problem is not None:
            raise self.problem

    def _run(self) -> None:
        try:
            self._insist(lambda: self.caller.register())
            result: pb.TaskResult | None = None
            while not self.killed.is_set():
                reply = self._acquire(result)
                if reply.stop:
                    return
                result = self._work(reply.task) if reply.HasField("task") else None
        except _KilledError:
            return
        except BaseException as error:
            self.problem = error
            raise
        finally:
            self.ended.set()

    def _acquire(self, result: pb.TaskResult | None) -> pb.AcquireTaskReply:
        finished = [] if result is None else [result]
        reply: pb.AcquireTaskReply = self._insist(lambda: self.caller.acquire(*finished, wait=0.5))
        return reply

    def _work(self, task: pb.Task) -> pb.TaskResult | None:
        match task.kind:
            case pb.DISCOVER:
                return discovered(task, self.evaluation)
            case pb.INDEX:
                return indexed(task, self.evaluation if task.split == pb.EVALUATION_DATA else self.records)
            case pb.EVALUATE:
                return evaluated(task)
            case _:
                return self._train(task)

    def _train(self, task: pb.Task) -> pb.TaskResult | None:
        routing = self._insist(
            lambda: self.caller.stub.GetRouting(pb.GetRoutingRequest(member=self.caller.member), timeout=60)
        )
        for position in range(task.start, task.stop, BATCH):
            self.killed.wait(self.pace)
            if not self._may_train(task, position):
                return None
            for server in self.servers():
                if self.killed.is_set():
                    raise _KilledError
                if not server.push(routing.generation, task.epoch, position // BATCH):
                    return None
            committed = min(position + BATCH, task.stop)
            self._sequence += 1
            beat = {
                "leases": [pb.LeaseProgress(token=task.token, committed=committed)],
                "delta_sequence": self._sequence,
                "worker": pb.WorkerDelta(samples=committed - position, batches=1, loss_sum=0.5),
            }
            if task.token in self._insist(lambda: self.caller.heartbeat(**beat)).revoked_tokens:  # noqa: B023
                return None
        return pb.TaskResult(token=task.token)

    def _may_train(self, task: pb.Task, position: int) -> bool:
        """Waits, and keeps the lease, until the batch may be trained; False if the lease is over before that."""
        is_last = task.epoch == self.epochs - 1 and position + BATCH >= self.records
        while is_last and self.last is not None and not self.last.is_set():
            lease = pb.LeaseProgress(token=task.token, committed=position)
            reply = self._insist(lambda: self.caller.heartbeat(leases=[lease]))  # noqa: B023
            if reply.stop or task.token in reply.revoked_tokens:
                return False
            self.killed.wait(0.05)
        return True

    def _insist(self, call: Callable[[], Any]) -> Any:
        while not self.killed.is_set():
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() not in _AWAY:
                    raise
            self.killed.wait(0.05)
        raise _KilledError


class _KilledError(Exception):
    pass
