"""Selects a point of each job's front: weighted greedy under capacity and quotas (DLRover-RM equations 11-14).

Equation 12 as printed sums RE x WG, efficiency times weight. A sum of quotients means nothing for a cluster (ten jobs
at their smallest, most efficient shapes would beat ten finished jobs), and the greedy that the paper names is the known
one of the multiple-choice knapsack: go up each job's front in the order of weighted gain per cost. So RE x WG is the
*order*, and the objective is the weighted gain itself:

    max sum_j  WG(A_j) TG(A_j)    subject to   sum_j A_j <= S  (13), and the same for every owner's quota,

with one candidate per job and `WG(A) = 1 / (remaining / throughput(A) + eps)^rho` (14).
`benchmarks/references.py` solves the same problem exactly, as the reference for the greedy.

The greedy steps along the upper hull of each job's candidates, where gain per cost falls from step to step. It then
fills the rest of the capacity with any candidates that fit. In small clusters, where a step is a large part of the
whole, it finally tries every move of every job, and moves other jobs down to make room. "Cost" weighs cores against
memory; which of the two is scarce is not known in advance, so a few weights compete.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_brain.planner.grid import Floats, Ints
from emberscale_brain.planner.room import ROUNDING
from emberscale_brain.planner.types import ClusterCapacity, Quota

_SMALL_CLUSTER = 12  # jobs
_MEMORY_WEIGHTS = (0.0, 0.5, 0.9)
_FEW_CANDIDATES = 600
_FILLS = 4
_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Options:
    """A job's candidates: cores, bytes and value WG x TG, each float64[n].

    A job that `must` run gets a candidate before any other job gains; other jobs may wait, with value 0.
    """

    owner: str
    must: bool
    cpu: Floats
    memory: Floats
    value: Floats


def weighted_value(
    throughput: Floats, net: Floats, remaining_samples: float, rho: float, epsilon: float, priority: float = 1.0
) -> Floats:
    """WG x TG of candidates: equation 14 at their throughput, times their net throughput (equation 8), float64[n]."""
    weight = (remaining_samples / np.maximum(throughput, 1e-12) + epsilon) ** -rho
    value: Floats = priority * weight * net
    return value


@dataclass(frozen=True, slots=True)
class SelectionTable:
    """All jobs' candidates, padded: float64[jobs, 1 + most candidates]. Column 0 is no shape.

    No shape for a job that must run costs more than all other jobs could gain. `pools` are the limits as (cores,
    bytes): row 0 is the cluster's, and each owner with a quota has a row. `pool` is the row of each job's owner, 0
    without a quota.
    """

    cpu: Floats
    memory: Floats
    value: Floats
    pools: Floats
    pool: Ints

    @classmethod
    def of(cls, jobs: Sequence[Options], capacity: ClusterCapacity, quotas: Mapping[str, Quota]) -> "SelectionTable":
        """Returns the table of some jobs."""
        columns = 1 + max((len(job.value) for job in jobs), default=0)
        cpu, memory = np.zeros((len(jobs), columns)), np.zeros((len(jobs), columns))
        value = np.full((len(jobs), columns), -np.inf)
        value[:, 0] = 0.0
        for row, job in enumerate(jobs):
            count = len(job.value)
            cpu[row, 1 : count + 1], memory[row, 1 : count + 1] = job.cpu, job.memory
            value[row, 1 : count + 1] = job.value
        penalty = 1.0 + 2.0 * float(value.max(axis=1, initial=0.0).sum())
        value[[row for row, job in enumerate(jobs) if job.must], 0] = -penalty
        limited = sorted({job.owner for job in jobs} & quotas.keys())
        rows = {owner: index + 1 for index, owner in enumerate(limited)}
        pools = [(capacity.cpu, capacity.memory), *((quotas[owner].cpu, quotas[owner].memory) for owner in limited)]
        return cls(
            cpu=cpu,
            memory=memory,
            value=value,
            pools=np.maximum(np.array(pools, dtype=np.float64), 0.0),
            pool=np.array([rows.get(job.owner, 0) for job in jobs], dtype=np.int64),
        )

    def total(self, chosen: Ints) -> float:
        """The objective."""
        return float(self.value[np.arange(len(chosen)), chosen].sum())


class _Room:
    """The room left in each pool."""

    def __init__(self, table: SelectionTable) -> None:
        self.table = table
        self.free = table.pools * (1 + ROUNDING)
        self.least = table.pools * ROUNDING + 1e-12  # a smaller deficit is a rounding error

    def fits(self, job: int, cpu: float, memory: float) -> bool:
        """Whether the job may have this much more; negative amounts always fit."""
        pool = self.table.pool[job]
        for row in (0, pool) if pool else (0,):
            if (cpu > 0 and cpu > self.free[row, 0]) or (memory > 0 and memory > self.free[row, 1]):
                return False
        return True

    def move(self, job: int, now: int, then: int) -> bool:
        """Moves a job from one candidate to another if the other fits; returns whether it did."""
        cpu = float(self.table.cpu[job, then] - self.table.cpu[job, now])
        memory = float(self.table.memory[job, then] - self.table.memory[job, now])
        if not self.fits(job, cpu, memory):
            return False
        self.force(job, now, then)
        return True

    def force(self, job: int, now: int, then: int) -> None:
        """Moves a job even if the other candidate does not fit."""
        pool = self.table.pool[job]
        more = (
            float(self.table.cpu[job, then] - self.table.cpu[job, now]),
            float(self.table.memory[job, then] - self.table.memory[job, now]),
        )
        self.free[0] -= more
        if pool:
            self.free[pool] -= more

    def copy(self) -> "_Room":
        other = _Room(self.table)
        other.free = self.free.copy()
        return other

    def left(self) -> tuple[Floats, Floats]:
        """Returns the additional cores and bytes that each job may have, float64[jobs] each."""
        left = np.minimum(self.free[0], self.free[self.table.pool])
        return left[:, 0], left[:, 1]


def upper_hull(price: Floats, value: Floats) -> list[int]:
    """Returns the points on the upper hull after point 0, by rising price and value: gain per price falls."""
    value = value / max(float(np.abs(value).max()), 1e-300)
    hull: list[int] = [0]
    for index in np.lexsort((-value, price)).tolist():
        if index == 0 or value[index] <= value[hull[-1]] or price[index] < price[0]:
            continue
        while len(hull) > 1:
            before, last = hull[-2], hull[-1]
            rise = (value[index] - value[last]) * (price[last] - price[before])
            if rise < (value[last] - value[before]) * (price[index] - price[last]):
                break
            hull.pop()
        hull.append(index)
    return hull[1:]


def _hull_of(table: SelectionTable, price: Floats, job: int) -> list[int]:
    count = int(np.count_nonzero(table.value[job] > -np.inf))
    return upper_hull(price[job, :count], table.value[job, :count])


def _greedy(table: SelectionTable, price: Floats) -> tuple[Ints, _Room]:
    """Steps up the hulls by gain per price; a job stops at the first step that does not fit."""
    room = _Room(table)
    chosen = np.zeros(len(table.pool), dtype=np.int64)
    steps: list[tuple[float, int, int, int]] = []
    for job in range(len(chosen)):
        prices, values = price[job], table.value[job]
        last = 0
        for number, index in enumerate(_hull_of(table, price, job)):
            density = (values[index] - values[last]) / max(prices[index] - prices[last], 1e-300)
            steps.append((-float(density), job, number, index))
            last = index
    steps.sort()
    blocked: set[int] = set()
    for _, job, _, index in steps:
        if job in blocked:
            continue
        if room.move(job, int(chosen[job]), index):
            chosen[job] = index
        else:
            blocked.add(job)
    return chosen, room


def _fill(table: SelectionTable, price: Floats, chosen: Ints, room: _Room) -> None:
    """Gives the remaining room to the jobs that gain most per price, even by candidates off the hull."""
    jobs = np.arange(len(chosen))
    for _ in range(_FILLS):
        cpu_left, memory_left = room.left()
        more_cpu = table.cpu - table.cpu[jobs, chosen][:, None]
        more_memory = table.memory - table.memory[jobs, chosen][:, None]
        fits = (more_cpu <= np.maximum(cpu_left, 0)[:, None]) & (more_memory <= np.maximum(memory_left, 0)[:, None])
        gain = np.where(fits, table.value - table.value[jobs, chosen][:, None], 0.0)
        best = gain.argmax(axis=1)
        gains = gain[jobs, best]
        density = gains / np.maximum(price[jobs, best] - price[jobs, chosen], 1e-300)
        moved = False
        for job in np.argsort(-density, kind="stable"):
            if gains[job] > 0 and room.move(int(job), int(chosen[job]), int(best[job])):
                chosen[job] = best[job]
                moved = True
        if not moved:
            return


def _rearrange(table: SelectionTable, price: Floats, chosen: Ints, room: _Room) -> None:
    """Tries every move of every job: other jobs make room for it, or take the room it leaves. Keeps moves that gain."""
    total = table.total(chosen)
    moves = _moves(table, price)
    for _ in range(_SWEEPS):
        gained = False
        for job, index in moves:
            if index == chosen[job]:
                continue
            trial, trial_room = chosen.copy(), room.copy()
            trial_room.force(job, int(trial[job]), index)
            trial[job] = index
            if not _make_room(table, trial, trial_room, job):
                continue
            _fill(table, price, trial, trial_room)
            trial_total = table.total(trial)
            if trial_total > total + 1e-9 * abs(total):
                chosen[:], room.free, total, gained = trial, trial_room.free, trial_total, True
        if not gained:
            return


def _moves(table: SelectionTable, price: Floats) -> list[tuple[int, int]]:
    """Returns the moves worth trying: all of them in the smallest clusters, else to no shape and to hull points."""
    if table.value.size <= _FEW_CANDIDATES:
        return [(int(job), int(index)) for job, index in np.argwhere(table.value > -np.inf)]
    return [(job, index) for job in range(len(table.value)) for index in (0, *_hull_of(table, price, job))]


def _make_room(table: SelectionTable, chosen: Ints, room: _Room, keep: int) -> bool:
    """Moves jobs other than `keep` down, least loss per missing resource first; returns whether that makes room."""
    jobs = np.arange(len(chosen))
    for _ in range(len(chosen)):
        missing = np.where(-room.free > room.least, -room.free, 0.0)
        if not missing.any():
            return True
        freed = np.stack(
            [table.cpu[jobs, chosen][:, None] - table.cpu, table.memory[jobs, chosen][:, None] - table.memory], axis=-1
        )
        loss = table.value[jobs, chosen][:, None] - table.value
        in_pool = np.zeros((len(chosen), len(missing)))
        in_pool[:, 0] = 1
        in_pool[jobs, table.pool] = 1
        share = np.minimum(freed[:, :, None, :], missing) / np.where(missing > 0, missing, np.inf)
        relief = (share * in_pool[:, None, :, None]).sum(axis=(2, 3))
        possible = (freed >= 0).all(axis=-1) & (relief > 0) & (loss < np.inf)
        possible[keep] = False
        if not possible.any():
            return False
        price = np.where(possible, np.maximum(loss, 0.0) / np.maximum(relief, 1e-300), np.inf)
        job, index = divmod(int(price.argmin()), price.shape[1])
        room.force(job, int(chosen[job]), index)
        chosen[job] = index
    return not (-room.free > room.least).any()


def select(jobs: Sequence[Options], capacity: ClusterCapacity, quotas: Mapping[str, Quota]) -> list[int | None]:
    """Returns the candidate that each job gets, None for no shape; in total never over the capacity or a quota.

    Deterministic. Linear in the number of jobs, except for the exchange in small clusters.
    """
    if not jobs:
        return []
    table = SelectionTable.of(jobs, capacity, quotas)
    cpu_unit = _scale(table.pools[0, 0], table.cpu)
    memory_unit = _scale(table.pools[0, 1], table.memory)
    most = float(table.value.max(axis=1).sum())
    attempts = []
    for memory_weight in _MEMORY_WEIGHTS:
        price = (1 - memory_weight) * table.cpu / cpu_unit + memory_weight * table.memory / memory_unit
        chosen, room = _greedy(table, price)
        _fill(table, price, chosen, room)
        if table.total(chosen) >= most:  # every job has its best candidate
            return _picks(chosen)
        attempts.append((price, chosen, room))
    if len(jobs) <= _SMALL_CLUSTER:
        for price, chosen, room in attempts:
            _rearrange(table, price, chosen, room)
    return _picks(max((chosen for _, chosen, _ in attempts), key=table.total))


def _picks(chosen: Ints) -> list[int | None]:
    return [int(index) - 1 if index else None for index in chosen]


def _scale(limit: float, amounts: NDArray[np.float64]) -> float:
    """The unit of each resource: the capacity or, if that is unlimited, the sum of all possible requests."""
    asked = float(amounts.max(axis=1).sum())
    return max(float(limit) if 0 < limit < np.inf else asked, 1e-9)
