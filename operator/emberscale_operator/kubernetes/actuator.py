"""Carries out what the reconciler has decided on for one job."""

from collections.abc import Sequence

from emberscale_api.job.status import JobPhase
from emberscale_operator.kubernetes import stories
from emberscale_operator.kubernetes.client import STRATEGIC_PATCH, ApiClient, ApiError, core
from emberscale_operator.kubernetes.creation import ObjectMaker, RefusedError
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.master_link import MasterLink
from emberscale_operator.kubernetes.observation import Observation
from emberscale_operator.kubernetes.pod_spec import JobObjects, limits_of, requests_of, role_spec
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.recorder import Recorder
from emberscale_operator.kubernetes.status import ENDED
from emberscale_operator.machine import Action, Create, Delete, ReportExit, Resize, Resources, Role, Wait

_PREPARING_SECONDS = 3.0
_REFUSED_SECONDS = 5.0
_UNHEARD_SECONDS = 1.0
_ENDING_SECONDS = 30.0


class Actuator:
    """Creates, deletes and resizes pods, and tells the master of those that ended.

    `problems` are the reasons and messages for which pods could not be created.
    """

    def __init__(self, client: ApiClient, makes: ObjectMaker, observation: Observation, recorder: Recorder) -> None:
        self._client = client
        self._makes = makes
        self._observation = observation
        self._recorder = recorder
        self._refused_resizes: set[tuple[str, Resources]] = set()
        self._told_to_end: dict[str, float] = {}
        self.problems: dict[tuple[Role, int], tuple[str, str]] = {}

    async def act(
        self,
        job: Job,
        objects: JobObjects,
        actions: Sequence[Action],
        views: Sequence[PodView],
        link: MasterLink | None,
        phase: JobPhase,
        now: float,
    ) -> float | None:
        """Acts; returns the seconds until there may be more to do, None if nothing is expected."""
        by_id = {view.id: view for view in views}
        # a pod that is being prepared for long has a reason that no watch brings
        preparing = any(not view.running and view.instance.live for view in views)
        delays = [_PREPARING_SECONDS] if preparing else []
        refused: set[Role] = set()
        slots = {(action.id.role, action.id.index) for action in actions if isinstance(action, Create)}
        self.problems = {slot: problem for slot, problem in self.problems.items() if slot not in slots}
        for action in actions:
            match action:
                case Create(instance, resources):
                    if instance.role in refused:
                        continue
                    try:
                        pod = await self._makes.pod(job, objects, instance, resources)
                    except RefusedError as error:
                        refused.add(instance.role)
                        self.problems[instance.role, instance.index] = (error.reason, str(error))
                        stories.tell_refusal(self._recorder, job, instance, error.reason, str(error))
                        delays.append(_REFUSED_SECONDS)
                        continue
                    self._observation.made(pod)
                    delays.append(0.0)
                case Resize(instance, resources):
                    await self._resize(job, by_id[instance], resources)
                case Delete(instance):
                    view = by_id[instance]
                    if _keeps_logs(job, view, phase) and await self._ends_by_itself(view, link, now):
                        delays.append(_PREPARING_SECONDS)
                    else:
                        await self._delete(job, view, phase)
                case ReportExit(instance):
                    view = by_id[instance]
                    if link is not None and link.answers and await _report(link, view):
                        self._observation.history = self._observation.history.with_reported(instance)
                        delays.append(0.0)
                    else:
                        delays.append(_UNHEARD_SECONDS)
                case Wait(until):
                    delays.append(max(0.1, until - now))
        return min(delays, default=None)

    async def _ends_by_itself(self, view: PodView, link: MasterLink | None, now: float) -> bool:
        """Whether a master ends, or will: for a while after it has gone its pod still seems to run."""
        told_at = self._told_to_end.get(view.uid)
        if told_at is None and link is not None and await link.shut_down():
            told_at = self._told_to_end[view.uid] = now
        return told_at is not None and now < told_at + _ENDING_SECONDS

    async def _delete(self, job: Job, view: PodView, phase: JobPhase) -> None:
        ended = view.instance.exit is not None
        if self._observation.forget(view):
            return
        if ended and not view.lost and _stays(job, phase):
            return
        if not ended:
            # before it is done: of a pod that is gone nobody can tell why
            stories.tell_deletion(self._recorder, job, view)
            await self._recorder.flush()
        await self._client.delete(
            core(job.key.namespace, "pods", view.name), view.uid, grace_seconds=0 if ended else None
        )

    async def _resize(self, job: Job, view: PodView, resources: Resources) -> None:
        """In place, without a restart; a pod that cannot be resized so keeps what it has until it is started anew."""
        attempt = (view.uid, resources)
        if attempt in self._refused_resizes or not view.running:
            return
        requirements = role_spec(job, view.id.role).resources
        container = {
            "name": str(view.id.role),
            "resources": {"limits": limits_of(resources), "requests": requests_of(requirements, resources)},
        }
        try:
            await self._client.patch(
                core(job.key.namespace, "pods", view.name) + "/resize",
                {"spec": {"containers": [container]}},
                STRATEGIC_PATCH,
            )
        except ApiError as error:
            self._refused_resizes.add(attempt)
            stories.tell_refused_resize(self._recorder, job, view, str(error))


def _stays(job: Job, phase: JobPhase) -> bool:
    """Whether pods that have ended are left, for their logs."""
    return phase in ENDED and job.spec.run_policy.clean_pod_policy != "All"


def _keeps_logs(job: Job, view: PodView, phase: JobPhase) -> bool:
    """Whether a running master is to end by itself: a pod that is deleted takes its log along."""
    return view.id.role is Role.MASTER and view.running and _stays(job, phase)


async def _report(link: MasterLink, view: PodView) -> bool:
    ended = view.instance.exit
    return ended is not None and await link.report_exit(view.id, view.uid, ended, view.cause)
