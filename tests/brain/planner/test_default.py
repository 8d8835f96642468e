"""Plans for whole clusters, from profiles to shapes and reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobProfile, JobShape, memory_reserve
from emberscale_brain.model.predict import ModelConstants, shape_features
from emberscale_brain.planner import running as assessing
from emberscale_brain.planner.default import DefaultPlanner
from emberscale_brain.planner.front import MOST_SHAPES
from emberscale_brain.planner.job_model import JobModel
from emberscale_brain.planner.types import (
    ClusterCapacity,
    ClusterView,
    JobId,
    JobMetadata,
    JobView,
    PastJob,
    PlanAction,
    PlannedShape,
    Planner,
    PlannerSettings,
    Quota,
    ScalingOverheads,
    ShapeBounds,
)
from eventually import unwrap

NOW = 1e6
NETWORK = 1.25e9
DATA = JobMetadata(
    architecture="DLRM",
    batch_size=512,
    dense_bytes=4_000_000,
    embedding_dimension=416,
    tables=26,
    total_samples=10**9,
    name="ctr",
)
CONSTANTS = ModelConstants.of(DATA, NETWORK)
# seconds: 0.4 per batch on one core, 0.05 per worker and PS core, the network, look-ups on one PS, 0.005
TRUTH = np.array([0.4 / 512, 0.05, 2.0, 0.05 / (512 * 416), 0.005, 0.0])
SMALL = JobShape(2, 1, 2, 2, 4 * GIB, 16 * GIB)
BOUNDS = ShapeBounds(workers=(1, 16), ps=(1, 8), worker_cpu=(1, 8), ps_cpu=(1, 8))
PLENTY = ClusterCapacity(10_000, 100_000 * GIB)
QUIET = PlannerSettings(exploration=0)
VARIED = (
    SMALL,
    replace(SMALL, workers=6),
    replace(SMALL, ps=3),
    replace(SMALL, worker_cpu=6),
    replace(SMALL, ps_cpu=6),
)


def seconds(shape: JobShape, slower: float = 1.0) -> float:
    return slower * float(shape_features(CONSTANTS, shape) @ TRUTH)


def profiles(shapes: Sequence[JobShape], slower: float = 1.0, until: float = NOW) -> tuple[JobProfile, ...]:
    """Returns six profiles of each shape; the last shape's are the newest."""
    random = np.random.default_rng(0)
    made = []
    for number, shape in enumerate(shape for shape in shapes for _ in range(6)):
        iteration = seconds(shape, slower) * float(np.exp(0.02 * random.standard_normal()))
        made.append(
            JobProfile(
                time=until - 30.0 * (6 * len(shapes) - number),
                shape=shape,
                batch_size=512,
                iteration_seconds=iteration,
                throughput=shape.workers * 512 / iteration,
            )
        )
    return tuple(made)


def running(name: str = "job", shapes: Sequence[JobShape] = (*VARIED[1:], SMALL), slower: float = 1.0) -> JobView:
    """Returns a job that has had all `shapes` and has the last one now."""
    return JobView(
        id=JobId(name),
        owner="ads",
        metadata=DATA,
        remaining_samples=10**8,
        current=shapes[-1],
        bounds=BOUNDS,
        profiles=profiles(shapes, slower),
    )


def waiting(name: str = "new", owner: str = "ads") -> JobView:
    return replace(running(name), current=None, profiles=(), owner=owner)


def plan(
    jobs: Sequence[JobView], capacity: ClusterCapacity = PLENTY, planner: Planner | None = None, **view: object
) -> Mapping[JobId, PlannedShape]:
    cluster = ClusterView(jobs=tuple(jobs), capacity=capacity, **view)  # type: ignore[arg-type]  # as the caller says
    return (planner or DefaultPlanner(QUIET)).plan(cluster, NOW)


def only(plans: Mapping[JobId, PlannedShape]) -> PlannedShape:
    (planned,) = plans.values()
    return planned


