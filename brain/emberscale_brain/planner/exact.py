"""The exact Pareto front of a job, by looking at every shape of its grid."""

import numpy as np

from emberscale_brain.planner.front import Front, Staircase, non_dominated
from emberscale_brain.planner.grid import JobProblem

MOST_SHAPES = 1 << 21
"""A front of this many shapes takes about 0.2 s and 100 MB."""


_CHUNK = 1 << 13  # shapes evaluated at a time: their arrays stay in the processor's cache
_SAMPLE = 3


def exact_front(problem: JobProblem) -> Front:
    """Evaluates the whole grid; raises ValueError for more than `MOST_SHAPES` shapes."""
    grid = problem.grid
    if grid.size > MOST_SHAPES:
        raise ValueError(f"{grid.size} shapes are more than the {MOST_SHAPES} that are enumerated: use NSGA-II")
    workers = grid.workers[:, None, None, None]
    ps_index = np.arange(len(grid.ps))[:, None, None]
    worker_cpu = grid.worker_cpu[:, None]
    cost, throughput = problem.evaluate(
        workers[::-_SAMPLE], ps_index[::-_SAMPLE], worker_cpu[::-_SAMPLE], grid.ps_cpu[::-_SAMPLE]
    )
    staircase = Staircase.under(cost.ravel(), throughput.ravel())
    a_worker_count = grid.size // len(grid.workers)
    at_once = max(1, _CHUNK // a_worker_count)
    indices, costs, throughputs = [], [], []
    for first in range(0, len(workers), at_once):
        cost, throughput = problem.evaluate(workers[first : first + at_once], ps_index, worker_cpu, grid.ps_cpu)
        cost, throughput = cost.ravel(), throughput.ravel()
        kept = staircase.above(cost, throughput)
        indices.append(kept + first * a_worker_count)
        costs.append(cost[kept])
        throughputs.append(throughput[kept])
    index, cost, throughput = np.concatenate(indices), np.concatenate(costs), np.concatenate(throughputs)
    kept = non_dominated(cost, throughput)
    extent = (len(grid.workers), len(grid.ps), len(grid.worker_cpu), len(grid.ps_cpu))
    w, p, cpu_w, cpu_p = np.unravel_index(index[kept], extent)
    choices = np.column_stack([grid.workers[w], grid.ps[p], grid.worker_cpu[cpu_w], grid.ps_cpu[cpu_p]])
    return Front(grid, choices.astype(np.float64), cost[kept], throughput[kept])
