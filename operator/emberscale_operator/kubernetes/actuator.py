"""Carries out on pods what the job machine has decided for one job."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emberscale_api.job.roles import Role
from emberscale_api.job.training_job import API_VERSION, PLURAL
from emberscale_operator.kubernetes import stories
from emberscale_operator.kubernetes.client import STRATEGIC_PATCH, ApiClient, ApiError, ApiInternalError, path_of
from emberscale_operator.kubernetes.creation import NAME_TAKEN, QUOTA_EXCEEDED, ObjectMaker, RefusedError
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.observation import Observation
from emberscale_operator.kubernetes.pod_spec import JobObjects, limits_of, requests_of
from emberscale_operator.kubernetes.pod_state import GRACE_SECONDS, PodView
from emberscale_operator.machine import Action, Create, Delete, DeleteJob, Forget, InstanceId, Kill, Resize, Resources

_PREPARING_SECONDS = 3.0
_REFUSED_SECONDS = 5.0
_MOST_REFUSED_SECONDS = 300.0
_KILL_GRACE_SECONDS = 1
_LONGEST_SECONDS = 60.0
"""How long one step may act: one without end would count as stuck. The next step decides what is left to do."""
_FINAL_STATUSES = (404, 422)
"""Of a refused resize: the cluster cannot resize in place, or not this pod. Any other refusal may pass."""


@dataclass(frozen=True)
class _Refusal:
    """A pod that was refused `streak` times while the job had these `pods`; creation is retried at `until`."""

    streak: int
    until: float
    pods: frozenset[str]
    problem: tuple[str, str]

    def lasts(self, now: float) -> bool:
        """Whether another refusal at `now` would continue the row."""
        return now < self.until + _MOST_REFUSED_SECONDS

    def holds(self, pods: frozenset[str], now: float) -> bool:
        """Whether it is too early to retry; a change in the job's own pods may have made room in a quota."""
        return now < self.until and (pods == self.pods or self.problem[0] != QUOTA_EXCEEDED)


@dataclass(frozen=True)
class _ResizeAttempt:
    """A resize to `resources`, asked for `streak` times in a row, and again at `until` if it is still wanted.

    One that is granted may have no effect, or be undone by others, such as a webhook that rounds limits.
    """

    resources: Resources
    streak: int
    until: float

    def lasts(self, now: float) -> bool:
        """Whether another attempt at `now` continues the row."""
        return now < self.until + _MOST_REFUSED_SECONDS