def bill(shape: JobShape, settings: PlannerSettings = QUIET) -> float:
    cost = ClusterView((), PLENTY).prices.per_hour(shape)
    return (cost + settings.time_value_per_hour) * seconds(shape) / shape.workers


def best_bill() -> float:
    return min(
        bill(JobShape(w, p, cw, cp, 4 * GIB, max(GIB, 16 * GIB // p)))
        for w in range(1, 17)
        for p in range(1, 9)
        for cw in range(1, 9)
        for cp in range(1, 9)
    )


def test_a_small_job_in_an_empty_cluster_gets_nearly_the_best_shape_there_is() -> None:
    planned = only(plan([running()]))
    assert planned.action is PlanAction.SCALE
    assert planned.shape is not None
    assert bill(planned.shape) <= 1.03 * best_bill()


def test_the_reason_says_what_it_rests_on_and_the_numbers_agree() -> None:
    planned = only(plan([running()]))
    numbers = planned.explanation
    assert numbers.chosen is not None
    assert numbers.present is not None
    assert numbers.fit is not None
    assert numbers.chosen.shape == planned.shape
    assert numbers.present.shape == SMALL
    assert numbers.expected_gain > 0
    assert numbers.saved_seconds > 0
    assert numbers.expected_cost == pytest.approx(numbers.chosen.cost_per_hour - numbers.present.cost_per_hour)
    assert numbers.numbers["chosen_bill"] < numbers.numbers["present_bill"]
    assert len(numbers.front) > 5
    costs = [point.cost_per_hour for point in numbers.front]
    assert costs == sorted(costs)
    for words in ("throughput", "samples/s", "sooner", "standstill", "30 profiles of 5 shapes", "RMSLE"):
        assert words in planned.reason


def test_a_job_that_brings_nothing_new_is_not_fitted_again() -> None:
    planner, job = DefaultPlanner(QUIET), running()
    first, again = (only(plan([job], planner=planner)).explanation.fit for _ in range(2))
    assert first is not None
    assert again is first
    newer = replace(job, profiles=(*job.profiles, replace(job.profiles[-1], time=NOW - 1)))
    assert only(plan([newer], planner=planner)).explanation.fit is not first


def test_a_job_at_its_best_shape_is_left_alone() -> None:
    first = only(plan([running()]))
    assert first.shape is not None
    settled = running(shapes=(*VARIED, first.shape))
    again = only(plan([settled]))
    assert (again.action, again.shape) == (PlanAction.KEEP, first.shape)
    assert "Kept" in again.reason


def test_a_job_that_is_nearly_done_is_not_scaled_for_a_gain_below_its_cost() -> None:
    planned = only(plan([replace(running(), remaining_samples=20_000)]))
    assert planned.action is PlanAction.KEEP


@pytest.mark.parametrize("minutes", [0.5, 1, 2, 5, 20, 60])
def test_a_job_with_room_around_it_is_never_shrunk_to_a_crawl_before_its_end(minutes: float) -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=3.0))
    best = unwrap(only(plan([running()], planner=planner)).shape)
    speed = best.workers * 512 / seconds(best)
    job = replace(running(shapes=(*VARIED, best)), remaining_samples=int(minutes * 60 * speed))
    shape = unwrap(only(plan([job], planner=planner)).shape)
    assert shape.workers * 512 / seconds(shape) > 0.8 * speed


def test_a_cheap_hour_keeps_jobs_small() -> None:
    sizes = []
    for value in (0.1, 1.0, 500.0):
        planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=value))
        planned = only(plan([running()], planner=planner))
        assert planned.shape is not None
        sizes.append(planned.shape.cpu)
    assert sizes[0] < sizes[1] < sizes[2]


def test_an_oversized_job_gives_back_what_gains_nothing() -> None:
    huge = JobShape(4, 8, 8, 8, 4 * GIB, 16 * GIB)
    planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=1.0))
    job = replace(running(shapes=(*VARIED, huge)), bounds=replace(BOUNDS, workers=(1, 4)))
    planned = only(plan([job], planner=planner))
    assert planned.action is PlanAction.SHRINK
    assert unwrap(planned.shape).cpu < huge.cpu


