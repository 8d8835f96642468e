"""Back-pressure of a parameter server whose memory is nearly used up: pushes wait, so that rows can move away in time.

Only pushes create rows. Once little memory is left, the server lets its memory grow along a line that reaches the limit
minutes later, and pushes wait while memory is above the line. A server whose memory does not grow delays nobody, and no
push waits for long: a server that gets neither memory nor fewer rows continues.
"""

from dataclasses import dataclass

from emberscale_api.shape import memory_reserve

LONGEST_DELAY_SECONDS = 5.0
"""The longest time that a push waits."""
PATIENCE_SECONDS = 120.0
"""How long the remaining memory must last. After that no relief is expected, and pushes no longer wait."""
_PLENTIFUL = 1.5
"""Reserves that must be left before the memory counts as plentiful again."""
_HEAD_START = 16
"""The part of the remaining memory by which the line may begin lower: without more growth, pushes wait for 8 s."""
_TOLD_SECONDS = 10.0
"""How long the server still counts as delaying pushes after pushes could continue."""


@dataclass(slots=True)
class MemoryPressure:
    """Times are in seconds, on one monotonic clock.

    * `delay`: how long each push waits from its arrival, unless the delay becomes 0 before.
    * `since`: when memory became scarce; None while it is plentiful. The line begins at `used` bytes, somewhat below
      the memory in use if that was growing, so that pushes wait at once.
    * `seconds`: how long pushes had to wait in total, until the last look.
    """

    delay: float = 0.0
    since: float | None = None
    used: int = 0
    seconds: float = 0.0
    _looked_at: float = 0.0
    _seen: int | None = None
    _delayed_at: float | None = None

    @property
    def delays(self) -> bool:
        """Whether pushes have to wait now, or had to until a moment ago."""
        return self._delayed_at is not None and self._looked_at < self._delayed_at + _TOLD_SECONDS

    def look(self, used: int, limit: int | None, now: float) -> None:
        """Updates the delay from the memory in use and the limit, both in bytes; called several times a second."""
        if self.delay:
            self.seconds += max(0.0, now - self._looked_at)
        self._looked_at = now
        before, self._seen = self._seen, used
        self.delay = 0.0
        if limit is None:
            self.since = None
            return
        left, reserve = limit - used, memory_reserve(limit)
        if left >= _PLENTIFUL * reserve or (self.since is None and left >= reserve):
            self.since = None
            return
        if self.since is None:
            grown = 0 if before is None else max(0, used - before)
            self.since, self.used = now, used - min(grown, max(0, left) // _HEAD_START)
        elapsed = now - self.since
        if elapsed < PATIENCE_SECONDS and used > self.used + (limit - self.used) * elapsed / PATIENCE_SECONDS:
            self.delay, self._delayed_at = LONGEST_DELAY_SECONDS, now
