"""Puts a round's plans in force, job by job, while callers ask and report."""

import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.history.changes import PlanMade
from emberscale_brain.planner.types import JobId, PlannedShape, ScalingOverheads
from emberscale_brain.service.acceptance import beside_newcomers, unacceptable
from emberscale_brain.service.in_force import PlansInForce, with_reasons
from emberscale_brain.service.messages import plan_to
from emberscale_brain.service.state import BrainState, Conditions

_REASONS_A_ROUND = 20


class UnacceptablePlanError(Exception):
    """A round that plans what cannot be; the text says what."""


class Adoption:
    """Used by one thread. `state` is read, and `take` called with a new plan and its message, under `lock`."""

    def __init__(
        self,
        state: BrainState,
        lock: threading.Lock,
        conditions: Conditions,
        in_force: PlansInForce,
        planner: str,
        take: Callable[[PlanMade, pb.BrainPlan | None], None],
    ) -> None:
        self._state = state
        self._lock = lock
        self._conditions = conditions
        self._in_force = in_force
        self._planner = planner
        self._take = take
        self._reasons_turn = 0

    def adopt(self, planned: Mapping[JobId, PlannedShape], shown: AbstractSet[JobId], now: float) -> list[PlanMade]:
        """A new version where the shape is another, which are returned, and new reasons everywhere.

        `shown` are the jobs that the planner knew of. Raises UnacceptablePlanError; then nothing is adopted.
        """
        with self._lock:
            problem = unacceptable(self._state, self._conditions, planned, shown, now)
            if problem is not None:
                raise UnacceptablePlanError(problem)
            planned = beside_newcomers(self._state, self._conditions, planned, shown, now)
            jobs, overheads = list(self._state.jobs), self._state.overheads()
        made = (self._adopt_one(job, planned.get(job), overheads, now) for job in jobs)
        return [plan for plan in made if plan is not None]

    def reasons_of_now(self) -> Sequence[PlanMade]:
        """The plans in force of some jobs, in turn, with the reasons of the last round, for who asks the database."""
        with self._lock:
            jobs = list(self._state.jobs)
            first = self._reasons_turn % max(1, len(jobs))
            turn = [*jobs[first:], *jobs[:first]][:_REASONS_A_ROUND]
            self._reasons_turn = first + len(turn)
            plans = ((self._state.jobs[job].plan, self._in_force.latest(job)) for job in turn)
            return [plan for last, latest in plans for plan in with_reasons(last, latest)]

    def _adopt_one(
        self, job: JobId, planned: PlannedShape | None, overheads: ScalingOverheads, now: float
    ) -> PlanMade | None:
        """A job's plan of a round, with how it recovers best, which needs no plan.

        Most is done without the lock: callers would otherwise wait until all jobs are done, for a lock that is free
        only for an instant is taken again by the thread that let it go.
        """
        with self._lock:
            known = self._state.jobs.get(job)
            if known is None:
                return None
            submitted, last_plan = known.submitted, known.plan
            advice = self._state.fault_tolerance(job, overheads)
        change = None
        if submitted.fixed:
            planned = None
        if planned is not None:
            planned = replace(planned, explanation=replace(planned.explanation, fault_tolerance=advice))
            if last_plan is None or last_plan.planned.shape != planned.shape:
                last = submitted.last_plan if last_plan is None else last_plan.version
                change = PlanMade(job, last + 1, now, self._planner, planned)
        message = self._in_force.advised(job, advice) if change is None else plan_to(change)
        with self._lock:
            if self._state.jobs.get(job) is not known:
                return None
            if change is None:
                self._in_force.keep(job, planned, message)
            else:
                self._take(change, message)
        return change
