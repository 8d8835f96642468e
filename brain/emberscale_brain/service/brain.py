"""The brain: what is asked is answered from memory; what changes is recorded, and planned with.

Three things happen at once: callers ask and report, the recorder writes, and the planning thread has the planning
process make plans. They meet in one `BrainState` under one lock, which is never held for more than a look at each job.
What callers say is recorded under it, too: the database hears of a job before it hears of its profiles.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import structlog

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.history.changes import (
    SILENT,
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.history.claim import ClaimLostError
from emberscale_brain.history.database import DatabaseAwayError, DatabaseUnusableError
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.model.features import ModelConstants
from emberscale_brain.planner.types import JobId, PlannedShape
from emberscale_brain.service.adoption import Adoption, UnacceptablePlanError
from emberscale_brain.service.checks import Refusal, Refused, check_profile, check_start_up
from emberscale_brain.service.first_plan import FirstPlans
from emberscale_brain.service.in_force import PlansInForce, refreshed, with_reasons
from emberscale_brain.service.learning import Learning
from emberscale_brain.service.messages import explanation_to, plan_to, summary_to
from emberscale_brain.service.meters import Meters
from emberscale_brain.service.planning import PlanningFailedError
from emberscale_brain.service.recorder import Recorder
from emberscale_brain.service.rounds import PlanningRounds
from emberscale_brain.service.settings import BrainSettings
from emberscale_brain.service.state import BrainState

_EARLIER_PLANS = 10
_PRUNE_SECONDS = 3600.0
_MOST_BACKOFF = 16


class UnknownJobError(Exception):
    """A job that was never submitted, or has ended."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What became of reported profiles, by sequence, and start-ups, by place.

    `durable` resolves when the database has the accepted ones, or has not.
    """

    accepted: int
    refused: tuple[tuple[int, Refused], ...]
    refused_start_ups: tuple[tuple[int, Refused], ...]
    durable: Future[bool]


class Brain:
    """Start it, ask it, stop it. `clock` gives seconds since the epoch.

    `on_superseded` hears on some thread, and maybe again, that another brain has the database: this one must stop.
    """

    def __init__(
        self,
        settings: BrainSettings,
        store: HistoryStore,
        clock: Callable[[], float] = time.time,
        on_superseded: Callable[[str], object] = lambda why: None,
    ) -> None:
        self.meters = Meters()
        self._settings = settings
        self._store = store
        self.clock = clock
        self._log = structlog.get_logger()
        self._conditions = settings.conditions()
        self._lock = threading.Lock()
        self._state = BrainState(settings.planning.profiles_per_job, settings.planning.past_jobs)
        self._rounds = PlanningRounds(settings, self._state, self._lock)
        self._learning = Learning(store, settings.planning, self._state, self._lock, self._learned)
        self._heard: dict[JobId, float] = {}
        self._first_plans = FirstPlans(self._state, self._lock, self._conditions, settings.planner)
        self._in_force = PlansInForce()
        self._adoption = Adoption(
            self._state, self._lock, self._conditions, self._in_force, settings.planner.name, self._take
        )
        self._listeners: list[Callable[[JobId], None]] = []
        self._on_superseded = on_superseded
        self._recorder = Recorder(
            store,
            on_return=self._learn,
            on_lost=lambda why, count: self.meters.lost.labels(why).inc(count),
            on_superseded=on_superseded,
        )
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._threads = [
            threading.Thread(target=self._plan_for_ever, name="planning", daemon=True),
            threading.Thread(target=self._prune_for_ever, name="upkeep", daemon=True),
        ]
        self.meters.backlog.set_function(lambda: self._recorder.backlog)
        self.meters.database_up.set_function(lambda: float(self._recorder.away is None))
        self.meters.jobs.set_function(lambda: len(self._state.jobs))

    # -- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Learns again what the database knows, and begins. Raises DatabaseUnusableError."""
        away = None
        try:
            self._store.migrate()
            self._store.claim()
            self._learn()
        except DatabaseAwayError as error:
            away = str(error)
            self._log.error("database away", reason=away, kept=0)
        self._recorder.start(away)
        for thread in self._threads:
            thread.start()
        self._wake.set()
        self._log.info("brain started", jobs=len(self._state.jobs), past_jobs=len(self._state.history))

    def stop(self) -> None:
        """Ends its threads and the planning process, and writes what it still has."""
        self._stopping.set()
        self._wake.set()
        self._rounds.stop()
        for thread in self._threads:
            thread.join()
        self._recorder.stop()
        self._store.close()

    def on_plan(self, listener: Callable[[JobId], None]) -> None:
        """`listener` hears, on some thread, of every job that has a new plan or has ended."""
        self._listeners.append(listener)

    @property
    def database_away(self) -> str | None:
        """Why the database cannot be reached; None while it can."""
        return self._recorder.away

    # -- what others say and ask ----------------------------------------------------------------------------------

    def submit(self, submitted: JobSubmitted) -> tuple[pb.BrainPlan, Future[bool]]:
        """Makes a job known and gives it its first plan; a job that is known keeps its plan in force.

        Looks at all past jobs: not for a thread that must not wait.
        """
        wants_plan = not submitted.fixed and submitted.current is None
        started = self._first_plans.warm_start(submitted) if wants_plan else None
        changes: list[Change] = []
        with self._lock:
            self._heard[submitted.job] = self.clock()
            if submitted.job not in self._state.jobs:
                changes.append(submitted)
                if started is not None:
                    changes.append(self._first_plans.make(submitted, started, self.clock()))
                for change in changes:
                    self._take(change)
            plan = self._in_force.message(submitted.job)
            durable = self._recorder.record(changes)
        if changes:
            self._wake.set()
        return plan, durable

    def first_plan(self, submitted: JobSubmitted) -> pb.BrainPlan:
        """The plan that a job would start with; not for a thread that must not wait."""
        started = self._first_plans.warm_start(submitted)
        with self._lock:
            return plan_to(replace(self._first_plans.make(submitted, started, self.clock()), version=0))

    def report(self, job: JobId, reports: Sequence[ProfileReported], start_ups: Sequence[StartUpObserved]) -> Reported:
        """Takes in profiles and start-ups of a job, apart from those that make no sense."""
        now, skew = self.clock(), self._settings.clock_skew
        refused: list[tuple[int, Refused]] = []
        refused_start_ups: list[tuple[int, Refused]] = []
        new: list[Change] = []
        with self._lock:
            known = self._state.jobs.get(job)
            if known is None:
                unknown = Refused(Refusal.UNKNOWN_JOB, f"job {job!r} is not known here: submit it first")
                refused = [(report.sequence, unknown) for report in reports]
                refused_start_ups = [(place, unknown) for place in range(len(start_ups))]
            else:
                self._heard[job] = now
                for report in reports:
                    problem = check_profile(report.profile, known.submitted.metadata.batch_size, now, skew)
                    if problem is not None:
                        refused.append((report.sequence, problem))
                    elif report.sequence > known.sequence:
                        new.append(report)
                        self._take(report)
                for place, start_up in enumerate(start_ups):
                    problem = check_start_up(start_up)
                    if problem is not None:
                        refused_start_ups.append((place, problem))
                    else:
                        new.append(start_up)
                        self._take(start_up)
            durable = self._recorder.record(new)
        accepted = len(reports) - len(refused)
        self.meters.profiles.labels("Accepted").inc(accepted)
        for sequence, problem in refused:
            self.meters.profiles.labels(problem.reason.value).inc()
            self._log.warning("profile refused", job=job, sequence=sequence, why=problem.reason, detail=problem.message)
        self.meters.start_ups.labels("Accepted").inc(len(start_ups) - len(refused_start_ups))
        for place, problem in refused_start_ups:
            self.meters.start_ups.labels(problem.reason.value).inc()
            self._log.warning("start-up refused", job=job, place=place, why=problem.reason, detail=problem.message)
        return Reported(accepted, tuple(refused), tuple(refused_start_ups), durable)

    def count_refused(self, reason: Refusal, count: int) -> None:
        """Counts profiles that were refused before they could be reported."""
        self.meters.profiles.labels(reason.value).inc(count)

    def plan(self, job: JobId) -> pb.BrainPlan:
        """The plan in force. Raises UnknownJobError."""
        if job not in self._state.jobs:
            raise UnknownJobError(job)
        return self._in_force.message(job)

    def explain(self, job: JobId) -> pb.PlanExplanation:
        """Why the plan in force is what it is; for a job that has ended, why its last was. Raises UnknownJobError.

        Reads earlier plans from the database: not for a thread that must not wait.
        """
        with self._lock:
            known = self._state.jobs.get(job)
            made, latest = None if known is None else known.plan, self._in_force.latest(job)
            profiles = [] if known is None else list(known.profiles)
            remaining = 0 if known is None else known.remaining_samples
        try:
            earlier = self._store.plans(job, _EARLIER_PLANS)
        except (DatabaseAwayError, DatabaseUnusableError):
            earlier = []
        if known is None:
            if not earlier:
                raise UnknownJobError(job)
            return explanation_to(plan_to(earlier[0]), earlier[0], earlier[1:])
        in_force = self.plan(job)
        return explanation_to(
            in_force,
            None if made is None else refreshed(made, latest),
            [plan for plan in earlier if plan.version < in_force.version],
            remaining_samples=remaining,
            profiles=profiles,
            constants=ModelConstants.of(known.submitted.metadata, self._conditions.network_bytes_per_second),
        )

    def end(self, ended: JobEnded) -> Future[bool]:
        """A job is over; what is not said of it is what was last known. Raises UnknownJobError."""
        with self._lock:
            known = self._state.jobs.get(ended.job)
            if known is None:
                raise UnknownJobError(ended.job)
            latest = self._in_force.end(ended.job)
            reasons = with_reasons(known.plan, latest)
            complete = replace(
                ended,
                final_shape=ended.final_shape or known.shape,
                fit=None if latest is None else latest.explanation.fit,
                rows=ended.rows or known.rows,
                metadata=known.submitted.metadata,
            )
            self._take(complete)
            self._learning.ended(ended.job)
            self._heard.pop(ended.job, None)
            self._first_plans.history_changed()
            durable = self._recorder.record([*reasons, complete])
        self._wake.set()
        self._notify(ended.job)
        return durable

    def jobs(self) -> list[pb.JobSummary]:
        """Those that have not ended, by their submission."""
        with self._lock:
            known = sorted(self._state.jobs.items(), key=lambda item: item[1].submitted.submitted_at)
            return [summary_to(entry, self._in_force.message(job)) for job, entry in known]

    def _end_silent(self) -> None:
        """Jobs of which nothing was heard for too long stop taking room; one that speaks again is known again."""
        now, silence = self.clock(), self._settings.planning.silence
        with self._lock:
            silent = [job for job in self._state.jobs if now - self._heard.get(job, now) > silence]
        for job in silent:
            self._log.warning("job is silent", job=job, seconds=silence)
            try:
                self.end(JobEnded(job, SILENT, now))
            except UnknownJobError:
                continue

    # -- inside ---------------------------------------------------------------------------------------------------

    def _take(self, change: Change, message: pb.BrainPlan | None = None) -> None:
        """A change, into the state and towards the planning process; under the lock."""
        self._learned(change, message)
        if isinstance(change, PlanMade):
            self.meters.plans.labels(change.planned.action.value).inc()

    def _learned(self, change: Change, message: pb.BrainPlan | None = None) -> None:
        """The same for a change that was counted before, by this brain or another; under the lock."""
        self._state.apply(change)
        self._rounds.note(change)
        if isinstance(change, PlanMade):
            self._in_force.put(change, message)

    def _notify(self, job: JobId) -> None:
        for listener in self._listeners:
            listener(job)

    def _learn(self) -> None:
        """What the database knows. Raises DatabaseAwayError and DatabaseUnusableError."""
        if self._learning.learn(self.clock()):
            self._rounds.tell_anew()
        with self._lock:
            self._heard = dict.fromkeys(self._state.jobs, self.clock()) | self._heard
            self._first_plans.history_changed()
        self._wake.set()

    def _plan_for_ever(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._wake.wait(self._settings.planning.interval * min(2**failures, _MOST_BACKOFF))
            self._wake.clear()
            if self._stopping.is_set() or not self._state.jobs:
                continue
            began = time.monotonic()
            try:
                self._end_silent()
                planned = self._rounds.plan(self._conditions, self.clock())
                failures = 0
                self._in_force.stale_because = ""
                self._adopt(planned)
            except PlanningFailedError as error:
                if self._stopping.is_set():
                    break
                failures += 1
                self._no_plan(error.how, f"the planner {self._settings.planner.name!r} {error.how}: {error}")
                self._log.error("planning failed", how=error.how, reason=str(error), failures=failures)
                continue
            except Exception as error:  # noqa: BLE001  # without this thread nobody plans, and nobody is told
                failures += 1
                self._no_plan("internal", f"the brain failed: {type(error).__name__}: {error}")
                self._log.exception("planning failed", how="internal", failures=failures)
                continue
            self.meters.planning_seconds.observe(time.monotonic() - began)
            # whoever wakes it all the time does not make it plan all the time
            self._stopping.wait(min(self._settings.planning.interval, time.monotonic() - began))
        self._rounds.close()

    def _no_plan(self, how: str, why: str) -> None:
        """The last good plans stand, and callers are told why."""
        self._in_force.stale_because = why
        self.meters.planning_failures.labels(how).inc()

    def _adopt(self, planned: Mapping[JobId, PlannedShape]) -> None:
        """Puts a round's plans in force, and lets all know who want to."""
        try:
            made = self._adoption.adopt(planned, self._rounds.shown, self.clock())
        except UnacceptablePlanError as error:
            self._no_plan(
                "unacceptable", f"the planner {self._settings.planner.name!r} planned what cannot be: {error}"
            )
            self._log.error("plan refused", reason=str(error))
            return
        reasons = [] if self._recorder.away is not None else self._adoption.reasons_of_now()
        self._recorder.record([*made, *reasons])
        for plan in made:
            self._notify(plan.job)
        self._log.info("planned", jobs=len(planned), changed=len(made))

    def _prune_for_ever(self) -> None:
        while not self._stopping.wait(_PRUNE_SECONDS):
            try:
                pruned = self._store.prune(self._settings.retention.retention(), self.clock())
            except (DatabaseAwayError, DatabaseUnusableError) as error:
                self._log.warning("not pruned", reason=str(error))
            except ClaimLostError as error:
                self._on_superseded(str(error))
            else:
                self._log.info("pruned", profiles=pruned.profiles, plans=pruned.plans, jobs=pruned.jobs)
