"""The job machine: one pure function that decides everything about a job.

`decide` runs on every event and on a timer. The caller observes, calls `decide`, makes the new standing durable, and
carries out exactly the returned actions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from emberscale_api.frozen import replace
from emberscale_api.job import ScalingMode
from emberscale_api.job.roles import MANIFEST_ROLES, MemberId, Role
from emberscale_api.job.running import Scale
from emberscale_api.job.status import ENDED, JobPhase
from emberscale_api.readable import duration_text
from emberscale_api.shape import RoleShape
from emberscale_operator.machine.actions import Action, DeleteJob, Suspend, WaitUntil
from emberscale_operator.machine.convergence import (
    converge,
    end_given_up,
    replace_outdated,
    report_exits,
    wind_down,
)
from emberscale_operator.machine.instances import ExitReason, Instance
from emberscale_operator.machine.intent import Demand, JobIntent, Policy, demands_of, grown_memory, memory_of
from emberscale_operator.machine.restarts import History, advance
from emberscale_operator.machine.standing import JobStanding, MasterReport

_WAITING = "WaitingForMaster"
_UNHEARD_SECONDS = 15.0
"""How long calls may stay unanswered by a master whose pod is ready before the status says so."""
_UNHEARD = (
    "the master's pod is ready, but the master does not answer the operator: it hangs, or a NetworkPolicy of its "
    "namespace keeps the operator out"
)
_SUSPENDED = "JobSuspended"
_RETOLD_SECONDS = 10.0
"""How often the master is told a new reason why a server does not start."""


@dataclass(frozen=True)
class Decision:
    """The job's new standing, the instances that it needs, and the actions; a `WaitUntil` comes last."""

    standing: JobStanding
    demands: tuple[Demand, ...]
    actions: tuple[Action, ...]


def decide(
    job: JobIntent, standing: JobStanding, master: MasterReport, instances: Sequence[Instance], now: float
) -> Decision:
    """Decides from the job's previous standing, its master's report and the instances observed at `now`, in seconds."""
    instances = [_as_completed(one, master.drained) for one in sorted(instances, key=lambda instance: instance.id)]
    before = _remember(job, standing, instances, master.sizes or {})
    following = _stand(job, before, master, instances, now)
    demands = _demands(job, following, master)
    actions = _earliest_wait(_actions(job, following, master, demands, instances, now))
    return Decision(following, demands, actions)


def _as_completed(instance: Instance, drained: frozenset[MemberId]) -> Instance:
    """Takes the exit of a drained server for a completion, whatever ended it, such as an eviction.

    It still delays the next start: a master runs a team's own code, and may call every server drained.
    """
    if instance.exit is None or instance.as_member not in drained:
        return instance
    return replace(instance, exit=replace(instance.exit, reason=ExitReason.COMPLETED))


def _remember(
    job: JobIntent, standing: JobStanding, instances: Sequence[Instance], sizes: Mapping[Role, RoleShape]
) -> JobStanding:
    """Folds the observation into the standing; folding it twice changes nothing."""
    wanted = not standing.rests
    grown = dict(standing.grown)
    for instance in instances:
        counted = standing.history.of(instance.id.role, instance.id.index).counted >= instance.id.incarnation
        if wanted and not counted and (memory := _memory_after(job, instance, sizes)) is not None:
            grown[instance.id.role] = max(grown.get(instance.id.role, 0), memory)
    return replace(
        standing,
        history=advance(standing.history, instances, job.policy.backoff, wanted),
        grown=grown,
        store_ready=standing.store_ready or any(i.id.role is Role.REDIS and i.ready for i in instances),
    )


def _memory_after(job: JobIntent, instance: Instance, sizes: Mapping[Role, RoleShape]) -> int | None:
    """Returns the bytes that a role needs after an instance of it ran out of memory; None if its memory stays.

    In Manual mode the sizes in the manifest stand.
    """
    ended, limit = instance.exit, instance.resources.memory_bytes
    if ended is None or ended.deleted or ended.reason is not ExitReason.OOM_KILLED or limit is None:
        return None
    if job.spec.scaling.mode is ScalingMode.MANUAL:
        return None
    given = memory_of(job.spec, instance.id.role, sizes) or limit
    most = int(given * job.spec.scaling.max_memory_growth)
    grown = min(grown_memory(limit), most, job.memory_ceiling or most)
    return grown if grown > limit else None


