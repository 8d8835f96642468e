"""A compiled sieve over a job's whole grid, which passes all shapes that can be on the Pareto front.

It repeats the arithmetic of `JobProblem.evaluate` shape by shape, without intermediate arrays, so that a front of
131,072 shapes takes milliseconds. The sieve must pass every shape of the front; the shapes that pass are evaluated
again.
"""

import numba
import numpy as np

from emberscale_api.shape import GIB
from emberscale_brain.planner.grid import Ints, JobProblem

_BINS = 4096
_ROUNDING = 1e-9  # relative: the compiled sums may differ from numpy's in their last bits


@numba.njit(
    "void(f8[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8[::1], f8, f8, f8[::1], f8[::1],"
    " f8[::1], i8[::1], i8[::1])",
    nogil=True,
    cache=True,
    error_model="numpy",
)
def _sieve(  # type: ignore[no-untyped-def]  # compiled: the signature above
    workers,
    ps,
    ps_memory,
    worker_cpu,
    ps_cpu,
    own,
    shared,
    asked,
    lookup,
    overlap,
    batch,
    price,
    horizon,
    level,
    kept,
    count,
):
    """Fills `level` with the best net throughput at each bin of the root of the cost, then `kept` and `count[0]`.

    `own` (by worker cores), `shared` (by PS cores, for each worker and PS), `asked` (by PS cores, for each worker) and
    `lookup` (by PS) are seconds of an iteration to the power of `overlap`, `batch` its samples. `price`: of a core and
    of a byte, bytes of a worker, limits of cores and bytes, the root of the cost where bins begin, and bins for each
    unit of it. `horizon`: the present workers, PS and cores of each (0: none), seconds until a process has other cores
    (below 0: new ones replace it), the throughput, seconds to judge, and seconds to start and to switch of workers and
    of PS.
    """
    core, byte, worker_bytes, most_cores, most_bytes, low, scale = price
    now_w, now_p, now_cw, now_cp, resize, throughput, seconds = horizon[:7]
    worker_start, ps_start, worker_pause, ps_pause = horizon[7:]
    for collecting in range(2):
        if collecting:
            best = 0.0
            for index in range(len(level)):
                here = level[index]
                level[index] = best * (1 - _ROUNDING)
                best = max(best, here)
        number = 0
        for i in range(len(workers)):
            w = workers[i]
            all_workers = w**overlap
            for j in range(len(ps)):
                p = ps[j]
                bytes_ = w * worker_bytes + p * ps_memory[j]
                if bytes_ > most_bytes:
                    number += len(worker_cpu) * len(ps_cpu)
                    continue
                ratio = (w / p) ** overlap
                for k in range(len(worker_cpu)):
                    cw = worker_cpu[k]
                    fixed = own[k] + lookup[j]
                    replaces = resize < 0 and cw != now_cw
                    new_workers = w != now_w or replaces
                    starting = w > now_w or replaces
                    for n in range(len(ps_cpu)):
                        cp = ps_cpu[n]
                        number += 1
                        cores = w * cw + p * cp
                        if cores > most_cores:
                            number += len(ps_cpu) - n - 1  # more cores of a PS are no fewer
                            break
                        taken = fixed + shared[n] * ratio + asked[n] * all_workers
                        if overlap != 1:
                            taken = taken ** (1 / overlap)
                        net = w * batch / max(taken, 1e-9)
                        if now_w > 0:
                            replaces_ps = resize < 0 and cp != now_cp
                            delay = 0.0
                            if cw != now_cw or cp != now_cp:
                                delay = max(resize, 0.0)
                            if p > now_p or replaces_ps:
                                delay = max(delay, ps_start)
                            if starting:
                                delay = max(delay, worker_start)
                            pause = 0.0
                            if p != now_p or replaces_ps:
                                pause += ps_pause
                            if new_workers:
                                pause += worker_pause
                            taken = min(delay, seconds)
                            if delay < seconds:
                                taken += pause + (seconds - delay) * throughput / max(net, 1e-12)
                            net = seconds * throughput / taken
                        cost = cores * core + bytes_ * byte
                        place = int((np.sqrt(cost) - low) * scale)
                        place = min(max(place, 0), len(level) - 1)
                        if collecting:
                            if net > 0 and net >= level[place]:
                                kept[count[0]] = number - 1
                                count[0] += 1
                        elif net > level[place]:
                            level[place] = net


def promising(problem: JobProblem) -> Ints:
    """Returns flat indices into (workers, PS, worker cores, PS cores) of all shapes of the front and a few others."""
    grid, constants, horizon = problem.grid, problem.constants, problem.horizon
    gradient, update, synchronize, embedding, constant, request = problem.fit.coefficients
    compute = gradient * constants.batch_size
    sync = synchronize * constants.dense_bytes / constants.network_bytes_per_second
    look_up = embedding * constants.batch_size * constants.embedding_dimension
    overlap = float(problem.fit.overlap)
    core, byte = problem.prices.cpu_core_hour, problem.prices.memory_gib_hour / GIB

    def root_of_cost(end: int) -> float:
        cores = grid.workers[end] * grid.worker_cpu[end] + grid.ps[end] * grid.ps_cpu[end]
        tables = grid.ps * grid.ps_memory
        memory = grid.workers[end] * grid.worker_memory + (tables.min() if end == 0 else tables.max())
        return float(np.sqrt(cores * core + memory * byte))

    low, high = root_of_cost(0), root_of_cost(-1)
    price = np.array(
        [
            core,
            byte,
            grid.worker_memory,
            problem.cpu_limit,
            problem.memory_limit,
            low,
            _BINS / max(high - low, 1e-12),
        ],
        dtype=np.float64,
    )
    now, costs = horizon.current, horizon.overheads
    present = (0.0, 0.0, 0.0, 0.0) if now is None else (now.workers, now.ps, now.worker_cpu, now.ps_cpu)
    change = (
        -1.0 if costs.resize_seconds is None else costs.resize_seconds,
        horizon.throughput,
        horizon.seconds,
        costs.worker_start_seconds,
        costs.ps_start_seconds,
        costs.worker_pause_seconds,
        costs.ps_pause_seconds,
    )
    kept, count = np.empty(grid.size, dtype=np.int64), np.zeros(1, dtype=np.int64)
    _sieve(
        grid.workers.astype(np.float64),
        grid.ps.astype(np.float64),
        grid.ps_memory.astype(np.float64),
        np.ascontiguousarray(grid.worker_cpu, dtype=np.float64),
        np.ascontiguousarray(grid.ps_cpu, dtype=np.float64),
        (compute / grid.worker_cpu) ** overlap + constant**overlap,
        (update / grid.ps_cpu) ** overlap + sync**overlap,
        (request / grid.ps_cpu) ** overlap,
        (look_up / grid.ps) ** overlap,
        overlap,
        float(constants.batch_size),
        price,
        np.array([*present, *change], dtype=np.float64),
        np.zeros(_BINS),
        kept,
        count,
    )
    found: Ints = kept[: count[0]].copy()
    return found
