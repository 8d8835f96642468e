"""The loop that runs a job on this machine: observe, reconcile, act."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from emberscale_api.job import TrainingJobSpec
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local.backend import LocalBackend
from emberscale_operator.local.embedded_redis import EmbeddedRedis, ping
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.local.errors import RedisUnavailableError
from emberscale_operator.local.master_link import MasterLink
from emberscale_operator.local.plan import ENDED_PHASES, demands_of, master_demand
from emberscale_operator.local.snapshot import MemberExit, Outcome, Snapshot
from emberscale_operator.machine import (
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
    Role,
    Wait,
    advance,
    grown_memory,
    reconcile,
)

_TICK_SECONDS = 0.1
_REDIS_TIMEOUT_SECONDS = 20.0
_SUSPEND_TIMEOUT_SECONDS = 120.0


@dataclass
class StopRequests:
    """What people asked for. Plain flags: signal handlers set them, and may wait for no lock."""

    suspend: bool = False
    kill: bool = False


class JobLoop:
    """One job's loop, in the thread that its processes are tied to; `wake` ends a pause early.

    `has_brain` says, at each look, whether the machine's brain is to run beside this job.
    """

    def __init__(
        self,
        spec: TrainingJobSpec,
        policy: Policy,
        backend: LocalBackend,
        link: MasterLink,
        environment: JobEnvironment,
        redis: EmbeddedRedis | None,
        stop: StopRequests,
        wake: threading.Event,
        logs: Path,
        has_brain: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._backend = backend
        self._link = link
        self._environment = environment
        self._redis = redis
        self._redis_ready = redis is None
        self._stop = stop
        self._wake = wake
        self._logs = logs
        self._has_brain = has_brain
        self._started_at = time.monotonic()
        self._history = History()
        self._exits: dict[InstanceId, MemberExit] = {}
        self._suspension: grpc.Future[pb.SuspendReply] | None = None
        self._ended_at: float | None = None
        self._ended_phase: pb.Phase.ValueType = pb.PHASE_UNSPECIFIED
        self._failure: Fail | None = None
        self._plan: pb.Plan | None = None
        self._grown: dict[Role, int] = {}

    def run(self, observer: Callable[[Snapshot], None]) -> Outcome:
        """Runs the job to its end, telling `observer` about ten times a second. Raises RedisUnavailableError."""
        while not self._stop.kill:
            now = time.monotonic()
            observed = self._backend.observe(now)
            self._history = advance(self._history, observed, self._policy.backoff)
            for instance in self._link.take_reported():
                self._history = self._history.with_reported(instance)
            if self._ended_at is None:
                self._follow_suspension(now)
                self._follow_phase(now)
                self._note_exits(observed)
            elif not observed:
                break
            for action in reconcile(self._policy, self._desired(now), observed, self._history, now):
                self._apply(action, now)
            observer(self._snapshot(now))
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        self._backend.kill_all()
        return self._outcome()

    def _desired(self, now: float) -> Desired:
        if self._ended_at is not None:
            return Desired((), self._ended_at)
        redis = (Demand(Role.REDIS, 1),) if self._redis is not None else ()
        store = (*redis, *((Demand(Role.BRAIN, 1),) if self._has_brain() else ()))
        if not self._store_ready(now):
            return Desired(store)
        plan = self._link.plan
        if plan is not None and plan.phase not in ENDED_PHASES:
            self._plan = plan
        if plan is None and self._environment.brain_address and self._spec.leaves_sizes_open:
            return Desired((*store, master_demand(self._spec)))
        return Desired((*store, *demands_of(plan, self._spec, self._grown)))

    def _store_ready(self, now: float) -> bool:
        """Whether the store has answered once: the rest starts after it, and outlives its restarts."""
        if self._redis_ready or self._redis is None:
            return True
        if ping(self._redis.url) is None:
            self._redis_ready = True
        elif self._history.of(Role.REDIS, 0).counted or now - self._started_at > _REDIS_TIMEOUT_SECONDS:
            log = self._logs / f"{Role.REDIS}-0.log"
            raise RedisUnavailableError(f"Redis cannot be had: the job's own redis-server did not start; see {log}")
        return self._redis_ready

    def _follow_suspension(self, now: float) -> None:
        if not self._stop.suspend:
            return
        if self._suspension is None:
            if self._link.status is None:
                self._end_untold(now)  # nothing has begun: there is nothing to save
                return
            self._suspension = self._link.suspend(_SUSPEND_TIMEOUT_SECONDS)
        elif self._suspension.done():
            if self._suspension.exception() is None:
                self._end(now, pb.SUSPENDED)
            else:
                # it is wanted that the run ends all the same; the last checkpoint is there to go on from
                self._end_untold(now)

    def _follow_phase(self, now: float) -> None:
        plan, status = self._link.plan, self._link.status
        for phase in (plan.phase if plan else None, status.phase if status else None):
            if phase in ENDED_PHASES and self._ended_at is None:
                self._end(now, phase)

    def _end(self, now: float, phase: "pb.Phase.ValueType") -> None:
        """The master has ended the job, and tells its members."""
        self._ended_at = now
        self._ended_phase = phase
        self._link.refresh_status()

    def _end_untold(self, now: float) -> None:
        """The run ends without its members having been told: there is no use in waiting for them to go."""
        self._ended_at = now - self._policy.stop_grace

    def _note_exits(self, observed: Sequence[Instance]) -> None:
        for instance in observed:
            ended = instance.exit
            if ended is not None and not ended.deleted and instance.id not in self._exits:
                limit, grown = instance.resources.memory_bytes, None
                if ended.reason is ExitReason.OOM_KILLED and limit is not None:
                    grown = self._grow(instance.id.role, limit)
                self._exits[instance.id] = MemberExit(instance.id.member, ended.reason, ended.code, limit, grown)

    def _grow(self, role: Role, limit: int) -> int:
        """What all of a role get once one of them ran out of `limit` bytes; not more than the machine has."""
        grown = min(grown_memory(limit), psutil.virtual_memory().total)
        self._grown[role] = max(grown, self._grown.get(role, 0))
        return self._grown[role]

    def _apply(self, action: Action, now: float) -> None:
        match action:
            case Create(instance, resources):
                self._backend.create(instance, resources, now)
            case Resize(instance, resources):
                self._backend.resize(instance, resources)
            case Delete(instance):
                if instance.role is not Role.MASTER or self._ended_at is None or self._knows_end(now):
                    self._backend.delete(instance, now)
            case ReportExit(instance, ended):
                self._link.report_exit(instance, self._environment.incarnation(instance), ended)
            case Fail():
                self._failure = action
                self._ended_phase = pb.FAILED
                self._end_untold(now)
            case Wait():
                pass  # the tick is shorter

    def _knows_end(self, now: float) -> bool:
        """Whether the master's last status, with its members' last reports, is here, or has been waited for enough."""
        self._link.refresh_status()
        status, ended_at = self._link.status, self._ended_at
        if status is not None and status.phase == self._ended_phase:
            return True
        return ended_at is not None and now >= ended_at + self._policy.stop_grace

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
            suspending=self._stop.suspend,
        )

    def _outcome(self) -> Outcome:
        status = self._link.status
        reason, message = self._explanation(status)
        return Outcome(
            phase=self._ended_phase,
            reason=reason,
            message=message,
            status=status,
            peak_memory=self._backend.peak_memory(),
            restarts=self._restarts(),
            seconds=time.monotonic() - self._started_at,
            plan=self._plan,
        )

    def _explanation(self, status: pb.JobStatus | None) -> tuple[str, str]:
        if self._failure is not None:
            return self._failure.reason, f"{self._failure.message}; see {self._logs}"
        if self._ended_phase != pb.PHASE_UNSPECIFIED:
            return (status.reason, status.message) if status is not None else ("", "")
        problem = self._suspension.exception() if self._suspension is not None and self._suspension.done() else None
        why = f": {problem.details()}" if isinstance(problem, grpc.Call) and problem.details() else ""
        return "Interrupted", f"stopped before its state could be saved{why}"
