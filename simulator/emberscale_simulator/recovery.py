"""The recovery of one job: its checkpoints, and its restarts with more memory."""

import math
from dataclasses import replace

from emberscale_api.job.run_policy import DEFAULT_INTERVAL
from emberscale_api.shape import JobShape
from emberscale_simulator.mechanics import Mechanics


class Checkpoints:
    """Mutable. The newest checkpoint has `saved_samples`; 0 before the first. `interval` is in seconds."""

    def __init__(self, mechanics: Mechanics) -> None:
        self.saved_samples = 0.0
        self.interval = mechanics.checkpoint_interval or DEFAULT_INTERVAL
        self._follows_advice = mechanics.checkpoint_interval is None
        self._pause = mechanics.checkpoint_pause
        self._slowdown = mechanics.checkpoint_slowdown
        self._next = math.inf

    def training_begins(self, now: float) -> None:
        """Schedules the next checkpoint when training continues after a start, a pause or a failure."""
        if self._next <= now or self._next == math.inf:
            self._next = now + self.interval

    def time_passes(self, before: float, now: float, samples: float, speed: float) -> None:
        """Takes the due checkpoints: from `before`, with `samples`, the job trained to `now` at `speed` samples/s."""
        while self._next <= now:
            self.saved_samples = samples + speed * (self._next - before)
            self._next += self.interval

    def taken(self, samples: float) -> None:
        """Notes that a change of the servers saved all `samples`."""
        self.saved_samples = samples

    def rolled_back(self, samples: float) -> float:
        """Rolls back after a failure; returns how many of `samples` are left."""
        self._next = math.inf
        return min(samples, self.saved_samples)

    def advised(self, interval: float, now: float) -> None:
        """Adopts the brain's advice of another interval, which counts from the newest checkpoint on."""
        if not self._follows_advice:
            return
        if self._next < math.inf:
            self._next = max(now, self._next - self.interval + interval)
        self.interval = interval

    def cost(self, saving: float) -> float:
        """Seconds of training that a checkpoint costs if its files take `saving` seconds to write."""
        return self._pause + self._slowdown * saving

    def kept(self, saving: float) -> float:
        """The share of training that checkpoints leave, 0 to 1."""
        return 1 - min(1.0, self.cost(saving) / self.interval)


class MemoryRestarts:
    """Mutable. `count` is how often a server ran out of memory."""

    def __init__(self, mechanics: Mechanics) -> None:
        self.count = 0
        self._mechanics = mechanics
        self._given = 0
        self._serving_since = 0.0
        self._short_lives = 0

    @property
    def exhausted(self) -> bool:
        """Whether the job has exceeded its limit of restarts."""
        return self.count > self._mechanics.backoff_limit

    def serving_since(self, now: float) -> None:
        """Notes that new servers serve from `now` on."""
        self._serving_since = now

    def given(self, shape: JobShape) -> None:
        """Notes the shape that a scheduler gave the job; its memory bounds later growth."""
        self._given = shape.ps_memory

    def killed(self, now: float) -> float:
        """Counts a server that ran out of memory; returns the seconds until it restarts, 0 after a long life."""
        mechanics = self._mechanics
        self.count += 1
        long = now - self._serving_since >= mechanics.restart_backoff_reset
        self._short_lives = 1 if long else self._short_lives + 1
        if self._short_lives < 2:
            return 0.0
        doubled: float = mechanics.restart_backoff * 2 ** (self._short_lives - 2)
        return min(mechanics.restart_backoff_limit, doubled)

    def grown(self, shape: JobShape, most: float) -> JobShape:
        """Returns the shape with which the job restarts; a server may have at most `most` bytes."""
        most = min(most, round(self._given * self._mechanics.max_memory_growth))
        grown = min(most, round(shape.ps_memory * self._mechanics.memory_growth))
        return replace(shape, ps_memory=max(shape.ps_memory, int(grown)))
