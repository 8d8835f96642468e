"""Pareto fronts of (cost, throughput).

`exact_front` evaluates every shape of a job's grid. `nsga2_front` searches grids that are too large for that by
NSGA-II, as in DLRover-RM section 4.3. The search starts from the job's last population if there is one, else from
shapes of every size that balance workers and PS in several ways. All points that it evaluates compete for the front.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.population import Population
from pymoo.core.problem import Problem
from pymoo.operators.crossover.sbx import SBX
from pymoo.operators.mutation.pm import PM
from pymoo.operators.repair.rounding import RoundingRepair

from emberscale_api.shape import JobShape
from emberscale_brain.planner.grid import Floats, Ints, JobProblem, ShapeGrid
from emberscale_brain.planner.sieve import promising


def non_dominated(cost: Floats, throughput: Floats) -> Ints:
    """Returns the indices of the points that no other dominates, by ascending cost; of equal points one is kept.

    Both arguments are float64[n]. Points of infinite cost or no throughput are never kept.
    """
    usable = np.flatnonzero(np.isfinite(cost) & (throughput > 0))
    order = usable[np.argsort(cost[usable], kind="stable")]
    best = np.maximum.accumulate(throughput[order]) if len(order) else np.empty(0)
    order = order[np.flatnonzero(np.diff(best, prepend=0.0) > 0)]
    # points of equal cost may come worst first; few points are left to sort
    order = order[np.lexsort((-throughput[order], cost[order]))]
    best = np.maximum.accumulate(throughput[order]) if len(order) else np.empty(0)
    kept: Ints = order[np.flatnonzero(np.diff(best, prepend=0.0) > 0)]
    return kept


@dataclass(frozen=True, slots=True)
class Front:
    """A Pareto front, by ascending cost: choices [n, 4] as (workers, PS, worker cores, PS cores)."""

    grid: ShapeGrid
    choices: Floats
    cost: Floats
    throughput: Floats

    def __len__(self) -> int:
        return len(self.cost)

    def shape(self, index: int) -> JobShape:
        """The shape of a point."""
        workers, ps, worker_cpu, ps_cpu = self.choices[index]
        return self.grid.shape(int(workers), int(ps), float(worker_cpu), float(ps_cpu))

    def spread(self, most: int) -> Ints:
        """Indices of at most `most` points, evenly spaced in the logarithm of the throughput, ends included."""
        if len(self) <= most:
            return np.arange(len(self))
        level = np.log(self.throughput)
        wanted = np.linspace(level[0], level[-1], most)
        return np.unique(np.clip(np.searchsorted(level, wanted), 0, len(self) - 1))


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """The size of the population, and the number of generations from scratch and from a last population."""

    population: int = 64
    cold_generations: int = 40
    warm_generations: int = 8


def _balanced_start(grid: ShapeGrid, count: int, random: np.random.Generator) -> Ints:
    """Index vectors [count, 4]: sizes spread evenly, each dimension near that size's level, and two corners."""
    lengths: Ints = np.array(grid.extent)
    level = np.linspace(0, 1, count)[:, None]
    spread = random.normal(0, 0.25, (count, 4))
    start = np.rint(np.clip(level + spread, 0, 1) ** 1.5 * (lengths - 1)).astype(np.int64)
    start[0], start[-1] = 0, lengths - 1
    return start


def nsga2_front(
    problem: JobProblem, seed: int, last: Ints | None = None, effort: SearchEffort | None = None
) -> tuple[Front, Ints]:
    """Returns the front, and the population for the next search to start from: indices [n, 4] into the dimensions."""
    effort = effort or SearchEffort()
    grid = problem.grid
    lengths = np.array(grid.extent)
    if last is None:
        start = _balanced_start(grid, effort.population, np.random.default_rng(seed))
        generations = effort.cold_generations
    else:
        start = np.minimum(last, lengths - 1)
        generations = effort.warm_generations
    algorithm = NSGA2(
        pop_size=effort.population,
        sampling=start.astype(np.float64),
        crossover=SBX(prob=0.9, eta=5, vtype=float, repair=RoundingRepair()),
        mutation=PM(prob=1.0, prob_var=0.4, eta=8, vtype=float, repair=RoundingRepair()),
        eliminate_duplicates=True,
    )
    search_space = Problem(n_var=4, n_obj=2, xl=np.zeros(4), xu=(lengths - 1).astype(np.float64))
    algorithm.setup(search_space, termination=("n_gen", generations), seed=seed, verbose=False)
    archive: list[Ints] = []
    while algorithm.has_next():
        individuals: Population = algorithm.ask()
        index = np.rint(individuals.get("X")).astype(np.int64)
        _, cost, throughput = _evaluated(problem, index.T)
        archive.append(index)
        inverse = 1 / np.maximum(throughput, 1e-12)
        individuals.set("F", np.column_stack([np.minimum(cost, 1e12), inverse]))
        algorithm.tell(infills=individuals)
    population = np.rint(algorithm.pop.get("X")).astype(np.int64)
    return _front_of(problem, np.concatenate(archive).T), population


MOST_SHAPES = 1 << 21
"""A front of this many shapes takes some 50 ms and 16 MB."""


def exact_front(problem: JobProblem) -> Front:
    """Evaluates the whole grid; raises ValueError for more than `MOST_SHAPES` shapes."""
    grid = problem.grid
    if grid.size > MOST_SHAPES:
        raise ValueError(f"{grid.size} shapes are more than the {MOST_SHAPES} that are enumerated: use NSGA-II")
    return _front_of(problem, np.unravel_index(promising(problem), grid.extent))


def _front_of(problem: JobProblem, index: Iterable[Ints]) -> Front:
    """The front of some shapes, given by their indices in each of the grid's dimensions."""
    choices, cost, throughput = _evaluated(problem, index)
    kept = non_dominated(cost, throughput)
    return Front(problem.grid, choices[kept], cost[kept], throughput[kept])


def _evaluated(problem: JobProblem, index: Iterable[Ints]) -> tuple[Floats, Floats, Floats]:
    """Choices [n, 4], costs and throughputs of shapes by their indices."""
    grid, (w, p, cpu_w, cpu_p) = problem.grid, index
    workers, worker_cpu, ps_cpu = grid.workers[w], grid.worker_cpu[cpu_w], grid.ps_cpu[cpu_p]
    choices = np.column_stack([workers, grid.ps[p], worker_cpu, ps_cpu]).astype(np.float64)
    return choices, *problem.evaluate(workers, p, worker_cpu, ps_cpu)
