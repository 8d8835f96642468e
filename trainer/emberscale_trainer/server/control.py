"""The control plane of a parameter server: its gRPC service for the master."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import structlog

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.job import FaultToleranceStrategy, TrainingJob, resolve_model
from emberscale_api.readable import bytes_text
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_api.rpc.codec import damage_metadata, message_of, same_fields
from emberscale_trainer.checkpoint import (
    AbandonedError,
    CheckpointFiles,
    FlashUnusableError,
    StorageUnreachableError,
    Work,
    load_partition,
    load_priority_rows,
)
from emberscale_trainer.membership import routing_from_proto
from emberscale_trainer.models.initial import initial_parameters
from emberscale_trainer.models.refusals import EntrypointError
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.adoption import bytes_to_adopt
from emberscale_trainer.server.background import Background
from emberscale_trainer.server.barrier import NotHeldError, Outcome
from emberscale_trainer.server.core import Assigning, Assignment, LaterError
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.saves import FlashStore, SaveRequest, Saves
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound, Ticket
from emberscale_trainer.server.state import NotSettledError, ServerState
from emberscale_trainer.table import DensePieces, TableStore, UnquantizableError
from emberscale_trainer.table.snapshot import Lock

_log = structlog.get_logger()


class OtherIncarnationError(Exception):
    """The call is meant for another process, which had this address before."""


_STATUS: dict[type[Exception], grpc.StatusCode] = {
    OtherIncarnationError: grpc.StatusCode.FAILED_PRECONDITION,
    LaterError: grpc.StatusCode.ABORTED,
    NotHeldError: grpc.StatusCode.FAILED_PRECONDITION,
    NotSettledError: grpc.StatusCode.DEADLINE_EXCEEDED,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    DamagedCheckpointError: grpc.StatusCode.DATA_LOSS,
    EntrypointError: grpc.StatusCode.INVALID_ARGUMENT,
    StorageUnreachableError: grpc.StatusCode.UNAVAILABLE,
    UnquantizableError: grpc.StatusCode.INVALID_ARGUMENT,
    FlashUnusableError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AbandonedError: grpc.StatusCode.ABORTED,
}
"""The status codes under which errors reach the master."""


@dataclass(frozen=True)
class _Loaded:
    """The result of an assignment."""

    rows: dict[str, int]
    applied: AppliedBatches


@dataclass(frozen=True)
class _Staging:
    """The new tables of a server that joins by a move: empty, or loaded from a checkpoint."""

    move: int
    background: Background[bool]


class ParameterServerControl(master_pb2_grpc.ParameterServerServicer):
    """Assign, and the steps of barriers and moves, on one server. Every call answers within its `wait_seconds`."""

    def __init__(
        self,
        index: int,
        incarnation: str,
        state: ServerState,
        mover: RowMover,
        metrics: ServerMetrics,
        flash: FlashStore | None = None,
        memory_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`memory_left` returns the bytes below the memory limit that are free; None: there is no limit."""
        self._saves = Saves(index, incarnation, metrics, flash)
        self._index = index
        self._incarnation = incarnation
        self._state = state
        self._mover = mover
        self._metrics = metrics
        self._starting = threading.Lock()
        self._loading: Background[_Loaded] | None = None
        self._staging: _Staging | None = None
        self._ordering: tuple[int, TrainingJob] | None = None
        self._parity = 0
        self._memory_left = memory_left
        self._next: RoutingTable | None = None  # of the move under way
        self._next_lag: LagBound | None = None

    # The names of the methods are the proto's.

    def Assign(self, request: master_pb2.AssignRequest, context: grpc.ServicerContext) -> master_pb2.AssignReply:
        """Begins to load the rows of a routing table, or attaches to that loading, and reports the progress."""
        routing = routing_from_proto(request.routing)
        meant = routing.servers[self._index].incarnation if self._index < len(routing.servers) else ""
        with self._answering(context, meant):
            background = self._assign(request, routing)
            loaded = background.result(request.wait_seconds)
        if loaded is None:
            return master_pb2.AssignReply(loaded_bytes=background.work.moved_bytes, problem=background.work.problem)
        return master_pb2.AssignReply(
            done=True,
            loaded_bytes=background.work.moved_bytes,
            rows=loaded.rows,
            applied=_applied_to_proto(loaded.applied),
        )

    def _assign(self, request: master_pb2.AssignRequest, routing: RoutingTable) -> Background[_Loaded]:
        incarnations = tuple(server.incarnation for server in routing.servers)
        assignment = Assignment(routing.generation, routing.version, request.checkpoint_uri, incarnations)
        job = TrainingJob.from_json(request.manifest_json)
        with self._starting:
            if self._state.assign(assignment) is Assigning.LOAD or self._loading is None:
                self._mover.stop()
                if self._loading is not None:
                    self._loading.abandon()
                self._saves.abandon()
                self._loading = None  # not the one before, if no thread can be started
                self._loading = Background("load", lambda work: self._load(assignment, routing, job, request, work))
            return self._loading

    def _load(
        self,
        assignment: Assignment,
        routing: RoutingTable,
        job: TrainingJob,
        request: master_pb2.AssignRequest,
        work: Work,
    ) -> _Loaded:
        began = time.monotonic()
        try:
            tables = _empty_tables(job)
            owned, applied = Ownership.of(routing, self._index), AppliedBatches()
            if assignment.checkpoint:
                files = self._saves.files(assignment.checkpoint, work)
                applied = load_partition(files, owned, tables, tables.dense_parameters, anew=request.anew)
            loaded = _Loaded(tables.rows(), applied.copy())
            bound = _staleness_bound(job, applied) if routing.owners[0].index == self._index else None
            if not self._state.adopt(assignment, tables, owned, applied, bound):
                raise AbandonedError
            self._parity = _chosen_parity(request, job)
            self._prioritise(job)
            self._mover.protection.form(routing, self._index, self._parity, _lag(request))
        except BaseException as error:
            self._state.give_up(assignment)
            if not isinstance(error, AbandonedError):
                _log.error("not_assigned", checkpoint=assignment.checkpoint, problem=str(error))
            raise
        _log.info(
            "assigned",
            generation=assignment.generation,
            version=assignment.version,
            checkpoint=assignment.checkpoint,
            rows=sum(loaded.rows.values()),
            seconds=round(time.monotonic() - began, 3),
        )
        return loaded

    def _prioritise(self, job: TrainingJob) -> None:
        """Sets the job's priority for later saves of rows."""
        self._state.watched_by(self._saves.prioritise(job.spec.fault_tolerance.priority).watch)

    def Hold(self, request: master_pb2.HoldRequest, context: grpc.ServicerContext) -> master_pb2.HoldReply:
        """Holds pushes, and reports all applied batches."""
        barrier = request.barrier
        with self._answering(context, barrier.incarnation):
            applied = self._state.hold(
                barrier.generation, request.version, barrier.number, barrier.hold_seconds, request.checkpoint
            )
        return master_pb2.HoldReply(applied=_applied_to_proto(applied))

    def Settle(self, request: master_pb2.SettleRequest, context: grpc.ServicerContext) -> master_pb2.SettleReply:
        """Admits the batches that others have applied, and then reports all applied batches."""
        barrier = request.barrier
        with self._answering(context, barrier.incarnation):
            applied = self._state.settle(
                barrier.generation,
                barrier.number,
                _ranges(request.settle),
                barrier.hold_seconds,
                request.wait_seconds,
            )
        return master_pb2.SettleReply(applied=_applied_to_proto(applied))

    def Snapshot(self, request: master_pb2.SnapshotRequest, context: grpc.ServicerContext) -> master_pb2.SnapshotReply:
        """Ends a barrier with a snapshot, and begins to write it."""
        barrier = request.barrier
        asked = same_fields(SaveRequest, request, generation=barrier.generation, barrier=barrier.number)

        def take(tables: TableStore, lock: Lock, outcome: Outcome) -> None:
            self._saves.begin(asked, tables, lock, self._state.core.owned, outcome.applied)

        with self._answering(context, barrier.incarnation):
            outcome = self._state.snapshot(barrier.generation, barrier.number, take)
        if not outcome.repeated:
            self._metrics.snapshot_taken(outcome.settled_seconds)
        return message_of(master_pb2.SnapshotReply, outcome, applied=_applied_to_proto(outcome.applied))

    def GetSaved(self, request: master_pb2.GetSavedRequest, context: grpc.ServicerContext) -> master_pb2.GetSavedReply:
        """Reports how much of a snapshot is written; lifts the limit of its writer for a master that asks for that."""
        with self._answering(context, request.incarnation):
            save = self._saves.of(request.generation, request.barrier)
            if save is None:
                raise NotHeldError(f"no snapshot of barrier {request.barrier} is being written here")
            if request.at_full_speed:
                save.work.lift_limit()
            work, files = save.work, save.result(request.wait_seconds)
        return message_of(
            master_pb2.GetSavedReply, work, done=files is not None, written_bytes=work.moved_bytes, files=files or ()
        )

    def Prepare(self, request: master_pb2.PrepareRequest, context: grpc.ServicerContext) -> master_pb2.PrepareReply:
        """Begins a move; a server without rows makes tables for it, with a lost server's rows if it replaces one."""
        routing, checkpoint = routing_from_proto(request.routing), request.checkpoint_uri
        with self._answering(context, request.incarnation):
            group = self._mover.protection.group
            if request.lost and group is not None and group.is_async and not request.knows_async_parity:
                raise NotHeldError("rebuilt rows may lack batches, and this master would not know which")
            with self._starting:  # what follows must be of the move under way: a later one may come
                transfer = self._state.prepare(
                    request.move,
                    request.since,
                    routing,
                    self._index,
                    replaces=bool(checkpoint),
                    lost=tuple(request.lost),
                    on_demand=request.on_demand,
                )
                if transfer.joins:
                    self._parity = _chosen_parity(request, TrainingJob.from_json(request.manifest_json))
                elif transfer.lost and transfer.gained:
                    self._require_memory(transfer)
                self._next, self._next_lag = routing, _lag(request)
                begins = transfer.orders and (transfer.joins or not self._state.core.orders)
                self._ordering = (request.move, TrainingJob.from_json(request.manifest_json)) if begins else None
            if not transfer.joins:
                return master_pb2.PrepareReply(done=self._state.prepared(request.move, request.wait_seconds))
            job = TrainingJob.from_json(request.manifest_json)
            staging = self._staged(transfer, job, checkpoint, request.priority_uris)
            is_done = staging.background.result(request.wait_seconds) is not None
            work = staging.background.work
            return master_pb2.PrepareReply(done=is_done, loaded_bytes=work.moved_bytes, problem=work.problem)

    def _require_memory(self, transfer: Transfer) -> None:
        """Raises NotHeldError if the rows of lost servers do not fit into the memory that is left."""
        left, group = self._memory_left(), self._mover.protection.group
        if left is None or group is None:
            return
        rows = self._state.figures().table_bytes
        servers = len(transfer.table.owners)
        needed = bytes_to_adopt(rows, transfer.before, transfer.gained, servers, self._parity, group.blocks.nbytes)
        if needed > left:
            raise NotHeldError(
                f"adopting rows takes about {bytes_text(needed)} of memory, and {bytes_text(max(0, left))} are left"
            )

    def _staged(self, transfer: Transfer, job: TrainingJob, checkpoint: str, priority: Sequence[str]) -> _Staging:
        move = transfer.number

        def make(work: Work) -> bool:
            tables = _empty_tables(job)
            if checkpoint:
                load_partition(self._saves.files(checkpoint, work), transfer.after, tables, tables.dense_parameters)
            for uri in priority:
                load_priority_rows(CheckpointFiles(uri, work), transfer.after, tables, tables.dense_parameters)
            self._prioritise(job)
            self._state.stage(move, tables)
            return True

        with self._starting:
            if self._staging is not None and move < self._staging.move:
                raise NotHeldError(f"move {move} is over")
            if self._staging is None or self._staging.move < move:
                if self._staging is not None:
                    self._staging.background.abandon()
                self._staging = _Staging(move, Background("stage", make))
            return self._staging

    def Copy(self, request: master_pb2.CopyRequest, context: grpc.ServicerContext) -> master_pb2.CopyReply:
        """Sends the rows that the server gives away, and reports the progress."""
        with self._answering(context, request.incarnation):
            progress = self._mover.copy(request.move, request.wait_seconds, request.spare_seconds)
        rebuilt = [
            master_pb2.RebuiltRows(server=server, applied=_applied_to_proto(applied))
            for server, applied in progress.rebuilt.items()
        ]
        return message_of(master_pb2.CopyReply, progress, rebuilt=rebuilt)

    def HandOver(self, request: master_pb2.HandOverRequest, context: grpc.ServicerContext) -> master_pb2.HandOverReply:
        """Sends the last changes within a settled barrier, and keeps holding."""
        barrier = request.barrier
        hold = (barrier.generation, barrier.number, request.move, barrier.hold_seconds)
        with self._answering(context, barrier.incarnation):
            self._state.hand_over(*hold)
            self._mover.hand_over(request.move, request.wait_seconds)
            handed = self._state.hand_over(*hold)
        pulls = [message_of(master_pb2.OutstandingPull, pull, **pull.ticket._asdict()) for pull in handed.pulls]
        return master_pb2.HandOverReply(applied=_applied_to_proto(handed.applied), pulls=pulls)

    def Switch(self, request: master_pb2.SwitchRequest, context: grpc.ServicerContext) -> master_pb2.SwitchReply:
        """Ends a barrier with the table of a move."""
        barrier, settled = request.barrier, _applied_from_proto(request.applied)
        ordering, bound = self._ordering, None
        if ordering is not None and ordering[0] == request.move:
            bound = _staleness_bound(ordering[1], settled)
            bound.take_over(
                OutstandingPull(
                    Ticket(pull.session, pull.epoch, pull.batch, pull.batches, pull.is_round), pull.token, pull.unseen
                )
                for pull in request.pulls
            )
        group = self._mover.protection.group
        rebuilt = [
            (Ownership.of(group.table, one.server), _applied_from_proto(one.applied))
            for one in request.rebuilt
            if group is not None
        ]
        with self._answering(context, barrier.incarnation):
            outcome = self._state.switch(barrier.generation, barrier.number, request.move, settled, bound, rebuilt)
        generation, version = self._state.core.known
        if (
            self._parity
            and self._next is not None
            and (self._next.generation, self._next.version) == (generation, version)
        ):
            self._mover.switched(request.move)
            self._mover.protect(self._next, self._index, self._parity, self._next_lag)
        _log.info("switched", move=request.move, generation=generation, version=version)
        return master_pb2.SwitchReply(applied=_applied_to_proto(outcome.applied))

    def Abandon(self, request: master_pb2.AbandonRequest, context: grpc.ServicerContext) -> master_pb2.AbandonReply:
        """Abandons a move."""
        with self._answering(context, request.incarnation):
            self._mover.abandon(request.move)
        return master_pb2.AbandonReply()

    def Resume(self, request: master_pb2.ResumeRequest, context: grpc.ServicerContext) -> master_pb2.ResumeReply:
        """Releases a barrier, and abandons the snapshot taken in it, as nobody will ask for its files."""
        barrier = request.barrier
        with self._answering(context, barrier.incarnation):
            self._state.resume(barrier.generation, barrier.number)
        save = self._saves.of(barrier.generation, barrier.number)
        if save is not None:
            save.abandon()
        return master_pb2.ResumeReply()

    @contextmanager
    def _answering(self, context: grpc.ServicerContext, incarnation: str) -> Iterator[None]:
        """Ends the call with the status code of an error, by `_STATUS`, also if another process is meant."""
        try:
            if incarnation != self._incarnation:
                raise OtherIncarnationError(f"{incarnation!r} is meant, and this is {self._incarnation!r}")
            yield
        except tuple(_STATUS) as error:
            code = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
            if isinstance(error, DamagedCheckpointError):
                context.set_trailing_metadata(damage_metadata(error.file))
            context.abort(code, str(error) or "the work was abandoned for a later call")


