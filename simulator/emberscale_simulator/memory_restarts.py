"""How the servers of one job start again after running out of memory: when, with how much, and how often."""

from dataclasses import replace

from emberscale_api.shape import JobShape
from emberscale_simulator.mechanics import Mechanics


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
