import math
from dataclasses import replace
from typing import Any

import pytest

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_simulator.ground_truth import Physics, TableGrowth, batch_rate
from emberscale_simulator.job import Happening, RunPhase, SimulatedJob
from emberscale_simulator.mechanics import ChangeMethod, FailureLaw, Mechanics
from emberscale_simulator.resources import Amounts
from emberscale_simulator.run import JobRun
from emberscale_simulator.scenario import FailureSpec, ProfilingSpec, StartUpSpec, StragglerSpec, Surroundings
from eventually import unwrap

PHYSICS = Physics(512, 0.3, 0.95, 0.22, 0.95, 4.8e6, 2e-4, 3e-3, 6e8, 6e8)
SHAPE = JobShape(8, 4, 4, 4, 4 * GIB, 8 * GIB)
PLENTY = Amounts(1e6, 1 << 60)
# a server saves or loads its share of the tables at 100 MB/s
RATES: dict[str, Any] = {"save_bandwidth": "100M", "load_bandwidth": "100M"}
LIVE = Mechanics(
    change=ChangeMethod.LIVE, worker_pause=1, reshape=5, dynamic_sharding=True, elastic=True, end_detection=8, **RATES
)
STOPPING = Mechanics(change=ChangeMethod.STOP_AND_RESTART, checkpoint_interval=600, end_detection=8, **RATES)


def job(**changes: Any) -> SimulatedJob:
    made = SimulatedJob(
        id=JobId("a"),
        owner="team",
        metadata=JobMetadata("DLRM", 512, 1_500_000, 416, 26, 512 * 100_000),
        physics=PHYSICS,
        growth=TableGrowth(GIB, 4 * GIB, 2e7, 0.7),
        row_bytes=160,
        worker_memory=2 * GIB,
        ps_base=GIB // 4,
        arrival=0.0,
        request=SHAPE,
        bounds=ShapeBounds(),
    )
    return replace(made, **changes)


SURROUNDINGS = Surroundings(
    failures=FailureSpec(silent=0.0),
    start_up=StartUpSpec(median=30, spread=0),
    profiling=ProfilingSpec(noise=0.0, interval=30),
    ps_memory_skew=1.1,
)
OFTEN = FailureLaw(mean_pod_seconds=12 * 200, shape=1.0)


def begin(
    mechanics: Mechanics,
    shape: JobShape = SHAPE,
    failures: FailureLaw | None = None,
    surroundings: dict[str, Any] | None = None,
    **job_changes: Any,
) -> JobRun:
    around = SURROUNDINGS.model_copy(update=surroundings)
    run = JobRun(job(**job_changes), mechanics, around, failures, (0, 0))
    run.start(shape, 0.0)
    return run


def tables(run: JobRun, ps: int = SHAPE.ps, samples: float | None = None) -> float:
    """Returns the seconds of a save or load: of the largest server's share, a tenth above the mean."""
    trained = run.samples if samples is None else samples
    return run.job.growth.bytes_at(trained) * 1.1 / ps / 1e8


def step(run: JobRun) -> tuple[float, Happening]:
    event = unwrap(run.next_event())
    run.happen(event[1], event[0], PLENTY)
    return event


def begun(*args: Any, **job_changes: Any) -> JobRun:
    """Begins a run as `begin` does, and makes its pods ready."""
    run = begin(*args, **job_changes)
    step(run)
    return run


def to_the_end(run: JobRun) -> None:
    while not run.ended:
        step(run)


def test_a_job_starts_trains_and_completes_at_the_true_speed() -> None:
    run = begin(LIVE)
    assert step(run) == (30.0, Happening.READY)
    at, what = step(run)
    assert what is Happening.DONE
    assert at == pytest.approx(30 + 100_000 / batch_rate(PHYSICS, 8, 4, 4, 4))
    assert run.phase is RunPhase.COMPLETE


def test_a_live_change_trains_on_until_the_new_pods_are_there() -> None:
    run = begun(LIVE)
    assert run.change_to(replace(SHAPE, workers=10), 100.0, PLENTY)
    assert run.next_event() == (130.0, Happening.CHANGE_READY)
    step(run)
    assert run.samples == pytest.approx(100 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4))
    assert step(run) == (131.0, Happening.READY)
    assert run.shape == replace(SHAPE, workers=10)
    assert run.scalings == 1


