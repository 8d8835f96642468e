"""Events of a job, each reported once. A reason is a verb and a noun; a message gives old values, new ones, and why."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from emberscale_api.job import memory_quantity
from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobPlan
from emberscale_api.job.status import (
    PARITY_STEP,
    RECOVERY_STEPS,
    RESTING,
    ConditionType,
    JobPhase,
    MemberStatus,
    PlanStatus,
    TrainingJobStatus,
)
from emberscale_api.readable import duration_text
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.record import with_limits
from emberscale_operator.kubernetes.status import FLASH_FAILED
from emberscale_operator.machine import InstanceId, JobStanding

_NOUNS = {Role.MASTER: "Master", Role.PS: "PS", Role.WORKER: "Worker", Role.REDIS: "Redis", Role.BRAIN: "Brain"}
_SETBACKS = frozenset({"GaveUpDrain", "GaveUpScaling", *RECOVERY_STEPS}) - {
    PARITY_STEP,
    "Recovered",
    "Returned",
    "RowsRebuilt",
}
_PHASES = {
    JobPhase.PREPARING: ("PreparedPods", "the parameter servers are ready; workers index the data"),
    JobPhase.RESTORING: ("RestoringRows", "the parameter servers load their rows, new or from the last checkpoint"),
    JobPhase.TRAINING: ("StartedTraining", "workers train"),
    JobPhase.EVALUATING: ("StartedEvaluation", "workers evaluate"),
    JobPhase.SAVING: ("SavingModel", "writing the final checkpoint"),
    JobPhase.SUSPENDING: ("SuspendingJob", "taking a checkpoint"),
    JobPhase.PENDING: ("ResumedJob", "creating the pods"),
}
_SAVES_NOTHING = (
    "spec.checkpoint.uri is not set: the job starts over after a suspension, or after a loss that parity does not"
    " cover, and its model is lost when it ends"
)


def tell_phase(recorder: EventRecorder, job: Job, before: JobPhase, status: TrainingJobStatus) -> None:
    """Reports a change of the job's phase."""
    recoveries = status.progress.recoveries if status.progress else 0
    key = f"{before}-{status.phase}-{job.generation}-{recoveries}"
    match status.phase:
        case JobPhase.COMPLETE:
            recorder.normal(job, "CompletedJob", status.message or "every sample is trained", key)
        case JobPhase.FAILED:
            recorder.warning(job, "FailedJob", f"{status.reason}: {status.message}", key)
        case JobPhase.SUSPENDED:
            recorder.normal(job, "SuspendedJob", f"{status.reason}: {status.message}", key)
        case JobPhase.PENDING if before not in (JobPhase.SUSPENDED, JobPhase.SUSPENDING):
            return  # a master without the state of the one before it: the pods' Events say the rest
        case _:
            recorder.normal(job, *_PHASES[status.phase], key)
            if job.spec.checkpoint.uri is None:
                recorder.warning(job, "SavesNothing", _SAVES_NOTHING, "")


def tell_creation(recorder: EventRecorder, job: Job, view: PodView) -> None:
    """Reports a created pod."""
    again = f", incarnation {view.id.incarnation}" if view.id.incarnation > 1 else ""
    recorder.normal(job, f"Created{_NOUNS[view.id.role]}Pod", f"created pod {view.name}{again}", view.name)


def tell_pods(recorder: EventRecorder, job: Job, views: Iterable[PodView], members: Iterable[MemberStatus]) -> None:
    """Reports pods that the status does not know yet, or knows with other limits."""
    known = {(Role(member.role), member.index): member for member in members}
    for view in views:
        member = known.get((view.id.role, view.id.index))
        if member is None or member.incarnation < view.id.incarnation:
            tell_creation(recorder, job, view)
        elif member.uid == view.uid:
            tell_resize(recorder, job, view, member)


