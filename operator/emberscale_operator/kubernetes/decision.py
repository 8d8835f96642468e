"""Where a job stands: from what its manifest wants, what its master says, and what its pods are."""

from collections.abc import Sequence

from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.master_link import MasterLink
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.status import ENDED, RESTING, phase_of
from emberscale_operator.machine import Action, Create, Delete, ExitReason, InstanceState, Role


def decide(
    job: Job, status: TrainingJobStatus, views: Sequence[PodView], link: MasterLink | None, now: float
) -> tuple[JobPhase, str, str]:
    """Where the job stands now: phase, reason and message. `status` says where it stood.

    `now` is in seconds since 1970. Asks the master for a checkpoint where the job has to rest and does not yet.
    """
    if status.phase in ENDED:
        return status.phase, status.reason, status.message
    live = any(view.instance.live for view in views)
    if status.phase is JobPhase.SUSPENDED:
        if job.spec.suspend or live:
            return status.phase, status.reason, status.message
        return JobPhase.PENDING, "Resumed", "the pods are being created"
    master = link.status if link is not None else None
    if link is not None and link.plan is not None and link.plan.phase in (pb.COMPLETE, pb.FAILED, pb.SUSPENDED):
        ended = phase_of(link.plan.phase) or status.phase
        told = master if master is not None and master.phase == link.plan.phase else link.plan
        if ended is JobPhase.SUSPENDED:
            return ended, *_why_suspended(job, told.message)
        return ended, told.reason, told.message
    if job.spec.suspend or _reshapes(job, status):
        return _suspend(job, status, views, link)
    deadline = job.spec.run_policy.active_deadline
    if (
        deadline is not None
        and (link is None or not link.answers)
        and status.start_time is not None
        and now > status.start_time.timestamp() + deadline
    ):
        text = f"the job did not end within spec.runPolicy.activeDeadline ({deadline:g}s)"
        return JobPhase.FAILED, "DeadlineExceeded", text
    if master is not None and link is not None and link.answers:
        return phase_of(master.phase) or status.phase, master.reason, master.message
    if status.phase in (JobPhase.PENDING, JobPhase.SUSPENDING):
        return JobPhase.PENDING, "WaitingForMaster", "the master is being started"
    return status.phase, "WaitingForMaster", "the master is away; parameter servers and workers go on"


def _reshapes(job: Job, status: TrainingJobStatus) -> bool:
    """Whether the number of parameter servers was edited: they change it by way of a checkpoint."""
    wanted, applied = job.spec.ps.replicas, status.applied_ps
    return wanted is not None and applied is not None and wanted != applied


def _suspend(
    job: Job, status: TrainingJobStatus, views: Sequence[PodView], link: MasterLink | None
) -> tuple[JobPhase, str, str]:
    masters = [view for view in views if view.id.role is Role.MASTER and view.instance.live]
    begun = any(view.running for view in masters) or status.phase is JobPhase.SUSPENDING
    if not begun and (not masters or status.progress is None):
        return JobPhase.SUSPENDED, *_why_suspended(job, "no checkpoint had to be taken")
    if link is not None and link.suspend():
        told = link.status
        return JobPhase.SUSPENDED, *_why_suspended(job, told.message if told else "")
    return JobPhase.SUSPENDING, "TakingCheckpoint", "the job rests once its checkpoint is complete"


def _why_suspended(job: Job, message: str) -> tuple[str, str]:
    if job.spec.suspend:
        return "JobSuspended", message
    return "ScalingPS", f"goes on with {job.spec.ps.replicas or 'other'} parameter servers; {message}"


def applied_ps(job: Job, status: TrainingJobStatus, phase: JobPhase) -> int | None:
    """The number of parameter servers that the job runs with; None while it rests and may go on with any."""
    if phase is JobPhase.SUSPENDED:
        return None
    if phase in ENDED or status.applied_ps is not None:
        return status.applied_ps
    return job.spec.ps.replicas


def ended_at(status: TrainingJobStatus, phase: JobPhase, now: float) -> float | None:
    """When the job came to rest, in seconds since 1970; None while it runs."""
    if phase not in RESTING:
        return None
    if phase is not status.phase:
        return now
    if phase is JobPhase.SUSPENDED:
        return max((condition.last_transition_time.timestamp() for condition in status.conditions), default=now)
    return status.completion_time.timestamp() if status.completion_time else now


def outlived(job: Job, status: TrainingJobStatus, now: float) -> bool:
    """Whether a job that has ended is to be deleted by now, in seconds since 1970."""
    ttl, ended = job.spec.run_policy.ttl_after_finished, status.completion_time
    return status.phase in ENDED and ttl is not None and ended is not None and now >= ended.timestamp() + ttl


def still_wanted(actions: Sequence[Action], views: Sequence[PodView], link: MasterLink | None) -> tuple[Action, ...]:
    """The actions without new members in the place of those that are done, until the master has said that it wants any.

    They may be done because the job is; an operator that has just started does not know.
    """
    if link is not None and link.plan is not None:
        return tuple(actions)
    done = {
        (view.id.role, view.id.index)
        for view in views
        if view.instance.exit is not None and view.instance.exit.reason is ExitReason.COMPLETED
    }
    return tuple(
        action
        for action in actions
        if not isinstance(action, Create)
        or action.id.role is Role.MASTER
        or (action.id.role, action.id.index) not in done
    )


def outdated(objects: JobObjects, views: Sequence[PodView], phase: JobPhase) -> tuple[Action, ...]:
    """Pods that are replaced because the manifest was edited since.

    A master reads the manifest when it starts, and its state is durable. Of the others those that do not run yet
    may wait for what the edit has mended, such as an image; those that run are left alone.
    """
    if phase in RESTING or phase is JobPhase.SUSPENDING:
        return ()
    return tuple(
        Delete(view.id)
        for view in views
        if view.instance.state is InstanceState.RUNNING
        and (view.id.role is Role.MASTER or not view.running)
        and view.restart_key
        and view.restart_key != objects.restart_keys[view.id.role]
    )