def test_a_job_without_profiles_stays_as_it_is_and_says_why() -> None:
    planned = only(plan([replace(running(), profiles=())]))
    assert (planned.action, planned.shape) == (PlanAction.KEEP, SMALL)
    assert "no usable measurement" in planned.reason


def test_a_job_is_measured_at_its_new_shape_before_it_moves_again() -> None:
    moved = replace(running(), current=replace(SMALL, workers=5, worker_cpu=3))
    assert only(plan([moved])).action is PlanAction.KEEP


def total(plans: Mapping[JobId, PlannedShape], owner_of: Mapping[JobId, str], owner: str | None = None) -> float:
    return sum(p.shape.cpu for job, p in plans.items() if p.shape is not None and owner in (None, owner_of[job]))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(3, 8)), min_size=1, max_size=8),
    st.floats(0, 400),
    st.floats(0, 200),
)
def test_plans_are_never_over_the_capacity_or_a_quota(
    kinds: list[tuple[bool, str, int]], cores: float, quota: float
) -> None:
    jobs = [
        replace(running(f"job{i}") if runs else waiting(f"job{i}"), owner=owner, remaining_samples=10**size)
        for i, (runs, owner, size) in enumerate(kinds)
    ]
    planner = DefaultPlanner(PlannerSettings())  # with experiments
    capacity = ClusterCapacity(cores, 2000 * GIB)
    plans = plan(jobs, capacity, planner, quotas={"b": Quota(quota, 1e15)})
    owner_of = {job.id: job.owner for job in jobs}
    assert total(plans, owner_of) <= cores + 1e-6
    assert total(plans, owner_of, "b") <= quota + 1e-6
    assert sum(p.shape.memory for p in plans.values() if p.shape is not None) <= 2000 * GIB
    assert plans.keys() == owner_of.keys()


@pytest.mark.parametrize("name", ["liars", "*"])
def test_what_an_owners_jobs_say_beyond_its_quota_takes_no_room_from_others(name: str) -> None:
    """A job reports its own shape: if it claimed the whole cluster, all other jobs would stop."""
    huge = JobShape(1000, 1000, 1000, 1000, 1 << 40, 1 << 40)
    liar = replace(running("liar"), owner="liars", current=huge, fixed=True)
    capacity, quotas = ClusterCapacity(100, 2000 * GIB), {name: Quota(40, 800 * GIB), "ads": Quota()}
    plans = plan([liar, waiting()], capacity, quotas=quotas)
    first = unwrap(only(plans).shape)
    assert 0 < first.cpu <= 60
    more = plan([liar, waiting(), waiting("greedy", owner="liars")], capacity, quotas=quotas)
    assert more[JobId("greedy")].shape is None, "its owner has nothing left"


def test_the_job_that_is_nearly_done_gets_the_scarce_cores() -> None:
    soon, late = replace(running("soon"), remaining_samples=10**7), replace(running("late"), remaining_samples=10**9)
    plans = plan([late, soon], ClusterCapacity(60, 10_000 * GIB))
    soon_shape, late_shape = plans[JobId("soon")].shape, plans[JobId("late")].shape
    assert soon_shape is not None
    assert soon_shape.cpu > 2 * unwrap(late_shape).cpu


def test_a_fixed_job_counts_against_the_capacity_and_is_not_planned() -> None:
    fixed = replace(running("fixed"), current=JobShape(10, 5, 8, 4, 4 * GIB, 16 * GIB), fixed=True)
    plans = plan([fixed, running()], ClusterCapacity(110, 10_000 * GIB))
    assert list(plans) == [JobId("job")]
    shape = unwrap(only(plans).shape)
    assert shape.cpu <= 10


def past(name: str, shape: JobShape) -> PastJob:
    """Returns a past job, whose throughput model was fitted for its plan."""
    planned = only(plan([running(name)]))
    return PastJob(JobId(name), "ads", DATA, shape, fit=planned.explanation.fit, finished_at=NOW)


