"""What a brain reads from its database: when it starts, or when the database is there at last."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from emberscale_brain.history.changes import SILENT, Change, JobEnded, JobSubmitted, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, PastJob

_START_UPS = 200


@dataclass(frozen=True, slots=True)
class Learned:
    """What the database knows; None for running jobs that were not asked for. `past` and start-ups: latest first."""

    running: tuple[Change, ...] | None
    past: tuple[PastJob, ...]
    start_ups: Mapping[str, Sequence[tuple[float, float]]]


def read(store: HistoryStore, *, running: bool, profiles_per_job: int, past_jobs: int, now: float) -> Learned:
    """Reads it. Raises DatabaseAwayError and DatabaseUnusableError."""
    jobs = not_ahead(store.running_jobs(profiles_per_job), now) if running else None
    return Learned(jobs, tuple(store.past_jobs(past_jobs)), store.start_ups(_START_UPS))


def close_running(store: HistoryStore, known: frozenset[JobId], now: float) -> None:
    """Ends the jobs of brains before this one, but for those that are known here; a job that is submitted runs again.

    Raises DatabaseAwayError, DatabaseUnusableError and ClaimLostError.
    """
    running = [change.job for change in store.running_jobs(0) if isinstance(change, JobSubmitted)]
    store.write([JobEnded(job, SILENT, now) for job in running if job not in known])


def not_ahead(changes: Sequence[Change], now: float) -> tuple[Change, ...]:
    """The same, with the profiles of a job that are ahead of `now` moved back together: a clock was set back since."""
    ahead: defaultdict[JobId, float] = defaultdict(float)
    for change in changes:
        if isinstance(change, ProfileReported):
            ahead[change.job] = max(ahead[change.job], change.profile.time - now)
    return tuple(
        replace(change, profile=replace(change.profile, time=change.profile.time - ahead[change.job]))
        if isinstance(change, ProfileReported)
        else change
        for change in changes
    )
