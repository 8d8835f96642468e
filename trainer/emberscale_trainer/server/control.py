"""The control plane of a parameter server: its gRPC service for the master."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import grpc
import structlog

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError, id_in, is_flash, is_priority
from emberscale_api.job import FaultToleranceStrategy, RecoveryPriority, TableSpec, TrainingJob, resolve_model
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2, master_pb2_grpc
from emberscale_trainer.checkpoint import (
    AbandonedError,
    ChainDraft,
    ChainWriter,
    CheckpointFiles,
    FlashFiles,
    FlashUnusableError,
    FlashWriter,
    PriorityWriter,
    Share,
    StorageUnreachableError,
    Work,
    load_partition,
    load_priority_rows,
    owned_rows,
)
from emberscale_trainer.membership import routing_from_proto
from emberscale_trainer.models.initial import initial_parameters
from emberscale_trainer.models.refusals import EntrypointError
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.background import Background
from emberscale_trainer.server.barrier import NotHeldError, Outcome
from emberscale_trainer.server.core import Assigning, Assignment, LaterError
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound, Ticket
from emberscale_trainer.server.state import NotSettledError, ServerState
from emberscale_trainer.table import DensePieces, TableStore, UnquantizableError, trim_heap
from emberscale_trainer.table.snapshot import Lock

log = structlog.get_logger()


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
class _Saving:
    """A snapshot of a barrier of a generation, which is being written or already written."""

    generation: int
    barrier: int
    background: Background[list[CheckpointFile]]


@dataclass(frozen=True)
class _Staging:
    """The new tables of a server that joins by a move: empty, or loaded from a checkpoint."""

    move: int
    background: Background[bool]


class _Kind(Enum):
    """The kind of a save; saves of different kinds do not disturb each other."""

    PERSISTENT = auto()
    FLASH = auto()
    PRIORITY = auto()


def _kind_of(uri: str) -> _Kind:
    """Returns the kind of the save in this folder, or under this id of a flash checkpoint."""
    if is_flash(uri):
        return _Kind.FLASH
    return _Kind.PRIORITY if is_priority(id_in(uri)) else _Kind.PERSISTENT


_Write = Callable[[Sequence[TableSpec], Share, Work], list[CheckpointFile]]
"""Writes these tables' rows of a snapshot."""


