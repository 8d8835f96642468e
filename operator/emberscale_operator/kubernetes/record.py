"""The state that must outlive the operator, kept in a job's status: its standing and its members' past lives."""

from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime

from emberscale_api.frozen import replace
from emberscale_api.job import memory_bytes
from emberscale_api.job.roles import Role
from emberscale_api.job.status import RESTING, ConditionType, MemberStatus, TrainingJobStatus
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.machine import History, Instance, JobStanding, Lives

DELETING = "Deleting"
"""The state of a member that the operator asks to end. It is written first, so that a successor knows of it."""

_LONGEST_MESSAGE = 512
_ALL_MESSAGES = 128 << 10
"""Characters in the messages of all members: the API server stores no object beyond 1.5 MiB."""


def standing_of(status: TrainingJobStatus) -> JobStanding:
    """Returns the job's standing as of the status."""
    parts = {Role.MASTER: status.master, Role.PS: status.ps, Role.WORKER: status.worker}
    return JobStanding(
        phase=status.phase,
        reason=status.reason,
        message=status.message,
        active_since=status.active_since.timestamp() if status.active_since else None,
        rested_at=_rested_at(status),
        applied_ps=status.applied_ps,
        grown={role: part.memory_bytes for role, part in parts.items() if part and part.memory_bytes},
        history=_history_of(status.members),
    )


def _rested_at(status: TrainingJobStatus) -> float | None:
    if status.phase not in RESTING:
        return None
    if status.completion_time is not None:
        return status.completion_time.timestamp()
    suspended = status.condition(ConditionType.SUSPENDED)
    return suspended.last_transition_time.timestamp() if suspended is not None else None


def _history_of(members: Iterable[MemberStatus]) -> History:
    lives = {
        (Role(member.role), member.index): Lives(
            last_incarnation=member.incarnation,
            counted=member.counted,
            restarts=member.restarts,
            streak=member.streak,
            ready_at=member.not_before.timestamp() if member.not_before else 0.0,
            faults=member.faults,
        )
        for member in members
    }
    return History(lives)


def members_of(
    history: History,
    views: Iterable[PodView],
    problems: Mapping[tuple[Role, int], tuple[str, str]],
    before: Iterable[MemberStatus],
    deleting: Container[str],
) -> tuple[MemberStatus, ...]:
    """Returns every member, for the record.

    `problems` are reasons and messages of what keeps a member from having a pod; they go before what its pod says.
    `deleting` are uids of pods whose end the operator asks for.
    """
    newest: dict[tuple[Role, int], PodView] = {}
    for view in sorted(views, key=lambda view: view.id):
        newest[view.id.role, view.id.index] = view
    old = {(Role(member.role), member.index): member for member in before}
    longest = min(_LONGEST_MESSAGE, _ALL_MESSAGES // max(1, len(history.lives)))
    return tuple(
        _member(slot, lives, newest.get(slot), problems.get(slot), old.get(slot), deleting, longest)
        for slot, lives in sorted(history.lives.items())
    )


def _member(
    slot: tuple[Role, int],
    lives: Lives,
    view: PodView | None,
    problem: tuple[str, str] | None,
    before: MemberStatus | None,
    deleting: Container[str],
    longest_message: int,
) -> MemberStatus:
    reason, message = problem or ("", "")
    if view is not None and not problem:
        if view.waiting is not None:
            reason, message = view.waiting.reason, view.waiting.message
        elif view.resizing is not None:
            reason, message = view.resizing.reason, view.resizing.message
        elif view.cause:
            reason, message = view.cause, view.detail
    elif view is None and not problem and before is not None and before.reason:
        reason, message = before.reason, before.message
    cpu, memory = view.limits.quantities if view is not None and view.limits is not None else ("", "")
    return MemberStatus(
        role=str(slot[0]),
        index=slot[1],
        pod=view.name if view else "",
        uid=view.uid if view else "",
        node=view.node if view else "",
        state=_state(view, deleting),
        reason=reason,
        message=message[:longest_message],
        cpu=cpu,
        memory=memory,
        incarnation=lives.last_incarnation,
        counted=lives.counted,
        restarts=lives.restarts,
        streak=lives.streak,
        faults=lives.faults,
        not_before=rounded(lives.ready_at) if lives.ready_at else None,
    )


def _state(view: PodView | None, deleting: Container[str]) -> str:
    if view is None:
        return "Absent"
    if view.instance.live and view.uid in deleting:
        return DELETING
    return str(view.instance.state)


def with_limits(instance: Instance, members: Iterable[MemberStatus]) -> Instance:
    """The instance of a pod, with the limit of memory that it ran with once it has ended.

    `members` are as its last look while it ran left them. Its manifest may have been edited since, by a resize that
    came too late for the container; only of a pod that was never seen running does the manifest tell.
    """
    seen = next((member.memory for member in members if member.uid == instance.name), "")
    if instance.live or not seen:
        return instance
    return replace(instance, resources=replace(instance.resources, memory_bytes=memory_bytes(seen)))


def rounded(seconds: float) -> datetime:
    """A moment, in seconds since 1970, as Kubernetes keeps it: whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC)
