"""Deadlines on the test's own clock, against a real store."""

import uuid
from collections.abc import Iterator

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.pure import TRAINING, WORKER, Pure
from tests.jobmaster.small_job import job

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.effects import Granted
from emberscale_jobmaster.events import (
    HeartbeatReceived,
    Registered,
    SuspensionWanted,
    TaskFinished,
    TaskWanted,
    TimePassed,
)
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.membership import Process, UnknownMemberError
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.store import JobStore
from emberscale_jobmaster.tasks import Discovered, Task
from eventually import unwrap
from redis_process import RedisProcess

SPEC_TIMEOUT = 30.0


class Clocked:
    """A runtime whose time passes only when the test says so; its own threads look at the same clock."""

    def __init__(self, redis_server: RedisProcess) -> None:
        self.now = 1000.0
        manifest = job(
            sharding={"leaseTimeout": SPEC_TIMEOUT, "heartbeatInterval": 1}, runPolicy={"activeDeadline": 500}
        )
        store = JobStore(redis_server.url, uuid.uuid4().hex)
        self.runtime = JobRuntime(
            manifest, "uid", store, on_deposed=lambda: None, clock=lambda: self.now, wall=lambda: 1e9
        )
        self.runtime.take_over()
        self.runtime.start()
        for role in (Role.PS, Role.WORKER):
            member = MemberId(role, 0, "w" if role is Role.WORKER else "p")
            process = Process(member.incarnation, "tcp://a", "b:1", "")
            self.runtime.handle(Registered(now=self.now, member=member, process=process))

    @property
    def state(self) -> JobState:
        return self.runtime.snapshot()[0]

    def pass_time(self, seconds: float, *speaking: MemberId) -> None:
        """Advances the clock by seconds: in each, `speaking` send heartbeats and the master checks its deadlines."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for member in speaking:
                self.runtime.handle(HeartbeatReceived(now=self.now, member=member))
            self.runtime.note(TimePassed(now=self.now))

    def acquire(self) -> Task:
        handled = self.runtime.handle(TaskWanted(now=self.now, member=WORKER))
        (granted,) = handled.answers
        assert isinstance(granted, Granted)
        return granted.task

    def alive(self, role: Role) -> bool:
        return self.state.members.process(role, 0) is not None


@pytest.fixture
def clocked(redis_server: RedisProcess) -> Iterator[Clocked]:
    clocked = Clocked(redis_server)
    yield clocked
    clocked.runtime.close()


def test_who_is_silent_for_too_long_is_given_up_and_may_come_back(clocked: Clocked) -> None:
    clocked.pass_time(SPEC_TIMEOUT)
    assert clocked.alive(Role.WORKER)
    clocked.pass_time(2)
    assert not clocked.alive(Role.WORKER)
    assert not clocked.alive(Role.PS)
    clocked.runtime.handle(HeartbeatReceived(now=clocked.now, member=WORKER))
    assert clocked.alive(Role.WORKER)


def test_a_file_may_take_longer_to_index_than_a_lease_lives(clocked: Clocked) -> None:
    task = clocked.acquire()
    clocked.pass_time(10 * SPEC_TIMEOUT, WORKER)
    assert task.token in clocked.state.ledger.leases
    clocked.pass_time(SPEC_TIMEOUT + 2)
    assert not clocked.state.ledger.leases


def test_nobody_is_given_up_for_a_pause_of_the_master(clocked: Clocked) -> None:
    task = clocked.acquire()
    clocked.now += 10 * SPEC_TIMEOUT
    clocked.runtime.note(TimePassed(now=clocked.now))
    assert clocked.alive(Role.WORKER)
    assert clocked.alive(Role.PS)
    assert task.token in clocked.state.ledger.leases
    clocked.pass_time(SPEC_TIMEOUT + 2)
    assert not clocked.alive(Role.WORKER)


def test_a_job_that_is_active_for_too_long_fails(clocked: Clocked) -> None:
    clocked.pass_time(490, WORKER)
    assert not clocked.state.over
    clocked.pass_time(15, WORKER)
    assert unwrap(clocked.state.outcome).reason == "DeadlineExceeded"


def test_a_job_whose_phases_are_short_fails_at_its_deadline_too() -> None:
    """Each change of phase counts the time before it, so the watch has little left to count."""
    pure = Pure(
        training={"epochs": 1000}, runPolicy={"activeDeadline": 20}, sharding={"leaseTimeout": 60}, evaluation=20
    )
    pure.start_training(records=20, evaluation=20)
    state, now = MasterState(pure.state), 0.0
    while not state.job.over and now < 25:
        now += 0.3
        state, effects = step(state, TaskWanted(now=now, member=WORKER), pure.spec)
        (task,) = [effect.task for effect in effects if isinstance(effect, Granted)]
        finding = Tally(samples=1) if task.stage is Stage.EVALUATE else None
        state, _ = step(state, TaskFinished(now=now, member=WORKER, token=task.token, finding=finding), pure.spec)
        state, _ = step(state, TimePassed(now=now + 0.1), pure.spec)
    assert state.job.evaluations, "its phases changed"
    assert unwrap(state.job.outcome).reason == "DeadlineExceeded"
    assert now == pytest.approx(20.0, abs=0.5)


def test_once_the_job_is_over_silence_means_nothing(clocked: Clocked) -> None:
    task = clocked.acquire()
    finding = Discovered((), (TRAINING,))
    clocked.runtime.handle(TaskFinished(now=clocked.now, member=WORKER, token=task.token, finding=finding))
    assert unwrap(clocked.state.outcome).phase is JobPhase.FAILED
    clocked.pass_time(3 * SPEC_TIMEOUT)
    assert clocked.alive(Role.WORKER)


def test_an_event_that_is_refused_changes_nothing(clocked: Clocked) -> None:
    before = clocked.state
    with pytest.raises(UnknownMemberError):
        clocked.runtime.handle(TaskWanted(now=clocked.now, member=MemberId(Role.WORKER, 7, "stranger")))
    assert clocked.state == before


def test_a_wall_clock_that_jumps_harms_nothing(redis_server: RedisProcess) -> None:
    wall = 1e9
    store = JobStore(redis_server.url, uuid.uuid4().hex)
    runtime = JobRuntime(
        job(runPolicy={"activeDeadline": 500}), "uid", store, lambda: None, clock=lambda: 10.0, wall=lambda: wall
    )
    runtime.take_over()
    wall += 1e6
    runtime.note(TimePassed(now=12.0))
    wall -= 2e6
    runtime.note(TimePassed(now=14.0))
    state, _ = runtime.snapshot()
    assert not state.over
    assert state.clock.active_seconds == 4.0


def test_training_is_timed_from_when_it_can_begin_to_its_last_commit() -> None:
    driven = Driven(records=40)
    driven.pass_time(3)
    driven.start()
    driven.now += 0.4
    driven.train(2)
    driven.now += 0.2
    driven.train(2)
    driven.now += 5.0
    driven.tell(TimePassed(now=driven.now))
    assert driven.job.outcome is not None
    assert driven.job.clock.training_seconds == pytest.approx(0.6)
    assert driven.job.clock.active_seconds == pytest.approx(3.6)


def test_time_in_which_the_job_rests_is_no_part_of_any_deadline() -> None:
    driven = Driven()
    driven.start()
    driven.pass_time(5)
    driven.tell(SuspensionWanted(now=driven.now))
    driven.now += 1e6
    driven.tell(TimePassed(now=driven.now))
    driven.master_dies()
    assert driven.job.clock.active_seconds == pytest.approx(5.0)
    assert driven.state.clock(driven.now + 2) == pytest.approx(7.0)
