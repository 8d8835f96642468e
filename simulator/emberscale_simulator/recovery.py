"""The recovery of one job: its checkpoints, and its restarts with more memory."""

import math
from dataclasses import replace

from emberscale_api.job.run_policy import DEFAULT_INTERVAL
from emberscale_api.shape import JobShape
from emberscale_simulator.mechanics import Mechanics


class Checkpoints:
    """Mutable. `saved_samples` are in the newest checkpoint; 0 before the first. `interval` is in seconds."""

    def __init__(self, mechanics: Mechanics) -> None:
        self.saved_samples = 0.0
        self.interval = mechanics.checkpoint_interval or DEFAULT_INTERVAL
        self._follows_advice = mechanics.checkpoint_interval is None
        self._pause = mechanics.checkpoint_pause
        self._slowdown = mechanics.checkpoint_slowdown
        self._next = math.inf

    def training_begins(self, now: float) -> None:
        """Training continues after a start, a pause or a failure."""
        if self._next <= now or self._next == math.inf:
            self._next = now + self.interval

    def time_passes(self, before: float, now: float, samples: float, speed: float) -> None:
        """The job trained from `before`, when it had `samples`, to `now` at `speed` samples per second."""
        while self._next <= now:
            self.saved_samples = samples + speed * (self._next - before)
            self._next += self.interval

    def taken(self, samples: float) -> None:
        """A change of the servers saved everything."""
        self.saved_samples = samples

    def rolled_back(self, samples: float) -> float:
        """Returns what is left of `samples` after a failure."""
        self._next = math.inf
        return min(samples, self.saved_samples)

    def advised(self, interval: float, now: float) -> None:
        """The brain advises another interval, which counts from the newest checkpoint on."""
        if not self._follows_advice:
            return
        if self._next < math.inf:
            self._next = max(now, self._next - self.interval + interval)
        self.interval = interval

    def cost(self, saving: float) -> float:
        """Seconds of training that one costs whose files take `saving` seconds to write."""
        return self._pause + self._slowdown * saving

    def kept(self, saving: float) -> float:
        """The share of training that is left beside checkpoints, 0 to 1."""
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
        """Whether one more was too many."""
        return self.count > self._mechanics.backoff_limit

    def serving_since(self, now: float) -> None:
        """New servers serve from `now` on."""
        self._serving_since = now

    def given(self, shape: JobShape) -> None:
        """A scheduler gave the job this shape; growth is bounded by what it gives."""
        self._given = shape.ps_memory

    def killed(self, now: float) -> float:
        """A server ran out of memory; returns the seconds before it starts again, none after a long life."""
        mechanics = self._mechanics
        self.count += 1
        long = now - self._serving_since >= mechanics.restart_backoff_reset
        self._short_lives = 1 if long else self._short_lives + 1
        if self._short_lives < 2:
            return 0.0
        doubled: float = mechanics.restart_backoff * 2 ** (self._short_lives - 2)
        return min(mechanics.restart_backoff_limit, doubled)

    def grown(self, shape: JobShape, most: float) -> JobShape:
        """The shape with which it starts again; `most` bytes are allowed for a server."""
        most = min(most, round(self._given * self._mechanics.max_memory_growth))
        grown = min(most, round(shape.ps_memory * self._mechanics.memory_growth))
        return replace(shape, ps_memory=max(shape.ps_memory, int(grown)))
