"""The control plane of a parameter server: what the master asks of it."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.job import TableSpec, TrainingJob, resolve_model
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_trainer.checkpoint import (
    AbandonedError,
    Share,
    StorageUnreachableError,
    Work,
    WrittenFile,
    load_partition,
    write_snapshot,
)
from emberscale_trainer.membership.master import routing_from_proto
from emberscale_trainer.models import build_model
from emberscale_trainer.models.entrypoint import EntrypointError
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.background import Background
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assigning, Assignment, LaterError, Outcome
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.state import NotSettledError, ServerState
from emberscale_trainer.table import DensePieces, TableStore
from emberscale_trainer.table import Snapshot as TablesSnapshot

log = structlog.get_logger()


class OtherIncarnationError(Exception):
    """A call is meant for a process that had this address before."""


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    OtherIncarnationError: grpc.StatusCode.FAILED_PRECONDITION,
    LaterError: grpc.StatusCode.ABORTED,
    NotHeldError: grpc.StatusCode.FAILED_PRECONDITION,
    NotSettledError: grpc.StatusCode.DEADLINE_EXCEEDED,
    DamagedCheckpointError: grpc.StatusCode.DATA_LOSS,
    EntrypointError: grpc.StatusCode.INVALID_ARGUMENT,
    StorageUnreachableError: grpc.StatusCode.UNAVAILABLE,
    AbandonedError: grpc.StatusCode.ABORTED,
}
"""How the master is told of what cannot be done."""

_TOLD = tuple(_STATUS)


@dataclass(frozen=True)
class _Loaded:
    """What an assignment ended with: its tables, the dense one last, and `parameters` floats of dense vector."""

    specs: tuple[TableSpec, ...]
    parameters: int
    rows: dict[str, int]
    applied: AppliedBatches


@dataclass(frozen=True)
class _Saving:
    """A snapshot that is being written, or was: that of a barrier of a generation."""

    generation: int
    barrier: int
    background: Background[list[WrittenFile]]


class ParameterServerControl(master_pb2_grpc.ParameterServerServicer):
    """Assign, and the steps of a barrier, on one server's state. Every call answers within its `wait_seconds`."""

    def __init__(self, index: int, incarnation: str, state: ServerState, metrics: ServerMetrics) -> None:
        self._index = index
        self._incarnation = incarnation
        self._state = state
        self._metrics = metrics
        self._starting = threading.Lock()
        self._loading: Background[_Loaded] | None = None
        self._saving: _Saving | None = None

    # The names of the methods are the proto's.

    def Assign(  # noqa: N802
        self, request: master_pb2.AssignRequest, context: grpc.ServicerContext
    ) -> master_pb2.AssignReply:
        """Begins to load the rows of a routing table, or attaches to it, and says how far it is."""
        with _told(context):
            background = self._assign(request)
            loaded = background.result(request.wait_seconds)
        if loaded is None:
            return master_pb2.AssignReply(loaded_bytes=background.work.moved_bytes, problem=background.work.problem)
        return master_pb2.AssignReply(
            done=True,
            loaded_bytes=background.work.moved_bytes,
            rows=loaded.rows,
            applied=_applied_to_proto(loaded.applied),
        )

    def _assign(self, request: master_pb2.AssignRequest) -> Background[_Loaded]:
        routing = routing_from_proto(request.routing)
        self._require(routing.servers[self._index].incarnation if self._index < len(routing.servers) else "")
        wanted = Assignment(routing.generation, routing.version, request.checkpoint_uri)
        job = TrainingJob.from_json(request.manifest_json)
        with self._starting:
            if self._state.assign(wanted) is Assigning.LOAD or self._loading is None:
                if self._loading is not None:
                    self._loading.abandon()
                if self._saving is not None:
                    self._saving.background.abandon()
                self._saving = None
                self._loading = Background("load", lambda work: self._load(wanted, routing, job, work))
            return self._loading

    def _load(self, wanted: Assignment, routing: RoutingTable, job: TrainingJob, work: Work) -> _Loaded:
        began = time.monotonic()
        try:
            resolved = resolve_model(job.spec)
            initial = flat_copy(build_model(job.spec.model, resolved, job.spec.training.seed)).numpy()
            tables = TableStore(resolved.tables, DensePieces.of(initial, job.spec.optimizers.dense))
            owned, applied = Ownership.of(routing, self._index), AppliedBatches()
            if wanted.checkpoint:
                applied = load_partition(wanted.checkpoint, owned, tables, len(initial), work)
            loaded = _Loaded(tables.specs, len(initial), tables.rows(), applied.copy())
            bound = _staleness_bound(job, applied) if self._index == 0 else None
            if not self._state.adopt(wanted, tables, owned, applied, bound):
                raise AbandonedError
        except BaseException as error:
            self._state.give_up(wanted)
            if not isinstance(error, AbandonedError):
                log.error("not_assigned", checkpoint=wanted.checkpoint, problem=str(error))
            raise
        log.info(
            "assigned",
            generation=wanted.generation,
            version=wanted.version,
            checkpoint=wanted.checkpoint,
            rows=sum(loaded.rows.values()),
            seconds=round(time.monotonic() - began, 3),
        )
        return loaded

    def Hold(  # noqa: N802
        self, request: master_pb2.HoldRequest, context: grpc.ServicerContext
    ) -> master_pb2.HoldReply:
        """Holds pushes, and says everything that is applied."""
        barrier = request.barrier
        with _told(context):
            self._require(barrier.incarnation)
            applied = self._state.hold(barrier.generation, barrier.number, barrier.hold_seconds)
        return master_pb2.HoldReply(applied=_applied_to_proto(applied))

    def Settle(  # noqa: N802
        self, request: master_pb2.SettleRequest, context: grpc.ServicerContext
    ) -> master_pb2.SettleReply:
        """Lets through what others have applied, and says everything that is applied then."""
        barrier = request.barrier
        with _told(context):
            self._require(barrier.incarnation)
            applied = self._state.settle(
                barrier.generation,
                barrier.number,
                _ranges(request.settle),
                barrier.hold_seconds,
                request.wait_seconds,
            )
        return master_pb2.SettleReply(applied=_applied_to_proto(applied))

    def Snapshot(  # noqa: N802
        self, request: master_pb2.SnapshotRequest, context: grpc.ServicerContext
    ) -> master_pb2.SnapshotReply:
        """Ends a barrier with a snapshot, and begins to write it."""
        barrier = request.barrier

        def take(outcome: Outcome, snapshot: TablesSnapshot) -> None:
            self._save(barrier, request.uri, outcome, snapshot)

        with _told(context):
            self._require(barrier.incarnation)
            outcome = self._state.snapshot(barrier.generation, barrier.number, take)
        if not outcome.repeated:
            self._metrics.snapshot_taken(outcome.settled_seconds)
        return master_pb2.SnapshotReply(
            applied=_applied_to_proto(outcome.applied),
            held_seconds=outcome.held_seconds,
            settled_seconds=outcome.settled_seconds,
        )

    def _save(self, barrier: master_pb2.Barrier, uri: str, outcome: Outcome, snapshot: TablesSnapshot) -> None:
        """Called at the moment of the snapshot, before any other push."""
        loaded = None if self._loading is None else self._loading.result(0)
        if loaded is None:
            raise RuntimeError("a snapshot is taken of rows that were not loaded")
        share = Share(self._index, self._state.owned, outcome.applied, loaded.parameters)
        if self._saving is not None:
            self._saving.background.abandon()

        def write(work: Work) -> list[WrittenFile]:
            began = time.monotonic()
            files = write_snapshot(snapshot, loaded.specs, share, uri, work)
            self._metrics.checkpoint_written(time.monotonic() - began, sum(file.bytes for file in files))
            return files

        self._saving = _Saving(barrier.generation, barrier.number, Background("save", write))

    def GetSaved(  # noqa: N802
        self, request: master_pb2.GetSavedRequest, context: grpc.ServicerContext
    ) -> master_pb2.GetSavedReply:
        """Says how far a snapshot is written."""
        with _told(context):
            self._require(request.incarnation)
        saving = self._saving
        if saving is None or (saving.generation, saving.barrier) != (request.generation, request.barrier):
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"no snapshot of barrier {request.barrier} is being written here"
            )
        work = saving.background.work
        with _told(context):
            files = saving.background.result(request.wait_seconds)
        return master_pb2.GetSavedReply(
            done=files is not None,
            written_bytes=work.moved_bytes,
            problem=work.problem,
            files=[master_pb2.SavedFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in files or ()],
        )

    def Switch(  # noqa: N802
        self, request: master_pb2.SwitchRequest, context: grpc.ServicerContext
    ) -> master_pb2.SwitchReply:
        """Ends a barrier with the next version of the routing table."""
        barrier, routing = request.barrier, routing_from_proto(request.routing)
        with _told(context):
            self._require(barrier.incarnation)
            outcome = self._state.switch(
                barrier.generation, barrier.number, routing.version, Ownership.of(routing, self._index)
            )
        log.info("switched", generation=routing.generation, version=routing.version)
        return master_pb2.SwitchReply(applied=_applied_to_proto(outcome.applied))

    def Resume(  # noqa: N802
        self, request: master_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> master_pb2.ResumeReply:
        """Lets go of a barrier, and gives up the snapshot that was taken in it: nobody will ask for its files."""
        barrier, saving = request.barrier, self._saving
        with _told(context):
            self._require(barrier.incarnation)
        self._state.resume(barrier.generation, barrier.number)
        if saving is not None and saving.generation == barrier.generation and saving.barrier <= barrier.number:
            saving.background.abandon()
        return master_pb2.ResumeReply()

    def _require(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise OtherIncarnationError(f"{incarnation!r} is meant, and this is {self._incarnation!r}")


@contextmanager
def _told(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the status that an error has in the contract."""
    try:
        yield
    except _TOLD as error:
        context.abort(_STATUS[type(error)], str(error) or "the work was abandoned for a later call")


def _staleness_bound(job: TrainingJob, applied: AppliedBatches) -> StalenessBound:
    batches = sum(stop - first for epoch in applied.epochs() for first, stop in applied.ranges(epoch))
    return StalenessBound(job.spec.training.max_staleness, job.spec.training.staleness_warmup, batches)


def _ranges(messages: Iterable[master_pb2.AppliedBatches]) -> list[tuple[int, int, int]]:
    return [
        (message.epoch, first, stop)
        for message in messages
        for first, stop in zip(message.ranges[::2], message.ranges[1::2], strict=True)
    ]


def _applied_to_proto(applied: AppliedBatches) -> list[master_pb2.AppliedBatches]:
    return [
        master_pb2.AppliedBatches(epoch=epoch, ranges=[edge for edges in applied.ranges(epoch) for edge in edges])
        for epoch in applied.epochs()
    ]