def test_rows_move_to_more_servers_and_to_fewer_while_the_job_trains() -> None:
    moving = LIVE.model_copy(update={"move_bandwidth": "100M", "move_slowdown": 0.2})
    for servers, busiest in ((6, 1.0), (2, 1.0), (1, 3.0)):  # of 4: the busiest one joins, leaves, or stays alone
        run = begun(moving)
        assert run.change_to(replace(SHAPE, ps=servers), 100.0, PLENTY)
        at, _ = step(run)
        smaller = min(tables(run, ps=SHAPE.ps), tables(run, ps=servers))
        assert step(run)[0] == pytest.approx(at + 5 + 0.2 * busiest * smaller)
        assert run.shape == replace(SHAPE, ps=servers)


def test_a_restart_stands_still_for_saving_starting_and_loading() -> None:
    run = begun(STOPPING)
    assert run.change_to(replace(SHAPE, workers=10), 100.0, PLENTY)
    at, _ = step(run)
    assert at == pytest.approx(100.0 + 30 + 2 * tables(run, samples=70 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4)))
    assert run.samples == pytest.approx(70 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4))


def test_pods_that_are_replaced_overlap_only_where_there_is_room() -> None:
    larger = replace(SHAPE, ps_cpu=8)
    roomy, tight, full, refused = (begin(LIVE) for _ in range(4))
    for run in (roomy, tight, full, refused):
        step(run)
    assert roomy.change_to(larger, 100.0, Amounts(4 * 8, 1 << 60))
    assert roomy.reserved.cpu == SHAPE.cpu + 4 * 8
    assert roomy.next_event() == (130.0, Happening.CHANGE_READY)
    assert tight.change_to(larger, 100.0, Amounts(4 * 8 - 1, 1 << 60))
    assert tight.reserved.cpu == larger.cpu + 8
    assert tight.next_event() == (100 + 4 * 30.0, Happening.CHANGE_READY)
    assert full.change_to(larger, 100.0, Amounts(4 * 4, 1 << 60))
    assert full.reserved.cpu == larger.cpu
    step(full)
    event = unwrap(full.next_event())
    assert event[0] == pytest.approx(100 + 4 * 30.0 + 30.0 + 5.0 + 2 * tables(full))
    assert not refused.change_to(larger, 100.0, Amounts(4 * 4 - 1, 1 << 60))


def test_pods_that_are_resized_in_place_neither_start_nor_overlap_nor_stand_still() -> None:
    run = begun(LIVE.model_copy(update={"resize": 10.0}))
    larger = replace(SHAPE, ps_cpu=8, worker_cpu=2, ps_memory=16 * GIB)
    assert run.change_to(larger, 100.0, PLENTY)
    assert run.reserved.cpu == 8 * 4 + 4 * 8  # the larger of both for each role, until the change is done
    assert step(run) == (110.0, Happening.CHANGE_READY)
    assert step(run) == (110.0, Happening.READY)
    assert (run.shape, run.reserved.cpu) == (larger, larger.cpu)
    assert run.samples == pytest.approx(80 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4))


def test_pods_that_are_added_while_others_are_resized_are_all_that_starts() -> None:
    run = begun(LIVE.model_copy(update={"resize": 10.0}))
    assert run.change_to(replace(SHAPE, workers=10, worker_cpu=2), 100.0, PLENTY)
    assert run.reserved.cpu == 8 * 4 + 2 * 2 + 4 * 4
    assert step(run) == (130.0, Happening.CHANGE_READY)


def test_another_number_of_servers_holds_training_while_their_rows_are_saved_and_loaded() -> None:
    run = begun(LIVE)
    assert run.change_to(replace(SHAPE, ps=8), 100.0, PLENTY)
    assert step(run) == (130.0, Happening.CHANGE_READY)
    saved, loaded = tables(run, 4), tables(run, 8)
    assert saved == 2 * loaded
    at, what = step(run)
    assert what is Happening.READY
    assert at == pytest.approx(130.0 + 5 + saved + loaded)


