"""What a brain learns from its database: when it starts, or when the database is there at last."""

import threading
from collections import defaultdict
from collections.abc import Callable

from emberscale_brain.history.changes import SILENT, Change, JobEnded, JobSubmitted, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.settings import PlanningSettings
from emberscale_brain.service.state import BrainState

_START_UPS = 200


class Learning:
    """`take` puts a change into `state`, under `lock`. Learning raises DatabaseAwayError, DatabaseUnusableError."""

    def __init__(
        self,
        store: HistoryStore,
        settings: PlanningSettings,
        state: BrainState,
        lock: threading.Lock,
        take: Callable[[Change], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._state = state
        self._lock = lock
        self._take = take
        self._knows_running = False
        self._over: set[JobId] = set()

    def ended(self, job: JobId) -> None:
        """A job is over, though the database may not know it yet; under the lock."""
        if not self._knows_running:
            self._over.add(job)

    def learn(self, now: float) -> bool:
        """Running jobs, the first time; past jobs and start-ups. Whether a job that was known has more profiles now."""
        recalled = False
        if not self._knows_running:
            if not self._settings.take_over:
                self._close_running(now)
            recalled = self._learn_running()
        self._learn_history()
        return recalled

    def _close_running(self, now: float) -> None:
        """Jobs of brains before this one are over for it; one that is submitted again runs again."""
        running = [change.job for change in self._store.running_jobs(0) if isinstance(change, JobSubmitted)]
        with self._lock:
            others = [job for job in running if job not in self._state.jobs]
        self._store.write([JobEnded(job, SILENT, now) for job in others])

    def _learn_running(self) -> bool:
        changes = self._store.running_jobs(self._settings.profiles_per_job)
        profiles: defaultdict[JobId, list[ProfileReported]] = defaultdict(list)
        with self._lock:
            known = set(self._state.jobs)
            here = known | self._over
            for change in changes:
                if change.job not in here:
                    self._take(change)
                elif change.job in known and isinstance(change, ProfileReported):
                    profiles[change.job].append(change)
            self._knows_running = True
            self._over.clear()
            recalled = [self._state.recall(job, earlier) for job, earlier in profiles.items()]
        return any(recalled)

    def _learn_history(self) -> None:
        past = self._store.past_jobs(self._settings.past_jobs)
        start_ups = self._store.start_ups(_START_UPS)
        with self._lock:
            have = {job.id for job in self._state.history}
            self._state.remember([job for job in reversed(past) if job.id not in have])
            for role, values in start_ups.items():
                if not self._state.start_ups[role]:
                    self._state.start_ups[role].extend(reversed(values))
