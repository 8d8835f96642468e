"""The operator: the real job machine over simulated processes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.calls import CallError
from tests.simulation.master import Master, Plan
from tests.simulation.network import UnavailableError
from tests.simulation.world import Process, Signal, Task

from emberscale_api.environment import SUPERSEDED_EXIT_CODE
from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import ENDED, RESTING, JobPhase
from emberscale_api.shape import RoleShape
from emberscale_jobmaster.state import JobState
from emberscale_operator.machine import (
    Create,
    Delete,
    Demand,
    ExitReason,
    Forget,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    JobIntent,
    JobStanding,
    Kill,
    MasterReport,
    Policy,
    ReportExit,
    Resources,
    Scale,
    decide,
)

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_TICK_SECONDS = 1.4
"""How often it looks without being told to."""
_PLAN_SECONDS = 0.9
_CALL_SECONDS = 5.0


@dataclass
class _Running:
    instance: Instance
    process: Process


class Operator(Process):
    """One job's loop. It never dies here; the operator's own tests cover that."""

    def __init__(self, cluster: "Cluster") -> None:
        super().__init__(cluster.world, "operator")
        self.cluster = cluster
        self.final: JobState | None = None
        """The job's last state, once it is over."""
        self.failure = ""
        self._plan: Plan | None = None
        self._heard_at: float | None = None
        self._unanswered_since: float | None = None
        self._answers_since: float | None = None
        self._told_at: float | None = None
        self._intent = JobIntent(
            cluster.spec,
            policy=Policy(backoff_limit=cluster.spec.run_policy.backoff_limit, start_silence=30.0, join_silence=60.0),
            own=(Demand(Role.REDIS, 1),),
            awaits_store=True,
        )
        self._standing = JobStanding()
        self._running: dict[InstanceId, _Running] = {}
        self._changed: Signal[None] = Signal()

    def live(self) -> Task[None]:
        """Observes, decides and acts, and asks the master for its plan."""
        self.spawn(self._follow_plan())
        self.spawn(self._ping_redis())
        while self.final is None and not self.failure:
            self._act()
            self._changed = Signal()
            self.after(_TICK_SECONDS, self._changed.set)
            yield self._changed

    def look(self) -> None:
        """Looks as soon as possible."""
        self.after(0.0, self._changed.set)

    def process(self, role: Role, index: int) -> Process | None:
        """Returns the newest live process of a role and index."""
        for one in reversed(self._running.values()):
            process, key = one.process, one.instance.id
            if process.alive and key.role is role and key.index == index:
                return process
        return None

    def all_of(self, role: Role) -> list[Process]:
        """Returns all live processes of a role."""
        return [one.process for key, one in self._running.items() if key.role is role and one.process.alive]

    def note_exit(self, process: Process, code: int) -> None:
        """Records the end of a process."""
        reason = {0: ExitReason.COMPLETED, -9: ExitReason.KILLED, SUPERSEDED_EXIT_CODE: ExitReason.KILLED}.get(
            code, ExitReason.ERROR
        )
        for key, running in self._running.items():
            if running.process is process and running.instance.exit is None:
                left = InstanceExit(reason, code, self.world.now, running.instance.state is InstanceState.TERMINATING)
                running.instance = replace(running.instance, state=InstanceState.EXITED, exit=left)
                self.trace(f"{key} ended: {reason} {code}")
                self.after(0.0, self._changed.set)

    def start_second_master(self) -> list[Master]:
        """Starts a second master, as after the loss of a node: the first lives on unseen. Returns the old masters."""
        parted = []
        for running in self._running.values():
            if isinstance(running.process, Master) and running.process.alive:
                left = InstanceExit(ExitReason.NODE_LOST, -9, self.world.now)
                running.instance = replace(running.instance, state=InstanceState.EXITED, exit=left)
                parted.append(running.process)
        return parted

    def _act(self) -> None:
        observed = tuple(running.instance for running in self._running.values())
        pending = sorted(key.index for key, one in self._running.items() if one.instance.state is InstanceState.PENDING)
        waits = f"ps-{pending[0]}: Unschedulable" if pending else ""
        intent = replace(self._intent, spec=self.cluster.manifest, waits=waits)
        decision = decide(intent, self._standing, self._report(), observed, self.world.now)
        self._standing = decision.standing
        if decision.standing.phase in ENDED:
            if decision.standing.phase is JobPhase.FAILED and self._plan is not None and self.final is None:
                self.failure = f"{decision.standing.reason}: {decision.standing.message}"
                self.world.over = True
            return
        for action in decision.actions:
            match action:
                case Create(key, resources):
                    self._create(key, resources)
                case Kill(key, why) if key in self._running:
                    self.trace(why)
                    self.cluster.exited(self._running[key].process, -9)
                case Delete(key) if key in self._running:
                    running = self._running[key]
                    running.instance = replace(running.instance, state=InstanceState.TERMINATING)
                    self.cluster.exited(running.process, -9)
                case Forget(key) if key in self._running:
                    left = self._running.pop(key).process
                    if left.alive:
                        self.cluster.strays.append(left)
                case ReportExit(key, left_with):
                    self.spawn(self._report_exit(key, left_with))
                case Scale():
                    self._told_at = self.world.now
                    self.spawn(self._scale(action))

    def _report(self) -> MasterReport:
        plan = self._plan
        if plan is None:
            return MasterReport(unanswered_since=self._unanswered_since)
        return MasterReport(
            sizes={Role.PS: RoleShape(plan.servers), Role.WORKER: RoleShape(plan.workers)},
            plan_heard=True,
            asked=plan.asked,
            told_at=self._told_at,
            silent=frozenset(plan.given_up),
            drained=frozenset(plan.drained),
            joined=frozenset(
                MemberId(slot.role, slot.index, slot.process.incarnation)
                for slot in plan.job.members.slots.values()
                if slot.process is not None
            ),
            answers=self._unanswered_since is None,
            answers_since=self._answers_since,
            heard_at=self._heard_at,
            unanswered_since=self._unanswered_since,
        )

    def _create(self, key: InstanceId, resources: Resources) -> None:
        if key in self._running:
            return
        if key.role is Role.MASTER:
            self._heard_at = self._unanswered_since = None
        if key.role is Role.PS and key.index >= self.cluster.scenario.room:
            instance = Instance(key, InstanceState.PENDING, resources, self.world.now, name=name_of(key))
            self._running[key] = _Running(instance, Process(self.world, name_of(key)))
            return
        placing_seconds = self.cluster.scenario.placing_seconds
        if key.role is Role.PS and key.incarnation > 1 and placing_seconds:
            instance = Instance(key, InstanceState.PENDING, resources, self.world.now, name=name_of(key))
            self._running[key] = _Running(instance, Process(self.world, name_of(key)))
            self.after(placing_seconds, lambda: self._start(key, resources) if key in self._running else None)
        else:
            self._start(key, resources)

    def _start(self, key: InstanceId, resources: Resources) -> None:
        process = self.cluster.start(key)
        ready = key.role is Role.REDIS
        instance = Instance(key, InstanceState.RUNNING, resources, self.world.now, name=name_of(key), ready=ready)
        self._running[key] = _Running(instance, process)

    def _report_exit(self, key: InstanceId, left: InstanceExit) -> Task[None]:
        member = MemberId(key.role, key.index, name_of(key))
        try:
            yield self.cluster.call_master(
                self, lambda master: master.report_exit(member, left.code, left.reason.value)
            )
        except (UnavailableError, CallError):
            return
        self._standing = replace(self._standing, history=self._standing.history.with_reported(key))

    def _scale(self, edit: Scale) -> Task[None]:
        try:
            yield self.cluster.call_master(self, lambda master: master.scale(edit))
        except (UnavailableError, CallError):
            return  # the next plan shows that the edit was not heard

    def _follow_plan(self) -> Task[None]:
        while self.final is None:
            yield self.sleep(_PLAN_SECONDS)
            try:
                plan = yield self.cluster.call_master(self, lambda master: master.plan(), -_CALL_SECONDS)
            except UnavailableError:
                if self._unanswered_since is None:
                    self._unanswered_since = self.world.now
                continue
            except CallError:
                plan = self._plan
            if self._answers_since is None or self._unanswered_since is not None:
                self._answers_since = self.world.now
            self._heard_at, self._unanswered_since = self.world.now, None
            if plan is None or self._plan is None or plan.asked_for != self._plan.asked_for:
                self._changed.set()
            self._plan = plan
            if plan is None:
                continue
            wanted = self.cluster.manifest.ps.replicas or 0
            begins = self.world.now < self.cluster.scenario.quiet_after
            waits = plan.phase is JobPhase.PENDING or not plan.job.clock.training_seconds
            if waits and wanted > self.cluster.scenario.room and not begins:
                self.cluster.edit_back()
            if plan.phase in RESTING:
                self.final = plan.job
                self.world.over = True

    def _ping_redis(self) -> Task[None]:
        while self.final is None:
            yield self.sleep(1.0)
            asked = self.process(Role.REDIS, 0)
            since: float | None = None
            try:
                yield self.cluster.call_redis(self, lambda redis: redis.ping())
            except UnavailableError:
                since = self.world.now
            for running in self._running.values():
                if running.process is asked:
                    since = since and (running.instance.unanswered_since or since)
                    running.instance = replace(running.instance, unanswered_since=since)


def name_of(key: InstanceId) -> str:
    """Returns the name of a process, which is also its address and its incarnation."""
    return f"{key.role.value}-{key.index}.{key.incarnation}"