def tell_exits(
    recorder: EventRecorder,
    job: Job,
    views: Iterable[PodView],
    members: Sequence[MemberStatus],
    before: JobStanding,
    after: JobStanding,
) -> list[PodView]:
    """Reports pods that ended unasked, and the memory that their role gets if it ran out; returns the pods."""
    told = []
    for view in views:
        role, ended = view.id.role, view.instance.exit
        if ended is None or ended.deleted or before.history.of(role, view.id.index).counted >= view.id.incarnation:
            continue
        tell_exit(recorder, job, view)
        told.append(view)
        grown, limit = after.grown.get(role, 0), with_limits(view.instance, members).resources.memory_bytes
        if limit is not None and grown > before.grown.get(role, 0):
            tell_growth(recorder, job, view, limit, grown)
    return told


def tell_scaling(recorder: EventRecorder, job: Job, before: JobPlan | None, after: JobPlan) -> None:
    """Reports that the plan gives a role other numbers or resources, with old values, new ones, and the reason."""
    if before is None or after.phase in RESTING:
        return
    for role, new in after.shapes.items():
        was = before.shapes.get(role)
        if role is Role.MASTER or was is None or not was.replicas:
            continue
        key = f"{role}-{new.replicas}-{new.cpu_cores or 0:g}-{new.memory_bytes or 0}-{after.sizing.scalings}"
        text = f"{after.sizing.reason}: {after.sizing.message}"
        if new.replicas != was.replicas:
            way = "Up" if new.replicas > was.replicas else "Down"
            recorder.normal(job, f"Scaled{way}{_NOUNS[role]}", f"{was.replicas} -> {new.replicas}; {text}", key)
        elif (new.cpu_cores, new.memory_bytes) != (was.cpu_cores, was.memory_bytes):
            recorder.normal(job, f"Planned{_NOUNS[role]}Resources", text, key)


def tell_steps(recorder: EventRecorder, job: Job, before: PlanStatus | None, after: JobPlan) -> None:
    """Reports the steps of a change of shape since the status was written, and recoveries."""
    known = before.step if before is not None else 0
    for step in after.sizing.steps:
        if step.number > known and step.reason:
            took = f", after {duration_text(step.seconds)}" if step.seconds else ""
            tell = recorder.warning if step.reason in _SETBACKS else recorder.normal
            tell(job, step.reason, f"{step.message}{took}", str(step.number))


def tell_condition(
    recorder: EventRecorder, job: Job, kind: ConditionType, before: TrainingJobStatus, after: TrainingJobStatus
) -> None:
    """Reports that a warning condition, such as that of slow members, has come, changed its subject, or gone."""
    old, new = before.condition(kind), after.condition(kind)
    if new is None or (old is not None and (old.status, old.message) == (new.status, new.message)):
        return
    tell = recorder.warning if new.status == "True" else recorder.normal
    tell(job, new.reason, new.message, f"{new.last_transition_time.isoformat()}-{new.message}")


def tell_flash(recorder: EventRecorder, job: Job, before: TrainingJobStatus, after: TrainingJobStatus) -> None:
    """Reports that flash checkpoints have begun to fail, or are taken again."""
    old, new = (status.condition(ConditionType.FLASH_CHECKPOINT) for status in (before, after))
    was_degraded = old is not None and old.reason == FLASH_FAILED
    if new is None or after.phase in RESTING:
        return
    key = f"{new.last_transition_time.isoformat()}-{new.message}"
    if new.reason == FLASH_FAILED and not was_degraded:
        recorder.warning(job, "DegradedFlashCheckpoints", new.message, key)
    elif new.status == "True" and was_degraded:
        recorder.normal(job, "RestoredFlashCheckpoints", f"Redis takes them again; {new.message}", key)


def tell_refusal(recorder: EventRecorder, job: Job, instance: InstanceId, reason: str, message: str) -> None:
    """Reports that the cluster refuses a pod."""
    text = f"{instance.member}: {reason}: {message}"
    recorder.warning(job, f"FailedToCreate{_NOUNS[instance.role]}Pod", text, f"{instance}{reason}")


