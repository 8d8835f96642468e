"""The control plane of a parameter server: what the master asks of it."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import structlog

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.job import ResolvedModel, TrainingJob, resolve_model
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_trainer.checkpoint import load_partition, write_snapshot
from emberscale_trainer.checkpoint.writer import WrittenFile
from emberscale_trainer.membership.routing import routing_from_proto
from emberscale_trainer.models import build_model
from emberscale_trainer.models.entrypoint import EntrypointError
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.partition import AppliedBatches, DenseSlice, Partition, PartitionSnapshot
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.state import CutRefusedError, ServerState
from emberscale_trainer.table import SnapshotAbandonedError, TableStore

log = structlog.get_logger()


@dataclass(frozen=True)
class _Assignment:
    """What the server was told to be at the last Assign."""

    routing: RoutingTable
    resolved: ResolvedModel
    parameters: int


class ParameterServerControl(master_pb2_grpc.ParameterServerServicer):
    """Assign, and the steps of a cut, on one server's state."""

    def __init__(self, index: int, state: ServerState, metrics: ServerMetrics) -> None:
        self._index = index
        self._state = state
        self._metrics = metrics
        self._assigning = threading.Lock()
        self._assignment: _Assignment | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saves: dict[int, Future[list[WrittenFile]]] = {}

    @property
    def routing_epoch(self) -> int:
        """Of the table that was adopted last; 0 before the first."""
        return 0 if self._assignment is None else self._assignment.routing.epoch

    def Assign(  # noqa: N802 - the name is the proto's
        self, request: master_pb2.AssignRequest, context: grpc.ServicerContext
    ) -> master_pb2.AssignReply:
        """Adopts a routing table with the rows of a checkpoint, or with none."""
        routing = routing_from_proto(request.routing)
        with self._assigning:
            if self._assignment is not None and routing.epoch < self._assignment.routing.epoch:
                context.abort(grpc.StatusCode.ABORTED, f"routing epoch {routing.epoch} is behind this server's")
            self._state.leave()
            started = time.monotonic()
            job = TrainingJob.from_json(request.manifest_json)
            try:
                partition, assignment = self._build(routing, job, request.checkpoint_uri)
            except DamagedCheckpointError as error:
                log.error("checkpoint_refused", uri=request.checkpoint_uri, problem=str(error))
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except EntrypointError as error:
                log.error("model_refused", problem=str(error))
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            self._assignment = assignment
            keeps_the_bound = self._index == 0
            self._state.adopt(partition, _staleness_bound(job, partition.applied) if keeps_the_bound else None)
        rows = partition.tables.rows()
        log.info(
            "assigned",
            routing_epoch=routing.epoch,
            checkpoint=request.checkpoint_uri,
            rows=sum(rows.values()),
            seconds=round(time.monotonic() - started, 3),
        )
        return master_pb2.AssignReply(rows=rows, applied=_applied_to_proto(partition.applied))

    def _build(self, routing: RoutingTable, job: TrainingJob, checkpoint: str) -> tuple[Partition, _Assignment]:
        resolved = resolve_model(job.spec)
        initial = flat_copy(build_model(job.spec.model, resolved, job.spec.training.seed)).numpy()
        assignment = _Assignment(routing, resolved, len(initial))
        start, stop = routing.dense_slice(self._index, len(initial))
        dense = DenseSlice(initial[start:stop], job.spec.optimizers.dense)
        tables = TableStore(resolved.tables)
        applied = AppliedBatches()
        if checkpoint:
            loaded = load_partition(checkpoint, routing, self._index, resolved.tables, tables, len(initial))
            dense.restore(loaded.dense)
            applied = loaded.applied
        return Partition(routing.epoch, tables, dense, applied), assignment

    def Freeze(  # noqa: N802 - the name is the proto's
        self, request: master_pb2.FreezeRequest, context: grpc.ServicerContext
    ) -> master_pb2.FreezeReply:
        """Holds pushes, and says which of the asked batches are applied."""
        try:
            applied = self._state.freeze(request.cut, _ranges(request.asked))
        except CutRefusedError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        reply = master_pb2.FreezeReply()
        for epoch, first, stop in applied:
            reply.applied.add(epoch=epoch, ranges=[first, stop])
        return reply

    def Cut(  # noqa: N802 - the name is the proto's
        self, request: master_pb2.CutRequest, context: grpc.ServicerContext
    ) -> master_pb2.CutReply:
        """Takes a snapshot once the asked batches are in, and begins to write it."""
        assignment = self._assignment
        if assignment is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "nothing is assigned to this server")
        try:
            snapshot, pause = self._state.cut(
                request.cut, list(_ranges(request.settle)), request.settle_seconds, request.hold_seconds
            )
        except CutRefusedError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._metrics.cut_taken(pause)
        self._saves = {request.cut: self._writer.submit(self._write, snapshot, request.uri, assignment)}
        return master_pb2.CutReply(applied=_applied_to_proto(snapshot.applied), pause_seconds=pause)

    def _write(self, snapshot: PartitionSnapshot, uri: str, assignment: _Assignment) -> list[WrittenFile]:
        started = time.monotonic()
        files = write_snapshot(
            snapshot, uri, self._index, assignment.routing, assignment.resolved.tables, assignment.parameters
        )
        self._metrics.checkpoint_written(time.monotonic() - started, sum(file.bytes for file in files))
        return files

    def AwaitSaved(  # noqa: N802 - the name is the proto's
        self, request: master_pb2.AwaitSavedRequest, context: grpc.ServicerContext
    ) -> master_pb2.AwaitSavedReply:
        """Waits until the cut's files are written."""
        save = self._saves.get(request.cut)
        if save is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"cut {request.cut} was not taken here")
        try:
            files = save.result()
        except (OSError, SnapshotAbandonedError) as error:
            log.error("checkpoint_not_written", problem=str(error))
            context.abort(grpc.StatusCode.INTERNAL, f"the checkpoint cannot be written: {error}")
        return master_pb2.AwaitSavedReply(
            files=[master_pb2.SavedFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in files]
        )

    def Thaw(  # noqa: N802 - the name is the proto's
        self, request: master_pb2.ThawRequest, context: grpc.ServicerContext
    ) -> master_pb2.ThawReply:
        """Gives up a cut."""
        self._state.thaw(request.cut)
        return master_pb2.ThawReply()


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