def _chosen_parity(request: master_pb2.AssignRequest | master_pb2.PrepareRequest, job: TrainingJob) -> int:
    """Returns the parity that the master, or else the manifest, tells this server to keep; 0: none."""
    if request.no_parity:
        return 0
    tolerance = job.spec.fault_tolerance
    by_manifest = tolerance.parity if tolerance.strategy is FaultToleranceStrategy.ERASURE_CODING else 0
    return request.parity or by_manifest


def _lag(request: master_pb2.AssignRequest | master_pb2.PrepareRequest) -> LagBound | None:
    """Returns how far parity may lag behind answered pushes; None: not at all."""
    return LagBound() if request.async_parity else None


def _empty_tables(job: TrainingJob) -> TableStore:
    """Returns the job's tables without rows: keys have their initial weights, dense pieces those of the model."""
    resolved = resolve_model(job.spec)
    initial = initial_parameters(job.spec.model, resolved, job.spec.training.seed)
    return TableStore(resolved.tables, DensePieces.of(initial, job.spec.optimizers.dense))


def _staleness_bound(job: TrainingJob, applied: AppliedBatches) -> StalenessBound:
    batches = sum(stop - first for epoch in applied.epochs() for first, stop in applied.ranges(epoch))
    return StalenessBound(job.spec.training.max_staleness, job.spec.training.staleness_warmup, batches)


def _ranges(messages: Iterable[master_pb2.AppliedBatches]) -> list[tuple[int, int, int]]:
    return [
        (message.epoch, first, stop)
        for message in messages
        for first, stop in zip(message.ranges[::2], message.ranges[1::2], strict=True)
    ]


def _applied_from_proto(messages: Iterable[master_pb2.AppliedBatches]) -> AppliedBatches:
    """Returns the applied batches, each applied once."""
    return AppliedBatches.from_runs((epoch, [(first, stop, 1)]) for epoch, first, stop in _ranges(messages))


def _applied_to_proto(applied: AppliedBatches) -> list[master_pb2.AppliedBatches]:
    return [
        master_pb2.AppliedBatches(epoch=epoch, ranges=[edge for edges in applied.ranges(epoch) for edge in edges])
        for epoch in applied.epochs()
    ]
