"""Reads the database when a brain starts or its database returns, and for jobs that no longer run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from emberscale_api.shape import JobProfile
from emberscale_brain.history.changes import SILENT, Change, JobEnded, JobSubmitted, PlanMade, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.types import JobId, PastJob
from emberscale_brain.preferences import START_UPS_REMEMBERED
from emberscale_brain.service.in_force import ExplainedPlan, PlanInForce
from emberscale_brain.service.settings import CapacitySettings
from emberscale_brain.service.state import START_UPS_OF_ONE_JOB

_PLANS = 11
_PROFILES = 256


def recall(database: str, uid: str) -> ExplainedPlan | None:
    """Returns a job's last plan with its reasons; None if it never had a plan.

    Raises DatabaseAwayError, and DatabaseUnusableError for an invalid address or a newer schema.
    """
    store = HistoryStore.open(database)
    try:
        store.migrate()
        job = JobId(uid)
        plans = store.plans(job, _PLANS)
        if not plans:
            return None
        metadata = store.metadata(job)
        constants = None if metadata is None else ModelConstants.of(metadata, CapacitySettings().bandwidth())
        last, *earlier = plans
        return ExplainedPlan(
            PlanInForce.of(last),
            last,
            tuple(earlier),
            profiles=tuple(store.profiles(job, _PROFILES)),
            constants=constants,
        )
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class Learned:
    """The contents of the database; `running` is None if not requested. `past` and start-ups: latest first."""

    running: tuple[Change, ...] | None
    past: tuple[PastJob, ...]
    start_ups: Mapping[str, Sequence[tuple[float, float]]]


def read(store: HistoryStore, *, running: bool, profiles_per_job: int, past_jobs: int, now: float) -> Learned:
    """Reads the database. Raises DatabaseAwayError and DatabaseUnusableError."""
    jobs = not_ahead(store.running_jobs(profiles_per_job), now) if running else None
    return Learned(jobs, tuple(store.past_jobs(past_jobs)), store.start_ups(START_UPS_REMEMBERED, START_UPS_OF_ONE_JOB))


def close_running(store: HistoryStore, known: frozenset[JobId], now: float) -> None:
    """Ends the jobs of earlier brains, except those that this brain knows; a job that is submitted again runs again.

    Raises DatabaseAwayError, DatabaseUnusableError and ClaimLostError.
    """
    store.write([JobEnded(job, SILENT, now) for job in store.running_ids() if job not in known])


def not_ahead(changes: Sequence[Change], now: float) -> tuple[Change, ...]:
    """Returns the changes of running jobs; if any of a job is ahead of `now`, all move back: a clock was set back."""
    ahead: defaultdict[JobId, float] = defaultdict(float)
    for change in changes:
        match change:
            case JobSubmitted(submitted_at=time) | PlanMade(made_at=time) | ProfileReported(profile=JobProfile(time)):
                ahead[change.job] = max(ahead[change.job], time - now)
    return tuple(_earlier(change, ahead[change.job]) for change in changes)


def _earlier(change: Change, seconds: float) -> Change:
    match change:
        case JobSubmitted():
            return replace(change, submitted_at=change.submitted_at - seconds)
        case ProfileReported(profile=profile):
            return replace(change, profile=replace(profile, time=profile.time - seconds))
        case PlanMade():
            return replace(change, made_at=change.made_at - seconds)
        case _:
            return change
