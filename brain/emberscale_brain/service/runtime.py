"""The brain's knowledge, shared by all its threads: one state, one lock, and atomic methods.

Callers, the recorder and the planning thread meet only here. The lock never leaves this module, and no holder does more
than look at each job once. The functions that decide are pure and take the state (`first_plan`, `in_force`,
`acceptance`). A change is recorded while the lock is held, so that the database gets a job before its profiles.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, replace

from emberscale_brain.history.changes import (
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.types import JobId, PastJob, PlannedShape, ScalingOverheads
from emberscale_brain.service.acceptance import UnacceptablePlanError, beside_newcomers, unacceptable
from emberscale_brain.service.checks import Refusal, Refused, check_profile, check_start_up
from emberscale_brain.service.first_plan import first_plan
from emberscale_brain.service.in_force import (
    ExplainedPlan,
    PlanInForce,
    PlansInForce,
    adopt_one,
    refreshed,
    with_reasons,
)
from emberscale_brain.service.learning import Learned
from emberscale_brain.service.state import BrainState, Conditions
from emberscale_brain.warm_start import WarmStart

_REASONS_A_ROUND = 20
_MOST_TAKEN = 4096
"""Profiles and start-ups that a job may report in a window: far above what a master does after an outage."""
_WINDOW_SECONDS = 600.0
_TICK = 1e-6  # seconds between profiles of one job that arrive together

Record = Callable[[Sequence[Change], Sequence[ProfileReported]], Future[bool]]


class UnknownJobError(Exception):
    """The job was never submitted, or has ended."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The outcome of a submission: the plan in force, and the first plan if the job is new and got one."""

    plan: PlanInForce
    new: bool
    first: PlanMade | None
    durable: Future[bool]


@dataclass(frozen=True, slots=True)
class Reported:
    """The outcome of a report: refused profiles by sequence, and refused start-ups by place.

    `durable` resolves once it is known whether the database has the accepted ones.
    """

    accepted: int
    refused: tuple[tuple[int, Refused], ...]
    refused_start_ups: tuple[tuple[int, Refused], ...]
    durable: Future[bool]


