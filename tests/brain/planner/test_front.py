"""Exact Pareto fronts, and how close NSGA-II comes to them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.memory import PsMemoryNeed
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.candidates import dimensions, neighbours
from emberscale_brain.planner.front import MOST_SHAPES, Front, SearchEffort, exact_front, nsga2_front
from emberscale_brain.planner.grid import Horizon, JobProblem, cpu_choices, shape_grid
from emberscale_brain.planner.types import ClusterCapacity, Prices, ScalingOverheads, ShapeBounds, ThroughputFit
from eventually import unwrap
from references import hypervolume, hypervolume_ratio

UNITS = ModelConstants(batch_size=1, dense_bytes=1, embedding_dimension=1, network_bytes_per_second=1)
PLENTY = ClusterCapacity(1e6, 1 << 60)
NONE = ((0.0,) * 6,) * 6


def problem(seed: int, bounds: ShapeBounds | None = None, cpu_limit: float = float("inf")) -> JobProblem:
    """Returns a job with coefficients near the paper's, tables of 4 to 400 GiB, and often a present shape."""
    random = np.random.default_rng(seed)
    a, b, c, d, e, f = (np.array([3.48, 2.36, 0.68, 2.45, 2.45, 0.6]) * np.exp(random.normal(0, 0.8, 6))).tolist()
    fit = ThroughputFit((a, b, c, d, e, f), NONE, 0.05, 0.05, 10, 10)
    bounds = bounds or ShapeBounds()
    grid = unwrap(shape_grid(bounds, PLENTY, 8 * GIB, PsMemoryNeed(GIB, float(np.exp(random.uniform(1.4, 6))) * GIB)))
    fresh = JobProblem(grid, UNITS, fit, Prices(), Horizon(None, 0.0, 1.0, ScalingOverheads()), cpu_limit)
    if random.random() < 0.3:
        return fresh
    present = JobShape(
        int(random.integers(1, bounds.workers[1] + 1)),
        int(random.integers(1, bounds.ps[1] + 1)),
        float(random.integers(1, 9)),
        float(random.integers(1, 9)),
        8 * GIB,
        64 * GIB,
    )
    now = float(fresh.gross(*dimensions((present,)))[0])
    seconds = float(np.exp(random.uniform(5, 11)))
    return replace(fresh, horizon=Horizon(present, now, seconds, ScalingOverheads()))


def brute_force(job: JobProblem) -> tuple[np.ndarray, np.ndarray]:
    """Finds the front by a comparison of every shape with every other."""
    grid = job.grid
    cost, net = job.evaluate(
        grid.workers[:, None, None, None], np.arange(len(grid.ps))[:, None, None], grid.worker_cpu[:, None], grid.ps_cpu
    )
    cost, net = cost.ravel(), net.ravel()
    best = [
        i
        for i in range(len(cost))
        if np.isfinite(cost[i])
        and net[i] > 0
        and not ((cost <= cost[i]) & (net >= net[i]) & ((cost < cost[i]) | (net > net[i]))).any()
    ]
    points = np.unique(np.column_stack([cost[best], net[best]]), axis=0)
    return points[:, 0], points[:, 1]


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([float("inf"), 12.0]), st.sampled_from([1.0, 4.0]))
def test_the_exact_front_is_what_no_shape_beats(seed: int, cpu_limit: float, overlap: float) -> None:
    job = problem(seed, ShapeBounds(workers=(1, 7), ps=(1, 4), worker_cpu=(1, 5), ps_cpu=(1, 5)), cpu_limit)
    job = replace(job, fit=replace(job.fit, overlap=overlap))
    front = exact_front(job)
    cost, net = brute_force(job)
    assert front.cost == pytest.approx(cost)
    assert front.throughput == pytest.approx(net)
    for index in range(len(front)):
        shape = front.shape(index)
        assert Prices().per_hour(shape) == pytest.approx(front.cost[index])
        assert shape.cpu <= cpu_limit


@pytest.mark.parametrize("seed", range(6))
def test_nsga2_reaches_99_percent_of_the_exact_hypervolume(seed: int) -> None:
    job = problem(seed)
    exact = exact_front(job)
    found, population = nsga2_front(job, seed)
    assert hypervolume_ratio(found, exact) >= 0.99
    a, b, c, d, e, f = job.fit.coefficients
    changed = replace(job, fit=replace(job.fit, coefficients=(1.2 * a, b, 0.9 * c, d, e, f)))
    again, _ = nsga2_front(changed, seed, population)
    assert hypervolume_ratio(again, exact_front(changed)) >= 0.99


def test_nsga2_is_the_same_for_the_same_seed() -> None:
    effort = SearchEffort(population=24, cold_generations=6)
    one, two = (nsga2_front(problem(1), 7, effort=effort)[0] for _ in range(2))
    assert (one.choices == two.choices).all()


