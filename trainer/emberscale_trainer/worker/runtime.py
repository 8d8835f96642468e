"""Runs a worker: register, prepare, then one pipeline after another until the job has ended."""

import contextlib
import secrets
import threading
from collections.abc import Callable

import structlog

from emberscale_api.environment import ProcessIdentity
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJob
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.routing import RoutingTable
from emberscale_api.rpc import master_pb2
from emberscale_api.rpc.codec import dataset_from_wire
from emberscale_api.telemetry import MemoryGauge
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.data.records import DataUnavailableError
from emberscale_trainer.data.source import BatchSource
from emberscale_trainer.membership import Heartbeat, JobOverError, MasterClient, SupersededError
from emberscale_trainer.models.refusals import REASON, EntrypointError
from emberscale_trainer.table import NonFiniteGradientError
from emberscale_trainer.transport import ConnectionLostError
from emberscale_trainer.worker.compute import REMEDY, ComputeThreads, ModelReplica, NonFiniteLossError
from emberscale_trainer.worker.keys import KeyPlanner, RequestTooLargeError
from emberscale_trainer.worker.leases import LeaseBook, ShardLease
from emberscale_trainer.worker.local_rows import LocalRows
from emberscale_trainer.worker.messages import report_work
from emberscale_trainer.worker.pipeline import NextTask, Pipeline
from emberscale_trainer.worker.rounds import RoundLengths, rounds_ruled_out
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.servers import (
    HistoryChangedError,
    Identity,
    LeaseFencedError,
    ParameterServers,
    RequestRefusedError,
    RoundSplitError,
    RoundTooLargeError,
)
from emberscale_trainer.worker.statistics import WorkerStatistics
from emberscale_trainer.worker.tasks import TaskFeed

_log = structlog.get_logger()

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_PASSING = (ConnectionLostError, HistoryChangedError, LeaseFencedError, RoundSplitError, RoundTooLargeError)


