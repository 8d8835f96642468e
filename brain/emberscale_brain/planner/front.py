"""Pareto fronts of (cost, throughput), and how good one is."""

from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.planner.grid import Floats, Ints, ShapeGrid


def non_dominated(cost: Floats, throughput: Floats) -> Ints:
    """Indices of the points that none beats in both, by ascending cost; of equal points one is kept.

    Both are float64[n]; points of infinite cost or no throughput are never kept.
    """
    usable = np.flatnonzero(np.isfinite(cost) & (throughput > 0))
    order = usable[np.argsort(cost[usable], kind="stable")]
    best = np.maximum.accumulate(throughput[order]) if len(order) else np.empty(0)
    order = order[np.flatnonzero(np.diff(best, prepend=0.0) > 0)]
    # equal costs may have slipped in worst first; few points are left to sort
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


def hypervolume(cost: Floats, throughput: Floats, reference: tuple[float, float]) -> float:
    """Area that a front dominates in (cost, 1 / throughput), up to a reference point (cost, 1 / throughput)."""
    order = non_dominated(cost, throughput)
    costs, inverses = cost[order], 1 / throughput[order]
    inside = (costs < reference[0]) & (inverses < reference[1])
    costs, inverses = costs[inside], inverses[inside]
    right = np.append(costs[1:], reference[0])
    return float(((right - costs) * (reference[1] - inverses)).sum())


def hypervolume_ratio(front: Front, exact: Front) -> float:
    """Hypervolume of a front over that of the exact one; the reference is 10% of its extent beyond its nadir."""
    inverse = 1 / exact.throughput
    reference = (
        float(exact.cost.max() + 0.1 * np.ptp(exact.cost) + 1e-12),
        float(inverse.max() + 0.1 * np.ptp(inverse) + 1e-12),
    )
    return hypervolume(front.cost, front.throughput, reference) / hypervolume(exact.cost, exact.throughput, reference)
