"""The choice for all jobs together: never over the limits, and nearly optimal."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_brain.planner.selection import Options, SelectionTable, select, upper_hull, weighted_value
from emberscale_brain.planner.types import ClusterCapacity, Quota
from examples import examples
from references import select_optimally


def random_cluster(
    seed: int, most_jobs: int = 12, rho: float = 1.0
) -> tuple[list[Options], ClusterCapacity, dict[str, Quota]]:
    """Returns jobs with throughput concave in cores, capacity for a part of their demand, and quotas of some owners."""
    random = np.random.default_rng(seed)
    jobs = []
    for _ in range(int(random.integers(1, most_jobs + 1))):
        points = int(random.integers(2, 20))
        cpu = np.cumsum(random.uniform(1, 30, points))
        memory = cpu * random.uniform(0.5, 8) + random.uniform(0, 50) + random.uniform(0, 20, points)
        half = random.uniform(20, 400)
        throughput = random.uniform(10, 1e4) * cpu / (cpu + half)
        remaining = float(np.exp(random.uniform(5, 12)))
        value = weighted_value(throughput, throughput, remaining, rho, 1.0)
        jobs.append(Options(f"owner{random.integers(3)}", bool(random.random() < 0.5), cpu, memory, value))
    share = random.uniform(0.2, 0.9)
    cpu_capacity = sum(float(job.cpu[0]) for job in jobs) + share * sum(float(job.cpu[-1]) for job in jobs)
    memory_capacity = sum(float(job.memory.max()) for job in jobs) * random.uniform(0.4, 1.2)
    quotas = {
        f"owner{i}": Quota(cpu_capacity * random.uniform(0.3, 0.9), memory_capacity * random.uniform(0.3, 0.9))
        for i in range(3)
        if random.random() < 0.5
    }
    return jobs, ClusterCapacity(cpu_capacity, int(memory_capacity)), quotas


def used(jobs: list[Options], chosen: list[int | None], owner: str | None = None) -> tuple[float, float]:
    picked = [
        (job, index)
        for job, index in zip(jobs, chosen, strict=True)
        if index is not None and owner in (None, job.owner)
    ]
    return sum(float(j.cpu[i]) for j, i in picked), sum(float(j.memory[i]) for j, i in picked)


def worth(jobs: list[Options], chosen: list[int | None]) -> float:
    table = SelectionTable.of(jobs, ClusterCapacity(1, 1), {})
    return table.total(np.array([0 if index is None else index + 1 for index in chosen]))


amounts = st.one_of(st.integers(0, 20).map(float), st.floats(1e-3, 1e4))


@st.composite
def any_cluster(draw: st.DrawFn) -> tuple[list[Options], ClusterCapacity, dict[str, Quota]]:
    jobs = []
    for _ in range(draw(st.integers(0, 14))):
        points = draw(st.integers(1, 5))
        columns = [np.array(draw(st.lists(amounts, min_size=points, max_size=points))) for _ in range(3)]
        jobs.append(Options(draw(st.sampled_from("abc")), draw(st.booleans()), *columns))
    quotas = {
        owner: Quota(draw(amounts), draw(amounts)) for owner in draw(st.sets(st.sampled_from("abcd"), max_size=3))
    }
    return jobs, ClusterCapacity(draw(amounts), int(draw(amounts))), quotas


@settings(max_examples=examples(120))
@given(any_cluster())
def test_a_selection_is_never_over_the_capacity_or_a_quota(
    cluster: tuple[list[Options], ClusterCapacity, dict[str, Quota]],
) -> None:
    jobs, capacity, quotas = cluster
    chosen = select(jobs, capacity, quotas)
    cpu, memory = used(jobs, chosen)
    assert cpu <= capacity.cpu * (1 + 1e-6) + 1e-9
    assert memory <= capacity.memory * (1 + 1e-6) + 1e-9
    for owner, quota in quotas.items():
        cpu, memory = used(jobs, chosen, owner)
        assert cpu <= quota.cpu * (1 + 1e-6) + 1e-9
        assert memory <= quota.memory * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("rho", [0.0, 2.5])
def test_greedy_reaches_97_percent_of_the_optimum(seed: int, rho: float) -> None:
    jobs, capacity, quotas = random_cluster(seed, rho=rho)
    best = worth(jobs, select_optimally(jobs, capacity, quotas))
    found = worth(jobs, select(jobs, capacity, quotas))
    if best >= 0:
        assert found >= 0.97 * best
    else:  # some jobs that must run cannot run
        assert found == pytest.approx(best, rel=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_large_clusters_are_nearly_optimal_too(seed: int) -> None:
    jobs, capacity, quotas = random_cluster(seed + 100, most_jobs=60, rho=0.0)
    best = worth(jobs, select_optimally(jobs, capacity, quotas))
    assert worth(jobs, select(jobs, capacity, quotas)) >= 0.97 * best


def test_a_job_that_must_run_comes_before_one_that_may_wait() -> None:
    small = np.array([10.0]), np.array([10.0])
    running = Options("a", True, *small, np.array([1.0]))
    waiting = Options("a", False, *small, np.array([1e9]))
    assert select([waiting, running], ClusterCapacity(15, 15), {}) == [None, 0]
    assert select([waiting, running], ClusterCapacity(20, 20), {}) == [0, 0]


def test_memory_alone_can_be_what_is_scarce() -> None:
    greedy_for_memory = Options("a", False, np.array([1.0]), np.array([90.0]), np.array([5.0]))
    modest = [Options("a", False, np.array([5.0]), np.array([30.0]), np.array([4.0])) for _ in range(3)]
    assert select([greedy_for_memory, *modest], ClusterCapacity(100, 95), {}) == [None, 0, 0, 0]


def test_nothing_to_choose_from() -> None:
    assert select([], ClusterCapacity(1, 1), {}) == []
    nothing = np.zeros(0)
    assert select([Options("a", True, nothing, nothing, nothing)], ClusterCapacity(1, 1), {}) == [None]


def test_weights_prefer_jobs_that_are_nearly_done() -> None:
    throughput = np.array([100.0])
    nearly, hardly = (weighted_value(throughput, throughput, remaining, 2.5, 1.0) for remaining in (1e3, 1e6))
    assert nearly[0] > 1e6 * hardly[0]
    equal = [weighted_value(throughput, throughput, remaining, 0.0, 1.0)[0] for remaining in (1e3, 1e6)]
    assert equal == [100.0, 100.0]


def test_the_hull_takes_steps_of_falling_gain() -> None:
    price = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    value = np.array([0.0, 5.0, 5.5, 9.0, 9.5])
    assert upper_hull(price, value) == [1, 3, 4]