@dataclass(frozen=True)
class FlashStore:
    """The location of the job's flash checkpoints."""

    url: str
    job_uid: str


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
    ) -> None:
        self._flash = flash
        self._flash_writer = None if flash is None else FlashWriter(flash.url, flash.job_uid, incarnation)
        self._chain_writer = ChainWriter()
        self._priority = PriorityWriter(RecoveryPriority.NONE)
        self._index = index
        self._incarnation = incarnation
        self._state = state
        self._mover = mover
        self._metrics = metrics
        self._starting = threading.Lock()
        self._loading: Background[_Loaded] | None = None
        self._savings: dict[_Kind, _Saving] = {}
        self._staging: _Staging | None = None
        self._ordering: tuple[int, TrainingJob] | None = None
        self._parity = 0
        self._next: RoutingTable | None = None  # of the move under way

    # The names of the methods are the proto's.

    def Assign(self, request: master_pb2.AssignRequest, context: grpc.ServicerContext) -> master_pb2.AssignReply:
        """Begins to load the rows of a routing table, or attaches to that loading, and reports the progress."""
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
        incarnations = tuple(server.incarnation for server in routing.servers)
        wanted = Assignment(routing.generation, routing.version, request.checkpoint_uri, incarnations)
        job = TrainingJob.from_json(request.manifest_json)
        with self._starting:
            if self._state.assign(wanted) is Assigning.LOAD or self._loading is None:
                self._mover.stop()
                if self._loading is not None:
                    self._loading.abandon()
                for saving in self._savings.values():
                    saving.background.abandon()
                self._savings, self._loading = {}, None  # not the one before, if no thread can be started
                self._loading = Background("load", lambda work: self._load(wanted, routing, job, request, work))
            return self._loading

    def _load(
        self,
        wanted: Assignment,
        routing: RoutingTable,
        job: TrainingJob,
        request: master_pb2.AssignRequest,
        work: Work,
    ) -> _Loaded:
        began = time.monotonic()
        try:
            tables = _empty_tables(job)
            owned, applied = Ownership.of(routing, self._index), AppliedBatches()
            if wanted.checkpoint:
                files = self._files(wanted.checkpoint, work)
                applied = load_partition(files, owned, tables, tables.dense_parameters, anew=request.anew)
            loaded = _Loaded(tables.rows(), applied.copy())
            bound = _staleness_bound(job, applied) if routing.owners[0].index == self._index else None
            if not self._state.adopt(wanted, tables, owned, applied, bound):
                raise AbandonedError
            self._parity = _chosen_parity(request, job)
            self._prioritise(job)
            self._mover.protection.form(routing, self._index, self._parity)
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

    def _prioritise(self, job: TrainingJob) -> None:
        """Sets the job's priority for later saves of rows."""
        self._priority = PriorityWriter(job.spec.fault_tolerance.priority)
        self._state.watched_by(self._priority.watch)

    def _files(self, checkpoint: str, work: Work) -> CheckpointFiles:
        if not is_flash(checkpoint):
            return CheckpointFiles(checkpoint, work)
        if self._flash is None:
            raise DamagedCheckpointError(f"{checkpoint}: this server knows of no Redis for flash checkpoints")
        return FlashFiles(self._flash.url, self._flash.job_uid, checkpoint, work)

    def Hold(self, request: master_pb2.HoldRequest, context: grpc.ServicerContext) -> master_pb2.HoldReply:
        """Holds pushes, and reports all applied batches."""
        barrier = request.barrier
        with _told(context):
            self._require(barrier.incarnation)
            applied = self._state.hold(
                barrier.generation, request.version, barrier.number, barrier.hold_seconds, request.checkpoint
            )
        return master_pb2.HoldReply(applied=_applied_to_proto(applied))

    def Settle(self, request: master_pb2.SettleRequest, context: grpc.ServicerContext) -> master_pb2.SettleReply:
        """Admits the batches that others have applied, and then reports all applied batches."""
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

    def Snapshot(self, request: master_pb2.SnapshotRequest, context: grpc.ServicerContext) -> master_pb2.SnapshotReply:
        """Ends a barrier with a snapshot, and begins to write it."""
        barrier = request.barrier

        def take(tables: TableStore, lock: Lock, outcome: Outcome) -> None:
            self._save(request, tables, outcome.applied, self._begin(request, tables, lock))

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

    def _begin(self, request: master_pb2.SnapshotRequest, tables: TableStore, lock: Lock) -> _Write:
        """Takes the snapshot of a checkpoint or a save of priority rows; returns the function that writes it."""
        kind = _kind_of(request.uri)
        if kind is _Kind.PRIORITY:
            priority = self._priority
            rows = priority.begin(tables, lock, request.since)
            return lambda specs, share, work: priority.write(rows, specs, share, request.uri, work)
        if kind is _Kind.PERSISTENT:
            draft = self._chain_writer.begin(
                tables, lock, self._state.owned, tracked=request.tracked, since=request.since
            )
            self._priority.checkpoint_begins(tables, request.uri, whole=draft.before is None)
            return partial(self._write_chain, draft, request)
        writer = self._flash_writer
        if writer is None:
            raise FlashUnusableError("this parameter server knows of no Redis for flash checkpoints")
        begun = writer.begin(tables, lock, request.flash_bytes)
        return lambda _, share, work: writer.write(begun, request.uri, share, work)

    def _write_chain(
        self,
        draft: ChainDraft,
        request: master_pb2.SnapshotRequest,
        specs: Sequence[TableSpec],
        share: Share,
        work: Work,
    ) -> list[CheckpointFile]:
        priority = self._priority
        priority.forget(draft.snapshot.retired)
        files = self._chain_writer.write(draft, specs, share, request.uri, work, request.weight_bits, priority.note)
        trim_heap()
        return files

    def _save(
        self, request: master_pb2.SnapshotRequest, tables: TableStore, applied: AppliedBatches, write_share: _Write
    ) -> None:
        """Begins to write a snapshot; called at the moment of the snapshot, before any other push. Abandons an earlier
        save of the same kind only.
        """
        owned, specs, kind = self._state.owned, tables.specs, _kind_of(request.uri)
        share = Share(self._index, owned, applied, tables.dense_parameters, owned_rows(tables, owned))
        earlier = self._savings.pop(kind, None)
        if earlier is not None:
            earlier.background.abandon()

        def write(work: Work) -> list[CheckpointFile]:
            began = time.monotonic()
            files = write_share(specs, share, work)
            self._metrics.checkpoint_written(time.monotonic() - began, work.moved_bytes)
            return files

        barrier = request.barrier
        self._savings[kind] = _Saving(barrier.generation, barrier.number, Background("save", write))

    def _saving_of(self, generation: int, barrier: int) -> _Saving | None:
        wanted = (generation, barrier)
        return next((one for one in [*self._savings.values()] if (one.generation, one.barrier) == wanted), None)

    def GetSaved(self, request: master_pb2.GetSavedRequest, context: grpc.ServicerContext) -> master_pb2.GetSavedReply:
        """Reports how much of a snapshot is written."""
        with _told(context):
            self._require(request.incarnation)
        saving = self._saving_of(request.generation, request.barrier)
        if saving is None:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"no snapshot of barrier {request.barrier} is being written here"
            )
        work = saving.background.work
        with _told(context):
            files = saving.background.result(request.wait_seconds)
        return master_pb2.GetSavedReply(
            done=files is not None,
            written_bytes=work.moved_bytes,
            examined_rows=work.examined_rows,
            problem=work.problem,
            files=[
                master_pb2.SavedFile(path=file.path, bytes=file.bytes, crc32=file.crc32, checkpoint=file.checkpoint)
                for file in files or ()
            ],
        )

    def Prepare(self, request: master_pb2.PrepareRequest, context: grpc.ServicerContext) -> master_pb2.PrepareReply:
        """Begins a move; a server without rows makes tables for it, with a lost server's rows if it replaces one."""
        routing, checkpoint = routing_from_proto(request.routing), request.checkpoint_uri
        with _told(context):
            self._require(request.incarnation)
            with self._starting:  # what follows must be of the move under way: a later one may come
                transfer = self._state.prepare(
                    request.move,
                    request.since,
                    routing,
                    self._index,
                    replaces=bool(checkpoint),
                    lost=tuple(request.lost),
                )
                if transfer.joins:
                    self._parity = _chosen_parity(request, TrainingJob.from_json(request.manifest_json))
                self._next = routing
                begins = transfer.orders and (transfer.joins or not self._state.orders)
                self._ordering = (request.move, TrainingJob.from_json(request.manifest_json)) if begins else None
            if not transfer.joins:
                return master_pb2.PrepareReply(done=self._state.prepared(request.move, request.wait_seconds))
            job = TrainingJob.from_json(request.manifest_json)
            staging = self._staged(transfer, job, checkpoint, request.priority_uris)
            is_done = staging.background.result(request.wait_seconds) is not None
            work = staging.background.work
            return master_pb2.PrepareReply(done=is_done, loaded_bytes=work.moved_bytes, problem=work.problem)

    def _staged(self, transfer: Transfer, job: TrainingJob, checkpoint: str, priority: Sequence[str]) -> _Staging:
        move = transfer.number

        def make(work: Work) -> bool:
            tables = _empty_tables(job)
            if checkpoint:
                load_partition(self._files(checkpoint, work), transfer.after, tables, tables.dense_parameters)
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
        with _told(context):
            self._require(request.incarnation)
            progress = self._mover.copy(request.move, request.wait_seconds, request.spare_seconds)
        return master_pb2.CopyReply(
            ready=progress.ready,
            copied_bytes=progress.copied_bytes,
            rounds=progress.rounds,
            changed_rows=progress.changed_rows,
            rebuilt=[
                master_pb2.RebuiltRows(server=server, applied=_applied_to_proto(applied))
                for server, applied in progress.rebuilt.items()
            ],
        )

    def HandOver(self, request: master_pb2.HandOverRequest, context: grpc.ServicerContext) -> master_pb2.HandOverReply:
        """Sends the last changes within a settled barrier, and keeps holding."""
        barrier = request.barrier
        hold = (barrier.generation, barrier.number, request.move, barrier.hold_seconds)
        with _told(context):
            self._require(barrier.incarnation)
            self._state.hand_over(*hold)
            self._mover.hand_over(request.move, request.wait_seconds)
            handed = self._state.hand_over(*hold)
        pulls = [
            master_pb2.OutstandingPull(**pull.ticket._asdict(), token=pull.token, unseen=pull.unseen)
            for pull in handed.pulls
        ]
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
        with _told(context):
            self._require(barrier.incarnation)
            outcome = self._state.switch(barrier.generation, barrier.number, request.move, settled, bound)
        generation, version = self._state.known
        if (
            self._parity
            and self._next is not None
            and (self._next.generation, self._next.version) == (generation, version)
        ):
            self._mover.protection.form(self._next, self._index, self._parity)
        log.info("switched", move=request.move, generation=generation, version=version)
        return master_pb2.SwitchReply(applied=_applied_to_proto(outcome.applied))

    def Abandon(self, request: master_pb2.AbandonRequest, context: grpc.ServicerContext) -> master_pb2.AbandonReply:
        """Abandons a move."""
        with _told(context):
            self._require(request.incarnation)
        self._mover.abandon(request.move)
        return master_pb2.AbandonReply()

    def Resume(self, request: master_pb2.ResumeRequest, context: grpc.ServicerContext) -> master_pb2.ResumeReply:
        """Releases a barrier, and abandons the snapshot taken in it, as nobody will ask for its files."""
        barrier = request.barrier
        with _told(context):
            self._require(barrier.incarnation)
        self._state.resume(barrier.generation, barrier.number)
        saving = self._saving_of(barrier.generation, barrier.number)
        if saving is not None:
            saving.background.abandon()
        return master_pb2.ResumeReply()

    def _require(self, incarnation: str) -> None:
        if incarnation != self._incarnation:
            raise OtherIncarnationError(f"{incarnation!r} is meant, and this is {self._incarnation!r}")


@contextmanager
def _told(context: grpc.ServicerContext) -> Iterator[None]:
    """Ends the call with the status code of an error, by `_STATUS`."""
    try:
        yield
    except tuple(_STATUS) as error:
        code = next(code for kind, code in _STATUS.items() if isinstance(error, kind))
        context.abort(code, str(error) or "the work was abandoned for a later call")


def _chosen_parity(request: master_pb2.AssignRequest | master_pb2.PrepareRequest, job: TrainingJob) -> int:
    """Returns the parity that the master, or else the manifest, tells this server to keep; 0: none."""
    if request.no_parity:
        return 0
    tolerance = job.spec.fault_tolerance
    by_manifest = tolerance.parity if tolerance.strategy is FaultToleranceStrategy.ERASURE_CODING else 0
    return request.parity or by_manifest


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
