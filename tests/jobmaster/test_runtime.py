"""The one lock around the machine: what a call finds while the store is away."""

from collections.abc import Iterator

import pytest
from tests.jobmaster.fakes import job

from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.store import JobStore, StoreUnavailableError


class AwayStore(JobStore):
    """Takes the first state, and no other."""

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


def test_an_edit_that_is_refused_changes_nothing(runtime: JobRuntime) -> None:
    with pytest.raises(StoreUnavailableError):  # the step is taken, and not durable
        runtime.rescale(0, 3, "")
    with pytest.raises(StoreUnavailableError):  # no step is taken
        runtime.rescale(0, 5, "")
    assert runtime.spec.worker.replicas == 3
    assert [step.message for step in runtime.snapshot()[0].scaling.steps] == ["workers 2 -> 3: the manifest was edited"]