def _stand(
    job: JobIntent, before: JobStanding, master: MasterReport, instances: Sequence[Instance], now: float
) -> JobStanding:
    if before.phase in ENDED:
        return before
    live = any(instance.live for instance in instances)
    if before.phase is JobPhase.SUSPENDED:
        if job.suspend or live:
            return before
        after = _resumed(before, now)
    else:
        after = _continue(job, before, master, instances, now)
    if not after.rests and (failure := _exceeded(job.policy, after.history)):
        after = after.resting(JobPhase.FAILED, "BackoffLimitExceeded", failure, now, told=False)
    if after.phase is JobPhase.SUSPENDED:
        return replace(after, applied_ps=None)
    active_since = now if after.active_since is None else after.active_since
    if after.rests:
        return replace(after, active_since=active_since)
    return replace(after, active_since=active_since, applied_ps=_applied_ps(job, before, master))


def _applied_ps(job: JobIntent, before: JobStanding, master: MasterReport) -> int | None:
    """Returns how many parameter servers must run: rows leave a server before it goes, and only the master knows when.

    What a master said before the job rested no longer counts. As a master runs a team's own code, it gets no more
    servers than the manifest allows, or allowed when the running ones were created. If that is one server, another may
    stand in for it.
    """
    role = job.spec.ps
    if not before.rests:
        planned, most = (master.sizes or {}).get(Role.PS), role.replicas or role.max_replicas
        if planned is not None and planned.replicas:
            return planned.replicas if most is None else min(planned.replicas, max(most, 2, before.applied_ps or 0))
        if before.applied_ps is not None:
            return before.applied_ps
    return role.replicas


def _continue(
    job: JobIntent, before: JobStanding, master: MasterReport, instances: Sequence[Instance], now: float
) -> JobStanding:
    """Moves an active job from one phase to the next."""
    if master.end is not None:
        end = master.end
        # its status may know more than its plan
        told = master.status if master.status is not None and master.status.phase is end.phase else end
        reason = _SUSPENDED if end.phase is JobPhase.SUSPENDED else told.reason
        return before.resting(end.phase, reason, told.message, now, told=True)
    if job.suspend:
        return _suspend(job, before, master, any(instance.live for instance in instances), now)
    deadline = job.spec.run_policy.active_deadline
    # a master that answers counts the time itself
    if deadline is not None and not master.answers and now > _noted(before.active_since, now) + deadline:
        text = f"the job did not end within spec.runPolicy.activeDeadline ({duration_text(deadline)})"
        return before.resting(JobPhase.FAILED, "DeadlineExceeded", text, now, told=False)
    if master.status is not None and master.answers:
        return before.at(master.status.phase, master.status.reason, master.status.message)
    return _unheard(before, master, instances, now)


def _unheard(before: JobStanding, master: MasterReport, instances: Sequence[Instance], now: float) -> JobStanding:
    """Says what an active job waits for whose master does not answer."""
    waits = before.phase in (JobPhase.PENDING, JobPhase.SUSPENDING)
    phase = JobPhase.PENDING if waits else before.phase
    connects = any(instance.ready for instance in instances if instance.id.role is Role.MASTER)
    if connects and master.unanswered_since is not None and now >= master.unanswered_since + _UNHEARD_SECONDS:
        return before.at(phase, _WAITING, _UNHEARD)
    if waits:
        return before.at(phase, _WAITING, "starting the master")
    if connects and master.unanswered_since is None:
        return before  # an operator that has just started has not asked it yet
    return before.at(phase, _WAITING, "the master is unavailable; parameter servers and workers continue")


def _noted(since: float | None, now: float) -> float:
    """Returns when something began: now, unless an earlier moment was noted."""
    return now if since is None else since


def _resumed(before: JobStanding, now: float) -> JobStanding:
    """Resumes a job at rest; time at rest does not count against the deadline."""
    rested = now - _noted(before.rested_at, now)
    since = None if before.active_since is None else before.active_since + rested
    return replace(before.at(JobPhase.PENDING, "Resumed", "creating the instances"), active_since=since)


