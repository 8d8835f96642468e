from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.fault_tolerance import FailureRecord
from emberscale_brain.history.changes import Change, JobEnded, JobSubmitted, PlanMade, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import (
    ClusterCapacity,
    JobId,
    JobMetadata,
    PastJob,
    PlanAction,
    PlannedShape,
    Prices,
    ShapeBounds,
)
from emberscale_brain.service.learning import Learned, not_ahead, read
from emberscale_brain.service.runtime import BrainRuntime
from emberscale_brain.service.state import BrainState, Conditions

SHAPE = JobShape(2, 1, 4, 4, 1 << 30, 1 << 30)
CONDITIONS = Conditions(ClusterCapacity(100, 1 << 40), Prices(), {}, 1e9, adoption_seconds=60.0)


def submitted(job: str) -> JobSubmitted:
    return JobSubmitted(JobId(job), "ann", JobMetadata("DLRM", 512, 1, 1, 1, 10**6), ShapeBounds(), 0.0, SHAPE)


def reported(job: str, sequence: int) -> ProfileReported:
    return ProfileReported(JobId(job), sequence, JobProfile(float(sequence), SHAPE, 512, 0.1, 10_240.0))


def durable(changes: Sequence[Change], repeated: Sequence[ProfileReported]) -> Future[bool]:
    done: Future[bool] = Future()
    done.set_result(True)
    return done


def test_a_job_that_ended_before_the_database_heard_of_it_is_not_taken_up_again(tmp_path: Path) -> None:
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    store.migrate()
    store.write([submitted("over"), submitted("again"), reported("again", 1), submitted("quiet"), reported("quiet", 1)])
    runtime = BrainRuntime(BrainState(10, 10), CONDITIONS, durable)
    for job in ("over", "again"):
        runtime.submit(submitted(job), None, 0.0)
        runtime.end(JobEnded(JobId(job), "Failed", 5.0))
    runtime.submit(submitted("again"), None, 0.0)
    runtime.report(JobId("again"), [reported("again", 2)], (), now=2.0, wall=2.0, clock_skew=0.0)
    assert not runtime.knows_running
    learned = read(store, running=True, profiles_per_job=10, past_jobs=10, now=9.0)
    assert runtime.learn(learned, 9.0)
    assert runtime.job_ids == {"again", "quiet"}
    times = {}
    for job in runtime.job_ids:
        known = runtime.explain(job)
        assert known is not None
        times[job] = [profile.time for profile in known.profiles]
    assert times == {"again": [1.0, 2.0], "quiet": [1.0]}
    assert runtime.knows_running
    assert not runtime.learn(replace(learned, running=None), 9.0)
    store.close()


def test_past_jobs_and_start_ups_that_are_learned_late_are_untold_once() -> None:
    """A planning process that began while the database was away does not have them."""
    runtime = BrainRuntime(BrainState(10, 10), CONDITIONS, durable)
    runtime.begin_telling()
    past = PastJob(JobId("past"), "ann", submitted("past").metadata, SHAPE, None, finished_at=5.0)
    assert runtime.learn(Learned((), (past,), {}), 9.0)
    with_start_ups = Learned(None, (past,), {"worker": [(5.0, 0.0)], "ps": []})
    assert runtime.learn(with_start_ups, 9.0)
    assert not runtime.learn(with_start_ups, 9.0)
    assert runtime.past_jobs() == (past,)


def test_a_job_that_ended_while_the_database_was_away_is_not_forgotten_for_older_ones() -> None:
    runtime = BrainRuntime(BrainState(10, past_jobs=2), CONDITIONS, durable)
    runtime.submit(submitted("new"), None, 0.0)
    runtime.end(JobEnded(JobId("new"), "Complete", 9.0))
    older = [PastJob(JobId(f"old-{at}"), "ann", submitted("old").metadata, SHAPE, finished_at=at) for at in (2.0, 1.0)]
    runtime.learn(Learned(None, tuple(older), {}), 9.0)
    assert [job.id for job in runtime.past_jobs()] == ["old-2.0", "new"]


def test_what_a_clock_said_that_was_set_back_since_is_moved_back_together() -> None:
    ahead, early, behind = reported("a", 1000), reported("a", 900), reported("b", 5)
    plan = PlanMade(JobId("a"), 1, 950.0, "p", PlannedShape(SHAPE, PlanAction.SCALE, "why"))
    alone = replace(submitted("c"), submitted_at=130.0)
    moved = not_ahead([submitted("a"), early, ahead, plan, submitted("b"), behind, alone], now=100.0)
    assert [change.profile.time for change in moved if isinstance(change, ProfileReported)] == [0.0, 100.0, 5.0]
    assert [change.submitted_at for change in moved if isinstance(change, JobSubmitted)] == [-900.0, 0.0, 100.0]
    assert [change.made_at for change in moved if isinstance(change, PlanMade)] == [50.0]


def test_servers_that_run_after_a_clock_was_set_back_count_at_once() -> None:
    state = BrainState(10, 10)
    for change in not_ahead([replace(submitted("a"), submitted_at=500.0), reported("a", 1000)], now=100.0):
        state.apply(change)
    state.apply(replace(reported("a", 1001), profile=replace(reported("a", 0).profile, time=160.0)))
    assert state.fleet.total == FailureRecord(0, 500.0 + 60.0)