class FatalError(Exception):
    """The job cannot continue; `reason` is in CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class LeasesRevokedError(Exception):
    """The master has given leases of this worker to others."""


class Worker:
    """One worker process. `run` returns when the job is over."""

    def __init__(
        self,
        identity: ProcessIdentity,
        master: MasterClient,
        statistics: WorkerStatistics,
        metrics_address: str,
        stopping: threading.Event,
    ) -> None:
        self._identity = identity
        self._master = master
        self._statistics = statistics
        self._metrics_address = metrics_address
        self._stopping = stopping
        self._pipeline: Pipeline | None = None
        self._told_rounds: RoundsDecision | None = None
        self._generation = 0
        self._threads = ComputeThreads()

    def run(self) -> None:
        """Trains until there is nothing left.

        Raises FatalError for errors that would recur, and SupersededError if another process replaced this one.
        """
        try:
            registered = self._master.register(metrics_address=self._metrics_address)
        except JobOverError:
            _log.info("stopped", reason="NotRegistered")
            return
        _log.info("registered", metrics_address=self._metrics_address)
        job = TrainingJob.from_json(registered.manifest_json)
        ruled_out = rounds_ruled_out(job.spec, MemoryGauge(self._identity.memory_bytes).limit())
        self._lengths = RoundLengths(job.spec.hot_embeddings, job.spec.sharding.lease_timeout, ruled_out)
        self._leases = LeaseBook()
        self._heartbeat = Heartbeat(
            self._master, registered.heartbeat_seconds, self._report, self._heed, self._stopping
        )
        self._heartbeat.start()
        try:
            self._train(job)
        except JobOverError:
            _log.info("job_over", samples=self._statistics.total_samples)
        except NonFiniteLossError as error:
            raise FatalError("NonFiniteLoss", str(error)) from error
        except NonFiniteGradientError as error:
            raise FatalError("NonFiniteGradient", f"{error}: {REMEDY}") from error
        except DataUnavailableError as error:
            raise FatalError(error.reason, str(error)) from error
        except EntrypointError as error:
            raise FatalError(REASON, str(error)) from error
        except RequestTooLargeError as error:
            raise FatalError("BatchTooLarge", str(error)) from error
        if self._heartbeat.superseded:
            raise SupersededError("another process has this worker's index")

    def _train(self, job: TrainingJob) -> None:
        feed = TaskFeed(self._master, self._leases, job.spec.data, self._stopping)
        feed.next()
        dataset = self._master.call(
            self._master.stub.GetDataset, master_pb2.GetDatasetRequest(member=self._master.member)
        )
        source = BatchSource(
            dataset_from_wire(dataset),
            record_format(job.spec.data),
            job.spec.training.batch_size,
            job.spec.training.seed,
            job.spec.data.shuffling.enabled,
        )
        replica = ModelReplica(job)
        pause = _FIRST_PAUSE
        while True:
            before, routes = self._statistics.total_batches, Routes(self._master, self._stopping)
            try:
                self._run_pipeline(routes, job, feed, source, replica)
            except _PASSING as error:
                _log.warning("pipeline_restarts", reason=type(error).__name__, problem=str(error))
                if isinstance(error, LeaseFencedError):
                    self._leases.revoke({error.token})
                if isinstance(error, RoundSplitError):
                    self._lengths.split(error.token)
            except LeasesRevokedError:
                _log.warning("pipeline_restarts", reason="LeasesRevoked")
            pause = _FIRST_PAUSE if self._statistics.total_batches > before else min(_LONGEST_PAUSE, 2 * pause)
            routes.pause(pause)
            if self._stopping.is_set():
                raise JobOverError("the process is told to stop")

    def _run_pipeline(
        self, routes: Routes, job: TrainingJob, feed: TaskFeed, source: BatchSource, replica: ModelReplica
    ) -> None:
        if routes.table.generation != self._generation:
            if self._generation:
                self._leases.drop_all()
            self._generation = routes.table.generation
        try:
            self._run_on(routes, job, feed, source, replica)
        except RequestRefusedError as error:
            # a server that shuts down may answer anything
            if routes.in_force():
                raise
            _log.warning("pipeline_restarts", reason="RequestRefused", problem=str(error))

    def _run_on(
        self, routes: Routes, job: TrainingJob, feed: TaskFeed, source: BatchSource, replica: ModelReplica
    ) -> None:
        certificates = self._identity.certificates
        identity = Identity(
            self._identity.token,
            self._identity.index,
            secrets.randbits(64),
            certificates.client_context if certificates is not None else None,
        )

        dense = job.spec.optimizers.dense.type

        def make_planner(routing: RoutingTable, in_rounds: bool) -> KeyPlanner:
            return KeyPlanner(routing, replica.tables, replica.parameters, dense if in_rounds else None)

        def connect() -> ParameterServers:
            return ParameterServers(routes, identity, make_planner, replica.layout)

        with contextlib.closing(connect()) as pulls, contextlib.closing(connect()) as pushes:
            resumed = [replace(lease, start=committed) for lease, committed in self._leases.held()]
            self._pipeline = Pipeline(
                source,
                routes,
                make_planner,
                replica,
                pulls,
                pushes,
                self._leases,
                self._statistics,
                job.spec.training.prefetch_batches,
                job.spec.training.pull_ahead,
                lease_finished=self._heartbeat.beat_now,
                before_compute=self._threads.adopt,
                lengths=self._lengths,
                make_local=lambda: LocalRows(replica.tables, job.spec.optimizers.dense, replica.parameters),
            )
            try:
                self._pipeline.run(_resumed_then(resumed, feed.next))
            finally:
                self._pipeline = None

    def _report(self, request: master_pb2.HeartbeatRequest) -> None:
        request.leases.extend(
            master_pb2.LeaseProgress(token=token, committed=committed)
            for token, committed in self._leases.progress().items()
        )
        rounds = self._lengths.decision
        if rounds is not None and rounds != self._told_rounds:
            self._told_rounds = rounds
            _log.info("rounds", trained=rounds.active, reason=rounds.reason, message=rounds.message)
        report_work(request, self._statistics, rounds)

    def _heed(self, reply: master_pb2.HeartbeatReply) -> None:
        self._threads.want(reply.cpu_cores)
        lost = self._leases.revoke(set(reply.revoked_tokens))
        pipeline = self._pipeline
        if pipeline is None:
            return
        if reply.stop:
            pipeline.abort(JobOverError("the job has ended"))
        elif reply.generation > self._generation:
            pipeline.abort(HistoryChangedError(f"the job is at generation {reply.generation}"))
        elif lost:
            pipeline.abort(LeasesRevokedError())


def _resumed_then(resumed: list[ShardLease], next_task: NextTask) -> NextTask:
    """Yields the leases that an earlier pipeline left unfinished, then new ones."""

    def following(unwanted: Callable[[], bool]) -> ShardLease:
        return resumed.pop(0) if resumed else next_task(unwanted)

    return following
