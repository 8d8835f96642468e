"""The brain: answers questions from memory, records changes, and plans with them.

Three activities run concurrently: callers ask and report, the recorder writes, and the planning thread has the planning
process make plans. They meet in one `BrainRuntime`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import structlog
from prometheus_client import Counter

from emberscale_brain.history.changes import SILENT, JobEnded, JobSubmitted, ProfileReported, StartUpObserved
from emberscale_brain.history.database import ClaimLostError, DatabaseAwayError, DatabaseUnusableError
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId, PastJob, PlannedShape
from emberscale_brain.preferences import PlannerPreferences
from emberscale_brain.service import learning
from emberscale_brain.service.acceptance import UnacceptablePlanError
from emberscale_brain.service.checks import Refusal, Refused
from emberscale_brain.service.in_force import ExplainedPlan, PlanInForce
from emberscale_brain.service.instruments import Meters, SteadyClock
from emberscale_brain.service.planning import PlanningFailedError
from emberscale_brain.service.recorder import ChangeRecorder
from emberscale_brain.service.rounds import PlanningRounds
from emberscale_brain.service.runtime import BrainRuntime, Reported, UnknownJobError
from emberscale_brain.service.settings import BrainSettings
from emberscale_brain.service.state import BrainState
from emberscale_brain.warm_start import HistoryIndex, NewJob, WarmStart, warm_start

_log = structlog.get_logger()

_EARLIER_PLANS = 10
_PRUNE_SECONDS = 3600.0
_MOST_BACKOFF = 16
_TOLD = 8
"""The most refusals of a report that are logged."""


class _WarmStarts:
    """Finds the shapes that past jobs suggest; keeps the index of one history."""

    def __init__(self, preferences: PlannerPreferences) -> None:
        self._preferences = preferences
        self._index = HistoryIndex(())
        self._comparing = threading.Lock()

    def find(self, submitted: JobSubmitted, history: tuple[PastJob, ...]) -> WarmStart:
        """Returns a new job's warm start. Slow with many past jobs: not for a thread that must not wait."""
        with self._comparing:  # one thread at a time: more would keep the answering threads from the interpreter
            if self._index.history is not history:
                self._index = HistoryIndex(history)
            return warm_start(
                NewJob(submitted.owner, submitted.metadata),
                submitted.bounds,
                self._index,
                self._preferences.neighbours,
                self._preferences.smoothing,
            )


