"""The brain's clock, which does not jump when the machine's clock is set."""

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch: the wall clock at the start, and the monotonic clock from then on.

    What lasts (silence, settling, the age of a profile) is measured with it. `wall` and `monotonic` are seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.wall = wall
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        """Now."""
        return self._monotonic() + self._offset

    def of(self, wall_time: float) -> float:
        """When something was that happened at `wall_time` by the wall clock as it is set now; never after now."""
        return self() - max(0.0, self.wall() - wall_time)
