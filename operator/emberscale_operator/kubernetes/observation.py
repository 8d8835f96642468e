"""Observes a job's pods over time, including created pods that no watch has shown yet, and vanished ones."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emberscale_api.frozen import replace
from emberscale_api.job import cpu_cores, memory_bytes
from emberscale_api.job.roles import MANIFEST_ROLES, Role
from emberscale_api.job.running import JobPlan, JobStatus, ScalingStep, Sizing
from emberscale_api.job.status import MemberStatus, PlanStatus
from emberscale_api.shape import RoleShape
from emberscale_operator.kubernetes.names import is_owned_by
from emberscale_operator.kubernetes.pod_state import PodView, view_pod
from emberscale_operator.kubernetes.record import DELETING, rounded
from emberscale_operator.machine import (
    ExitReason,
    History,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Resources,
)

_UNSEEN_SECONDS = 30.0
"""How long a created pod is taken to exist, without being seen, until the API server is asked for it."""
_UNDER_WAY_SECONDS = 30.0
"""How long a deletion that was sent may take to show."""
_AVOIDED_SECONDS = 60.0
"""How long new pods avoid a silent node: the cluster itself takes up to 50 s to notice that it is gone."""


class Observation:
    """The known state of one job's pods."""

    def __init__(self) -> None:
        self._seen: dict[str, PodView] = {}
        self._ghosts: dict[str, PodView] = {}
        self._made: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self._deleted: set[str] = set()
        self._killed: set[str] = set()
        self._ending: dict[str, float] = {}
        self._deletion_sent_at: dict[str, float] = {}
        self._silent_nodes: dict[str, float] = {}
        self._now = 0.0

    def take_over(self, members: Iterable[MemberStatus]) -> None:
        """Continues from what another operator wrote; pods that it saw alive and that are gone now have vanished."""
        for member in members:
            if member.uid and member.state in ("Running", "Pending", "Terminating", DELETING):
                identity = InstanceId(Role(member.role), member.index, member.incarnation)
                instance = Instance(identity, InstanceState.PENDING, Resources(), started_at=0.0, name=member.uid)
                self._seen[member.uid] = PodView(member.pod, member.uid, member.node, "", instance)
            if member.state == DELETING:
                self._deleted.add(member.uid)

    def observe(self, pods: Iterable[Mapping[str, Any]], uid: str, now: float) -> tuple[PodView, ...]:
        """Returns every pod of the job of this uid, and vanished ones until they are forgotten."""
        self._now = now
        bodies = {body["metadata"]["uid"]: body for body in pods if is_owned_by(body, uid)}
        self._made = {name: made for name, made in self._made.items() if name not in bodies and name not in self._seen}
        bodies |= {name: body for name, (_, body) in self._made.items()}
        ending = (name for name, body in bodies.items() if "deletionTimestamp" in body["metadata"])
        self._ending = {name: self._ending.get(name, now) for name in ending}
        found = {name: view_pod(body, now, self._ending.get(name)) for name, body in bodies.items()}
        views = {name: view for name, view in found.items() if view is not None}
        for name in self._seen.keys() - views.keys():
            if self._seen[name].instance.live:
                self._ghosts[name] = self._vanished(self._seen[name], now)
        self._seen = {name: view for name, view in views.items() if name not in self._made}
        self._deleted &= views.keys() | self._ghosts.keys()
        self._killed &= views.keys() | self._ghosts.keys()
        self._deletion_sent_at = {name: at for name, at in self._deletion_sent_at.items() if name in views}
        lately = {node: at for node, at in self._silent_nodes.items() if now < at + _AVOIDED_SECONDS}
        self._silent_nodes = lately | {view.node: now for view in views.values() if self._is_on_silent_node(view)}
        return (*(self._asked(view) for view in views.values()), *self._ghosts.values())

    def is_unsure(self, now: float) -> bool:
        """Whether created pods have not been seen for so long that they may be gone."""
        return any(now - made_at > _UNSEEN_SECONDS for made_at, _ in self._made.values())

    def confirm_made(self, pods: Iterable[Mapping[str, Any]], now: float) -> None:
        """Takes what the API server has of the pods that no watch has shown; those that it does not have are gone."""
        held = {body["metadata"]["uid"]: body for body in pods}
        self._made = {name: (now, held[name]) for name in self._made if name in held}

    def note_made(self, body: Mapping[str, Any]) -> None:
        """Notes a created pod, which no watch may have shown yet."""
        self._made[body["metadata"]["uid"]] = (self._now, body)

    def mark_ends(self, deleted: Iterable[PodView], killed: Iterable[PodView]) -> None:
        """Notes which pods are to end now, and which because they do not answer: the end of these counts as unasked.

        A pod whose deletion was decided but never sent is an ordinary pod again once it is wanted.
        """
        kept = {name for name in self._deleted | self._killed if self._may_be_ending(name)}
        self._deleted = self._deleted & kept | {view.uid for view in deleted}
        self._killed = self._killed & kept | {view.uid for view in killed}

    def note_deletion_sent(self, view: PodView) -> None:
        """Notes that the API server is asked to delete a pod; no answer does not mean that it has not."""
        self._deletion_sent_at[view.uid] = self._now

    def _may_be_ending(self, name: str) -> bool:
        seen, sent_at = self._seen.get(name), self._deletion_sent_at.get(name)
        return (
            seen is None or seen.instance.ending or (sent_at is not None and self._now < sent_at + _UNDER_WAY_SECONDS)
        )

    @property
    def silent_nodes(self) -> frozenset[str]:
        """The nodes that have not confirmed the end of a silent pod, now or a moment ago."""
        return frozenset(self._silent_nodes)

    def _is_on_silent_node(self, view: PodView) -> bool:
        ended = view.instance.exit
        if ended is None:
            suspect = view.uid in self._killed and view.instance.state is InstanceState.TERMINATING
        else:
            suspect = ended.reason is ExitReason.NODE_LOST
        return suspect and bool(view.node)

    @property
    def asked_to_end(self) -> frozenset[str]:
        """The uids of pods that were asked to end."""
        return frozenset(self._deleted)

    def forget(self, view: PodView) -> bool:
        """Forgets a pod if it has vanished, so that it is no longer observed; returns whether it has."""
        return self._ghosts.pop(view.uid, None) is not None

    def ready(self, views: Sequence[PodView], status: JobStatus | None) -> dict[Role, int]:
        """Returns the number of ready pods of each role; members are ready once the master hears them."""
        ready = dict.fromkeys(MANIFEST_ROLES, 0)
        heard = {entry.member.incarnation for entry in status.members if entry.alive} if status is not None else None
        for view in views:
            if not view.instance.ready:
                continue
            if view.id.role is Role.MASTER or heard is None or view.uid in heard:
                ready[view.id.role] += 1
        return ready

    def waits(
        self,
        views: Sequence[PodView],
        slots: set[tuple[Role, int]],
        problems: Mapping[tuple[Role, int], tuple[str, str]],
        members: Iterable[MemberStatus],
        history: History,
        now: float,
    ) -> tuple[str, str] | None:
        """Returns the first obstacle that a wanted pod waits for: a reason, and a sentence that names the pod."""
        alive = {(view.id.role, view.id.index): view for view in views if view.instance.live}
        last = {(Role(member.role), member.index): member for member in members}
        order = sorted(slots, key=lambda slot: (list(Role).index(slot[0]), slot[1]))
        for slot in order:
            who, view = f"{slot[0]}-{slot[1]}", alive.get(slot)
            if view is None and slot in problems:
                reason, message = problems[slot]
                return reason, f"{who}: {message}"
            if view is not None and view.waiting is not None:
                return view.waiting.reason, f"{who}: {view.waiting.message or view.waiting.reason}"
            if view is None and now < history.of(*slot).ready_at and slot in last and last[slot].reason:
                member = last[slot]
                cause = f"{member.reason}: {member.message}" if member.message else member.reason
                # a moment, as a time that counts down would be news at each look
                moment = rounded(history.of(*slot).ready_at).strftime("%Y-%m-%dT%H:%M:%SZ")
                return "BackOff", f"{who} is restarted at {moment}; it ended: {cause}"
        return None

    def obstacle(self, views: Iterable[PodView], problems: Mapping[tuple[Role, int], tuple[str, str]]) -> str:
        """Describes what keeps the first PS without a running pod from starting; empty if nothing is known."""
        found = {slot: problem for slot, problem in problems.items() if slot[0] is Role.PS}
        for view in views:
            if view.id.role is Role.PS and view.instance.state is InstanceState.PENDING and view.waiting is not None:
                found.setdefault((view.id.role, view.id.index), (view.waiting.reason, view.waiting.message))
        if not found:
            return ""
        (role, index), (reason, message) = min(found.items())
        return f"{role}-{index}: {reason}: {message}".removesuffix(": ")

    def _asked(self, view: PodView) -> PodView:
        """Marks the exit of a pod that the operator deleted as asked for, and of one that it killed as silent."""
        ended = view.instance.exit
        if ended is None:
            return view
        if view.uid in self._killed:
            ended = replace(ended, reason=ExitReason.KILLED, deleted=False)
            return replace(
                view, instance=replace(view.instance, exit=ended), cause="Silent", detail="it did not answer"
            )
        if view.uid not in self._deleted or ended.deleted:
            return view
        return replace(view, instance=replace(view.instance, exit=replace(ended, deleted=True)))

    def _vanished(self, view: PodView, now: float) -> PodView:
        ended = InstanceExit(ExitReason.KILLED, -9, at=now, deleted=view.uid in self._deleted)
        instance = replace(view.instance, state=InstanceState.EXITED, exit=ended, ready=False, holds_log=False)
        view = replace(view, instance=instance, waiting=None, cause="Deleted", detail="", mounting=False)
        return self._asked(view)


def plan_of(written: PlanStatus | None) -> JobPlan | None:
    """Returns the plan that a status holds, which is in force until the master reports."""
    if written is None:
        return None
    sizing = Sizing(
        reason=written.reason,
        message=written.message,
        plan_version=written.brain_version,
        expected_samples_per_second=written.expected_samples_per_second,
        scalings=written.scalings,
        steps=(ScalingStep(written.step),) if written.step else (),
    )
    shapes = {
        role: RoleShape(
            part.replicas,
            cpu_cores(part.cpu) if part.cpu else None,
            memory_bytes(part.memory) if part.memory else None,
        )
        for role, part in ((Role.PS, written.ps), (Role.WORKER, written.worker))
        if part is not None
    }
    return JobPlan(shapes=shapes, sizing=sizing)
