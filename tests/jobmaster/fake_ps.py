"""A parameter server in this process that stores no rows, behind the calls of a real one."""

import json
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
from tests.jobmaster.small_job import TOKEN

from emberscale_api.checkpoint import DamagedCheckpointError, rows_suffix
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.codec import damage_metadata
from emberscale_api.rpc.token import TokenCheck

Applied = dict[int, set[int]]
_Reply = TypeVar("_Reply")


def runs(batches: set[int]) -> list[int]:
    """Returns runs as on the wire: first, stop, first, stop, ..."""
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


class FakePs(rpc.ParameterServerServicer):
    """A parameter server without rows: it only remembers which batches it has applied, and how often.

    `faults[step]` is called at the beginning of that step; it may raise FaultError or DamagedCheckpointError.
    `after[step]` is called before the answer of that step leaves.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = uuid.uuid4().hex
        self.lock = threading.Condition()
        self.applied: Applied = {}
        self.generation = 0
        self.version = 0
        self.held: int | None = None
        self.held_until = 0.0
        self.over = 0
        self.settling: Applied = {}
        self.snapshots: dict[int, tuple[str, Applied]] = {}
        self.weight_bits: dict[int, int] = {}
        self.steps: list[str] = []
        self.assigned_from: list[str] = []
        self.repeated = 0
        self.copied_bytes = 7
        self.live: pb.LeaseTokens | None = None
        self.faults: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), interceptors=[TokenCheck(TOKEN)])
        rpc.add_ParameterServerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def holds(self) -> bool:
        """Whether pushes are held now."""
        return self.held is not None and time.monotonic() < self.held_until

    def stop(self) -> None:
        self._server.stop(None).wait()

    def push(self, generation: int, epoch: int, batch: int) -> bool:
        """Applies a batch once; False if the generation is not this server's. Waits while a barrier holds it."""
        with self.lock:
            while generation == self.generation and self.holds and batch not in self.settling.get(epoch, ()):
                self.lock.wait(max(0.0, self.held_until - time.monotonic()))
            if generation != self.generation:
                return False
            self.apply(epoch, batch)
            return True

    def apply(self, epoch: int, batch: int) -> None:
        """Applies a batch, even while pushes are held."""
        with self.lock:
            if batch in self.applied.setdefault(epoch, set()):
                self.repeated += 1
            self.applied[epoch].add(batch)
            self.lock.notify_all()

    def until(self, look: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Waits until `look` finds something true after a step, or a batch, or as a barrier ends."""
        with self.lock:
            assert self.lock.wait_for(look, seconds), f"not within {seconds:g} s: {what}"

    def lapse(self) -> None:
        """Lets the held barrier lapse now."""
        with self.lock:
            self._let_go()

    def Assign(self, request: pb.AssignRequest, context: grpc.ServicerContext) -> pb.AssignReply:
        self._step("Assign", context)
        with self.lock:
            if (request.routing.generation, request.routing.version) != (self.generation, self.version):
                self._assign(request)
            return pb.AssignReply(done=True, loaded_bytes=7, rows={"C1": 7}, applied=to_wire(self.applied))

    def _assign(self, request: pb.AssignRequest) -> None:
        self.applied = {}
        self.assigned_from.append(request.checkpoint_uri)
        if request.checkpoint_uri:
            # a checkpoint of fewer servers has no file for this index: any other server's file will do
            written = Path(request.checkpoint_uri) / f"ps-{self.index}" / "applied.json"
            whole = written if written.exists() else Path(request.checkpoint_uri) / "ps-0" / "applied.json"
            stored = json.loads(whole.read_text())
            self.applied = {int(epoch): set(batches) for epoch, batches in stored.items()}
        self.generation, self.version = request.routing.generation, request.routing.version
        self._let_go()

    def Hold(self, request: pb.HoldRequest, context: grpc.ServicerContext) -> pb.HoldReply:
        self._step("Hold", context)
        with self.lock:
            barrier = request.barrier
            self._check(barrier, barrier.number > self.over, context)
            if self.held != barrier.number:
                self._let_go()
                self.held = barrier.number
            self.held_until = time.monotonic() + barrier.hold_seconds
            reply = pb.HoldReply(applied=to_wire(self.applied))
        return self._answer("Hold", reply)

    def Settle(self, request: pb.SettleRequest, context: grpc.ServicerContext) -> pb.SettleReply:
        self._step("Settle", context)
        with self.lock:
            self._check_held(request.barrier, context)
            self.settling = from_wire(request.settle)
            self.lock.notify_all()
            settled = self.lock.wait_for(self._settled, request.wait_seconds)
            self.settling = {}
            reply = pb.SettleReply(applied=to_wire(self.applied))
        if not settled:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "not settled")
        return self._answer("Settle", reply)

    def Snapshot(self, request: pb.SnapshotRequest, context: grpc.ServicerContext) -> pb.SnapshotReply:
        self._step("Snapshot", context)
        with self.lock:
            self._check_held(request.barrier, context)
            copy = {epoch: set(batches) for epoch, batches in self.applied.items()}
            self.snapshots[request.barrier.number] = (request.uri, copy)
            self.weight_bits[request.barrier.number] = request.weight_bits
            self._let_go()
            reply = pb.SnapshotReply(applied=to_wire(copy), held_seconds=0.01)
        return self._answer("Snapshot", reply)

    def GetSaved(self, request: pb.GetSavedRequest, context: grpc.ServicerContext) -> pb.GetSavedReply:
        self._step("GetSaved", context)
        uri, applied = self.snapshots[request.barrier]
        place = Path(uri) / f"ps-{self.index}" / "applied.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({epoch: sorted(batches) for epoch, batches in applied.items()}).encode()
        place.write_bytes(content)
        files = [pb.SavedFile(path=f"ps-{self.index}/{place.name}", bytes=len(content), crc32=zlib.crc32(content))]
        if bits := self.weight_bits[request.barrier]:
            rows = place.with_name(f"table-0-0{rows_suffix(bits)}")
            rows.touch()
            files.append(pb.SavedFile(path=f"ps-{self.index}/{rows.name}"))
        return pb.GetSavedReply(done=True, written_bytes=len(content), files=files)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> pb.ResumeReply:
        self._step("Resume", context)
        with self.lock:
            if self.held is not None and self.held <= request.barrier.number:
                self._let_go()
            self.over = max(self.over, request.barrier.number)
        return pb.ResumeReply()

    def _check_held(self, barrier: pb.Barrier, context: grpc.ServicerContext) -> None:
        self._check(barrier, self.holds and self.held == barrier.number, context)
        self.held_until = time.monotonic() + barrier.hold_seconds

    def _check(self, barrier: pb.Barrier, held: bool, context: grpc.ServicerContext) -> None:
        if barrier.generation != self.generation:
            context.abort(grpc.StatusCode.ABORTED, f"generation {self.generation} is served")
        if not held:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"barrier {barrier.number} is not held")

    def _let_go(self) -> None:
        if self.held is not None:
            self.over = max(self.over, self.held)
        self.held, self.settling = None, {}
        self.lock.notify_all()

    def _settled(self) -> bool:
        return all(batches <= self.applied.get(epoch, set()) for epoch, batches in self.settling.items())

    def _step(self, name: str, context: grpc.ServicerContext) -> None:
        with self.lock:
            self.steps.append(name)
            self.lock.notify_all()
        if fault := self.faults.get(name):
            try:
                fault()
            except FaultError as error:
                context.abort(error.code, str(error))
            except DamagedCheckpointError as error:
                context.set_trailing_metadata(damage_metadata(error.file))
                context.abort(grpc.StatusCode.DATA_LOSS, str(error))

    def Prepare(self, request: pb.PrepareRequest, context: grpc.ServicerContext) -> pb.PrepareReply:
        self._step("Prepare", context)
        with self.lock:
            self.move, self.next_table = request.move, request.routing
        return pb.PrepareReply(done=True)

    def Copy(self, request: pb.CopyRequest, context: grpc.ServicerContext) -> pb.CopyReply:
        self._step("Copy", context)
        self._check_move(request.move, context)
        return pb.CopyReply(ready=True, copied_bytes=self.copied_bytes, rounds=2)

    def HandOver(self, request: pb.HandOverRequest, context: grpc.ServicerContext) -> pb.HandOverReply:
        self._step("HandOver", context)
        self._check_move(request.move, context)
        with self.lock:
            self._check_held(request.barrier, context)
            return pb.HandOverReply(applied=to_wire(self.applied))

    def Switch(self, request: pb.SwitchRequest, context: grpc.ServicerContext) -> pb.SwitchReply:
        self._step("Switch", context)
        self._check_move(request.move, context)
        with self.lock:
            table = self.next_table
            if self.version != table.version:
                if self.generation == table.generation:
                    self._check_held(request.barrier, context)
                self._let_go()
                self.applied = from_wire(request.applied)
                self.generation, self.version = table.generation, table.version
            return pb.SwitchReply(applied=to_wire(self.applied))

    def Abandon(self, request: pb.AbandonRequest, context: grpc.ServicerContext) -> pb.AbandonReply:
        self._step("Abandon", context)
        return pb.AbandonReply()

    def _check_move(self, move: int, context: grpc.ServicerContext) -> None:
        if move != self.move:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"move {move} is not under way here")

    def _answer(self, name: str, reply: _Reply) -> _Reply:
        if after := self.after.get(name):
            after()
        return reply


class FaultError(Exception):
    """The error that a fake parameter server returns in place of an answer."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
