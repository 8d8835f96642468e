import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_simulator.ground_truth import (
    Physics,
    TableGrowth,
    amdahl_seconds,
    batch_rate,
    batch_rates,
    rate,
)

PHYSICS = Physics(
    batch_size=512,
    worker_work=0.3,
    worker_parallel=0.95,
    ps_work=0.2,
    ps_parallel=0.95,
    batch_bytes=4e6,
    request_seconds=2e-4,
    fixed_seconds=2e-3,
    worker_bandwidth=6e8,
    ps_bandwidth=6e8,
)
shapes = st.tuples(st.integers(1, 40), st.integers(1, 12), st.floats(0.5, 32), st.floats(0.5, 32))


def test_twenty_times_the_cores_never_beat_the_serial_part() -> None:
    assert amdahl_seconds(1.0, 0.95, 1) == 1.0
    assert amdahl_seconds(1.0, 0.95, 20) == pytest.approx(0.05 + 0.95 / 20)
    assert amdahl_seconds(1.0, 0.95, 1e9) == pytest.approx(0.05)
    assert amdahl_seconds(1.0, 0.95, 0.25) == 4.0


@given(shapes)
def test_more_of_anything_but_servers_never_slows_a_job(shape: tuple[int, int, float, float]) -> None:
    workers, ps, worker_cores, ps_cores = shape
    base = batch_rate(PHYSICS, workers, ps, worker_cores, ps_cores)
    assert batch_rate(PHYSICS, workers + 1, ps, worker_cores, ps_cores) >= base * (1 - 1e-9)
    assert batch_rate(PHYSICS, workers, ps, worker_cores + 1, ps_cores) >= base * (1 - 1e-9)
    assert batch_rate(PHYSICS, workers, ps, worker_cores, ps_cores + 1) >= base * (1 - 1e-9)


@given(shapes)
def test_cores_are_never_busier_than_there_are(shape: tuple[int, int, float, float]) -> None:
    workers, ps, worker_cores, ps_cores = shape
    done = rate(PHYSICS, workers, ps, worker_cores, ps_cores)
    assert 0 < done.worker_busy_cores <= workers * worker_cores * (1 + 1e-9)
    assert 0 < done.ps_busy_cores <= ps * ps_cores * (1 + 1e-9)


def test_the_network_saturates() -> None:
    endless_cores = replace(PHYSICS, ps_parallel=1.0)
    limit = PHYSICS.ps_bandwidth / PHYSICS.batch_bytes * 2
    few, many, more = (batch_rate(endless_cores, workers, 2, 4, 1000) for workers in (2, 400, 800))
    assert few < limit / 4
    assert many == pytest.approx(limit, rel=0.15)
    assert more - many < 0.02 * limit


def test_half_a_worker_lies_between_none_and_one() -> None:
    one, two = (batch_rate(PHYSICS, workers, 2, 4, 4) for workers in (1, 2))
    assert batch_rate(PHYSICS, 1.5, 2, 4, 4) == pytest.approx((one + two) / 2)


def test_the_search_grid_is_the_same_truth() -> None:
    ps, cores = np.array([1, 3]), np.array([0.5, 8.0])
    grid = batch_rates(PHYSICS, 5, ps, cores, cores)
    for workers in range(1, 6):
        for i, servers in enumerate(ps):
            for j, worker_cores in enumerate(cores):
                for k, ps_cores in enumerate(cores):
                    expected = batch_rate(PHYSICS, workers, int(servers), float(worker_cores), float(ps_cores))
                    assert grid[workers - 1, i, j, k] == pytest.approx(expected)


@given(st.floats(0, 1e10), st.floats(0.3, 1.0))
def test_the_samples_at_a_size_have_that_size(samples: float, exponent: float) -> None:
    growth = TableGrowth(base_bytes=1e9, limit_bytes=5e10, scale_samples=1e9, exponent=exponent)
    size = growth.bytes_at(samples)
    assert 1e9 <= size <= 5.1e10
    if size < 5.0e10:
        assert growth.bytes_at(growth.samples_at(size)) == pytest.approx(size)


def test_tables_that_never_reach_a_size_reach_it_never() -> None:
    growth = TableGrowth(base_bytes=1e9, limit_bytes=5e10, scale_samples=1e9, exponent=0.7)
    assert growth.samples_at(6e10) == math.inf
    assert growth.samples_at(5e8) == 0.0
