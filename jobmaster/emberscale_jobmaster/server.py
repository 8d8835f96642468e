"""Assembles the master: store, runtime, conductor, metrics and the gRPC server, started and stopped in order."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberscale_api import metrics
from emberscale_api.environment import ProcessIdentity
from emberscale_api.errors import UnavailableError
from emberscale_api.job import RoleSpec, TrainingJob, TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.metrics_server import start_metrics_server
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc import tls
from emberscale_api.rpc.token import CHANNEL_OPTIONS, TokenCheck
from emberscale_api.telemetry import ProcessMetrics, labelled
from emberscale_jobmaster import flash
from emberscale_jobmaster.brain_link import BrainLink
from emberscale_jobmaster.conductor import Conductor
from emberscale_jobmaster.figures import committed_samples, due_parity, phase_of
from emberscale_jobmaster.losses import is_protected
from emberscale_jobmaster.messages import wire_member
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.service import STEERING, MasterService
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.status import plan
from emberscale_jobmaster.store import JobStore

_SPARE_THREADS = 64
_CALLS_PER_MEMBER = 3
"""Threads per member: for its heartbeat, its wait for a task or a routing table, and one more call."""
_OPEN_REPLICAS = 256
"""The number of members of a role that get threads if the manifest does not bound it."""
_GRACE_SECONDS = 0.5

_log = structlog.get_logger()


class MasterProcess:
    """One running master; without the address of a brain, its job keeps the sizes that it has.

    `on_deposed` is called when another master has taken over, `on_shutdown` when this one is asked to end. `alone`: no
    other process of the job is alive. With an `operator_token`, only its holder may steer the job.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        job: TrainingJob,
        store: JobStore,
        on_deposed: Callable[[], None],
        on_shutdown: Callable[[], None],
        brain_address: str = "",
        brain_token: str = "",
        brain_authority: bytes | None = None,
        alone: bool = False,
        operator_token: str = "",
    ) -> None:
        self._identity = identity
        self._alone = alone
        self._store = store
        self.runtime = JobRuntime(job, identity.job_uid, store, on_deposed)
        self._brain: BrainLink | None = None
        if brain_address:
            self._brain = BrainLink(self.runtime, brain_address, brain_token, brain_authority)
        conductor = Conductor(self.runtime, identity.token, identity.authority, identity.flash_redis_url)
        self._conductor = threading.Thread(target=conductor.run, name="conductor")
        members = sum(_most(role) for role in (job.spec.ps, job.spec.worker))
        self._server = grpc.server(
            ThreadPoolExecutor(_SPARE_THREADS + _CALLS_PER_MEMBER * members, thread_name_prefix="call"),
            interceptors=[TokenCheck(identity.token, operator_token, STEERING)],
            options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)),
        )
        rpc.add_MasterServicer_to_server(MasterService(self.runtime, self._own_status, on_shutdown), self._server)
        self._address = f"{identity.listen_host}:{identity.master_address.rpartition(':')[2]}"
        self._bound = False
        self._process = psutil.Process()
        self._peak_memory = 0
        self._metrics_address = ""

    def start(self) -> None:
        """Takes over the job and serves; may be called again if it raised.

        Raises StoreUnavailableError, UnreadableStateError and UnavailableError.
        """
        self._bind()
        self.runtime.take_over(
            awaits_plan=self._brain is not None,
            alone=self._alone,
            has_flash_store=bool(self._identity.flash_redis_url),
        )
        registry = CollectorRegistry()
        registry.register(JobMetrics(self.runtime))
        registry.register(ProcessMetrics())
        self._metrics_server = start_metrics_server(self._identity.metrics_port, self._identity.listen_host, registry)
        self._metrics_address = f"{self._identity.advertised_host}:{self._metrics_server.server_port}"
        self.runtime.start()
        self._conductor.start()
        self._server.start()
        if self._brain is not None:
            self._brain.start()
        _log.info("serving", address=self._address, term=self._store.term, metrics_address=self._metrics_address)

    def stop(self) -> None:
        """Ends all calls and threads, promptly."""
        if self._brain is not None:
            self._brain.finish()
        stopped = self._server.stop(_GRACE_SECONDS)
        self.runtime.close()
        if self._brain is not None:
            self._brain.close()
        stopped.wait()
        self._conductor.join()
        self._metrics_server.shutdown()
        self._metrics_server.server_close()

    def _bind(self) -> None:
        """Binds the address, only once: a server cannot bind its own address again."""
        if self._bound:
            return
        try:
            tls.bind(self._server, self._address, self._identity.certificates)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self._address}: is another process there?") from error
        self._bound = True

    def _own_status(self) -> pb.MemberStatus:
        """Returns the master's status as a member of its job; every term is one start of a master."""
        memory, times = self._process.memory_info().rss, self._process.cpu_times()
        self._peak_memory = max(self._peak_memory, memory)
        return pb.MemberStatus(
            member=wire_member(Role.MASTER, 0, self._identity.incarnation),
            alive=True,
            registrations=self._store.term,
            memory_bytes=memory,
            peak_memory_bytes=self._peak_memory,
            cpu_seconds=times.user + times.system,
            metrics_address=self._metrics_address,
        )


