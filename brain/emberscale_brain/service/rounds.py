"""Rounds of planning: feeds the planning process with the brain's changes, and restarts it after a failure."""

import threading
from collections.abc import Mapping

from emberscale_brain.planner.types import JobId, PlannedShape
from emberscale_brain.service.planning import PlannerChoice, PlanningProcess
from emberscale_brain.service.runtime import BrainRuntime
from emberscale_brain.service.settings import BrainSettings

_PROCESS_START_SECONDS = 60.0


class PlanningRounds:
    """The rounds of one brain. Threads call `plan` and `close` in turn, `stop` and `tell_anew` at any time."""

    def __init__(self, settings: BrainSettings, runtime: BrainRuntime) -> None:
        preferences, planning = settings.planner, settings.planning
        self._choice = PlannerChoice(
            preferences.name, preferences.settings(0, planning.interval), planning.profiles_per_job, planning.past_jobs
        )
        self._timeout = planning.timeout
        self._runtime = runtime
        self._process: PlanningProcess | None = None
        self._over = False
        self._outdated = threading.Event()
        self.shown: frozenset[JobId] = frozenset()
        """The jobs that the planner knew in the last round."""

    def tell_anew(self) -> None:
        """Discards the planning process, which has missed changes: the next round begins with a new one."""
        self._outdated.set()

    def plan(self, now: float) -> Mapping[JobId, PlannedShape]:
        """Returns this round's plans.

        Raises PlanningFailedError, and OSError if the machine has no process or file left for a new planning process.
        After an error the next round begins with a new process.
        """
        try:
            return dict(self._fed().plan(self._runtime.conditions, now, self._timeout))
        except Exception:  # any: changes are taken from the runtime only once, and this process may have missed some
            self.close()
            raise

    def stop(self) -> None:
        """Kills the process, even while another thread waits for it."""
        self._over = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._runtime.end_telling()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _fed(self) -> PlanningProcess:
        """Returns the process, up to date with all changes."""
        if self._outdated.is_set():
            self._outdated.clear()
            self.close()
        if self._process is None:
            self._process = self._begun()
        changes, self.shown = self._runtime.take_unsent()
        self._process.feed((), changes, self._timeout)
        return self._process

    def _begun(self) -> PlanningProcess:
        self._process = process = PlanningProcess()
        if self._over:  # `stop` came too early to kill it
            process.kill()
        process.begin(self._choice, _PROCESS_START_SECONDS)
        past, overheads, jobs = self._runtime.begin_telling()
        process.feed(reversed(past), overheads, self._timeout)  # each one before those that the process knows
        for job in jobs:
            process.feed((), self._runtime.job_changes(job), self._timeout)
        return process