def test_a_new_job_starts_like_its_predecessor_and_says_which() -> None:
    shape = JobShape(8, 4, 6, 4, 4 * GIB, 8 * GIB)
    planned = only(plan([waiting()], history=(past("yesterday", shape),)))
    assert (planned.action, planned.shape) == (PlanAction.START, shape)
    assert "yesterday" in planned.reason
    assert planned.explanation.similar[0].id == "yesterday"


def test_a_new_job_gets_a_smaller_start_when_the_cluster_is_nearly_full() -> None:
    shape = JobShape(8, 4, 6, 4, 4 * GIB, 8 * GIB)
    history = (past("yesterday", shape),)
    planned = only(plan([waiting()], ClusterCapacity(40, 10_000 * GIB), history=history))
    assert planned.action is PlanAction.START
    assert planned.shape is not None
    assert planned.shape.cpu <= 40
    assert planned.shape.ps * planned.shape.ps_memory >= shape.ps * shape.ps_memory  # the tables are as large as before


def test_a_new_job_waits_for_room_that_others_have_and_is_refused_where_there_will_be_none() -> None:
    fixed = replace(running("fixed"), current=JobShape(10, 5, 8, 4, 4 * GIB, 16 * GIB), fixed=True)
    full = plan([fixed, waiting()], ClusterCapacity(101, 10_000 * GIB))[waiting().id]
    assert (full.action, full.shape) == (PlanAction.WAIT, None)
    assert "no room for it (at least" in full.reason
    for capacity, quotas in (
        (ClusterCapacity(1, 10_000 * GIB), {}),
        (PLENTY, {waiting().owner: Quota(1, 10_000 * GIB)}),
    ):
        never = only(plan([waiting()], capacity, quotas=quotas))
        assert (never.action, never.shape) == (PlanAction.REFUSE, None)
        assert "exceeds" in never.reason


def test_a_job_starts_at_least_cores_that_are_no_multiple_of_the_step() -> None:
    job = replace(waiting(), bounds=replace(BOUNDS, worker_cpu=(1.7, 8), ps_cpu=(1.7, 8)))
    history = (past("yesterday", JobShape(8, 4, 6, 4, 4 * GIB, 8 * GIB)),)
    planned = only(plan([job], ClusterCapacity(3.4, 10_000 * GIB), history=history))
    assert planned.action is PlanAction.START, planned.reason
    assert unwrap(planned.shape).cpu == 3.4


def test_a_smaller_start_has_servers_enough_for_the_tables() -> None:
    shape = JobShape(8, 8, 6, 4, 4 * GIB, 200 * GIB)  # a server may have at most 256 GiB
    planned = only(plan([waiting()], ClusterCapacity(20, 10_000 * GIB), history=(past("yesterday", shape),)))
    assert planned.shape is not None
    assert planned.shape.cpu <= 20
    assert planned.shape.ps * planned.shape.ps_memory >= shape.ps * shape.ps_memory


def test_similar_jobs_let_a_job_that_never_varied_its_shape_be_sized_well() -> None:
    unvaried = running(shapes=(SMALL,), slower=1.2)
    taught = only(plan([unvaried], history=(past("yesterday", JobShape(8, 4, 6, 4, 4 * GIB, 8 * GIB)),)))
    assert taught.shape is not None
    assert bill(taught.shape) <= 1.05 * best_bill()


def growing(limit: int, until: float = 10**8) -> JobView:
    """Returns a job whose PS hold 40 bytes per sample, after `until` of 10^9 samples."""
    measured = tuple(
        replace(
            p,
            samples=int(until * (i + 1) / 30),
            rows=int(until * (i + 1) / 30),
            ps_memory=GIB + int(40 * until * (i + 1) / 30),
        )
        for i, p in enumerate(profiles((*VARIED[1:], replace(SMALL, ps_memory=limit))))
    )
    return replace(
        running(),
        current=replace(SMALL, ps_memory=limit),
        profiles=measured,
        remaining_samples=int(10**9 - until),
        bounds=replace(BOUNDS, workers=(2, 2), ps=(1, 1), worker_cpu=(2, 2), ps_cpu=(2, 2)),
    )


