"""Bounds on how often the operator writes for one job: many times at once, and then at a steady pace.

A job's master runs a team's own code, and much of what it says has the operator write to the API server. The bounds are
far above the needs of a job that behaves, and so slow down only one that makes things up.
"""

from emberscale_api.job.roles import MAX_REPLICAS

EVENTS_BURST = 4 * (2 * MAX_REPLICAS + 1)
"""Several for each pod of the largest job."""
_STATUS_BURST = 60
_PER_SECOND = 1.0


class Allowance:
    """A token bucket: it begins full, with `burst` uses, and regains `per_second` of them while it is not full.

    Times are seconds on a clock of the caller's. If that is set back, nothing is regained or lost.
    """

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = burst
        self._counted_at: float | None = None

    def take(self, now: float) -> bool:
        """Takes one use if there is one; returns whether there was."""
        if self.wait(now):
            return False
        self._left -= 1.0
        return True

    def wait(self, now: float) -> float:
        """Returns the seconds until there is a use to take; 0: there is one now."""
        if self._counted_at is not None:
            self._left = min(self._left + self._per_second * max(0.0, now - self._counted_at), self._burst)
        self._counted_at = now
        return max(0.0, (1.0 - self._left) / self._per_second)


def events_allowance() -> Allowance:
    """Returns the allowance of one job's Events."""
    return Allowance(EVENTS_BURST, _PER_SECOND)


def status_allowance() -> Allowance:
    """Returns the allowance of one job's writes of a status that says more than progress."""
    return Allowance(_STATUS_BURST, _PER_SECOND)