def test_what_changes_cost_is_told_as_the_product_tells_it() -> None:
    run = begun(LIVE)
    first = run.take_start_times()
    assert {(start.role, start.seconds, start.paused_seconds) for start in first} == {
        ("worker", 30.0, None),
        ("ps", 30.0, None),
    }
    run.change_to(replace(SHAPE, ps=8), 100.0, PLENTY)
    step(run)
    started, paused = run.take_start_times()
    assert (started.role, started.seconds) == ("ps", 30.0)
    assert paused.role == "ps"
    assert paused.paused_seconds == pytest.approx(5 + tables(run, 4) + tables(run, 8))


def test_a_failed_worker_only_slows_a_job_and_a_failed_server_takes_it_back_to_its_checkpoint() -> None:
    run = begin(LIVE, failures=OFTEN)
    workers_lost = servers_lost = 0
    while not run.ended:
        event = unwrap(run.next_event())
        run.advance(event[0])
        before = run.samples
        run.happen(event[1], event[0], PLENTY)
        if event[1] is not Happening.FAILURE:
            continue
        if run.phase is RunPhase.TRAINING:
            workers_lost += 1
            assert run.samples == before
        else:
            servers_lost += 1
            assert run.samples <= before
            again = unwrap(run.next_event())
            assert again[0] == pytest.approx(event[0] + 8 + 30 + tables(run))
    assert run.phase is RunPhase.COMPLETE
    assert workers_lost
    assert servers_lost == run.servers_lost > 0


def test_any_failed_pod_of_a_job_that_is_not_elastic_starts_all_anew_from_its_checkpoint() -> None:
    run = begin(STOPPING, failures=OFTEN)
    failures = 0
    while not run.ended:
        event = unwrap(run.next_event())
        run.take_start_times()
        run.happen(event[1], event[0], PLENTY)
        if event[1] is not Happening.FAILURE:
            continue
        failures += 1
        assert {start.role for start in run.take_start_times()} == {"worker", "ps"}
        again = unwrap(run.next_event())
        assert again[0] == pytest.approx(event[0] + 8 + 30 + tables(run))
    assert failures > run.servers_lost > 0


@pytest.mark.parametrize("silent", [False, True])
def test_a_pod_that_goes_silent_is_given_up_later_than_one_whose_process_ends(silent: bool) -> None:
    around = {"failures": FailureSpec(silent=float(silent))}
    run = begin(LIVE.model_copy(update={"detection": 15.0, "end_detection": 1.0}), failures=OFTEN, surroundings=around)
    back: dict[Happening, float] = {}
    while len(back) < 2:
        event = step(run)
        after = run.next_event()
        if event[1] is Happening.FAILURE and after is not None and after[1] in (Happening.READY, Happening.WORKER_BACK):
            loading = tables(run) if after[1] is Happening.READY else 0.0
            back[after[1]] = after[0] - event[0] - loading
        assert not run.ended
    assert list(back.values()) == pytest.approx([(15 if silent else 1) + 30] * 2)


def test_a_job_saves_as_often_as_the_brain_advises_where_nothing_else_is_said() -> None:
    run = begun(LIVE)
    speed = 512 * batch_rate(PHYSICS, 8, 4, 4, 4)
    run.advance(430.0)
    run.advise(100.0, 430.0)
    run.evict(545.0)
    assert run.samples == pytest.approx((530 - 30) * speed)
    fixed = begun(STOPPING)
    fixed.advise(100.0, 430.0)
    fixed.evict(729.0)
    assert fixed.samples == pytest.approx(600 * speed)


def test_writing_a_checkpoint_costs_its_share_of_training() -> None:
    slowed = begin(STOPPING.model_copy(update={"checkpoint_slowdown": 0.1}))
    free = begin(STOPPING)
    for run in (slowed, free):
        step(run)
    saving = tables(slowed)
    assert slowed.checkpoint_cost == 0
    for run in (slowed, free):
        run.advance(1000.0)
    assert slowed.checkpoint_cost == pytest.approx(0.1 * tables(slowed))
    assert slowed.samples == pytest.approx(free.samples * (1 - 0.1 * saving / 600))


def test_a_roll_back_never_loses_more_than_a_checkpoint_interval() -> None:
    most = 600 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4)
    run = begin(STOPPING, failures=OFTEN)
    while not run.ended:
        event = unwrap(run.next_event())
        run.advance(event[0])
        before = run.samples
        run.happen(event[1], event[0], PLENTY)
        assert before - run.samples <= most * (1 + 1e-9)