def test_memory_grows_before_it_runs_out() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, memory_lead_seconds=1e6))
    planned = only(plan([growing(16 * GIB)], planner=planner))
    assert planned.action is PlanAction.GROW_MEMORY
    assert 38 * GIB < unwrap(planned.shape).ps_memory < 60 * GIB  # 40 bytes x 10^9 + 1 GiB, and headroom
    assert unwrap(planned.explanation.memory).oom_at_samples == pytest.approx(15 * GIB / 40, rel=0.1)
    assert "memory" in planned.reason


@pytest.mark.parametrize("speed", [1000.0, 0.0])
def test_memory_grows_even_where_nothing_says_how_fast_the_job_is(speed: float) -> None:
    """A job that was killed for its memory may have trained nothing in the window that it reports."""
    last = profiles((SMALL,))[-1]
    seconds_each = last.shape.workers * last.batch_size / speed if speed else 0.0
    reached = replace(last, iteration_seconds=seconds_each, throughput=speed, samples=10**6, rows=10**6)
    killed = (replace(reached, restarted=True, ps_memory=2 * GIB),)
    job = replace(running(), current=replace(SMALL, ps_memory=2 * GIB), profiles=killed, remaining_samples=9 * 10**6)
    planned = only(plan([replace(job, metadata=replace(DATA, total_samples=10**7))]))
    assert planned.action is PlanAction.GROW_MEMORY
    assert unwrap(planned.shape).ps_memory > 3 * GIB


def test_memory_that_runs_out_much_later_can_wait() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, memory_lead_seconds=60))
    assert only(plan([growing(16 * GIB)], planner=planner)).action is PlanAction.KEEP


def test_memory_grows_as_long_before_as_changes_took() -> None:
    """The limit of 16 GiB is hours away, which is soon if servers take long to start."""
    planner = DefaultPlanner(PlannerSettings(exploration=0))
    job = growing(16 * GIB)
    quick, slow = ScalingOverheads(ps_start_seconds=5), ScalingOverheads(ps_start_seconds=1e6)
    assert only(plan([job], planner=planner, overheads=quick)).action is PlanAction.KEEP
    assert only(plan([job], planner=planner, overheads=slow)).action is PlanAction.GROW_MEMORY


def test_memory_grows_where_hardly_any_is_left() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0))
    held = max(profile.ps_memory for profile in growing(16 * GIB).profiles)
    limit = held + memory_reserve(held) // 2
    assert only(plan([growing(limit)], planner=planner)).action is PlanAction.GROW_MEMORY


def measured_early(count: int, rows_per_sample: float) -> JobView:
    """Returns a job of 4 * 10^5 samples in 20 s, measured every second.

    Its PS of 1 GiB begin with 300 MiB, and a row takes 400 bytes; up to 10^4 samples are trained but not committed yet.
    """
    rate, total = 20_000, 400_000
    shape = replace(SMALL, ps=2, ps_memory=GIB)
    seen = []
    for second in range(1, count + 1):
        rows = int(rows_per_sample * rate * second)
        profile = JobProfile(
            time=NOW - 15 + second,
            shape=shape,
            batch_size=1024,
            iteration_seconds=0.1,
            throughput=float(rate),
            samples=rate * second - (10_000 if second % 2 else 5_000),
            rows=rows,
            ps_memory=(300 << 20) + 400 * rows // 2,
        )
        seen.append(profile)
    return replace(
        running(),
        metadata=replace(DATA, total_samples=total, batch_size=1024, embedding_dimension=5 * 85, tables=5),
        current=shape,
        profiles=tuple(seen),
        remaining_samples=total - seen[-1].samples,
        bounds=replace(BOUNDS, workers=(2, 2), ps=(2, 8), worker_cpu=(2, 2), ps_cpu=(2, 2), ps_memory=(GIB, GIB)),
    )


