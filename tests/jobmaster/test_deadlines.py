"""Deadlines on a clock of the test's own, against a real store."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.jobmaster.fakes import RedisServer, job
from tests.jobmaster.pure import TRAINING, WORKER, Pure

from emberscale_jobmaster import lifecycle, tasks
from emberscale_jobmaster.membership import MemberId, Process, Role
from emberscale_jobmaster.observations import Vitals
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState, Phase
from emberscale_jobmaster.store import JobStore
from emberscale_jobmaster.tasks import Discovered, Task

SPEC_TIMEOUT = 30.0


class Clocked:
    """A runtime whose time passes only when the test says so; its own threads look at the same clock."""

    def __init__(self, redis_server: RedisServer) -> None:
        self.now = 1000.0
        manifest = job(
            sharding={"leaseTimeout": SPEC_TIMEOUT, "heartbeatInterval": 1}, runPolicy={"activeDeadline": 500}
        )
        store = JobStore(redis_server.url, uuid.uuid4().hex)
        self.runtime = JobRuntime(
            manifest, "uid", store, on_deposed=lambda: None, clock=lambda: self.now, wall=lambda: self.now
        )
        self.runtime.take_over()
        self.runtime.start()
        for role in (Role.PS, Role.WORKER):
            member = MemberId(role, 0, "w" if role is Role.WORKER else "p")
            process = Process(member.incarnation, "tcp://a", "b:1", "", 1, "h")
            with self.runtime.changing() as change:
                change.state = lifecycle.registered(change.state, self.runtime.spec, member, process)
                change.observed = change.observed.heard(member, self.now)

    @property
    def state(self) -> JobState:
        return self.runtime.snapshot()[0]

    def pass_time(self, seconds: float, *speaking: MemberId) -> None:
        """In steps of a second, in each of which the master looks at its deadlines; `speaking` send heartbeats."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for member in speaking:
                self.runtime.hear(member)
                with self.runtime.changing() as change:
                    change.observed = change.observed.beat(member, Vitals(), [], self.now)
            self.runtime.tick()

    def acquire(self) -> Task:
        with self.runtime.changing() as change:
            change.state, task = tasks.acquire(change.state, self.runtime.spec, WORKER, 4)
        assert task is not None
        return task

    def alive(self, role: Role) -> bool:
        return self.state.members.process(role, 0) is not None


@pytest.fixture
def clocked(redis_server: RedisServer) -> Iterator[Clocked]:
    clocked = Clocked(redis_server)
    yield clocked
    clocked.runtime.close()


def test_who_is_silent_for_too_long_is_given_up_and_may_come_back(clocked: Clocked) -> None:
    clocked.pass_time(SPEC_TIMEOUT)
    assert clocked.alive(Role.WORKER)
    clocked.pass_time(2)
    assert not clocked.alive(Role.WORKER)
    assert not clocked.alive(Role.PS)
    clocked.runtime.update(lambda state: lifecycle.heard(state, clocked.runtime.spec, WORKER))
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
    clocked.runtime.tick()
    assert clocked.alive(Role.WORKER)
    assert clocked.alive(Role.PS)
    assert task.token in clocked.state.ledger.leases
    clocked.pass_time(SPEC_TIMEOUT + 2)
    assert not clocked.alive(Role.WORKER)


def test_a_job_that_is_active_for_too_long_fails(clocked: Clocked) -> None:
    clocked.pass_time(490, WORKER)
    assert not clocked.state.over
    clocked.pass_time(15, WORKER)
    assert clocked.state.outcome is not None
    assert clocked.state.outcome.reason == "DeadlineExceeded"


def test_once_the_job_is_over_silence_means_nothing(clocked: Clocked) -> None:
    task = clocked.acquire()
    clocked.runtime.update(lambda state: tasks.finish(state, WORKER, task.token, Discovered((), (TRAINING,))))
    assert clocked.state.outcome is not None
    assert clocked.state.outcome.phase is Phase.FAILED
    clocked.pass_time(3 * SPEC_TIMEOUT)
    assert clocked.alive(Role.WORKER)


def test_a_change_that_raises_changes_nothing(clocked: Clocked) -> None:
    def broken(state: JobState) -> JobState:
        raise RuntimeError

    before = clocked.state
    with pytest.raises(RuntimeError):
        clocked.runtime.update(broken)
    assert clocked.state == before


def test_training_is_timed_from_when_it_can_begin_to_its_last_commit(clocked: Clocked) -> None:
    pure = Pure()  # which knows what prepares a job
    pure.start_training(records=4)
    clocked.now += 0.3
    clocked.runtime.update(
        lambda state: replace(
            pure.state, clock=state.clock, next_token=state.next_token, members=state.members, plan_version=1
        )
    )
    clocked.now += 0.4
    task = clocked.acquire()
    clocked.runtime.update(lambda state: tasks.finish(state, WORKER, task.token, None))
    clocked.now += 5.0
    clocked.runtime.tick()
    assert clocked.state.outcome is not None
    assert clocked.state.clock.training_seconds == pytest.approx(0.4)
