"""The exact Pareto front of a job, by looking at every shape of its grid."""

import numpy as np

from emberscale_brain.planner.front import Front, non_dominated
from emberscale_brain.planner.grid import JobProblem
from emberscale_brain.planner.sieve import promising

MOST_SHAPES = 1 << 21
"""A front of this many shapes takes some 50 ms and 16 MB."""


def exact_front(problem: JobProblem) -> Front:
    """Evaluates the whole grid; raises ValueError for more than `MOST_SHAPES` shapes."""
    grid = problem.grid
    if grid.size > MOST_SHAPES:
        raise ValueError(f"{grid.size} shapes are more than the {MOST_SHAPES} that are enumerated: use NSGA-II")
    extent = (len(grid.workers), len(grid.ps), len(grid.worker_cpu), len(grid.ps_cpu))
    w, p, cpu_w, cpu_p = np.unravel_index(promising(problem), extent)
    choices = np.column_stack([grid.workers[w], grid.ps[p], grid.worker_cpu[cpu_w], grid.ps_cpu[cpu_p]])
    cost, throughput = problem.evaluate(grid.workers[w], p, grid.worker_cpu[cpu_w], grid.ps_cpu[cpu_p])
    kept = non_dominated(cost, throughput)
    return Front(grid, choices[kept].astype(np.float64), cost[kept], throughput[kept])
