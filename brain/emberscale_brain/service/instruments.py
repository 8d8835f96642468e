"""The brain's instruments: a clock that does not jump when the machine's is set, and its Prometheus metrics."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from emberscale_api import metrics as names


class SteadyClock:
    """Seconds since the epoch: the wall clock at the start, and the monotonic clock from then on.

    The brain measures durations with it (silence, settling, the age of a profile). `wall` and `monotonic` are seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.wall = wall
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def __call__(self) -> float:
        """Returns the present time."""
        return self._monotonic() + self._offset


_PLANNING_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300)


class Meters:
    """The metrics of one brain, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.jobs = Gauge(names.BRAIN_JOBS, "Jobs that have not ended", registry=self.registry)
        self.profiles = Counter(names.BRAIN_PROFILES_TOTAL, "Profiles by outcome", ["result"], registry=self.registry)
        self.start_ups = Counter(
            names.BRAIN_START_UPS_TOTAL, "Start-ups by outcome", ["result"], registry=self.registry
        )
        self.plans = Counter(names.BRAIN_PLANS_TOTAL, "New plans by action", ["action"], registry=self.registry)
        self.planning_seconds = Histogram(
            names.BRAIN_PLANNING_SECONDS, "Rounds of planning", buckets=_PLANNING_BUCKETS, registry=self.registry
        )
        self.planning_failures = Counter(
            names.BRAIN_PLANNING_FAILURES_TOTAL, "Rounds without a plan, by cause", ["how"], registry=self.registry
        )
        self.database_up = Gauge(names.BRAIN_DATABASE_UP, "1 while the database is available", registry=self.registry)
        self.backlog = Gauge(names.BRAIN_BACKLOG_CHANGES, "Changes waiting for the database", registry=self.registry)
        self.lost = Counter(
            names.BRAIN_LOST_CHANGES_TOTAL, "Changes dropped, by reason", ["why"], registry=self.registry
        )