def _suspend(job: JobIntent, before: JobStanding, master: MasterReport, live: bool, now: float) -> JobStanding:
    """Rests once the master has taken a checkpoint, or if no checkpoint can be taken."""

    def rest(message: str, told: bool) -> JobStanding:
        return before.resting(JobPhase.SUSPENDED, _SUSPENDED, message, now, told)

    if not live or (before.phase is JobPhase.PENDING and not master.answers):
        return rest("no checkpoint had to be taken", told=False)
    if master.suspended:
        return rest(master.status.message if master.status else "", told=True)
    since, limit = _noted(before.suspending_since, now), job.policy.suspend_limit
    if now >= max(since, master.heard_at or since) + job.policy.suspend_silence:
        return rest(
            f"the master has not answered for {duration_text(job.policy.suspend_silence)}: "
            "resumes from its last checkpoint",
            told=False,
        )
    if limit is not None and now >= since + limit:
        return rest(f"no checkpoint was complete within {duration_text(limit)}: resumes from the last one", told=False)
    at = before.at(JobPhase.SUSPENDING, "TakingCheckpoint", "the job suspends once its checkpoint is complete")
    return replace(at, suspending_since=since)


def _exceeded(policy: Policy, history: History) -> str:
    """Names the member that ended too often by its own errors; empty if none did."""
    for (role, index), lives in sorted(history.lives.items()):
        is_needed = role is not Role.BRAIN and (role is not Role.REDIS or index == 0)
        if is_needed and lives.faults > policy.backoff_limit and lives.last_exit is not None:
            last = lives.last_exit
            lacked_memory = last.reason is ExitReason.OOM_KILLED
            how = "out of memory" if lacked_memory else f"with exit code {last.code}"
            more = f"; more memory: spec.{role}.resources.limits.memory"
            remedy = more if lacked_memory and role in MANIFEST_ROLES else ""
            return (
                f"{role}-{index} failed {lives.faults} times, the last time {how}; "
                f"spec.runPolicy.backoffLimit allows {policy.backoff_limit}{remedy}"
            )
    return ""


def _demands(job: JobIntent, standing: JobStanding, master: MasterReport) -> tuple[Demand, ...]:
    if standing.rests:
        return ()
    if job.awaits_store and not standing.store_ready:
        return job.own
    return (*job.own, *demands_of(job.spec, master.sizes, standing.applied_ps, standing.grown, job.planned))


def _actions(
    job: JobIntent,
    standing: JobStanding,
    master: MasterReport,
    demands: Sequence[Demand],
    instances: Sequence[Instance],
    now: float,
) -> Iterable[Action]:
    if standing.rests:
        if job.ttl is not None and standing.phase in ENDED and now >= (standing.rested_at or 0.0) + job.ttl:
            yield DeleteJob()
        else:
            yield from wind_down(job, standing, instances, master, now)
        return
    if standing.phase is JobPhase.SUSPENDING:
        yield Suspend()
        yield WaitUntil(now + 1.0)
    else:
        yield from replace_outdated(job, instances)
        yield from _edits(job, master, now)
    yield from end_given_up(job.policy, instances, master, now)
    yield from report_exits(instances, standing.history)
    yield from converge(demands, instances, standing.history, master.plan_heard, now)


def _edits(job: JobIntent, master: MasterReport, now: float) -> Iterable[Action]:
    """Tells a responsive master about edits that it has not heard of.

    Limits how often: the reason why a server does not start may change at each look, and the master persists it.
    """
    wanted = Scale(job.spec.ps.replicas or 0, job.spec.worker.replicas or 0, job.waits)
    if not master.answers or master.asked is None or master.asked == wanted:
        return
    again_at = now
    if master.told_at is not None and replace(master.asked, waits=wanted.waits) == wanted:
        again_at = master.told_at + _RETOLD_SECONDS
    yield wanted if now >= again_at else WaitUntil(again_at)


def _earliest_wait(actions: Iterable[Action]) -> tuple[Action, ...]:
    waits: list[float] = []
    others: list[Action] = []
    for action in actions:
        if isinstance(action, WaitUntil):
            waits.append(action.until)
        else:
            others.append(action)
    return (*others, WaitUntil(min(waits))) if waits else tuple(others)