class BrainRuntime:
    """Thread-safe. `now` is always the brain's steady clock; `record` writes changes, in the order of the calls."""

    def __init__(self, state: BrainState, conditions: Conditions, record: Record) -> None:
        self.conditions = conditions
        self._lock = threading.Lock()
        self._state = state
        self._in_force = PlansInForce()
        self._record = record
        self._heard: dict[JobId, float] = {}
        self._taken: dict[JobId, tuple[float, int]] = {}
        """Since when a window lasts, and how much of what a job reported was taken in it, even if the job ended."""
        self._past: tuple[PastJob, ...] | None = None
        self._ended_unread: set[JobId] | None = set()
        self._unsent: list[Change] | None = None
        self._reasons_turn = 0

    # -- what callers say -----------------------------------------------------------------------------------------

    def submit(self, submitted: JobSubmitted, started: WarmStart | None, now: float) -> Submitted:
        """Adds a job, with a first plan if there is a warm start; a known job stays unchanged."""
        changes: list[Change] = []
        first = None
        with self._lock:
            self._heard[submitted.job] = now
            new = submitted.job not in self._state.jobs
            if new:
                changes.append(submitted)
                if started is not None:
                    first = first_plan(self._state, self.conditions, submitted, started, now)
                    changes.append(first)
                for change in changes:
                    self._apply(change)
            return Submitted(self._in_force.plan(submitted.job), new, first, self._record(changes, ()))

    def report(
        self,
        job: JobId,
        reports: Sequence[ProfileReported],
        start_ups: Sequence[StartUpObserved],
        now: float,
        wall: float,
        clock_skew: float,
    ) -> Reported:
        """Takes profiles and start-ups of a job, and refuses implausible ones.

        Times are by the reporter's clock, which may be `clock_skew` seconds ahead of the `wall` clock.
        """
        refused: list[tuple[int, Refused]] = []
        refused_start_ups: list[tuple[int, Refused]] = []
        new: list[Change] = []
        repeated: list[ProfileReported] = []
        with self._lock:
            known = self._state.jobs.get(job)
            if known is None:
                unknown = Refused(Refusal.UNKNOWN_JOB, f"job {job!r} is unknown: submit it first")
                refused = [(report.sequence, unknown) for report in reports]
                refused_start_ups = [(place, unknown) for place in range(len(start_ups))]
            else:
                self._heard[job] = now
                room = self._room(job, now)
                too_many = Refused(Refusal.TOO_MANY, f"the job has reported {_MOST_TAKEN} lately: report less often")
                for report in reports:
                    problem = check_profile(report.profile, known.submitted.metadata.batch_size, wall, clock_skew)
                    if problem is None and report.sequence > known.sequence and len(new) >= room:
                        problem = too_many
                    if problem is not None:
                        refused.append((report.sequence, problem))
                    elif report.sequence > known.sequence:
                        last = known.profiles[-1].time if known.profiles else 0.0
                        at = max(now - max(0.0, wall - report.profile.time), last + _TICK)
                        stamped = replace(report, profile=replace(report.profile, time=at))
                        new.append(stamped)
                        self._apply(stamped)
                    else:
                        repeated.append(report)
                for place, start_up in enumerate(start_ups):
                    problem = check_start_up(start_up) or (too_many if len(new) >= room else None)
                    if problem is not None:
                        refused_start_ups.append((place, problem))
                    else:
                        new.append(start_up)
                        self._apply(start_up)
                began, taken = self._taken[job]
                self._taken[job] = began, taken + len(new)
            durable = self._record(new, repeated)
        return Reported(len(reports) - len(refused), tuple(refused), tuple(refused_start_ups), durable)

    def end(self, ended: JobEnded) -> Future[bool]:
        """Ends a job; missing fields keep their last known values. Raises UnknownJobError."""
        with self._lock:
            known = self._state.jobs.get(ended.job)
            if known is None:
                raise UnknownJobError(ended.job)
            latest = self._in_force.end(ended.job)
            complete = replace(
                ended,
                final_shape=ended.final_shape or known.shape,
                fit=None if latest is None else latest.explanation.fit,
                rows=ended.rows or known.rows,
                metadata=known.submitted.metadata,
            )
            submitted, reasons = known.submitted, with_reasons(known.plan, latest)
            self._apply(complete)
            if self._ended_unread is not None:
                self._ended_unread.add(ended.job)
            self._heard.pop(ended.job, None)
            self._past = None
            # with the submission again: a database that was emptied meanwhile could not record the job's end
            return self._record([submitted, *reasons, complete], ())

    # -- what callers ask -----------------------------------------------------------------------------------------

    def plan(self, job: JobId, now: float) -> PlanInForce:
        """Returns the plan in force to the job's master, which thereby is heard. Raises UnknownJobError."""
        with self._lock:
            if job not in self._state.jobs:
                raise UnknownJobError(job)
            self._heard[job] = now
            return self._in_force.plan(job)

    def explain(self, job: JobId) -> ExplainedPlan | None:
        """Explains the plan in force, without earlier plans; None for a job that has ended."""
        with self._lock:
            known = self._state.jobs.get(job)
            if known is None:
                return None
            return ExplainedPlan(
                self._in_force.plan(job),
                None if known.plan is None else refreshed(known.plan, self._in_force.latest(job)),
                earlier=(),
                remaining_samples=known.remaining_samples,
                profiles=tuple(known.profiles),
                constants=ModelConstants.of(known.submitted.metadata, self.conditions.network_bytes_per_second),
            )

    @property
    def job_ids(self) -> frozenset[JobId]:
        """Jobs that have not ended."""
        with self._lock:
            return frozenset(self._state.jobs)

    def past_jobs(self) -> tuple[PastJob, ...]:
        """Returns the jobs that have ended, the oldest first; the same tuple until there are more."""
        with self._lock:
            if self._past is None:
                self._past = tuple(self._state.history)
            return self._past

    def silent(self, now: float, silence: float) -> list[JobId]:
        """Returns the jobs whose masters were not heard for more than `silence` seconds."""
        with self._lock:
            return [job for job in self._state.jobs if now - self._heard.get(job, now) > silence]

    # -- what the database knows ----------------------------------------------------------------------------------

    @property
    def knows_running(self) -> bool:
        """Whether the database's running jobs were learned."""
        with self._lock:
            return self._ended_unread is None

    def learn(self, learned: Learned, now: float) -> bool:
        """Merges the contents of the database; returns whether a planning process must begin anew to know of it."""
        untold = False
        with self._lock:
            if learned.running is not None and self._ended_unread is not None:
                untold = self._learn_running(learned.running, self._ended_unread)
                self._ended_unread = None
            have = {job.id for job in self._state.history}
            past = [job for job in reversed(learned.past) if job.id not in have]
            self._state.remember(past)
            for role, values in learned.start_ups.items():
                if values and not self._state.start_ups[role]:
                    self._state.remember_start_ups(role, values[::-1])
                    untold = True
            self._heard = dict.fromkeys(self._state.jobs, now) | self._heard
            self._past = None
        return untold or bool(past)

    def _learn_running(self, changes: Sequence[Change], over: AbstractSet[JobId]) -> bool:
        """Returns whether a job known here has more profiles now."""
        known = set(self._state.jobs)
        earlier: dict[JobId, list[ProfileReported]] = {}
        for change in changes:
            if change.job not in known and change.job not in over:
                self._apply(change)
            elif change.job in known and isinstance(change, ProfileReported):
                earlier.setdefault(change.job, []).append(change)
        recalled = [self._state.recall(job, profiles) for job, profiles in earlier.items()]
        return any(recalled)

    def job_changes(self, job: JobId) -> list[Change]:
        """Returns the changes that bring another state's knowledge of the job up to date; none if it has ended."""
        with self._lock:
            return self._state.job_changes(job)

    # -- rounds of planning ---------------------------------------------------------------------------------------

    def begin_telling(self) -> tuple[list[PastJob], list[Change], list[JobId]]:
        """Collects changes for the planning process from now on, until `end_telling`.

        Returns past jobs and overheads, which a new process gets first, and the jobs, which it then gets one by one.
        """
        with self._lock:
            self._unsent = []
            return list(self._state.history), self._state.overhead_changes(), list(self._state.jobs)

    def take_unsent(self) -> tuple[list[Change], frozenset[JobId]]:
        """Returns the changes since the last call, and the jobs that the caller knows with them."""
        with self._lock:
            unsent, self._unsent = self._unsent or [], []
            return unsent, frozenset(self._state.jobs)

    def end_telling(self) -> None:
        """Stops collecting changes, as there is no planning process."""
        with self._lock:
            self._unsent = None

    def adopt(
        self, planned: Mapping[JobId, PlannedShape], shown: AbstractSet[JobId], planner: str, now: float
    ) -> list[PlanMade]:
        """Puts a round in force; returns the new versions, one for each changed shape.

        Raises UnacceptablePlanError; then nothing is adopted. The lock is released between jobs, so that callers need
        not wait for all of them.
        """
        with self._lock:
            problem = unacceptable(self._state, self.conditions, planned, shown, now)
            if problem is not None:
                raise UnacceptablePlanError(problem)
            accepted = beside_newcomers(self._state, self.conditions, planned, shown, now)
            jobs, overheads = list(self._state.jobs), self._state.overheads()
        made = (self._adopt(job, accepted.get(job), overheads, planner, now) for job in jobs)
        return [plan for plan in made if plan is not None]

    def _adopt(
        self, job: JobId, planned: PlannedShape | None, overheads: ScalingOverheads, planner: str, now: float
    ) -> PlanMade | None:
        with self._lock:
            known = self._state.jobs.get(job)
            if known is None:
                return None
            submitted, last = known.submitted, known.plan
            advice = self._state.fault_tolerance(job, overheads)
        adopted = adopt_one(submitted, last, planned, advice, planner, now)
        with self._lock:
            if self._state.jobs.get(job) is not known:
                return None
            if adopted.change is None:
                self._in_force.keep(job, adopted.planned, advice)
            else:
                self._apply(adopted.change)
        return adopted.change

    def reasons_of_now(self) -> list[PlanMade]:
        """Returns the plans of some jobs, in turn, with the last round's reasons, for readers of the database."""
        with self._lock:
            jobs = list(self._state.jobs)
            first = self._reasons_turn % max(1, len(jobs))
            turn = [*jobs[first:], *jobs[:first]][:_REASONS_A_ROUND]
            self._reasons_turn = first + len(turn)
            plans = ((self._state.jobs[job].plan, self._in_force.latest(job)) for job in turn)
            return [plan for last, latest in plans for plan in with_reasons(last, latest)]

    def stale(self, because: str) -> None:
        """Notes for callers why plans are outdated; empty if they are current."""
        with self._lock:
            self._in_force.stale_because = because

    # -- inside ---------------------------------------------------------------------------------------------------

    def _room(self, job: JobId, now: float) -> int:
        """Returns how much more a job may report, which the database of all jobs keeps."""
        began, taken = self._taken.get(job, (now, 0))
        if now >= began + _WINDOW_SECONDS:
            self._taken = {one: window for one, window in self._taken.items() if now < window[0] + _WINDOW_SECONDS}
            began, taken = now, 0
        self._taken[job] = began, taken
        return _MOST_TAKEN - taken

    def _apply(self, change: Change) -> None:
        self._state.apply(change)
        if self._unsent is not None:
            self._unsent.append(change)
        if isinstance(change, PlanMade):
            self._in_force.put(change)
