from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.fault_tolerance import FailureRecord, Recovery
from emberscale_brain.history.changes import (
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.planner.types import (
    Candidate,
    ClusterCapacity,
    Explanation,
    JobId,
    JobMetadata,
    PlanAction,
    PlannedShape,
    Prices,
    ShapeBounds,
)
from emberscale_brain.service.frames import change_frame, read_change, read_frame
from emberscale_brain.service.state import BrainState, Conditions
from eventually import unwrap

SHAPE = JobShape(4, 2, 4, 4, GIB, GIB)
CONDITIONS = Conditions(ClusterCapacity(100, 1 << 40), Prices(), {}, 1e9, adoption_seconds=60.0)
JOBS = [JobId(name) for name in "abc"]


def submitted(job: JobId, at: float = 0.0) -> JobSubmitted:
    return JobSubmitted(job, "ann", JobMetadata("DLRM", 512, 1, 1, 1, 10**6), ShapeBounds(), at)


def reported(
    job: JobId, sequence: int, shape: JobShape = SHAPE, time: float = 0.0, samples: int = 0
) -> ProfileReported:
    return ProfileReported(job, sequence, JobProfile(time, shape, 512, 0.1, 1000.0, samples))


def planned(job: JobId, version: int, shape: JobShape | None, at: float = 0.0) -> PlanMade:
    return PlanMade(job, version, at, "p", PlannedShape(shape, PlanAction.SCALE, "why"))


changes = st.lists(
    st.one_of(
        st.builds(submitted, st.sampled_from(JOBS), st.floats(0, 100)),
        st.builds(reported, st.sampled_from(JOBS), st.integers(0, 20)),
        st.builds(planned, st.sampled_from(JOBS), st.integers(1, 5), st.just(SHAPE)),
        st.builds(
            StartUpObserved, st.sampled_from(JOBS), st.sampled_from(["worker", "ps"]), st.just(0.0), st.floats(0, 99)
        ),
        st.builds(
            JobEnded, st.sampled_from(JOBS), st.sampled_from(["Complete", "Failed"]), st.just(9.0), st.just(SHAPE)
        ),
    ),
    max_size=40,
)


@given(changes)
def test_another_state_told_everything_sees_the_same_cluster(happened: list[Change]) -> None:
    one, other = BrainState(8, 10), BrainState(8, 10)
    for change in happened:
        one.apply(change)
    other.remember(list(one.history))
    told = one.overhead_changes() + [change for job in one.jobs for change in one.job_changes(job)]
    for change in told:
        other.apply(read_change(read_frame(change_frame(change))))
    expected = one.cluster_view(CONDITIONS, 50.0)
    seen = other.cluster_view(CONDITIONS, 50.0)
    assert replace(seen, jobs=()) == replace(expected, jobs=())
    assert [job.id for job in seen.jobs] == [job.id for job in expected.jobs]
    for a, b in zip(seen.jobs, expected.jobs, strict=True):
        assert replace(a, last_scaled_at=0) == replace(b, last_scaled_at=0)


@given(changes)
def test_changes_that_come_twice_count_once(happened: list[Change]) -> None:
    once, twice = BrainState(8, 10), BrainState(8, 10)
    for change in happened:
        once.apply(change)
        if not isinstance(change, StartUpObserved | JobSubmitted):
            twice.apply(change)
        twice.apply(change)
    assert once.cluster_view(CONDITIONS, 50.0) == twice.cluster_view(CONDITIONS, 50.0)


def test_a_job_on_its_way_to_a_new_shape_is_left_alone_for_a_while() -> None:
    state, larger = BrainState(8, 10), replace(SHAPE, workers=9)
    for change in (submitted(JOBS[0]), reported(JOBS[0], 1), planned(JOBS[0], 1, larger, at=100.0)):
        state.apply(change)
    going = state.view(JOBS[0], now=120.0, adoption_seconds=60.0)
    assert (going.current, going.fixed) == (larger, True)
    stuck = state.view(JOBS[0], now=170.0, adoption_seconds=60.0)
    assert (stuck.current, stuck.fixed) == (SHAPE, False)
    state.apply(reported(JOBS[0], 2, larger, time=130.0))
    there = state.view(JOBS[0], now=131.0, adoption_seconds=60.0)
    assert (there.current, there.fixed, there.last_scaled_at) == (larger, False, 130.0)


def test_samples_go_back_with_a_roll_back() -> None:
    state = BrainState(8, 10)
    for change in (submitted(JOBS[0]), reported(JOBS[0], 1, samples=900_000), reported(JOBS[0], 2, samples=600_000)):
        state.apply(change)
    assert state.view(JOBS[0], 0.0, 0.0).remaining_samples == 400_000


def test_a_job_near_its_end_takes_checkpoints_as_often_as_before() -> None:
    state, intervals = BrainState(8, 10), []
    state.apply(submitted(JOBS[0]))
    for sequence, (time, samples) in enumerate(((500.0, 500_000), (999.0, 999_000)), start=1):
        state.apply(reported(JOBS[0], sequence, time=time, samples=samples))
        advice = state.fault_tolerance(JOBS[0], state.overheads())
        assert advice is not None
        intervals.append(advice.checkpoint_interval)
    assert intervals == [pytest.approx(1000.0), pytest.approx(1000.0)]


@pytest.mark.parametrize(("parity", "strategy"), [(0, Recovery.FULL), (1, Recovery.CODED)])
def test_a_job_that_fails_often_and_starts_slowly_is_advised_parity_where_it_may_keep_any(
    parity: int, strategy: Recovery
) -> None:
    state, change = BrainState(8, 10), submitted(JOBS[0])
    state.apply(replace(change, metadata=replace(change.metadata, parity=parity)))
    for sequence in range(1, 11):
        report = reported(JOBS[0], sequence, time=300.0 * sequence)
        state.apply(replace(report, profile=replace(report.profile, failures=sequence, checkpoint_cost=5.0)))
    state.apply(StartUpObserved(JOBS[0], "ps", 0.0, 300.0, 60.0))
    advice = unwrap(state.fault_tolerance(JOBS[0], state.overheads()))
    assert advice.costs[Recovery.CODED].overhead < advice.costs[Recovery.FULL].overhead
    assert advice.strategy is strategy


def test_before_anything_is_measured_the_plan_says_how_fast_a_job_will_be() -> None:
    state = BrainState(8, 10)
    state.apply(submitted(JOBS[0]))
    assert state.fault_tolerance(JOBS[0], state.overheads()) is None
    chosen = Candidate(SHAPE, 1.0, 2000.0, 2000.0, 0.1)
    plan = planned(JOBS[0], 1, SHAPE)
    state.apply(replace(plan, planned=replace(plan.planned, explanation=Explanation(chosen=chosen))))
    advice = unwrap(state.fault_tolerance(JOBS[0], state.overheads()))
    assert advice.strategy is Recovery.FULL
    assert advice.checkpoint_interval <= 10**6 / 2000


def test_failures_of_all_jobs_count_for_the_fleet_also_of_those_that_ended() -> None:
    state = BrainState(8, 10)
    for number, job in enumerate(JOBS, start=1):
        state.apply(submitted(job))
        for sequence, failures in enumerate((0, number, number)):
            report = reported(job, sequence, time=100.0 * (sequence + 1))
            state.apply(replace(report, profile=replace(report.profile, failures=failures)))
    state.apply(JobEnded(JOBS[0], "Failed", 400.0))
    assert state.fleet.total == FailureRecord(failures=1 + 2 + 3, server_seconds=3 * 300.0 * SHAPE.ps)


def test_start_ups_become_overheads() -> None:
    state = BrainState(8, 10)
    state.apply(submitted(JOBS[0]))
    for at, seconds in enumerate((50.0, 70.0, 60.0)):
        state.apply(StartUpObserved(JOBS[0], "ps", float(at), seconds, 3.0))
    assert state.overheads().ps_start_seconds == pytest.approx(60.0)
    assert state.overheads().ps_pause_seconds == pytest.approx(3.0)


def test_a_start_up_that_is_told_again_counts_once() -> None:
    state = BrainState(8, 10)
    fast, slow = (StartUpObserved(JOBS[0], "ps", at, seconds) for at, seconds in ((0.0, 10.0), (1.0, 90.0)))
    elsewhere = replace(slow, job=JOBS[1], seconds=80.0)
    for start_up in (fast, slow, slow, elsewhere, slow, replace(slow, role="worker")):
        state.apply(start_up)
    assert state.overheads().ps_start_seconds == 80.0
    assert state.overheads().worker_start_seconds == 90.0


def test_one_job_does_not_decide_what_start_ups_cost_all_others() -> None:
    state, other = BrainState(8, 10), BrainState(8, 10)
    for at in range(30):
        state.apply(StartUpObserved(JobId(f"honest-{at}"), "ps", float(at), 40.0, 2.0))
    for at in range(200):
        state.apply(StartUpObserved(JOBS[0], "ps", 100.0 + at, 1e6, 1e6))
    assert state.overheads().ps_start_seconds == 40.0
    assert state.overheads().ps_pause_seconds == 2.0
    for change in state.overhead_changes():
        other.apply(change)
    assert other.overheads() == state.overheads()
    assert max(one.time for one in state.start_ups["ps"]) == 299.0, "of each job the newest ones count"


def test_another_state_gets_the_same_overheads_whatever_they_were_learned_from() -> None:
    state, other = BrainState(8, 10), BrainState(8, 10)
    state.remember_start_ups("ps", [(10.0, 1.0), (10.0, 1.0), (50.0, 5.0)])
    state.apply(StartUpObserved(JOBS[0], "ps", 0.0, 90.0, 9.0))
    for change in state.overhead_changes():
        other.apply(change)
    assert other.overheads() == state.overheads()
    assert other.overheads().ps_start_seconds == 30.0


def test_a_profile_of_long_ago_makes_no_hours_without_failures() -> None:
    state = BrainState(10, 10)
    state.apply(submitted(JOBS[0], at=1000.0))
    for sequence, at in enumerate((1010.0, 1.0, 1020.0)):
        state.apply(reported(JOBS[0], sequence, time=at))
    assert state.fleet.total == FailureRecord(0, 20.0 * SHAPE.ps)


def test_a_job_that_waits_for_room_has_no_servers_that_could_fail() -> None:
    state, day = BrainState(10, 10), 86_400.0
    state.apply(submitted(JOBS[0]))
    state.apply(planned(JOBS[0], 1, None, at=0.0))
    state.apply(planned(JOBS[0], 2, SHAPE, at=day))
    state.apply(reported(JOBS[0], 1, time=day + 100.0))
    state.apply(planned(JOBS[0], 3, replace(SHAPE, ps=3), at=day + 150.0))
    state.apply(reported(JOBS[0], 2, time=day + 200.0))
    assert state.fleet.total == FailureRecord(0, 200.0 * SHAPE.ps)


def test_the_time_for_which_a_job_waited_makes_no_checkpoint_rarer() -> None:
    prompt, late = BrainState(10, 10), BrainState(10, 10)
    for state, start in ((prompt, 0.0), (late, 10 * 86_400.0)):
        job = submitted(JOBS[0])
        state.apply(replace(job, metadata=replace(job.metadata, target_pls=0.01)))
        state.apply(planned(JOBS[0], 1, SHAPE, at=start))
        state.apply(reported(JOBS[0], 1, time=start + 100.0))
    expected, advised = (unwrap(state.fault_tolerance(JOBS[0], state.overheads())) for state in (prompt, late))
    assert advised.costs[Recovery.PARTIAL].interval == expected.costs[Recovery.PARTIAL].interval


@pytest.mark.parametrize(("failures", "seconds"), [(10**6, 60.0), (0, 1e9)])
def test_one_owner_does_not_decide_how_often_all_others_expect_failures(failures: int, seconds: float) -> None:
    def expected(others: bool) -> float:
        state, job = BrainState(8, 10), JobId("new")
        for number in range(10):
            honest = replace(submitted(JobId(f"honest-{number}")), owner=f"owner-{number}")
            state.apply(honest)
            report = reported(honest.job, 1, time=20 * 86_400.0)
            state.apply(replace(report, profile=replace(report.profile, failures=2)))
        for number in range(20 if others else 0):
            state.apply(replace(submitted(JobId(f"claim-{number}")), owner="mallory"))
            report = reported(JobId(f"claim-{number}"), 1, time=seconds)
            state.apply(replace(report, profile=replace(report.profile, failures=failures)))
        state.apply(replace(submitted(job), owner="bob"))
        state.apply(reported(job, 1, time=1.0))
        return unwrap(state.fault_tolerance(job, state.overheads())).between_failures

    assert 1 / 3 < expected(others=True) / expected(others=False) < 3
