"""The pods of one job: their speeds, the start times of new ones, and which are missing.

A job that changes its shape while it trains gets new pods beside its own if there is room, else one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_simulator.resources import Amounts, RoleResources, overlap_of
from emberscale_simulator.scenario import StartUpSpec, StragglerSpec


@dataclass(frozen=True, slots=True)
class StartTime:
    """A job's report to a brain on a start or a change: the pods' role, and one of two durations.

    `seconds` is the time from the request for pods until the slowest serves, `paused_seconds` the time that the job
    stood still for them; None if unknown to the job.
    """

    role: str
    seconds: float | None
    paused_seconds: float | None


class Pods:
    """Mutable. A pod's speed is relative to a healthy pod's, and does not change during its life.

    `balanced`: load was moved off slow servers, so that each works at its own speed.
    """

    def __init__(self, stragglers: StragglerSpec, start_up: StartUpSpec, random: np.random.Generator) -> None:
        self.balanced = False
        self._stragglers = stragglers
        self._start_up = start_up
        self._random = random
        self._workers: list[float] = []
        self._ps: list[float] = []
        self._back_at: list[float] = []
        self.evicted = 0
        """The number of workers that the cluster has taken and not given back."""
        self._starts: list[StartTime] = []

    @property
    def next_worker_back(self) -> float | None:
        """The time at which the next missing worker is back."""
        return min(self._back_at, default=None)

    @property
    def slow_worker(self) -> bool:
        """Whether any worker is slow."""
        return min(self._workers, default=1.0) < 1

    @property
    def slow_ps(self) -> bool:
        """Whether any server is slow and still has its full load."""
        return min(self._ps, default=1.0) < 1 and not self.balanced

    def start_seconds(self, role: str, count: int) -> float:
        """Draws the seconds until the last of `count` new pods serves."""
        law = self._start_up
        slowest = float(np.max(law.median * np.exp(self._random.normal(0.0, law.spread, count))))
        self._starts.append(StartTime(role, slowest, None))
        return slowest

    def stood_still(self, role: str, seconds: float) -> None:
        """Records how long the job stood still when pods of a role changed."""
        self._starts.append(StartTime(role, None, seconds))

    def take_start_times(self) -> list[StartTime]:
        """Returns the start times drawn since the last call."""
        taken, self._starts = self._starts, []
        return taken

    def renew(self, workers: int, ps: int) -> float:
        """Replaces all pods; returns the seconds until the last of them serves."""
        self._workers, self._ps = [], []
        self.set_workers(workers, keep=False)
        self.set_ps(ps, keep=False)
        return max(self.start_seconds("worker", workers), self.start_seconds("ps", ps))

    def set_workers(self, count: int, keep: bool) -> None:
        """Sets the number of workers: keeps the first of the present ones, or starts only new ones."""
        self._workers = self._resized(self._workers if keep else [], count, self._stragglers.worker_probability)
        self._back_at = self._back_at[: count - 1] if keep else []
        self.evicted = 0

    def set_ps(self, count: int, keep: bool) -> None:
        """Sets the servers to `count`; the load is spread evenly over them."""
        self._ps = self._resized(self._ps if keep else [], count, self._stragglers.ps_probability)
        self.balanced = False

    def replace_slow(self) -> None:
        """Replaces every slow pod with a healthy one."""
        self._workers = [1.0] * len(self._workers)
        self._ps = [1.0] * len(self._ps)

    def lose_worker(self, now: float) -> float:
        """Lets a worker fail; returns the time at which a new one replaces it."""
        back = now + self.start_seconds("worker", 1)
        self._back_at.append(back)
        return back

    def evict_workers(self, count: int) -> int:
        """Takes up to `count` workers away, never the last one; returns the number taken."""
        taken = max(0, min(count, len(self._workers) - self.evicted - 1))
        self.evicted += taken
        return taken

    def return_workers(self, count: int, now: float) -> None:
        """Starts new pods for `count` evicted workers, for which there is room again."""
        self.evicted -= count
        self._back_at.append(now + self.start_seconds("worker", count))
        self._back_at.extend([self._back_at[-1]] * (count - 1))

    def worker_is_back(self) -> None:
        """Lets the next missing worker serve again."""
        self._back_at.remove(min(self._back_at))

    def effective_workers(self, dynamic_sharding: bool) -> float:
        """The equivalent number of healthy workers: each works at its own speed with dynamic sharding, else at the
        slowest one's."""
        count = len(self._workers)
        present = max(0, count - len(self._back_at) - self.evicted)
        if dynamic_sharding:
            return sum(self._workers) * present / count
        return present * min(self._workers)

    def effective_ps(self) -> float:
        """The equivalent number of healthy servers: a batch waits for the slowest unless its load was moved off."""
        return sum(self._ps) if self.balanced else len(self._ps) * min(self._ps)

    def _resized(self, present: Sequence[float], count: int, slow_probability: float) -> list[float]:
        kept = list(present[:count])
        added = count - len(kept)
        healthy = self._random.uniform(size=added) >= slow_probability
        speeds = self._random.uniform(self._stragglers.slowest, self._stragglers.fastest, added)
        return kept + [1.0 if well else float(speed) for well, speed in zip(healthy, speeds, strict=True)]


@dataclass(frozen=True, slots=True)
class LiveChange:
    """A change under way: the resources reserved for it until it is ready, and the training that it costs."""

    target: JobShape
    ready_at: float
    reserved: RoleResources
    lost_seconds: float


def begin_live_change(
    present: JobShape, target: JobShape, now: float, room: Amounts, resize: float | None, pods: Pods
) -> LiveChange | None:
    """Begins the change in the fastest way that fits; None if none does.

    `room` is all that the job may have, including its own resources. `resize` is the time that a resize in place takes;
    None if pods cannot be resized. Pods that end before their replacements start cost their share of the time.
    """
    overlap = overlap_of(present, target, resize is not None)
    starting = [(role, count) for role, count in (("worker", overlap.new_workers), ("ps", overlap.new_ps)) if count]
    if overlap.at_once.total.fits(room):
        seconds = max((pods.start_seconds(role, count) for role, count in starting), default=resize or 0.0)
        return LiveChange(target, now + seconds, overlap.at_once, 0.0)
    if not overlap.in_place.total.fits(room):
        return None
    each = {role: [pods.start_seconds(role, 1) for _ in range(count)] for role, count in starting}
    ready_at = now + sum(map(sum, each.values()))
    if overlap.one_by_one.total.fits(room):
        return LiveChange(target, ready_at, overlap.one_by_one, 0.0)
    lost = sum(sum(starts) / len(starts) for starts in each.values())
    return LiveChange(target, ready_at, overlap.in_place, lost)