def test_grids_too_large_to_enumerate_are_refused_and_searched_instead() -> None:
    bounds = ShapeBounds(workers=(1, 512), ps=(1, 256), worker_cpu=(0.5, 32), ps_cpu=(0.5, 32), cpu_step=0.5)
    job = problem(3, bounds)
    assert job.grid.size > MOST_SHAPES
    with pytest.raises(ValueError, match="NSGA-II"):
        exact_front(job)
    front, _ = nsga2_front(job, 0, effort=SearchEffort(population=40, cold_generations=10))
    assert len(front) > 10


def test_a_front_that_misses_points_has_less_hypervolume() -> None:
    exact = exact_front(problem(2))
    half = Front(exact.grid, exact.choices[::7], exact.cost[::7], exact.throughput[::7])
    assert 0.5 < hypervolume_ratio(half, exact) < hypervolume_ratio(exact, exact) == pytest.approx(1.0)


def test_hypervolume_is_the_area_dominated() -> None:
    # corners (1, 1/1) and (3, 1/4), reference (5, 2): the first covers 4 x 1, the second 2 x (1 - 1/4) more
    assert hypervolume(np.array([1.0, 3.0]), np.array([1.0, 4.0]), (5.0, 2.0)) == pytest.approx(4 + 2 * 0.75)


def test_staying_is_free_and_a_ps_change_costs_more_than_a_worker_change() -> None:
    present = JobShape(4, 2, 4, 4, GIB, GIB)
    horizon = Horizon(present, 100.0, 600.0, ScalingOverheads())
    w, p = np.array([4.0, 5.0, 4.0]), np.array([2.0, 2.0, 3.0])
    cores = np.full(3, 4.0)
    net = horizon.net(np.full(3, 100.0), w, p, cores, cores)
    assert net[0] == 100.0
    assert net[0] > net[1] > net[2]
    short = Horizon(present, 100.0, 20.0, ScalingOverheads())
    assert short.net(np.full(3, 1e6), w, p, cores, cores)[1] == pytest.approx(100.0)  # over before a worker starts


def test_too_little_memory_rules_counts_of_ps_out() -> None:
    bounds = ShapeBounds(ps=(1, 16), ps_memory=(GIB, 8 * GIB))
    grid = unwrap(shape_grid(bounds, PLENTY, GIB, PsMemoryNeed(0.0, 40.0 * GIB)))
    assert grid.ps.tolist() == list(range(5, 17))
    assert shape_grid(bounds, PLENTY, GIB, PsMemoryNeed(0.0, 400.0 * GIB)) is None


def test_cores_are_chosen_on_a_grid_from_the_lower_bound() -> None:
    assert cpu_choices((0.25, 2.0), 0.5).tolist() == [0.25, 0.5, 1.0, 1.5, 2.0]
    assert cpu_choices((1.0, 4.0), 1.0).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert cpu_choices((3.0, 3.0), 1.0).tolist() == [3.0]


@pytest.mark.parametrize("most", [0.3, 0.6, 0.7])
def test_no_choice_of_cores_is_above_the_upper_bound(most: float) -> None:
    """A plan that is beyond it, by however little, is refused with those of all other jobs."""
    assert cpu_choices((0.1, most), 0.1)[-1] == most


@pytest.mark.parametrize(("least", "most", "step"), [(0.02, 0.8, 0.02), (0.2, 0.7, 0.1), (1.0, 16.0, 1.0)])
def test_a_shape_to_try_has_cores_of_the_grid_so_that_it_is_recognized_once_it_was_tried(
    least: float, most: float, step: float
) -> None:
    choices = cpu_choices((least, most), step).tolist()
    bounds = ShapeBounds(worker_cpu=(least, most), ps_cpu=(least, most), cpu_step=step)
    for cores in choices:
        for shape in neighbours(JobShape(2, 2, cores, cores, GIB, GIB), bounds):
            assert shape.worker_cpu in choices
            assert shape.ps_cpu in choices


@pytest.mark.parametrize("overlap", [1.0, 3.0])
def test_the_grid_predicts_by_the_equations(overlap: float) -> None:
    job = problem(3)
    job = replace(job, fit=replace(job.fit, overlap=overlap), constants=ModelConstants(512, 1e6, 416, 1e9))
    shapes = [JobShape(w, p, 2.0 * w, 0.5 * p, GIB, GIB) for w in (1, 3, 8) for p in (1, 2, 5)]
    expected = []
    for s in shapes:
        each, asked = s.workers / s.ps, s.workers / s.ps_cpu
        shares = (512 / s.worker_cpu, each / s.ps_cpu, each / 1e3, 512 * 416 / s.ps, 1, asked)
        terms = [coefficient * share for coefficient, share in zip(job.fit.coefficients, shares, strict=True)]
        expected.append(s.workers * 512 / sum(term**overlap for term in terms) ** (1 / overlap))
    assert job.gross(*dimensions(tuple(shapes))) == pytest.approx(expected)