def tell_deletion(recorder: EventRecorder, job: Job, view: PodView) -> None:
    """Reports the deletion of a running pod."""
    recorder.normal(job, f"Deleted{_NOUNS[view.id.role]}Pod", f"deleted pod {view.name}", view.name)


def tell_kill(recorder: EventRecorder, job: Job, view: PodView, why: str) -> None:
    """Reports that a pod is killed because it does not answer."""
    recorder.warning(job, f"Killed{_NOUNS[view.id.role]}Pod", f"killed pod {view.name}: {why}", view.name)


def tell_exit(recorder: EventRecorder, job: Job, view: PodView) -> None:
    """Reports a wanted pod that ended."""
    ended = view.instance.exit
    if ended is None or view.cause == "Completed":
        return
    noun = _NOUNS[view.id.role]
    where = f" on {view.node}" if view.node else ""
    detail = f": {view.detail[:512]}" if view.detail else ""
    match view.cause:
        case "Error":
            text = (
                f"{view.name} ended with exit code {ended.code}{detail}; it counts against spec.runPolicy.backoffLimit"
            )
            recorder.warning(job, f"Failed{noun}Pod", text, view.name)
        case "StorageLimitExceeded":
            text = f"{view.name} was evicted{where}{detail}; it counts against spec.runPolicy.backoffLimit"
            recorder.warning(job, f"Failed{noun}Pod", text, view.name)
        case "OOMKilled":
            recorder.warning(job, f"OOMKilled{noun}Pod", f"{view.name} ran out of memory{where}", view.name)
        case cause:
            text = f"{view.name} is gone{where} ({cause}){detail}; this is not counted against the job"
            recorder.warning(job, f"Lost{noun}Pod", text, view.name)


def tell_growth(recorder: EventRecorder, job: Job, view: PodView, limit: int, grown: int) -> None:
    """Reports that a role gets more memory."""
    noun = _NOUNS[view.id.role]
    text = (
        f"memory of {view.id.role} pods goes from {memory_quantity(limit)} to {memory_quantity(grown)}: "
        f"{view.name} was killed at its limit of {memory_quantity(limit)}"
    )
    recorder.normal(job, f"Increased{noun}Memory", text, f"{view.name}-{grown}")


def tell_resize(recorder: EventRecorder, job: Job, view: PodView, before: MemberStatus) -> None:
    """Reports that a running pod has new limits, or waits for them."""
    noun = _NOUNS[view.id.role]
    if view.limits is not None and (before.cpu or before.memory):
        changes = [
            f"{name} {old or 'unlimited'} -> {new or 'unlimited'}"
            for name, old, new in zip(
                ("cpu", "memory"), (before.cpu, before.memory), view.limits.quantities, strict=True
            )
            if old != new
        ]
        if changes:
            text = f"{view.name} was resized in place, without a restart: {', '.join(changes)}"
            recorder.normal(job, f"Resized{noun}Pod", text, f"{view.name}-{job.generation}-{changes}")
    if view.resizing is not None and view.resizing.reason != before.reason:
        text = f"{view.name} keeps its resources for now: {view.resizing.reason}: {view.resizing.message}"
        recorder.warning(job, f"FailedToResize{noun}Pod", text, f"{view.name}-{job.generation}-{view.resizing.reason}")


def tell_refused_resize(recorder: EventRecorder, job: Job, view: PodView, problem: str, final: bool) -> None:
    """Reports that a running pod cannot be resized: at all if it is `final`, or at present."""
    until = "until it restarts" if final else "for now"
    text = f"{view.name} keeps its resources {until}: {problem}"
    recorder.warning(job, f"FailedToResize{_NOUNS[view.id.role]}Pod", text, f"{view.name}-{until}")


def tell_waiting(recorder: EventRecorder, job: Job, blocked: tuple[str, str] | None, since: datetime) -> None:
    """Reports that the job has waited `since` then for something outside of it."""
    if blocked is not None and blocked[0] != "BackOff":
        recorder.warning(job, "WaitingForPods", f"{blocked[0]}: {blocked[1]}", f"{blocked[0]}-{since.isoformat()}")
