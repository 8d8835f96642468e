import threading
from pathlib import Path

from emberscale_brain.history.changes import JobEnded, JobSubmitted, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, JobMetadata, JobProfile, JobShape, ShapeBounds
from emberscale_brain.service.learning import Learning
from emberscale_brain.service.settings import PlanningSettings
from emberscale_brain.service.state import BrainState

SHAPE = JobShape(2, 1, 4, 4, 1 << 30, 1 << 30)


def submitted(job: str) -> JobSubmitted:
    return JobSubmitted(JobId(job), "ann", JobMetadata("DLRM", 512, 1, 1, 1, 10**6), ShapeBounds(), 0.0)


def reported(job: str, sequence: int) -> ProfileReported:
    return ProfileReported(JobId(job), sequence, JobProfile(float(sequence), SHAPE, 512, 0.1, 1000.0))


def test_a_job_that_ended_before_the_database_heard_of_it_is_not_taken_up_again(tmp_path: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    store.migrate()
    store.write([submitted("over"), submitted("again"), reported("again", 1), submitted("quiet"), reported("quiet", 1)])
    state = BrainState(10, 10)
    learning = Learning(store, PlanningSettings(), state, threading.Lock(), state.apply)
    for job in ("over", "again"):
        state.apply(submitted(job))
        state.apply(JobEnded(JobId(job), "Failed", 5.0))
        learning.ended(JobId(job))
    state.apply(submitted("again"))
    state.apply(reported("again", 2))
    assert learning.learn(now=9.0)
    assert {job: [profile.time for profile in known.profiles] for job, known in state.jobs.items()} == {
        "again": [1.0, 2.0],
        "quiet": [1.0],
    }
    assert not learning.learn(now=9.0)
    store.close()
