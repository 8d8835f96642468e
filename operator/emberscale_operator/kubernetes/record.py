"""What must outlive the operator: the past lives of a job's members, kept in the job's status."""

from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime

from emberscale_api.job import memory_bytes
from emberscale_api.job.status import MemberStatus
from emberscale_operator.kubernetes.demands import quantities
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.machine import History, InstanceState, Role
from emberscale_operator.machine.restarts import Lives

DELETING = "Deleting"
"""The state of a member whose end the operator asks for: written before it is, so that a next one knows of it."""


def history_of(members: Iterable[MemberStatus]) -> History:
    """The history as it was written."""
    lives = {
        (Role(member.role), member.index): Lives(
            last_incarnation=member.incarnation,
            counted=member.counted,
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
    restarts: Mapping[tuple[Role, int], int],
    problems: Mapping[tuple[Role, int], tuple[str, str]],
    before: Iterable[MemberStatus],
    deleting: Container[str],
) -> tuple[MemberStatus, ...]:
    """Every member as it is to be written.

    `restarts` counts the ends that nobody asked for. `problems` are reasons and messages of what keeps a member from
    having a pod; they go before what its pod says. `deleting` are uids of pods whose end the operator asks for.
    """
    newest: dict[tuple[Role, int], PodView] = {}
    for view in sorted(views, key=lambda view: view.id):
        newest[view.id.role, view.id.index] = view
    old = {(Role(member.role), member.index): member for member in before}
    return tuple(
        _member(slot, lives, newest.get(slot), restarts.get(slot, 0), problems.get(slot), old.get(slot), deleting)
        for slot, lives in sorted(history.lives.items())
    )


def _member(
    slot: tuple[Role, int],
    lives: Lives,
    view: PodView | None,
    restarts: int,
    problem: tuple[str, str] | None,
    before: MemberStatus | None,
    deleting: Container[str],
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
    cpu, memory = quantities(view.limits) if view is not None and view.limits is not None else ("", "")
    return MemberStatus(
        role=str(slot[0]),
        index=slot[1],
        pod=view.name if view else "",
        uid=view.uid if view else "",
        node=view.node if view else "",
        state=_state(view, deleting),
        reason=reason,
        message=message[:512],
        cpu=cpu,
        memory=memory,
        incarnation=lives.last_incarnation,
        counted=lives.counted,
        restarts=restarts,
        streak=lives.streak,
        faults=lives.faults,
        not_before=rounded(lives.ready_at) if lives.ready_at else None,
    )


def _state(view: PodView | None, deleting: Container[str]) -> str:
    if view is None:
        return "Absent"
    if view.instance.live and view.uid in deleting:
        return DELETING
    if view.instance.state is InstanceState.RUNNING:
        return "Running" if view.running else "Pending"
    return str(view.instance.state)


def memory_limit_of(view: PodView, members: Iterable[MemberStatus]) -> int | None:
    """The limit of memory, in bytes, that a pod which has ended ran with.

    `members` are as its last look while it ran left them. Its manifest may have been edited since, by a resize that
    came too late for the container; only of a pod that was never seen running does the manifest tell.
    """
    seen = next((member.memory for member in members if member.uid == view.uid), "")
    return memory_bytes(seen) if seen else view.instance.resources.memory_bytes


def rounded(seconds: float) -> datetime:
    """A moment, in seconds since 1970, as Kubernetes keeps it: whole seconds, UTC."""
    return datetime.fromtimestamp(int(seconds), UTC)
