"""Whatever happens to the instances, and however many of its actions are lost, the reconciler gets there."""

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberscale_operator.machine import (
    Action,
    Backoff,
    Create,
    Delete,
    Demand,
    Desired,
    ExitReason,
    History,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Policy,
    ReportExit,
    Resize,
    Resources,
    Role,
    advance,
    reconcile,
)

POLICY = Policy(Backoff(base=1.0, limit=30.0, reset_after=60.0), backoff_limit=1_000_000, stop_grace=10.0)
ROLES = (Role.MASTER, Role.PS, Role.WORKER)


@dataclass
class SimulatedBackend:
    """A backend without processes; what ends when it is asked to is decided from outside."""

    instances: dict[InstanceId, Instance] = field(default_factory=dict)
    ever: set[InstanceId] = field(default_factory=set)
    reported: list[InstanceId] = field(default_factory=list)

    def apply(self, action: Action, now: float) -> None:
        match action:
            case Create(id=new, resources=resources):
                if new not in self.ever:
                    self.ever.add(new)
                    self.instances[new] = Instance(new, InstanceState.RUNNING, resources, now)
            case Resize(id=old, resources=resources):
                if old in self.instances:
                    self.instances[old] = replace(self.instances[old], resources=resources)
            case Delete(id=old):
                instance = self.instances.get(old)
                if instance is None:
                    return
                if instance.live:
                    self.instances[old] = replace(instance, state=InstanceState.TERMINATING)
                else:
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


class Reconciliation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.backend = SimulatedBackend()
        self.history = History()
        self.now = 0.0
        self.desired = Desired(())

    @initialize(ps=st.integers(1, 3), workers=st.integers(1, 3))
    def plan(self, ps: int, workers: int) -> None:
        self.desired = Desired(self.demands(ps, workers, Resources(1.0)))

    def demands(self, ps: int, workers: int, resources: Resources) -> tuple[Demand, ...]:
        return (Demand(Role.MASTER, 1), Demand(Role.PS, ps, resources), Demand(Role.WORKER, workers, resources))

    def decide(self) -> tuple[Action, ...]:
        observed = tuple(self.backend.instances.values())
        self.history = advance(self.history, observed, POLICY.backoff)
        actions = reconcile(POLICY, self.desired, observed, self.history, self.now)
        again = advance(self.history, observed, POLICY.backoff)
        assert reconcile(POLICY, self.desired, observed, again, self.now) == actions
        return actions

    def apply(self, action: Action) -> None:
        self.backend.apply(action, self.now)
        if isinstance(action, ReportExit):
            self.history = self.history.with_reported(action.id)

    @rule(data=st.data())
    def some_actions_are_applied_in_any_order(self, data: st.DataObject) -> None:
        actions = self.decide()
        for action in data.draw(st.permutations(actions)):
            if data.draw(st.booleans()):
                self.apply(action)

    @rule()
    def all_actions_are_applied_twice(self) -> None:
        for action in self.decide() * 2:
            self.apply(action)

    @precondition(lambda self: bool(self.backend.live()))
    @rule(data=st.data(), reason=st.sampled_from(list(ExitReason)))
    def an_instance_ends(self, data: st.DataObject, reason: ExitReason) -> None:
        self.backend.end(data.draw(st.sampled_from(self.backend.live())).id, reason, self.now)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.desired.ended_at is None)
    @rule(ps=st.integers(0, 4), workers=st.integers(0, 4), cores=st.sampled_from([1.0, 2.0]))
    def the_plan_changes(self, ps: int, workers: int, cores: float) -> None:
        self.desired = Desired(self.demands(ps, workers, Resources(cores)))

    @precondition(lambda self: self.desired.ended_at is None)
    @rule()
    def the_job_ends(self) -> None:
        self.desired = replace(self.desired, ended_at=self.now)

    @invariant()
    def a_member_has_one_life_at_a_time(self) -> None:
        slots = [(instance.id.role, instance.id.index) for instance in self.backend.live()]
        assert len(slots) == len(set(slots))

    @invariant()
    def only_what_is_wanted_is_created(self) -> None:
        wanted = {} if self.desired.ended_at is not None else {d.role: d.replicas for d in self.desired.demands}
        for action in self.decide():
            if isinstance(action, Create):
                assert action.id.index < wanted.get(action.id.role, 0)
                assert action.id not in self.backend.ever

    def teardown(self) -> None:
        self.settle()
        if self.desired.ended_at is not None:
            assert not self.backend.instances
            return
        wanted = {(d.role, index): d.resources for d in self.desired.demands for index in range(d.replicas)}
        found = {(i.id.role, i.id.index): i.resources for i in self.backend.instances.values()}
        assert found == wanted
        assert all(instance.state is InstanceState.RUNNING for instance in self.backend.instances.values())
        assert not [action for action in self.decide() if not isinstance(action, Delete)]

    def settle(self) -> None:
        """Applies everything, lets what was asked to end do so, and lets time pass, until nothing is left to do."""
        for _ in range(20):
            for action in self.decide():
                self.apply(action)
            for instance in self.backend.live():
                if instance.state is InstanceState.TERMINATING:
                    self.backend.end(instance.id, ExitReason.COMPLETED, self.now)
            self.now += POLICY.backoff.limit


TestReconciliation = Reconciliation.TestCase
TestReconciliation.settings = settings(max_examples=100, stateful_step_count=25)