@pytest.mark.parametrize(("rows_per_sample", "outgrows"), [(6.0, False), (16.0, True)])
def test_how_tables_grow_is_known_with_the_second_measurement(rows_per_sample: float, outgrows: bool) -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=0, planning_seconds=1.0))
    start_ups = ScalingOverheads(ps_start_seconds=4.0, ps_pause_seconds=0.1)
    assert ((300 << 20) + 200 * rows_per_sample * 400_000 > GIB) is outgrows
    for count in range(1, 16):
        planned = only(plan([measured_early(count, rows_per_sample)], planner=planner, overheads=start_ups))
        if planned.action is PlanAction.GROW_MEMORY:
            assert outgrows, f"a false alarm with measurement {count}"
            held = measured_early(count, rows_per_sample).profiles[-1].ps_memory
            assert held < GIB / 2, "servers have the time to come"
            return
    assert not outgrows


PINNED = replace(BOUNDS, workers=(2, 2), ps=(1, 8), worker_cpu=(2, 2), ps_cpu=(2, 2), ps_memory=(16 * GIB, 16 * GIB))
"""Bounds that fix everything but the number of PS."""


def test_where_a_servers_memory_is_fixed_more_servers_come_before_it_runs_out() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=0, memory_lead_seconds=1e6))
    planned = only(plan([replace(growing(16 * GIB), bounds=PINNED)], planner=planner))
    assert planned.action is PlanAction.GROW_MEMORY  # without a wait for the cooldown
    assert planned.shape is not None
    assert 3 <= planned.shape.ps <= 4  # for 38 GiB of tables
    assert planned.shape.ps_memory == 16 * GIB
    assert "memory" in planned.reason


def test_more_servers_can_wait_where_memory_runs_out_much_later() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=0, time_value_per_hour=0, memory_lead_seconds=60))
    planned = only(plan([replace(growing(16 * GIB), bounds=PINNED)], planner=planner))
    assert planned.action is PlanAction.KEEP


def test_more_servers_come_even_where_nothing_says_how_fast_the_job_is() -> None:
    shape = replace(SMALL, ps_memory=16 * GIB)
    measured = tuple(replace(p, restarted=True) for p in growing(16 * GIB).profiles)
    job = replace(growing(16 * GIB), profiles=measured, current=shape)
    early = DefaultPlanner(PlannerSettings(exploration=0, memory_lead_seconds=1e9))
    enough = only(plan([replace(job, bounds=PINNED)], planner=early))
    assert enough.action is PlanAction.GROW_MEMORY
    assert enough.shape is not None
    assert 3 <= enough.shape.ps <= 4
    few = only(plan([replace(job, bounds=replace(PINNED, ps=(1, 2)))], planner=early))
    assert few.shape == replace(shape, ps=2)  # too few, but memory lasts longer
    cores_for_two = ClusterCapacity(8, 100 * GIB)
    assert only(plan([replace(job, bounds=PINNED)], cores_for_two, planner=early)).shape == replace(shape, ps=2)


def test_tables_that_no_allowed_shape_holds_are_named() -> None:
    small_bounds = replace(BOUNDS, ps=(1, 1), ps_memory=(GIB, 20 * GIB))
    planned = only(plan([replace(growing(16 * GIB), bounds=small_bounds)]))
    assert planned.action is PlanAction.KEEP
    assert "ps_memory" in planned.reason


def test_a_job_that_does_not_know_what_more_workers_bring_tries_it() -> None:
    doubtful = running(shapes=(replace(SMALL, worker_cpu=8, ps_cpu=8, ps=4, workers=12),))
    planner = DefaultPlanner(PlannerSettings(exploration=1.0))
    planned = only(plan([replace(doubtful, remaining_samples=10**9)], planner=planner))
    assert planned.action in (PlanAction.EXPLORE, PlanAction.SCALE)
    if planned.action is PlanAction.EXPLORE:
        assert "cheaper" in planned.reason


