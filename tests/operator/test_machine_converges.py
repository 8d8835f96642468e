"""The job machine converges, whatever happens to the instances and however many of its actions are lost."""

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_operator.machine import (
    Action,
    Create,
    Decision,
    Delete,
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
    PhaseNews,
    Policy,
    ReportExit,
    Resize,
    Resources,
    ShutDown,
    decide,
)
from emberscale_operator.machine.restarts import Backoff
from examples import examples
from training_jobs import training_spec

POLICY = Policy(Backoff(base=1.0, limit=30.0, reset_after=60.0), backoff_limit=1_000_000, stop_grace=10.0)
ROLES = (Role.MASTER, Role.PS, Role.WORKER)


@dataclass
class SimulatedBackend:
    """A backend without processes; the test decides when an instance ends that was asked to."""

    instances: dict[InstanceId, Instance] = field(default_factory=dict)
    ever: set[InstanceId] = field(default_factory=set)
    reported: list[InstanceId] = field(default_factory=list)

    def apply(self, action: Action, now: float) -> None:
        match action:
            case Create(id=new, resources=resources):
                if new not in self.ever:
                    self.ever.add(new)
                    name = str(new.incarnation)
                    self.instances[new] = Instance(new, InstanceState.RUNNING, resources, now, name=name)
            case Resize(id=old, resources=resources):
                if old in self.instances:
                    self.instances[old] = replace(self.instances[old], resources=resources)
            case Delete(id=old) | ShutDown(id=old):
                if old in self.instances and self.instances[old].live:
                    self.instances[old] = replace(self.instances[old], state=InstanceState.TERMINATING)
            case Kill(id=old):
                if old in self.instances and self.instances[old].live:
                    self.end(old, ExitReason.KILLED, now)
            case Forget(id=old):
                if old in self.instances and not self.instances[old].live:
                    del self.instances[old]
            case ReportExit(id=gone):
                self.reported.append(gone)

    def end(self, of: InstanceId, reason: ExitReason, now: float) -> None:
        instance = self.instances[of]
        deleted = instance.state is InstanceState.TERMINATING
        ended = InstanceExit(reason, 0 if reason is ExitReason.COMPLETED else 1, now, deleted)
        self.instances[of] = replace(instance, state=InstanceState.EXITED, exit=ended)

    def live(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.live]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.backend = SimulatedBackend()
        self.standing = JobStanding()
        self.master = MasterReport(answers=True, plan_heard=True, status=PhaseNews(JobPhase.TRAINING))
        self.now = 0.0
        self.wanted = {Role.PS: 0, Role.WORKER: 0}
        self.cores = 1.0

    @initialize(ps=st.integers(1, 3), workers=st.integers(1, 3))
    def plan(self, ps: int, workers: int) -> None:
        self.wanted = {Role.PS: ps, Role.WORKER: workers}

    def intent(self) -> JobIntent:
        limits = {"limits": {"cpu": self.cores}}
        ps, workers = ({"minReplicas": self.wanted[role], "resources": limits} for role in (Role.PS, Role.WORKER))
        return JobIntent(training_spec(ps=ps, worker=workers, master={"resources": limits}), policy=POLICY)

    def decide(self) -> Decision:
        observed, job = tuple(self.backend.instances.values()), self.intent()
        decision = decide(job, self.standing, self.master, observed, self.now)
        again = decide(job, decision.standing, self.master, observed, self.now)
        assert (again.standing, again.actions) == (decision.standing, decision.actions)
        self.standing = decision.standing
        return decision

    def apply(self, action: Action) -> None:
        self.backend.apply(action, self.now)
        if isinstance(action, ReportExit):
            self.standing = replace(self.standing, history=self.standing.history.with_reported(action.id))

    @rule(data=st.data())
    def some_actions_are_applied_in_any_order(self, data: st.DataObject) -> None:
        for action in data.draw(st.permutations(self.decide().actions)):
            if data.draw(st.booleans()):
                self.apply(action)

    @rule()
    def all_actions_are_applied_twice(self) -> None:
        for action in self.decide().actions * 2:
            self.apply(action)

    @precondition(lambda self: bool(self.backend.live()))
    @rule(data=st.data(), reason=st.sampled_from(list(ExitReason)))
    def an_instance_ends(self, data: st.DataObject, reason: ExitReason) -> None:
        self.backend.end(data.draw(st.sampled_from(self.backend.live())).id, reason, self.now)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.standing.rests)
    @rule(ps=st.integers(1, 4), workers=st.integers(1, 4), cores=st.sampled_from([1.0, 2.0]))
    def the_manifest_changes(self, ps: int, workers: int, cores: float) -> None:
        self.wanted, self.cores = {Role.PS: ps, Role.WORKER: workers}, cores

    @precondition(lambda self: not self.standing.rests)
    @rule()
    def the_job_ends(self) -> None:
        self.master = replace(self.master, end=PhaseNews(JobPhase.COMPLETE))

    @precondition(lambda self: not self.standing.rests and bool(self.backend.live()))
    @rule(data=st.data())
    def the_master_gives_a_member_up(self, data: st.DataObject) -> None:
        silent = data.draw(st.sampled_from(self.backend.live())).id
        member = MemberId(silent.role, silent.index, str(silent.incarnation))
        self.master = replace(self.master, silent=frozenset({member}))

    @invariant()
    def a_member_has_one_life_at_a_time(self) -> None:
        slots = [(instance.id.role, instance.id.index) for instance in self.backend.live()]
        assert len(slots) == len(set(slots))

    @invariant()
    def only_what_is_wanted_is_created(self) -> None:
        wanted = {} if self.standing.rests else {**self.wanted, Role.MASTER: 1}
        for action in self.decide().actions:
            if isinstance(action, Create):
                assert action.id.index < wanted.get(action.id.role, 0)
                assert action.id not in self.backend.ever

    def teardown(self) -> None:
        self.settle()
        if self.standing.rests:
            assert not self.backend.instances
            return
        wanted = {
            (role, index) for role, replicas in {**self.wanted, Role.MASTER: 1}.items() for index in range(replicas)
        }
        found = {(i.id.role, i.id.index): i.resources for i in self.backend.instances.values()}
        assert found == dict.fromkeys(wanted, Resources(self.cores))
        assert all(instance.state is InstanceState.RUNNING for instance in self.backend.instances.values())
        assert not self.decide().actions

    def settle(self) -> None:
        """Applies all actions, ends what was asked to end, and lets time pass, until nothing is left to do."""
        for _ in range(20):
            for action in self.decide().actions:
                self.apply(action)
            for instance in self.backend.live():
                if instance.state is InstanceState.TERMINATING:
                    self.backend.end(instance.id, ExitReason.COMPLETED, self.now)
            self.now += POLICY.backoff.limit


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(100), stateful_step_count=25)
