"""The plans in force, as callers are told them, and why they are what they are."""

from dataclasses import replace

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.fault_tolerance.advice import FaultToleranceAdvice
from emberscale_brain.history.changes import PlanMade
from emberscale_brain.planner.types import JobId, PlannedShape
from emberscale_brain.service.messages import advice_to, no_plan, plan_to
from emberscale_brain.service.reasons import Reasons


class PlansInForce:
    """Messages are made before they are put in force, and never changed after: they may be on their way to somebody.

    `stale_because` says why the plans are older than they should be; empty while they are not.
    """

    def __init__(self) -> None:
        self.stale_because = ""
        self._messages: dict[JobId, pb.BrainPlan] = {}
        self._reasons = Reasons()

    def put(self, plan: PlanMade, message: pb.BrainPlan | None = None) -> None:
        """A new version; `message` is the plan as callers are told it, if it has been made already."""
        self._messages[plan.job] = message or plan_to(plan)
        self._reasons.give(plan.job, plan.planned)

    def keep(self, job: JobId, planned: PlannedShape | None, message: pb.BrainPlan | None) -> None:
        """The version that is in force, with the reasons and the message of now; None for those that are as before."""
        if planned is not None:
            self._reasons.give(job, planned)
        if message is not None:
            self._messages[job] = message

    def advised(self, job: JobId, advice: FaultToleranceAdvice | None) -> pb.BrainPlan | None:
        """The message in force with other advice in it; None without advice."""
        if advice is None:
            return None
        message = pb.BrainPlan()
        message.CopyFrom(self._messages.get(job) or no_plan(job))
        message.fault_tolerance.CopyFrom(advice_to(advice))
        return message

    def message(self, job: JobId) -> pb.BrainPlan:
        """What callers are told; of version 0 before anything was put in force."""
        message = self._messages.get(job) or no_plan(job)
        if not self.stale_because:
            return message
        stale = pb.BrainPlan()
        stale.CopyFrom(message)
        stale.stale_because = self.stale_because
        return stale

    def latest(self, job: JobId) -> PlannedShape | None:
        """What the last round planned for the job; None before the first."""
        return self._reasons.latest(job)

    def end(self, job: JobId) -> PlannedShape | None:
        """Forgets the job; what stays to be told of it."""
        self._messages.pop(job, None)
        return self._reasons.end(job)


def refreshed(plan: PlanMade, latest: PlannedShape | None) -> PlanMade:
    """The plan as it was made, with what the last round found; itself if nothing was found since."""
    if latest is None or latest is plan.planned:
        return plan
    kept = plan.kept if latest.reason == plan.planned.reason else latest.reason
    return replace(plan, planned=replace(plan.planned, explanation=latest.explanation), kept=kept)


def with_reasons(plan: PlanMade | None, latest: PlannedShape | None) -> list[PlanMade]:
    """A plan with its latest reasons, where they are others than those that it was made for."""
    if plan is None or (now := refreshed(plan, latest)) is plan:
        return []
    return [now]