def _most(role: RoleSpec) -> int:
    return max(role.replicas or 0, role.max_replicas or _OPEN_REPLICAS)


class JobMetrics(Collector):
    """Reads a job's state and observations at every scrape."""

    def __init__(self, runtime: JobRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        state, seen, spec = self._runtime.view()
        current = phase_of(state, spec)
        alive = {role.value: len(state.members.live(role)) for role in (Role.PS, Role.WORKER)}
        yield labelled(GaugeMetricFamily, metrics.MEMBERS_ALIVE, "Live members, by role", ["role"], alive)
        planned = {pb.Role.Name(part.role).lower(): part.replicas for part in plan(state, spec).roles}
        yield labelled(GaugeMetricFamily, metrics.PLANNED_REPLICAS, "Planned members, by role", ["role"], planned)
        text = "How many times as long as the median of its peers a member takes for the same work"
        slower = {tuple(name.rsplit("-", 1)): factor for name, factor in seen.slower(state.members).items()}
        yield labelled(GaugeMetricFamily, metrics.MEMBER_SLOWNESS_RATIO, text, ["role", "index"], slower)
        samples, expected = committed_samples(state, spec), spec.training.epochs * state.training_records
        yield GaugeMetricFamily(
            metrics.JOB_PROGRESS_RATIO, "Share of all epochs' samples that is trained", samples / (expected or 1)
        )
        throughput = seen.meter.rate(self._runtime.now()) if current is JobPhase.TRAINING else None
        yield GaugeMetricFamily(metrics.JOB_THROUGHPUT, "Recent throughput in samples per second", throughput or 0.0)
        yield GaugeMetricFamily(metrics.LOSS, "Recent progressive log loss", seen.window.loss())
        yield GaugeMetricFamily(metrics.AUC_RATIO, "Recent progressive area under the ROC curve", seen.window.auc())
        yield GaugeMetricFamily(metrics.SHARDS_LEASED, "Live leases", len(state.ledger.leases))
        yield CounterMetricFamily(metrics.LEASES_EXPIRED_TOTAL, "Lapsed leases", seen.lapses)
        yield CounterMetricFamily(metrics.RECOVERIES_TOTAL, "Roll-backs to a checkpoint", state.recoveries)
        yield from _flash(state, spec)
        yield from _protection(state, spec)


def _protection(state: JobState, spec: TrainingJobSpec) -> Iterator[Metric]:
    rebuilt = state.rebuilt
    if due_parity(state, spec):
        text = "Whether lost parameter servers can be rebuilt from parity"
        yield GaugeMetricFamily(metrics.JOB_PROTECTED, text, is_protected(state))
    elif not rebuilt.count:
        return
    yield CounterMetricFamily(metrics.JOB_REBUILDS_TOTAL, "Parameter servers rebuilt from parity", rebuilt.count)
    yield GaugeMetricFamily(metrics.JOB_REBUILD_SECONDS, "Time that the last rebuild took", rebuilt.seconds)
    move = state.move
    if move is not None and move.lost:
        sent = sum(report.copied_bytes for report in move.copied.values())
        yield GaugeMetricFamily(metrics.JOB_REBUILD_SENT_BYTES, "Bytes that the rebuild under way has sent", sent)


def _flash(state: JobState, spec: TrainingJobSpec) -> Iterator[Metric]:
    newest = state.flash
    if flash.is_wanted(newest, spec):
        fails = CheckpointPurpose.FLASH in state.troubles
        yield GaugeMetricFamily(metrics.FLASH_DEGRADED, "Whether the last attempt at a flash checkpoint failed", fails)
        if newest.checkpoint:
            age = max(0.0, state.clock.active_seconds - newest.taken_at)
            yield GaugeMetricFamily(metrics.FLASH_AGE_SECONDS, "Age of the newest flash checkpoint", age)
            yield GaugeMetricFamily(metrics.FLASH_SECONDS, "Time that it took", newest.seconds)
            yield GaugeMetricFamily(metrics.FLASH_HELD_SECONDS, "Time for which it held pushes", newest.held_seconds)
            yield GaugeMetricFamily(metrics.FLASH_WRITTEN_BYTES, "Bytes that it added", newest.written_bytes)
            yield GaugeMetricFamily(metrics.FLASH_BYTES, "Bytes of it and of what it builds on", newest.bytes)
