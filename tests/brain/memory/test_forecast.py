"""Forecasts of the memory of a job's parameter servers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.memory import MOST_POINTS, Expectation, MemoryTrack, fit_memory
from emberscale_brain.planner.types import JobMetadata
from eventually import unwrap

JOB = JobMetadata(
    architecture="DLRM", batch_size=512, dense_bytes=1 << 20, embedding_dimension=416, tables=26, total_samples=10**8
)
SHAPE = JobShape(workers=4, ps=4, worker_cpu=4, ps_cpu=4, worker_memory=GIB, ps_memory=8 * GIB)
BASE = 300 << 20
ROW_BYTES = 160


def rows_at(samples: float) -> float:
    return 3e8 * -math.expm1(-samples / 8e7)


def profiles(until: float, shape: JobShape = SHAPE, count: int = 40, with_rows: bool = True) -> list[JobProfile]:
    return [
        JobProfile(
            time=float(samples),
            shape=shape,
            batch_size=512,
            iteration_seconds=0.1,
            throughput=512 * shape.workers / 0.1,
            samples=int(samples),
            rows=int(rows_at(samples)) if with_rows else 0,
            ps_memory=int(BASE + ROW_BYTES * rows_at(samples) / shape.ps),
        )
        for samples in np.linspace(until / count, until, count)
    ]


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_ps_that_will_run_out_of_memory_is_seen_early(with_rows: bool) -> None:
    model = unwrap(fit_memory(MemoryTrack().add(profiles(1.5e7, with_rows=with_rows)), JOB))
    forecast = model.forecast(SHAPE)
    truth = BASE + ROW_BYTES * rows_at(1e8) / 4
    assert truth > SHAPE.ps_memory
    assert forecast.lower <= truth <= forecast.upper
    reached = float(
        np.interp(
            SHAPE.ps_memory, [BASE + ROW_BYTES * rows_at(s) / 4 for s in range(0, 10**8, 10**5)], range(0, 10**8, 10**5)
        )
    )
    assert forecast.oom_band is not None
    assert forecast.oom_band[0] <= reached <= forecast.oom_band[1]
    assert forecast.oom_at_samples == pytest.approx(reached, rel=0.15)


def test_a_ps_with_room_enough_is_left_alone() -> None:
    model = unwrap(fit_memory(MemoryTrack().add(profiles(3e7)), JOB))
    forecast = model.forecast(replace(SHAPE, ps_memory=32 * GIB))
    assert forecast.oom_at_samples is None
    assert forecast.oom_band is None


def test_the_need_of_any_number_of_ps_covers_the_truth_without_waste() -> None:
    model = unwrap(fit_memory(MemoryTrack().add(profiles(3e7)), JOB))
    counts = np.array([1, 2, 4, 8, 16])
    truth = BASE + ROW_BYTES * rows_at(1e8) / counts
    needed = model.need().each(counts)
    assert (needed >= truth).all()
    assert (needed <= 1.5 * truth + (1 << 26)).all()


def test_rows_do_not_grow_after_the_first_epoch() -> None:
    two_epochs = replace(JOB, total_samples=2 * 10**7, epochs=2)
    grown = [
        replace(p, rows=int(rows_at(min(p.samples, 10**7))), ps_memory=int(BASE + 40 * rows_at(min(p.samples, 10**7))))
        for p in profiles(1.5e7)
    ]
    model = unwrap(fit_memory(MemoryTrack().add(grown), two_epochs))
    assert model.forecast(SHAPE).upper == pytest.approx(grown[-1].ps_memory, rel=0.02)


def test_eviction_bounds_the_rows_and_so_the_memory() -> None:
    """With `eviction.maxRows`, tables that would outgrow a PS fit into it, and no alarm is raised."""
    early = MemoryTrack().add(profiles(1.5e7))
    unbounded, bounded = fit_memory(early, JOB), fit_memory(early, replace(JOB, most_rows=80_000_000))
    assert unbounded is not None
    assert bounded is not None
    assert unbounded.forecast(SHAPE).oom_band is not None
    forecast = bounded.forecast(SHAPE)
    assert forecast.oom_band is None
    assert forecast.upper == pytest.approx(BASE + ROW_BYTES * 8e7 / SHAPE.ps, rel=0.05)
    assert (bounded.need().each(np.array([4])) < unbounded.need().each(np.array([4]))).all()


def test_tables_beyond_their_bound_are_forecast_to_stay_as_they_are() -> None:
    """Tables exceed their bound if eviction lags behind or the bound was lowered."""
    model = fit_memory(MemoryTrack().add(profiles(1.5e7)), replace(JOB, most_rows=1000))
    assert model is not None
    held = profiles(1.5e7)[-1].ps_memory
    assert model.forecast(SHAPE).upper == pytest.approx(held, rel=0.05)


def test_a_track_keeps_the_whole_course_in_few_points() -> None:
    track = MemoryTrack()
    for profile in profiles(1e8, count=1000):
        track = track.add([profile])
    assert len(track.points) <= MOST_POINTS
    assert track.points[0].samples < 1e7
    assert track.points[-1].samples == 1e8
    gaps = np.diff([point.samples for point in track.points])
    assert gaps.max() < 1e7


def test_nothing_measured_means_no_forecast() -> None:
    unmeasured = [replace(p, ps_memory=0) for p in profiles(1e7)]
    assert fit_memory(MemoryTrack().add(unmeasured), JOB) is None


@pytest.mark.parametrize("measured_at", [1, 16])
def test_one_measurement_at_one_number_of_ps_never_sizes_another_number_too_small(measured_at: int) -> None:
    early = profiles(4e6, replace(SHAPE, ps=measured_at), count=1)
    model = unwrap(fit_memory(MemoryTrack().add(early), JOB))
    counts = np.array([1, 2, 4, 8, 16, 32])
    assert (model.need().each(counts) >= BASE + ROW_BYTES * rows_at(1e8) / counts).all()


def test_what_similar_jobs_ended_with_tells_early_how_far_the_rows_will_grow() -> None:
    early = MemoryTrack().add(profiles(4e6, count=4))
    alone, taught = fit_memory(early, JOB), fit_memory(early, JOB, Expectation(1e8, 1.05 * rows_at(1e8), 0.1))
    assert alone is not None
    assert taught is not None
    truth = BASE + ROW_BYTES * rows_at(1e8) / SHAPE.ps
    bands = [model.forecast(SHAPE) for model in (alone, taught)]
    assert bands[1].lower <= truth <= bands[1].upper
    assert bands[1].upper - bands[1].lower < 0.7 * (bands[0].upper - bands[0].lower)


def test_an_expectation_that_is_wrong_altogether_gives_way_to_what_is_measured() -> None:
    seen = MemoryTrack().add(profiles(6e7))
    model = unwrap(fit_memory(seen, JOB, Expectation(1e8, 100 * rows_at(1e8), 0.1)))
    forecast = model.forecast(SHAPE)
    assert forecast.lower <= BASE + ROW_BYTES * rows_at(1e8) / SHAPE.ps <= forecast.upper
    assert forecast.upper < 1.3 * forecast.expected
