"""Rounds of planning: a planning process that is told what the brain gets to know, begun anew when it is gone."""

import threading
from collections.abc import Mapping

from emberscale_brain.history.changes import Change
from emberscale_brain.planner.types import JobId, PlannedShape
from emberscale_brain.service.planning import PlannerChoice, PlanningFailedError, PlanningProcess
from emberscale_brain.service.settings import BrainSettings
from emberscale_brain.service.state import BrainState, Conditions

_PROCESS_START_SECONDS = 60.0


class PlanningRounds:
    """`state` and what is noted are read under `lock`; `plan` and `close` are called by one thread."""

    def __init__(self, settings: BrainSettings, state: BrainState, lock: threading.Lock) -> None:
        preferences, planning = settings.planner, settings.planning
        self._choice = PlannerChoice(
            preferences.name, preferences.settings(seed=0), planning.profiles_per_job, planning.past_jobs
        )
        self._timeout = planning.timeout
        self._state = state
        self._lock = lock
        self._unsent: list[Change] = []
        self._process: PlanningProcess | None = None
        self._over = False
        self._outdated = False
        self._shown: frozenset[JobId] = frozenset()

    @property
    def shown(self) -> frozenset[JobId]:
        """The jobs that the planner knew of in the last round."""
        return self._shown

    def note(self, change: Change) -> None:
        """The planning process is to know this by the next round; under the lock. A new process is told everything."""
        if self._process is not None:
            self._unsent.append(change)

    def tell_anew(self) -> None:
        """What the planning process knows is not what the state is: the next round begins with a new one."""
        self._outdated = True

    def plan(self, conditions: Conditions, now: float) -> Mapping[JobId, PlannedShape]:
        """What the planner plans now. Raises PlanningFailedError; the next round begins with a new process."""
        try:
            return dict(self._fed().plan(conditions, now, self._timeout))
        except PlanningFailedError:
            self._process = None
            raise

    def stop(self) -> None:
        """Ends the process under whoever waits for it; for other threads."""
        self._over = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.close()

    def _fed(self) -> PlanningProcess:
        """The process, knowing everything."""
        if self._outdated:
            self._outdated = False
            self.close()
            self._process = None
        if self._process is not None:
            with self._lock:
                changes, self._unsent = self._unsent, []
                self._shown = frozenset(self._state.jobs)
            self._process.feed((), changes)
            return self._process
        self._process = process = PlanningProcess()
        if self._over:  # `stop` came too early to end it
            process.kill()
        process.begin(self._choice, _PROCESS_START_SECONDS)
        with self._lock:
            self._unsent = []
            past, jobs = list(self._state.history), list(self._state.jobs)
            self._shown = frozenset(jobs)
        process.feed(past, self._state.overhead_changes())
        for job in jobs:
            with self._lock:
                everything = self._state.job_changes(job)
            process.feed((), everything)
        return process
