"""The shapes that a job may have, and the expected cost and throughput of each.

A job's two objectives are the cost of its resources (DLRover-RM equation 7) and the inverse of its throughput, net of
the cost of changing to the shape (equation 8). The throughput counts in full, not as a difference to the present one:
a difference would move every point by the same amount and leave the Pareto front unchanged, and a job without a shape
has no present throughput.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.memory import PsMemoryNeed
from emberscale_brain.model.predict import Coefficients, ModelConstants, features
from emberscale_brain.planner.types import ClusterCapacity, Prices, ScalingOverheads, ShapeBounds, ThroughputFit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def cpu_choices(bounds: tuple[float, float], step: float) -> Floats:
    """The multiples of `step` within the bounds, and the lower bound itself."""
    low, high = bounds
    first = np.floor(low / step) + 1
    multiples = np.minimum(np.arange(first, np.floor(high / step + 1e-9) + 1) * step, high)  # 3 * 0.1 > 0.3
    return np.concatenate([[low], multiples[multiples > low * (1 + 1e-9)]])


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """Choices of each dimension, ascending; `ps_memory[i]` is the memory of each PS when there are `ps[i]`."""

    workers: Ints
    ps: Ints
    worker_cpu: Floats
    ps_cpu: Floats
    worker_memory: int
    ps_memory: Ints

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """The number of choices of each dimension."""
        return len(self.workers), len(self.ps), len(self.worker_cpu), len(self.ps_cpu)

    @property
    def size(self) -> int:
        """The number of shapes."""
        return math.prod(self.extent)

    def shape(self, workers: int, ps: int, worker_cpu: float, ps_cpu: float) -> JobShape:
        """The shape with the memory that its number of PS needs."""
        memory = int(self.ps_memory[int(np.searchsorted(self.ps, ps))])
        return JobShape(workers, ps, worker_cpu, ps_cpu, self.worker_memory, memory)


def shape_grid(
    bounds: ShapeBounds, capacity: ClusterCapacity, worker_memory: int, ps_memory_for: PsMemoryNeed
) -> ShapeGrid | None:
    """Returns the grid of shapes that fit the bounds and the largest node; None if no shape does."""
    counts = np.arange(bounds.ps[0], bounds.ps[1] + 1)
    needs = np.maximum(ps_memory_for.each(counts), bounds.ps_memory[0])
    fits = needs <= min(bounds.ps_memory[1], capacity.largest_node_memory)
    worker_cpu = cpu_choices(bounds.worker_cpu, bounds.cpu_step)
    ps_cpu = cpu_choices(bounds.ps_cpu, bounds.cpu_step)
    worker_cpu = worker_cpu[worker_cpu <= capacity.largest_node_cpu]
    ps_cpu = ps_cpu[ps_cpu <= capacity.largest_node_cpu]
    worker_memory = int(np.clip(worker_memory, *bounds.worker_memory))
    if not fits.any() or not len(worker_cpu) or not len(ps_cpu) or worker_memory > capacity.largest_node_memory:
        return None
    return ShapeGrid(
        workers=np.arange(bounds.workers[0], bounds.workers[1] + 1),
        ps=counts[fits],
        worker_cpu=worker_cpu,
        ps_cpu=ps_cpu,
        worker_memory=worker_memory,
        ps_memory=needs[fits],
    )


@dataclass(frozen=True, slots=True)
class Horizon:
    """A change from `current` (None: nothing runs yet), judged over the work that `throughput` does in `seconds`."""

    current: JobShape | None
    throughput: float
    seconds: float
    overheads: ScalingOverheads

    def net(self, gross: Floats, workers: Floats, ps: Floats, worker_cpu: Floats, ps_cpu: Floats) -> Floats:
        """Samples per second over the work, including the change; all arrays broadcast together.

        The job continues as before while new processes start, and pauses while the change takes effect.
        """
        if self.current is None:
            return gross
        delay, pause = self.disturbance(workers, ps, worker_cpu, ps_cpu)
        left = np.maximum(0.0, self.seconds - delay) * self.throughput
        taken = np.minimum(delay, self.seconds) + np.where(left > 0, pause + left / np.maximum(gross, 1e-12), 0.0)
        net: Floats = self.seconds * self.throughput / taken
        return net

    def disturbance(self, workers: Floats, ps: Floats, worker_cpu: Floats, ps_cpu: Floats) -> tuple[Floats, Floats]:
        """Seconds until a change takes effect and seconds of standstill; 0 for the current shape."""
        now, costs = self.current, self.overheads
        if now is None:
            nothing = np.zeros(np.broadcast(workers, ps, worker_cpu, ps_cpu).shape)
            return nothing, nothing
        other_workers, other_ps = worker_cpu != now.worker_cpu, ps_cpu != now.ps_cpu
        replaced = costs.resize_seconds is None
        replaced_workers, replaced_ps = other_workers & replaced, other_ps & replaced
        new_ps = (ps != now.ps) | replaced_ps
        new_workers = (workers != now.workers) | replaced_workers
        starting_ps, starting_workers = (ps > now.ps) | replaced_ps, (workers > now.workers) | replaced_workers
        delay = np.maximum(costs.ps_start_seconds * starting_ps, costs.worker_start_seconds * starting_workers)
        delay = np.maximum(delay, (costs.resize_seconds or 0.0) * (other_workers | other_ps))
        pause = costs.ps_pause_seconds * new_ps + costs.worker_pause_seconds * new_workers
        return delay, pause


@dataclass(frozen=True, slots=True)
class JobProblem:
    """What a front is computed from: a job's grid, fitted model, prices, and the change from its present shape."""

    grid: ShapeGrid
    constants: ModelConstants
    fit: ThroughputFit
    prices: Prices
    horizon: Horizon
    cpu_limit: float = float("inf")
    memory_limit: float = float("inf")

    def gross(self, workers: Floats, ps: Floats, worker_cpu: Floats, ps_cpu: Floats) -> Floats:
        """Samples per second of shapes given as arrays that broadcast together."""
        x = features(self.constants, workers, ps, worker_cpu, ps_cpu)
        return workers * self.constants.batch_size / Coefficients.of(self.fit).iteration_seconds(x)

    def evaluate(self, workers: Ints, ps_index: Ints, worker_cpu: Floats, ps_cpu: Floats) -> tuple[Floats, Floats]:
        """Cost per hour and net throughput of shapes; arrays that broadcast together.

        A shape above the limits has infinite cost. `ps_index` points into `grid.ps`.
        """
        w = workers.astype(np.float64)
        ps = self.grid.ps[ps_index].astype(np.float64)
        cores = w * worker_cpu + ps * ps_cpu
        memory = w * self.grid.worker_memory + ps * self.grid.ps_memory[ps_index]
        cost = cores * self.prices.cpu_core_hour + memory * (self.prices.memory_gib_hour / GIB)
        if self.cpu_limit < float("inf") or self.memory_limit < float("inf"):
            cost = np.where((cores <= self.cpu_limit) & (memory <= self.memory_limit), cost, np.inf)
        gross = self.gross(w, ps, worker_cpu, ps_cpu)
        return cost, self.horizon.net(gross, w, ps, worker_cpu, ps_cpu)