class Actuator:
    """Creates, deletes and resizes pods.

    `problems` has the reasons and messages of pods that could not be created.
    """

    def __init__(
        self, client: ApiClient, makes: ObjectMaker, observation: Observation, recorder: EventRecorder
    ) -> None:
        self._client = client
        self._makes = makes
        self._observation = observation
        self._recorder = recorder
        self._refusals: dict[tuple[Role, Resources], _Refusal] = {}
        self._resizes: dict[str, _ResizeAttempt] = {}
        self.problems: dict[tuple[Role, int], tuple[str, str]] = {}

    async def act(
        self, job: Job, objects: JobObjects, actions: Sequence[Action], views: Mapping[InstanceId, PodView], now: float
    ) -> float | None:
        """Acts; returns the seconds until there may be more to do, None if nothing is expected.

        A deletion that is refused is raised once everything else is done.
        """
        # no watch delivers the reason why a pod is slow to be prepared
        preparing = any(not view.running and view.instance.live for view in views.values())
        delays = [_PREPARING_SECONDS] if preparing else []
        refused: set[Role] = set()
        kept: list[ApiError] = []
        pods = frozenset(view.uid for view in views.values())
        slots = {(action.id.role, action.id.index) for action in actions if isinstance(action, Create)}
        self.problems = {slot: problem for slot, problem in self.problems.items() if slot not in slots}
        self._resizes = {uid: made for uid, made in self._resizes.items() if uid in pods}
        self._refusals = {asked: made for asked, made in self._refusals.items() if made.lasts(now)}
        self._makes.look_again()
        began = time.monotonic()
        # resizes last: one that is never answered ends the step, and others need not wait for it
        for action in sorted(actions, key=lambda action: isinstance(action, Resize)):
            if time.monotonic() - began > _LONGEST_SECONDS:
                delays.append(0.0)
                break
            match action:
                case Create(instance, resources):
                    asked = (instance.role, resources)
                    before = self._refusals.get(asked)
                    if instance.role in refused:
                        continue
                    if before is not None and before.holds(pods, now):
                        refused.update(_refused_with(instance.role, before.problem[0]))
                        self.problems[instance.role, instance.index] = before.problem
                    else:
                        await self._create(job, objects, instance, resources, refused)
                        self._count_refusal(asked, instance, pods, now)
                    delays.append(self._refusals[asked].until - now if asked in self._refusals else 0.0)
                case Resize(instance, resources):
                    delays.append(await self._resize(job, views[instance], resources, now))
                case Delete(instance, at_once):
                    kept += await self._delete(job, views[instance], GRACE_SECONDS if at_once else None)
                case Kill(instance, why):
                    stories.tell_kill(self._recorder, job, views[instance], why)
                    kept += await self._delete(job, views[instance], _KILL_GRACE_SECONDS)
                case Forget(instance):
                    if not self._observation.forget(views[instance]):
                        kept += await self._delete_pod(job, views[instance], 0)
                case DeleteJob():
                    path = path_of(API_VERSION, PLURAL, job.key.namespace, job.key.name)
                    await self._client.delete(path, job.uid)
        await self._recorder.flush()
        if kept:
            raise kept[0]
        return min(filter(math.isfinite, delays), default=None)

    async def _create(
        self, job: Job, objects: JobObjects, instance: InstanceId, resources: Resources, refused: set[Role]
    ) -> None:
        try:
            pod = await self._makes.pod(job, objects, instance, resources, self._observation.silent_nodes)
        except RefusedError as error:
            refused.update(_refused_with(instance.role, error.reason))
            self.problems[instance.role, instance.index] = (error.reason, str(error))
            stories.tell_refusal(self._recorder, job, instance, error.reason, str(error))
        else:
            self._observation.note_made(pod)

    def _count_refusal(
        self, asked: tuple[Role, Resources], instance: InstanceId, pods: frozenset[str], now: float
    ) -> None:
        """Keeps the next attempt away for a while: each refusal may read differently, and each report wakes us."""
        problem = self.problems.get((instance.role, instance.index))
        before = self._refusals.pop(asked, None)
        if problem is None:
            return
        lasts = before is not None and before.pods == pods and problem[0] == QUOTA_EXCEEDED
        streak = before.streak + 1 if before is not None and lasts else 1
        self._refusals[asked] = _Refusal(streak, now + _wait_after(streak), pods, problem)

    async def _delete(self, job: Job, view: PodView, grace_seconds: int | None) -> list[ApiError]:
        # told first: once the pod is gone, nobody can tell why
        stories.tell_deletion(self._recorder, job, view)
        await self._recorder.flush()
        return await self._delete_pod(job, view, grace_seconds)

    async def _delete_pod(self, job: Job, view: PodView, grace_seconds: int | None) -> list[ApiError]:
        """Deletes a pod; returns why it may not be deleted, if so."""
        path = path_of("v1", "pods", job.key.namespace, view.name)
        self._observation.note_deletion_sent(view)
        try:
            await self._client.delete(path, view.uid, grace_seconds=grace_seconds)
        except ApiError as error:
            return [error]
        return []

    async def _resize(self, job: Job, view: PodView, resources: Resources, now: float) -> float:
        """Resizes in place; a pod that cannot be resized in place keeps its resources until it restarts.

        Returns the seconds until it may be asked for again, infinite if it is not.
        """
        before = self._resizes.get(view.uid)
        if before is not None and before.resources != resources:
            before = None
        if before is not None and now < before.until:
            return before.until - now
        requirements = job.spec.roles[view.id.role].resources
        limits, requests = limits_of(resources), requests_of(requirements, resources)
        container = {"name": str(view.id.role), "resources": {"limits": limits, "requests": requests}}
        path = path_of("v1", "pods", job.key.namespace, view.name) + "/resize"
        # the uid spares a pod of the same name, of a later job
        patch = {"metadata": {"uid": view.uid}, "spec": {"containers": [container]}}
        streak = before.streak + 1 if before is not None and before.lasts(now) else 1
        # noted first: one that is never answered ends the step, and must not end the next ones, too
        self._resizes[view.uid] = _ResizeAttempt(resources, streak, now + _wait_after(streak))
        try:
            await self._client.patch(path, patch, STRATEGIC_PATCH)
        except (ApiError, ApiInternalError) as error:
            final = isinstance(error, ApiError) and error.status in _FINAL_STATUSES
            stories.tell_refused_resize(self._recorder, job, view, str(error), final)
            if final:
                self._resizes[view.uid] = _ResizeAttempt(resources, streak, math.inf)
        return self._resizes[view.uid].until - now


def _refused_with(role: Role, reason: str) -> frozenset[Role]:
    """Returns the roles that get no pods while one of a role is refused for a reason.

    While the master of an earlier job of this name runs, members would call it, be refused, and end.
    """
    return frozenset(Role) if role is Role.MASTER and reason == NAME_TAKEN else frozenset((role,))


def _wait_after(streak: int) -> float:
    return min(_REFUSED_SECONDS * 2.0 ** min(streak - 1, 16), _MOST_REFUSED_SECONDS)
