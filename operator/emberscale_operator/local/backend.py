"""One job's processes as a backend of the job machine."""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MANIFEST_ROLES, Role
from emberscale_api.job.running import JobPlan, JobStatus
from emberscale_api.job.status import RESTING, JobPhase
from emberscale_operator.controller import News, Observed
from emberscale_operator.local.embedded_redis import RedisWatch
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.local.requests import KillRequest, WatchedManifest
from emberscale_operator.local.snapshot import MemberExit, RunOutcome, RunView
from emberscale_operator.machine import (
    Action,
    Create,
    Delete,
    Demand,
    ExitReason,
    Forget,
    History,
    Instance,
    InstanceId,
    InstanceState,
    JobIntent,
    JobStanding,
    Kill,
    Policy,
    Resize,
)
from emberscale_operator.master_link import MasterAddress

_TICK_SECONDS = 0.1
_SILENCE_SECONDS = 10.0
_START_SILENCE_SECONDS = 30.0
_JOIN_SILENCE_SECONDS = 60.0
_SUSPEND_SECONDS = 120.0
_FULL_BYTES = 1 << 20
_LONG_IMPORT_SECONDS = 10.0


@dataclass
class StopRequests:
    """The user's requests, as plain flags: signal handlers set them, and must not wait for a lock."""

    suspend: bool = False
    kill: bool = False


def policy_of(spec: TrainingJobSpec) -> Policy:
    """Returns the waits of the job machine on this machine, with the limits of the manifest."""
    return Policy(
        backoff_limit=spec.run_policy.backoff_limit,
        silence=_SILENCE_SECONDS,
        start_silence=_START_SILENCE_SECONDS,
        join_silence=_JOIN_SILENCE_SECONDS,
        suspend_limit=_SUSPEND_SECONDS,
    )