def test_tables_that_outgrow_their_memory_end_a_job_that_nobody_resizes() -> None:
    run = begin(STOPPING, shape=replace(SHAPE, ps_memory=GIB))
    happened = []
    while not run.ended:
        happened.append(step(run)[1])
    assert run.phase is RunPhase.FAILED
    assert happened.count(Happening.OUT_OF_MEMORY) == STOPPING.backoff_limit + 1


def test_a_server_that_is_killed_for_its_memory_waits_longer_each_time_and_reports_what_it_reached() -> None:
    waiting = LIVE.model_copy(update={"restart_backoff": 10.0, "restart_backoff_limit": 100.0})
    run = begun(waiting, shape=replace(SHAPE, ps_memory=GIB // 2))
    waits = []
    while not run.ended:
        at, what = step(run)
        if what is Happening.OUT_OF_MEMORY and not run.ended:
            profile = unwrap(run.measure(at))
            assert profile.restarted
            assert profile.ps_memory == GIB // 2
            back = tables(run)
            again, _ = step(run)
            waits.append(again - at - back)
    assert waits == pytest.approx([30 + 8 + delay for delay in (0, 10, 20, 40, 80, 100)])


def test_a_server_that_was_killed_for_its_memory_starts_again_with_more() -> None:
    growing = LIVE.model_copy(update={"memory_growth": 1.5})
    run = begun(growing, shape=replace(SHAPE, ps_memory=GIB))
    at, what = step(run)
    assert what is Happening.OUT_OF_MEMORY
    assert run.shape == replace(SHAPE, ps_memory=GIB * 3 // 2)
    profile = unwrap(run.measure(at))
    assert profile.ps_memory == GIB
    to_the_end(run)
    assert run.phase is RunPhase.COMPLETE
    assert run.restarts == 1


def test_memory_grows_no_further_than_the_cluster_and_the_bounds_have_room() -> None:
    growing = LIVE.model_copy(update={"memory_growth": 1.5})
    small = replace(SHAPE, ps_memory=GIB)
    full, bounded = begin(growing, shape=small), begin(growing, shape=small, bounds=ShapeBounds(ps_memory=(GIB, GIB)))
    for run, free in ((full, Amounts(1e6, GIB // 4)), (bounded, PLENTY)):
        step(run)
        event = unwrap(run.next_event())
        run.happen(event[1], event[0], free)
        assert run.shape == small


def test_memory_grows_to_a_multiple_of_what_the_job_was_given_and_no_further() -> None:
    growing = LIVE.model_copy(update={"memory_growth": 1.5, "max_memory_growth": 2.0})
    run = begun(growing, shape=replace(SHAPE, ps_memory=GIB // 2))
    to_the_end(run)
    assert unwrap(run.shape).ps_memory == GIB
    assert run.phase is RunPhase.FAILED


def test_a_server_that_lived_long_starts_again_at_once() -> None:
    waiting = LIVE.model_copy(update={"restart_backoff": 10.0, "memory_growth": 1.2, "restart_backoff_reset": 1.0})
    run = begun(waiting, shape=replace(SHAPE, ps_memory=GIB))
    waits = []
    while not run.ended:
        at, what = step(run)
        if what is Happening.OUT_OF_MEMORY:
            back = tables(run)
            waits.append(step(run)[0] - at - back)
    assert len(waits) > 1
    assert waits == pytest.approx([30 + 8] * len(waits))


def test_a_job_that_keeps_running_out_of_memory_may_be_given_more() -> None:
    run = begun(LIVE, shape=replace(SHAPE, ps_memory=GIB // 2))
    at, what = step(run)
    assert what is Happening.OUT_OF_MEMORY
    assert not run.in_transition
    assert not run.change_to(SHAPE, at + 1, Amounts(0.0, 0))
    assert run.change_to(SHAPE, at + 1, PLENTY)
    assert run.in_transition
    ready, _ = step(run)
    assert ready == pytest.approx(at + 1 + 30 + tables(run))
    to_the_end(run)
    assert run.phase is RunPhase.COMPLETE
    assert run.restarts == 1


def test_more_memory_in_time_saves_a_job() -> None:
    run = begun(LIVE, shape=replace(SHAPE, ps_memory=GIB))
    event = unwrap(run.next_event())
    assert event[1] is Happening.OUT_OF_MEMORY
    assert run.change_to(SHAPE, event[0] - 60, PLENTY)
    to_the_end(run)
    assert run.phase is RunPhase.COMPLETE
    assert run.restarts == 0


def test_a_slow_worker_holds_back_only_those_who_share_its_data_statically() -> None:
    slow = {"stragglers": StragglerSpec(worker_probability=0.3, slowest=0.5, fastest=0.5)}
    speeds = []
    for mechanics in (STOPPING, LIVE):
        run = begun(mechanics, surroundings=slow)
        run.advance(1000.0)
        speeds.append(run.samples)
    healthy = begun(LIVE)
    healthy.advance(1000.0)
    assert speeds[0] < 0.75 * healthy.samples
    assert speeds[0] < speeds[1] < healthy.samples


def test_a_slow_server_holds_back_its_job_to_the_end() -> None:
    slow = {"stragglers": StragglerSpec(ps_probability=0.5, slowest=0.2, fastest=0.2)}
    run = begun(LIVE, surroundings=slow)
    at, what = step(run)
    assert what is Happening.DONE
    assert at > 30 + 2 * 100_000 / batch_rate(PHYSICS, 8, 4, 4, 4)


def test_load_moves_off_a_slow_server_where_the_mechanics_can_do_that() -> None:
    slow = {"stragglers": StragglerSpec(ps_probability=0.5, slowest=0.2, fastest=0.2)}
    run = begun(LIVE.model_copy(update={"straggler_seconds": 60.0}), surroundings=slow)
    before = run.timeline[-1][1]
    assert step(run) == (90.0, Happening.MENDED)
    assert run.timeline[-1][1] > 1.3 * before


def test_an_evicted_job_starts_again_from_its_last_checkpoint() -> None:
    run = begun(STOPPING)
    run.evict(1500.0)
    assert run.phase is RunPhase.QUEUED
    assert run.reserved.cpu == 0
    speed = 512 * batch_rate(PHYSICS, 8, 4, 4, 4)
    assert run.samples == pytest.approx(1200 * speed)
    run.start(SHAPE, 2000.0)
    at, _ = step(run)
    assert at == pytest.approx(2000.0 + 30 + tables(run))


def test_an_elastic_job_trains_on_without_workers_that_are_taken_but_never_without_the_last() -> None:
    run = begun(LIVE)
    assert run.evict_workers(100, 50.0) == 7
    assert run.shape == SHAPE
    assert run.reserved.cpu == SHAPE.cpu - 7 * 4
    assert run.in_transition
    run.advance(100.0)
    slow = 50 * 512 * batch_rate(PHYSICS, 1, 4, 4, 4)
    assert run.samples == pytest.approx(20 * 512 * batch_rate(PHYSICS, 8, 4, 4, 4) + slow)
    for _ in range(7):
        run.return_worker(100.0)
    assert run.reserved.cpu == SHAPE.cpu
    for _ in range(7):
        assert step(run) == (130.0, Happening.WORKER_BACK)
    assert not run.in_transition
    stiff = begun(STOPPING)
    assert stiff.evict_workers(1, 50.0) == 0


def test_a_profile_says_what_is_true_and_when_it_says_nothing_about_the_shape() -> None:
    run = begin(LIVE)
    assert run.measure(10.0) is None
    step(run)
    early = run.measure(40.0)
    late = run.measure(100.0)
    assert unwrap(early).restarted
    assert late is not None
    assert not late.restarted
    assert late.throughput == pytest.approx(512 * batch_rate(PHYSICS, 8, 4, 4, 4))
    assert late.iteration_seconds * late.throughput == pytest.approx(8 * 512)
    assert late.samples == int(run.samples)
    assert 0 < late.worker_cpu_utilization < 1


def test_checkpoints_that_stop_training_cost_their_share() -> None:
    free = begin(STOPPING)
    costly = begin(STOPPING.model_copy(update={"checkpoint_pause": 60.0}))
    for run in (free, costly):
        step(run)
        run.advance(3000.0)
    assert costly.samples == pytest.approx(free.samples * (1 - 60 / 600))


def test_a_job_that_nothing_disturbs_never_fails() -> None:
    run = begun(LIVE)
    event = unwrap(run.next_event())
    assert event[0] < math.inf
    assert event[1] is Happening.DONE
