"""How often something may happen: many times at once, and then at a steady pace.

A job's master runs a team's own code, and much of what it says has the operator write to the API server. An allowance
is far above the needs of a job that behaves, so that it delays only one that makes things up.
"""

from emberscale_api.job.roles import MAX_REPLICAS

EVENTS_AT_ONCE = 4 * (2 * MAX_REPLICAS + 1)
"""Several for each pod of the largest job."""
_STATUS_WRITES_AT_ONCE = 60
_PER_SECOND = 1.0


class Allowance:
    """Counts down from the number of times at once, and up again with time.

    Times are seconds on a clock of the caller's that never goes back.
    """

    def __init__(self, at_once: float, per_second: float) -> None:
        """It begins with all that may happen at once."""
        self._at_once = at_once
        self._per_second = per_second
        self._left = at_once
        self._counted_at: float | None = None

    def take(self, now: float) -> bool:
        """Takes one time; returns whether it was allowed."""
        if self.wait(now):
            return False
        self._left -= 1.0
        return True

    def wait(self, now: float) -> float:
        """Returns the seconds until one time is allowed; 0: it is allowed now."""
        if self._counted_at is not None:
            self._left = min(self._left + self._per_second * (now - self._counted_at), self._at_once)
        self._counted_at = now
        return max(0.0, (1.0 - self._left) / self._per_second)


def events_allowance() -> Allowance:
    """Returns the allowance of one job's Events."""
    return Allowance(EVENTS_AT_ONCE, _PER_SECOND)


def status_allowance() -> Allowance:
    """Returns the allowance of one job's writes of a status that says more than progress."""
    return Allowance(_STATUS_WRITES_AT_ONCE, _PER_SECOND)
