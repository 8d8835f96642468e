"""The checkpoints of one job: when it takes them, what they cost, and what a failure takes it back to."""

import math

from emberscale_api.job.run_policy import DEFAULT_INTERVAL
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
        """Training goes on after a start, a standstill or a failure."""
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
        """What is left of `samples` after a failure."""
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
