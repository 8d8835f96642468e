"""The loop that runs a job on this machine: observe, reconcile, act."""

import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from emberscale_api.job import TrainingJob
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local.backend import COMMANDS, Launch, LocalBackend, ProcessView
from emberscale_operator.local.embedded_redis import EmbeddedRedis, check_given_redis, configure_redis, ping
from emberscale_operator.local.environment import JobEnvironment, numba_cache_folder
from emberscale_operator.local.errors import RedisUnavailableError
from emberscale_operator.local.folder import RunFolder, make_socket_folder, remove_socket_folder
from emberscale_operator.local.master_link import MasterLink
from emberscale_operator.local.plan import ENDED_PHASES, demands_of, initial_demands, policy_of
from emberscale_operator.local.port import ReservedPort, reserve_port
from emberscale_operator.reconcile import (
    Action,
    Create,
    Delete,
    Demand,
    Desired,
    ExitReason,
    Fail,
    History,
    Instance,
    InstanceId,
    InstanceState,
    Policy,
    ReportExit,
    Resize,
    Resources,
    Role,
    Wait,
    advance,
    reconcile,
)

_TICK_SECONDS = 0.1
_REDIS_TIMEOUT_SECONDS = 20.0
_SUSPEND_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class MemberExit:
    """A process that ended while it was wanted."""

    name: str
    reason: ExitReason
    code: int
    memory_limit: int | None