def test_exploring_ends_when_there_is_nothing_left_to_learn() -> None:
    planner = DefaultPlanner(PlannerSettings(exploration=1.0))
    job, shapes = replace(running(shapes=(SMALL,)), remaining_samples=10**9), [SMALL]
    for _ in range(25):
        planned = only(plan([job], planner=planner))
        if planned.action is PlanAction.KEEP:
            break
        assert planned.shape is not None
        shapes.append(planned.shape)
        job = replace(job, current=planned.shape, profiles=profiles(shapes, until=NOW))
        planner = DefaultPlanner(PlannerSettings(exploration=1.0))
    assert planned.action is PlanAction.KEEP
    assert planned.shape is not None
    assert bill(planned.shape) <= 1.03 * best_bill()


@pytest.mark.parametrize("enumerated", [MOST_SHAPES, 0], ids=["exact", "NSGA-II"])
def test_the_same_calls_give_the_same_plans(enumerated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessing, "MOST_SHAPES", enumerated)
    jobs = [running("a"), replace(running("b"), remaining_samples=10**7), waiting("c")]
    capacity = ClusterCapacity(150, 10_000 * GIB)
    one, two = (plan(jobs, capacity, DefaultPlanner(PlannerSettings(seed=3))) for _ in range(2))
    assert one == two


def test_both_ways_to_a_front_lead_to_equally_good_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    bills = []
    for enumerated in (MOST_SHAPES, 0):
        monkeypatch.setattr(assessing, "MOST_SHAPES", enumerated)
        bills.append(bill(unwrap(only(plan([running()])).shape)))
    assert max(bills) <= 1.02 * min(bills)


def test_a_planner_is_one_for_the_entry_point_and_forgets_jobs_that_are_gone() -> None:
    planner = DefaultPlanner(QUIET)
    assert isinstance(planner, Planner)
    plan([running("a"), running("b")], planner=planner)
    assert list(plan([running("b")], planner=planner)) == ["b"]
    assert plan([], planner=planner) == {}


def test_a_job_that_cannot_be_fitted_stays_as_it_is_and_the_others_are_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = only(plan([running("good")]))
    observe = JobModel.observe
    for cause in (np.linalg.LinAlgError("Singular matrix"), OverflowError("too large")):

        def fit(self: JobModel, job: JobView, constants: ModelConstants, now: float, cause: Exception = cause) -> None:
            if job.id == "bad":
                raise cause
            observe(self, job, constants, now)

        with monkeypatch.context() as patched:
            patched.setattr(JobModel, "observe", fit)
            plans = plan([running("bad"), running("good")])
        assert plans[JobId("good")].shape == alone.shape
        assert (plans[JobId("bad")].shape, plans[JobId("bad")].action) == (SMALL, PlanAction.KEEP)
        assert f"its model cannot be computed ({type(cause).__name__}: {cause})" in plans[JobId("bad")].reason


def test_profiles_over_many_decades_stop_nobody_else() -> None:
    alone = only(plan([running("good")]))
    for seed in range(60):
        random = np.random.default_rng(seed)
        made: list[JobProfile] = []
        for _ in range(2):
            sizes = random.integers(1, 9, 4)
            shape = JobShape(int(sizes[0]), int(sizes[1]), float(sizes[2]), float(sizes[3]), 4 * GIB, 16 * GIB)
            iteration = float(10 ** random.uniform(-8, 8))
            made.append(JobProfile(NOW - 9 + len(made), shape, 512, iteration, shape.workers * 512 / iteration))
        bad = replace(running("bad"), profiles=tuple(made), current=made[-1].shape)
        plans = plan([bad, running("good")])
        assert plans[JobId("good")].shape == alone.shape
        assert plans[JobId("bad")].reason


def test_a_job_that_is_fixed_for_a_while_keeps_what_was_learned_of_it() -> None:
    planner = DefaultPlanner(QUIET)
    job = running()
    before = only(plan([job], planner=planner)).explanation.fit
    latest = replace(job, profiles=job.profiles[-1:])
    assert plan([replace(latest, fixed=True)], planner=planner) == {}
    after = only(plan([latest], planner=planner)).explanation.fit
    assert before is not None
    assert (before.distinct_shapes, unwrap(after).distinct_shapes) == (5, 5)
