"""The truth about a simulated job: the speed of a shape, the load of its cores, and the memory of its tables.

This is not the planner's formula. A batch circulates in a closed queueing network: it computes on its worker, then
waits for the parameter servers' cores and for their network. One more worker adds its full speed while the servers are
idle, and nothing once one of them is saturated; the planner's linear terms (DLRover-RM equations 1-6) approximate that.

* Cores follow Amdahl's law, on workers and on servers.
* The network saturates: a server's link is one of the stations of the queueing network.
* The tables grow like the number of distinct keys in power-law data: neither linearly nor as a plain exponential.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Physics:
    """The cost of one batch of a model on this hardware. Times in seconds, work in core-seconds, sizes in bytes.

    `batch_size` is in samples. `worker_work` is forward and backward of a batch, `ps_work` the look-up and the update
    of a batch over all parameter servers; `*_parallel` are the fractions of them that more cores speed up.
    `batch_bytes` are pulled and pushed per batch. A worker spends `request_seconds` per server and batch, and
    `fixed_seconds` per batch in any shape. `*_bandwidth` are the actual bytes/s of one pod's link.
    """

    batch_size: int
    worker_work: float
    worker_parallel: float
    ps_work: float
    ps_parallel: float
    batch_bytes: float
    request_seconds: float
    fixed_seconds: float
    worker_bandwidth: float
    ps_bandwidth: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The performance of a shape: samples per second, and the busy cores of each role in total."""

    samples_per_second: float
    worker_busy_cores: float
    ps_busy_cores: float


@dataclass(frozen=True, slots=True)
class TableGrowth:
    """Memory of the embedding tables, all servers together.

    `base_bytes` are used from the start (dense parameters, buffers, the runtime). The rows of the distinct keys in `s`
    samples are `limit * (1 - exp(-(s / scale) ** exponent))`; an exponent below 1 models the early rush of power-law
    ids.
    """

    base_bytes: float
    limit_bytes: float
    scale_samples: float
    exponent: float

    def bytes_at(self, samples: float) -> float:
        """Bytes in use once `samples` are trained."""
        return self.base_bytes - self.limit_bytes * math.expm1(-((samples / self.scale_samples) ** self.exponent))

    def samples_at(self, size_bytes: float) -> float:
        """Samples after which the tables have this size: 0 if they start with it, infinite if they never do."""
        grown = (size_bytes - self.base_bytes) / self.limit_bytes
        if grown <= 0:
            return 0.0
        if grown >= 1:
            return math.inf
        return self.scale_samples * float((-math.log1p(-grown)) ** (1 / self.exponent))


def amdahl_seconds(work: float, parallel: float, cores: float) -> float:
    """Seconds that `work` core-seconds take on `cores`. A fraction of a core counts as one slower core."""
    if cores <= 1:
        return work / cores
    return work * ((1 - parallel) + parallel / cores)


def _think_and_demands(physics: Physics, ps: float, worker_cores: float, ps_cores: float) -> tuple[float, float, float]:
    """Seconds of a batch outside the queues, and its seconds at the servers' cores and at their links."""
    think = (
        amdahl_seconds(physics.worker_work, physics.worker_parallel, worker_cores)
        + physics.batch_bytes / physics.worker_bandwidth
        + physics.request_seconds * ps
        + physics.fixed_seconds
    )
    cores = amdahl_seconds(physics.ps_work / ps, physics.ps_parallel, ps_cores)
    link = physics.batch_bytes / ps / physics.ps_bandwidth
    return think, cores, link


_Seconds = TypeVar("_Seconds", float, NDArray[np.float64])


def _network_throughput(think: _Seconds, cores: _Seconds, link: _Seconds, batches: int) -> list[_Seconds]:
    """Batches per second with 1, 2, ... `batches` under way: exact mean-value analysis of two stations."""
    waiting_cores, waiting_link = 0 * cores, 0 * link
    throughput = []
    for under_way in range(1, batches + 1):
        at_cores = cores * (1 + waiting_cores)
        at_link = link * (1 + waiting_link)
        rate = under_way / (think + at_cores + at_link)
        waiting_cores, waiting_link = rate * at_cores, rate * at_link
        throughput.append(rate)
    return throughput


@lru_cache(maxsize=65536)
def batch_rate(physics: Physics, workers: float, ps: float, worker_cores: float, ps_cores: float) -> float:
    """Batches per second of all workers together.

    `workers` and `ps` may be fractions: a worker at half its speed counts as half a worker. Each worker has one batch
    under way.
    """
    if workers <= 0 or ps <= 0:
        return 0.0
    think, cores, link = _think_and_demands(physics, ps, worker_cores, ps_cores)
    whole = math.floor(workers)
    throughput = [0.0, *_network_throughput(think, cores, link, whole + 1)]
    return throughput[whole] + (workers - whole) * (throughput[whole + 1] - throughput[whole])


def rate(physics: Physics, workers: float, ps: float, worker_cores: float, ps_cores: float) -> Rate:
    """The speed of a shape without stragglers, and the number of cores that it keeps busy."""
    batches = batch_rate(physics, workers, ps, worker_cores, ps_cores)
    return Rate(
        samples_per_second=batches * physics.batch_size,
        worker_busy_cores=batches * physics.worker_work,
        ps_busy_cores=batches * physics.ps_work,
    )


def batch_rates(
    physics: Physics,
    max_workers: int,
    ps: NDArray[np.int64],
    worker_cores: NDArray[np.float64],
    ps_cores: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Batches per second of many shapes at once, for exhaustive search.

    Takes arrays of one dimension; returns float64[max_workers, len(ps), len(worker_cores), len(ps_cores)], whose first
    axis is 1, 2, ... workers.
    """
    servers = ps.astype(np.float64)[:, None, None]
    on_worker = np.array([amdahl_seconds(physics.worker_work, physics.worker_parallel, c) for c in worker_cores])
    on_server = np.array([amdahl_seconds(physics.ps_work, physics.ps_parallel, c) for c in ps_cores])
    think = (
        on_worker[None, :, None]
        + physics.batch_bytes / physics.worker_bandwidth
        + physics.request_seconds * servers
        + physics.fixed_seconds
    )
    cores = on_server[None, None, :] / servers
    link = physics.batch_bytes / servers / physics.ps_bandwidth
    return np.array(_network_throughput(think, cores, link, max_workers))
