"""The one lock around the machine: what a call finds while the store is away."""

import threading
from collections.abc import Iterable, Iterator

import pytest
from tests.jobmaster.small_job import job

from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_jobmaster.events import Registered
from emberscale_jobmaster.figures import sizes_of
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.store import JobStore, StoreUnavailableError


class KeepingStore(JobStore):
    """Saves every state at once."""

    def __init__(self) -> None:
        super().__init__("redis://nowhere", "uid")

    def open(self) -> JobState | None:
        return None

    def bad_records(self) -> set[tuple[str, int]]:
        return set()

    def save(self, state: JobState) -> None:
        pass


class AwayStore(JobStore):
    """Saves the first state, and no other."""

    def __init__(self) -> None:
        super().__init__("redis://nowhere", "uid")
        self.saved = 0

    def open(self) -> JobState | None:
        return None

    def bad_records(self) -> set[tuple[str, int]]:
        return set()

    def save(self, state: JobState) -> None:
        self.saved += 1
        if self.saved > 1:
            raise StoreUnavailableError(self.url, "away")


@pytest.fixture
def runtime() -> Iterator[JobRuntime]:
    runtime = JobRuntime(job(), "uid", AwayStore(), on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    yield runtime
    runtime.close()


def test_no_look_pairs_a_job_with_the_spec_of_before_an_edit() -> None:
    runtime = JobRuntime(job(), "uid", KeepingStore(), on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    torn: list[int | None] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            state, _, spec = runtime.view()
            planned = sizes_of(state, spec).worker.replicas
            if planned != spec.worker.replicas:
                torn.append(planned)

    looking = threading.Thread(target=look)
    looking.start()
    for workers in range(3, 100):
        runtime.rescale(0, workers, "")
    over.set()
    looking.join()
    runtime.close()
    assert not torn


def test_an_edit_that_is_refused_changes_nothing(runtime: JobRuntime) -> None:
    with pytest.raises(StoreUnavailableError):  # the step is taken, and not durable
        runtime.rescale(0, 3, "")
    with pytest.raises(StoreUnavailableError):  # no step is taken
        runtime.rescale(0, 5, "")
    assert runtime.spec.worker.replicas == 3
    assert [step.message for step in runtime.snapshot()[0].scaling.steps] == ["workers 2 -> 3: the manifest was edited"]


class ReturningStore(KeepingStore):
    """Takes bad records at once; is away for one save if the test wants it, and back once the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves, self.returns, self.told = False, threading.Event(), set[tuple[str, int]]()
        self.returns.set()

    def bad_records(self) -> set[tuple[str, int]]:
        return {*self.told}

    def save(self, state: JobState) -> None:
        if self.leaves:
            self.leaves = False
            self.returns.clear()
            raise StoreUnavailableError(self.url, "away")
        self.returns.wait()

    def add_bad_records(self, records: Iterable[tuple[str, int]]) -> None:
        self.told |= {*records}


def test_bad_records_that_are_told_as_the_store_returns_count_when_they_are_told_again() -> None:
    """The store takes them before the master knows by a save that it is back."""
    store, found = ReturningStore(), BadRecord("file", 7, "no number")
    runtime = JobRuntime(job(), "uid", store, on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    try:
        store.leaves = True
        with pytest.raises(StoreUnavailableError):
            runtime.rescale(0, 3, "")
        with pytest.raises(StoreUnavailableError):
            runtime.note_bad_records([found])
        assert store.told == {("file", 7)}
        store.returns.set()
        runtime.wait_until(lambda state: state, seconds=60)
        runtime.note_bad_records([found])
        assert runtime.snapshot()[0].bad_records == 1
        assert runtime.snapshot()[0].bad_record_samples == (found,)
    finally:
        store.returns.set()
        runtime.close()


def test_a_bad_record_that_a_master_noted_and_did_not_count_counts_for_the_next() -> None:
    store, found = ReturningStore(), BadRecord("file", 7, "no number")
    store.told = {("file", 7)}
    runtime = JobRuntime(job(), "uid", store, on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    try:
        for _ in range(2):
            runtime.note_bad_records([found])
            assert runtime.snapshot()[0].bad_records == 1
            assert runtime.snapshot()[0].bad_record_samples == (found,)
    finally:
        runtime.close()


class HangingStore(KeepingStore):
    """Saves states at once, until the test lets it hang."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.held, self.let_go = False, threading.Event(), threading.Event()

    def save(self, state: JobState) -> None:
        if self.hangs:
            self.held.set()
            self.let_go.wait()


class LookedAtClock:
    """A clock that advances a third of a second at each reading, while it runs."""

    def __init__(self) -> None:
        self.runs, self.seconds = False, 0.0

    def __call__(self) -> float:
        self.seconds += 1 / 3 if self.runs else 0.0
        return self.seconds


def test_members_that_wait_for_a_store_that_hangs_are_not_taken_for_silent() -> None:
    store, clock, worker = HangingStore(), LookedAtClock(), MemberId(Role.WORKER, 0, "i")
    spec = job(sharding={"leaseTimeout": 3.0, "heartbeatInterval": 1.0})
    runtime = JobRuntime(spec, "uid", store, lambda: None, clock)
    runtime.take_over()
    runtime.start()
    try:
        runtime.handle(Registered(now=clock(), member=worker, process=Process("i", "", "", "")))
        store.hangs = True
        waiting = threading.Thread(target=runtime.rescale, args=(0, 3, ""))
        waiting.start()
        store.held.wait()
        clock.runs = True
        while clock.seconds < 10:
            runtime.look_at_deadlines()
        clock.runs = store.hangs = False
        store.let_go.set()
        waiting.join()
        process = runtime.snapshot()[0].members.slots[worker.slot].process
        assert process is not None
        assert process.alive
    finally:
        store.let_go.set()
        runtime.close()