class LocalBackend:
    """Observes and controls one job's processes; calls `observer` about ten times a second.

    `has_brain` says, at each look, whether the machine's brain is to run beside this job.
    """

    def __init__(
        self,
        manifest: WatchedManifest,
        policy: Policy,
        processes: JobProcesses,
        environment: JobEnvironment,
        master: MasterAddress,
        redis: RedisWatch | None,
        stop: StopRequests,
        folder: RunFolder,
        has_brain: Callable[[], bool],
        observer: Callable[[RunView], None],
    ) -> None:
        self._manifest = manifest
        self._policy = policy
        self._processes = processes
        self._environment = environment
        self._master = master
        self._redis = redis
        self._stop = stop
        self._folder = folder
        self._has_brain = has_brain
        self._observer = observer
        self._started_at = time.monotonic()
        self._observed: tuple[Instance, ...] = ()
        self._standing = JobStanding()
        self._exits: dict[InstanceId, MemberExit] = {}
        self._status: JobStatus | None = None
        self._plan: JobPlan | None = None

    async def observe(self, now: float) -> Observed | None:
        """Returns the processes; None once the job has ended and none is left, or nobody waits for that.

        Kills the one that a request names.

        Raises UnavailableError if the job's own Redis does not start.
        """
        instances = self._processes.observe(now)
        unwanted = KillRequest.take(self._folder, instances)
        if unwanted is not None:
            self._processes.kill(unwanted.id)
        if self._stop.kill or (self._standing.rests and not instances):
            return None
        if self._redis is not None:
            instances = self._redis.watch(instances, now)
        self._observed = instances
        masters = (i.id for i in instances if i.id.role is Role.MASTER and i.state is InstanceState.RUNNING)
        return Observed(self._intent(), instances, max(masters, default=None))

    async def recall(self) -> tuple[JobStanding, JobPlan | None]:
        """Returns an empty standing: every launch begins anew, and only the master remembers earlier ones."""
        return JobStanding(), None

    async def address_of(self, master: InstanceId) -> MasterAddress:
        """Returns the address that all masters of the run share."""
        return self._master

    async def report(self, news: News, now: float) -> float:
        """Tells the observer."""
        self._standing, self._status = news.decision.standing, news.status
        self._keep_address()
        if news.plan is not None and news.plan.phase not in RESTING:
            self._plan = news.plan
        if not news.before.rests:
            self._note_exits()
        self._observer(self._snapshot(now))
        return _TICK_SECONDS

    async def act(self, actions: Sequence[Action], now: float) -> float | None:
        """Starts, resizes and ends processes."""
        for action in actions:
            match action:
                case Create(instance, resources):
                    self._processes.create(instance, resources, now)
                case Resize(instance, resources):
                    self._processes.resize(instance, resources)
                case Delete(id=instance) | Forget(id=instance):
                    self._processes.delete(instance, now)
                case Kill(instance):
                    self._processes.kill(instance)
        return None

    @property
    def ended_by_master(self) -> bool:
        """Whether the job rests by its master's doing, which tells the brain so."""
        return self._standing.rests and self._standing.told

    def outcome(self) -> RunOutcome:
        """Returns the outcome of the run."""
        standing = self._standing
        # a job that rests without its master's doing was stopped before its state could be saved
        saved = standing.rests and (standing.told or standing.phase is not JobPhase.SUSPENDED)
        reason, message = "Interrupted", "stopped before its state could be saved"
        if saved and standing.told:
            reason, message = (self._status.reason, self._status.message) if self._status is not None else ("", "")
        elif saved:
            reason, message = standing.reason, f"{standing.message}; see {self._folder.logs}"
        elif standing.phase is JobPhase.SUSPENDED:
            message = f"{message}: {standing.message}"
        return RunOutcome(
            phase=standing.phase if saved else None,
            reason=reason,
            message=message,
            status=self._status,
            peak_memory=self._processes.peak_memory(),
            restarts=_restarts(standing.history),
            plan=self._plan,
        )

    def _intent(self) -> JobIntent:
        redis = (Demand(Role.REDIS, 2 if self._environment.flash_redis_url else 1),) if self._redis is not None else ()
        brain = (Demand(Role.BRAIN, 1),) if self._has_brain() else ()
        return JobIntent(
            spec=self._manifest.read(),
            suspend=self._stop.suspend,
            policy=self._policy,
            own=(*redis, *brain),
            awaits_store=self._redis is not None,
            planned=bool(self._environment.brain.address),
            memory_ceiling=psutil.virtual_memory().total,
        )

    def _keep_address(self) -> None:
        """Hides the master from other commands while the job saves its state to end: they could change nothing."""
        ends = self._stop.suspend or self._standing.rests
        saves = self._status is not None and self._status.phase is JobPhase.SAVING
        with contextlib.suppress(OSError):  # of a full disk: the next look tries again
            if ends or saves:
                self._folder.master_address.unlink(missing_ok=True)
            elif not self._folder.master_address.exists():
                self._folder.master_address.write_text(self._master.address, encoding="utf-8")

    def _note_exits(self) -> None:
        for instance in self._observed:
            ended = instance.exit
            if ended is None or ended.deleted or instance.id in self._exits or self._may_be_through(instance):
                continue
            limit = instance.resources.memory_bytes
            grows = ended.reason is ExitReason.OOM_KILLED and limit is not None
            grown = self._standing.grown.get(instance.id.role) if grows else None
            full = ended.reason is ExitReason.ERROR and shutil.disk_usage(self._folder.logs).free < _FULL_BYTES
            self._exits[instance.id] = MemberExit(instance.id.member, ended.reason, ended.code, limit, grown, full)

    def _may_be_through(self, instance: Instance) -> bool:
        """Whether a member may have completed because the job has ended, as far as the run has heard."""
        goes_on = not self._standing.rests and instance.id in self._standing.history.reported
        return instance.has_completed and not goes_on

    def _snapshot(self, now: float) -> RunView:
        return RunView(
            seconds=now - self._started_at,
            status=self._status,
            processes=tuple(view for view in self._processes.processes() if view.state is not InstanceState.EXITED),
            restarts=_restarts(self._standing.history),
            exits=tuple(self._exits.values()),
            suspending=self._stop.suspend,
            unforked=self._processes.unforked(now - _LONG_IMPORT_SECONDS),
        )


def _restarts(history: History) -> Mapping[str, int]:
    return {str(role): history.restarts(role) for role in MANIFEST_ROLES}