@dataclass(frozen=True)
class Snapshot:
    """What is known of the running job, `seconds` after its start.

    `status` is None until the master was reached; `exits` are all since the start, `restarts` by role.
    """

    seconds: float
    status: pb.JobStatus | None
    processes: tuple[ProcessView, ...]
    restarts: Mapping[str, int]
    exits: tuple[MemberExit, ...]
    suspending: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    `phase` is PHASE_UNSPECIFIED for a run that was cut short. `peak_memory` is in bytes by member, `restarts` by role.
    """

    phase: "pb.Phase.ValueType"
    reason: str
    message: str
    status: pb.JobStatus | None
    peak_memory: Mapping[str, int]
    restarts: Mapping[str, int]
    seconds: float


class LocalJob:
    """One job on this machine, from the start of its processes to the end of the last one.

    Entering it takes what the job needs of the machine and raises StartError if that cannot be had; `run` blocks until
    the job has ended. Leaving it kills whatever is left. All of that must happen in one thread that lives as long as
    the job: the processes die with it. `suspend` and `kill` may be called from signal handlers.
    """

    def __init__(
        self,
        job: TrainingJob,
        uid: str,
        folder: RunFolder,
        redis_url: str | None = None,
        master_port: int = 0,
        commands: Mapping[Role, Sequence[str]] = COMMANDS,
        policy: Policy | None = None,
    ) -> None:
        self._job = job
        self._uid = uid
        self._folder = folder
        self._redis_url = redis_url
        self._master_port = master_port
        self._commands = commands
        self._wake = threading.Event()
        self._suspend_asked = False
        self._kill_asked = False
        self._policy = policy or policy_of(job.spec)
        self._history = History()
        self._ended_at: float | None = None
        self._ended_phase: pb.Phase.ValueType = pb.PHASE_UNSPECIFIED
        self._failure: Fail | None = None
        self._suspension: grpc.Future[pb.SuspendReply] | None = None
        self._redis_ready = False
        self._exits: dict[InstanceId, MemberExit] = {}

    def __enter__(self) -> Self:
        self._port: ReservedPort = reserve_port(self._master_port)
        if self._redis_url is not None:
            try:
                check_given_redis(self._redis_url)
            except RedisUnavailableError:
                self._port.__exit__(None, None, None)
                raise
        self._sockets = make_socket_folder(self._folder.sockets)
        self._started_at = time.monotonic()
        self._folder.manifest.write_text(self._job.to_json(), encoding="utf-8")
        token = self._folder.write_token()
        self._redis: EmbeddedRedis | None = None
        if self._redis_url is None:
            self._redis = configure_redis(self._folder.state, self._sockets)
        self._environment = JobEnvironment(
            job_name=self._job.metadata.name,
            job_uid=self._uid,
            launch=uuid.uuid4().hex[:12],
            master_address=self._port.address,
            token_file=self._folder.token.resolve(),
            manifest_file=self._folder.manifest.resolve(),
            redis_url=self._redis.url if self._redis else self._redis_url or "",
            socket_folder=self._sockets,
            numba_cache=numba_cache_folder(os.environ, self._folder.state.resolve() / "numba"),
        )
        self._backend = LocalBackend(self._launch_of, self._folder.logs, self._policy.stop_grace)
        self._link = MasterLink(self._port.address, token, self._wake.set)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.kill_all()
        self._link.close()
        self._port.__exit__(None, None, None)
        self._folder.token.unlink(missing_ok=True)
        remove_socket_folder(self._folder.sockets)
        if self._redis is not None:
            self._redis.configuration.unlink(missing_ok=True)

    def suspend(self) -> None:
        """Asks the job to save its state and end."""
        # no event is set here: a signal handler that interrupts the loop inside of that event's lock would hang
        self._suspend_asked = True

    def kill(self) -> None:
        """Ends every process now; the state is that of the last checkpoint."""
        self._kill_asked = True

    def run(self, observer: Callable[[Snapshot], None]) -> Outcome:
        """Runs the job to its end; `observer` is called about ten times a second. Raises RedisUnavailableError."""
        while not self._kill_asked:
            now = time.monotonic()
            observed = self._backend.observe(now)
            self._history = advance(self._history, observed, self._policy.backoff)
            for instance in self._link.take_reported():
                self._history = self._history.with_reported(instance)
            self._follow_suspension(now)
            self._note_end(now)
            self._note_exits(observed)
            desired = Desired(self._demands() if self._ended_at is None else (), self._ended_at)
            if self._ended_at is not None and not observed:
                break
            actions = reconcile(self._policy, desired, observed, self._history, now)
            for action in actions:
                self._apply(action, now)
            observer(self._snapshot(now))
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        self._backend.kill_all()
        return self._outcome()

    def _demands(self) -> tuple[Demand, ...]:
        store = (Demand(Role.REDIS, 1),) if self._redis else ()
        if not self._store_ready():
            return store
        plan = self._link.plan
        spec = self._job.spec
        return (*store, *(demands_of(plan, spec) if plan is not None else initial_demands(spec)))

    def _store_ready(self) -> bool:
        """Whether the store has answered once; the master starts after it, and is restarted as it likes."""
        if self._redis is None or self._redis_ready:
            return True
        problem = ping(self._redis.url)
        if problem is None:
            self._redis_ready = True
            return True
        late = time.monotonic() - self._started_at > _REDIS_TIMEOUT_SECONDS
        if self._history.of(Role.REDIS, 0).counted or late:
            log = self._folder.logs / "redis-0.log"
            raise RedisUnavailableError(f"Redis cannot be had: the job's own redis-server did not start; see {log}")
        return False

    def _follow_suspension(self, now: float) -> None:
        if not self._suspend_asked or self._ended_at is not None:
            return
        if self._suspension is None:
            if self._link.status is None:
                self._end_unannounced(now)  # nothing has begun: there is nothing to save
                return
            self._suspension = self._link.suspend(_SUSPEND_TIMEOUT_SECONDS)
        elif self._suspension.done():
            if self._suspension.exception() is None:
                self._ended_phase = pb.SUSPENDED
                self._ended_at = now
                self._link.refresh_status()
            else:
                # the person wants it to end all the same; the last checkpoint is there to go on from
                self._end_unannounced(now)

    def _end_unannounced(self, now: float) -> None:
        """The job ends without its members having been told: there is no use in waiting for them to go."""
        self._ended_at = now - self._policy.stop_grace

    def _note_end(self, now: float) -> None:
        if self._ended_at is not None:
            return
        plan, status = self._link.plan, self._link.status
        for phase in (plan.phase if plan else None, status.phase if status else None):
            if phase in ENDED_PHASES:
                self._ended_at = now
                self._ended_phase = phase
                self._link.refresh_status()
                return

    def _note_exits(self, observed: Sequence[Instance]) -> None:
        if self._ended_at is not None:
            return
        for instance in observed:
            ended = instance.exit
            if ended is not None and not ended.deleted and instance.id not in self._exits:
                limit = instance.resources.memory_bytes
                self._exits[instance.id] = MemberExit(instance.id.member, ended.reason, ended.code, limit)

    def _apply(self, action: Action, now: float) -> None:
        match action:
            case Create(instance, resources):
                self._backend.create(instance, resources, now)
            case Resize(instance, resources):
                self._backend.resize(instance, resources)
            case Delete(instance):
                if instance.role is Role.MASTER and self._ended_at is not None:
                    self._link.refresh_status()
                self._backend.delete(instance, now)
            case ReportExit(instance, ended):
                self._link.report_exit(instance, self._environment.incarnation(instance), ended)
            case Fail():
                self._failure = action
                self._end_unannounced(now)
                self._ended_phase = pb.FAILED
            case Wait():
                pass  # the tick is shorter

    def _launch_of(self, instance: InstanceId, resources: Resources) -> Launch:
        environment = self._environment.of(instance, resources, os.environ)
        if instance.role is Role.REDIS and self._redis is not None:
            return self._redis.launch(environment)
        return Launch(self._commands[instance.role], environment, self._environment.incarnation(instance))

    def _restarts(self) -> dict[str, int]:
        roles = (Role.MASTER, Role.PS, Role.WORKER)
        return {str(role): self._history.restarts(role) for role in roles}

    def _snapshot(self, now: float) -> Snapshot:
        return Snapshot(
            seconds=now - self._started_at,
            status=self._link.status,
            processes=tuple(view for view in self._backend.processes() if view.state is not InstanceState.EXITED),
            restarts=self._restarts(),
            exits=tuple(self._exits.values()),
            suspending=self._suspend_asked,
        )

    def _outcome(self) -> Outcome:
        status = self._link.status
        if self._failure is not None:
            reason, message = self._failure.reason, f"{self._failure.message}; see {self._folder.logs}"
        elif self._ended_phase == pb.PHASE_UNSPECIFIED:
            reason, message = "Interrupted", "stopped before its state could be saved"
        else:
            reason = status.reason if status else ""
            message = status.message if status else ""
        return Outcome(
            phase=self._ended_phase,
            reason=reason,
            message=message,
            status=status,
            peak_memory=self._backend.peak_memory(),
            restarts=self._restarts(),
            seconds=time.monotonic() - self._started_at,
        )