class Brain:
    """Start it, ask it, stop it. `clock` does not jump when the machine's clock is set.

    `on_superseded` is called, on any thread and maybe repeatedly, once another brain has the database: this one must
    stop.
    """

    def __init__(
        self,
        settings: BrainSettings,
        store: HistoryStore,
        clock: SteadyClock | None = None,
        on_superseded: Callable[[str], object] = lambda why: None,
    ) -> None:
        self.meters = Meters()
        self.clock = clock or SteadyClock()
        self._settings = settings
        self._store = store
        self._on_superseded = on_superseded
        self._recorder = ChangeRecorder(
            store,
            on_return=self._learn,
            on_lost=lambda why, count: self.meters.lost.labels(why).inc(count),
            on_superseded=on_superseded,
            retell=lambda job: self._runtime.job_changes(job),  # the runtime is made below, with the recorder
        )
        planning = settings.planning
        state = BrainState(planning.profiles_per_job, planning.past_jobs)
        self._runtime = BrainRuntime(state, settings.conditions(), self._recorder.record)
        self._warm_starts = _WarmStarts(settings.planner)
        self._rounds = PlanningRounds(settings, self._runtime)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._failures = 0
        self._threads: list[threading.Thread] = []
        self.meters.backlog.set_function(lambda: self._recorder.backlog)
        self.meters.database_up.set_function(lambda: float(self._recorder.away is None))
        self.meters.jobs.set_function(lambda: len(self._runtime.job_ids))

    # -- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the brain, and plans and prunes from then on. Raises DatabaseUnusableError."""
        self.open()
        for repeat, name in ((self._plan_for_ever, "planning"), (self._prune_for_ever, "upkeep")):
            self._threads.append(threading.Thread(target=repeat, name=name, daemon=True))
            self._threads[-1].start()

    def open(self) -> None:
        """Reads the database and starts to record, without planning. Raises DatabaseUnusableError."""
        away = None
        try:
            self._store.migrate()
            self._store.claim()
            self._learn()
        except DatabaseAwayError as error:
            away = str(error)
            _log.error("database_unavailable", problem=away, changes=0)
        self._recorder.start(away)
        self._wake.set()
        _log.info("brain_started", jobs=len(self._runtime.job_ids), past_jobs=len(self._runtime.past_jobs()))

    def stop(self) -> None:
        """Ends the threads and the planning process, and writes pending changes."""
        self._stopping.set()
        self._wake.set()
        self._rounds.stop()
        for thread in self._threads:
            thread.join()
        self._rounds.close()
        self._recorder.stop()
        self._store.close()

    # -- what others say and ask ----------------------------------------------------------------------------------

    def submit(self, submitted: JobSubmitted) -> tuple[PlanInForce, Future[bool]]:
        """Adds a job and gives it its first plan; a known job keeps its plan in force.

        Compares with all past jobs: not for a thread that must not wait.
        """
        wants_plan = not submitted.fixed and submitted.current is None
        started = self._warm_starts.find(submitted, self._runtime.past_jobs()) if wants_plan else None
        answer = self._runtime.submit(submitted, started, self.clock())
        if answer.first is not None:
            self.meters.plans.labels(answer.first.planned.action.value).inc()
        if answer.new:
            self._wake.set()
        return answer.plan, answer.durable

    def report(self, job: JobId, reports: Sequence[ProfileReported], start_ups: Sequence[StartUpObserved]) -> Reported:
        """Takes profiles and start-ups of a job, and refuses implausible ones."""
        reported = self._runtime.report(
            job, reports, start_ups, self.clock(), self.clock.wall(), self._settings.clock_skew
        )
        accepted_start_ups = len(start_ups) - len(reported.refused_start_ups)
        _count(self.meters.profiles, reported.accepted, reported.refused)
        _count(self.meters.start_ups, accepted_start_ups, reported.refused_start_ups)
        for sequence, problem in reported.refused[:_TOLD]:
            _log.warning(
                "profile_refused", job_uid=job, sequence=sequence, reason=problem.reason, problem=problem.message
            )
        for place, problem in reported.refused_start_ups[:_TOLD]:
            _log.warning("start_up_refused", job_uid=job, place=place, reason=problem.reason, problem=problem.message)
        return reported

    def count_refused(self, reason: Refusal, count: int) -> None:
        """Counts profiles that were refused before they could be reported."""
        self.meters.profiles.labels(reason.value).inc(count)

    def plan(self, job: JobId) -> PlanInForce:
        """Returns the plan in force to the job's master, which thereby is heard. Raises UnknownJobError."""
        return self._runtime.plan(job, self.clock())

    def explain(self, job: JobId) -> ExplainedPlan:
        """Explains the plan in force; for a job that has ended, its last one. Raises UnknownJobError.

        Reads earlier plans from the database: not for a thread that must not wait.
        """
        known = self._runtime.explain(job)
        try:
            earlier = self._store.plans(job, _EARLIER_PLANS)
        except (DatabaseAwayError, DatabaseUnusableError):
            earlier = []
        if known is None:
            if not earlier:
                raise UnknownJobError(job)
            return ExplainedPlan(PlanInForce.of(earlier[0]), earlier[0], tuple(earlier[1:]))
        return replace(known, earlier=tuple(plan for plan in earlier if plan.version < known.plan.version))

    def end(self, ended: JobEnded) -> Future[bool]:
        """Ends a job; missing fields keep their last known values. Raises UnknownJobError."""
        durable = self._runtime.end(ended)
        self._wake.set()
        return durable

    def plan_once(self) -> None:
        """Plays one round of planning; after `start`, only the planning thread may. A failure keeps the last plans."""
        began = time.monotonic()
        try:
            self._end_silent()
            planned = self._rounds.plan(self.clock())
            self._failures = 0
            self._runtime.stale("")
            self._adopt(planned)
            self.meters.planning_seconds.observe(time.monotonic() - began)
        except PlanningFailedError as error:
            if self._stopping.is_set():
                return
            self._failures += 1
            self._no_plan(error.how, f"the planner {self._settings.planner.name!r} {error.how}: {error}")
            _log.error("planning_failed", reason=error.how, problem=str(error), failures=self._failures)
        except Exception as error:  # noqa: BLE001  # without this thread nothing is planned, and nobody notices
            self._failures += 1
            self._no_plan("internal", f"the brain failed: {type(error).__name__}: {error}")
            _log.exception("planning_failed", reason="internal", failures=self._failures)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _end_silent(self) -> None:
        """Ends jobs that were not heard for too long, so that they take no room; they may be submitted again."""
        now, silence = self.clock(), self._settings.planning.silence
        for job in self._runtime.silent(now, silence):
            _log.warning("job_silent", job_uid=job, seconds=silence)
            try:
                self.end(JobEnded(job, SILENT, now))
            except UnknownJobError:
                continue

    def _learn(self) -> None:
        """Reads the database. Raises DatabaseAwayError and DatabaseUnusableError."""
        now, planning = self.clock(), self._settings.planning
        first = not self._runtime.knows_running
        if first and not planning.take_over:
            learning.close_running(self._store, self._runtime.job_ids, now)
        learned = learning.read(
            self._store,
            running=first,
            profiles_per_job=planning.profiles_per_job,
            past_jobs=planning.past_jobs,
            now=now,
        )
        if self._runtime.learn(learned, now):
            self._rounds.tell_anew()
        self._wake.set()

    def _plan_for_ever(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._settings.planning.interval * min(2**self._failures, _MOST_BACKOFF))
            self._wake.clear()
            if self._stopping.is_set() or not self._runtime.job_ids:
                continue
            began = time.monotonic()
            self.plan_once()
            # frequent wake-ups must not make it plan without pause
            self._stopping.wait(min(self._settings.planning.interval, time.monotonic() - began))

    def _no_plan(self, how: str, why: str) -> None:
        """Keeps the last good plans, and tells callers why."""
        self._runtime.stale(why)
        self.meters.planning_failures.labels(how).inc()

    def _adopt(self, planned: Mapping[JobId, PlannedShape]) -> None:
        """Puts a round's plans in force."""
        planner = self._settings.planner.name
        try:
            made = self._runtime.adopt(planned, self._rounds.shown, planner, self.clock())
        except UnacceptablePlanError as error:
            self._no_plan("unacceptable", f"the planner {planner!r} returned an infeasible plan: {error}")
            _log.error("plan_refused", problem=str(error))
            return
        reasons = [] if self._recorder.away is not None else self._runtime.reasons_of_now()
        self._recorder.record([*made, *reasons])
        for plan in made:
            self.meters.plans.labels(plan.planned.action.value).inc()
        _log.info("planned", jobs=len(planned), plans=len(made))

    def _prune_for_ever(self) -> None:
        while not self._stopping.wait(_PRUNE_SECONDS):
            try:
                pruned = self._store.prune(self._settings.retention, self.clock())
            except (DatabaseAwayError, DatabaseUnusableError) as error:
                _log.warning("pruning_failed", problem=str(error))
            except ClaimLostError as error:
                self._on_superseded(str(error))
            else:
                _log.info(
                    "pruned",
                    profiles=pruned.profiles,
                    plans=pruned.plans,
                    start_ups=pruned.start_ups,
                    jobs=pruned.jobs,
                )


def _count(outcomes: Counter, accepted: int, refused: Iterable[tuple[int, Refused]]) -> None:
    """Counts what was accepted, and what was refused by its reason."""
    outcomes.labels("Accepted").inc(accepted)
    for _, problem in refused:
        outcomes.labels(problem.reason.value).inc()
