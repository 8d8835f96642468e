"""One job's pods as a backend of the job machine: the API server's objects in, status, Events and calls out.

The job's status records each action before it is taken, and the name of every object follows from that record. So
repeating an action is a conflict, and does not create a second object.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import structlog

from emberscale_api.compatibility import VERSION
from emberscale_api.frozen import replace
from emberscale_api.job import CleanPodPolicy
from emberscale_api.job.continuity import Keeper, fixed_fields
from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobPlan
from emberscale_api.job.status import ENDED, ConditionType, JobPhase, UnreadableStatusError
from emberscale_operator.controller import BackendUnavailableError, JobController, News, Observed, Pause
from emberscale_operator.kubernetes import names, stories
from emberscale_operator.kubernetes.actuator import Actuator
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError
from emberscale_operator.kubernetes.creation import NamespaceEndsError, ObjectMaker, RefusedError
from emberscale_operator.kubernetes.disruption import DisruptionBudget
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.health import Tallies
from emberscale_operator.kubernetes.job import Job, JobKey, UnreadableJobError, read_job
from emberscale_operator.kubernetes.manifest_size import too_large
from emberscale_operator.kubernetes.observation import Observation, plan_of
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from emberscale_operator.kubernetes.record import members_of, standing_of, with_limits
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.status import Facts, build_status
from emberscale_operator.kubernetes.status_writer import ObjectCache, StatusWriter
from emberscale_operator.machine import (
    Action,
    Delete,
    Instance,
    InstanceId,
    JobIntent,
    JobStanding,
    Kill,
    Policy,
)
from emberscale_operator.master_link import MasterAddress, MasterLink

STATUS_SECONDS = 3.0
"""The interval between two questions for a master's status."""
_RETRY_SECONDS = 5.0
_EXPELLED = "StateTooLarge"
_INVALID = "InvalidSpec"
_LONGEST_OBSTACLE = 512
_TRAINS = (JobPhase.TRAINING, JobPhase.EVALUATING, JobPhase.SAVING)
_log = structlog.get_logger()


class Tenancy(Protocol):
    """The users of Redis, and the brain's claims."""

    def admit(self, job_uid: str, namespace: str, password: str) -> None:
        """Gives the job of this uid and namespace a user of this password."""

    def expelled(self, job_uid: str) -> str | None:
        """Returns why the job has lost its user again; None if it has not."""

    def fills(self, job_uid: str) -> str | None:
        """Returns a message if Redis fills up and this job has the most in it; None otherwise."""

    def release(self, job_uid: str) -> None:
        """Requests that the brain gives the cores and memory of the job to others."""


class KubernetesBackend:
    """Observes and changes one job's objects.

    `tenancy` gives the job a part of Redis.
    """

    def __init__(
        self,
        key: JobKey,
        uid: str,
        cluster: ObjectCache,
        client: ApiClient,
        recorder: EventRecorder,
        warnings: PodWarnings,
        tallies: Tallies,
        settings: Settings,
        tenancy: Tenancy,
        policy: Policy | None = None,
    ) -> None:
        self.key = key
        self.uid = uid
        self._cluster = cluster
        self._recorder = recorder
        self._warnings = warnings
        self._tallies = tallies
        self._settings = settings
        self._policy = policy
        self._tenancy = tenancy
        self._makes = ObjectMaker(client, settings, tenancy.admit)
        self._budget = DisruptionBudget(client)
        self._observation = Observation()
        self._actuator = Actuator(client, self._makes, self._observation, recorder)
        self._writer = StatusWriter(key, uid, cluster, client)
        self._namespace_ends = False
        self._views: dict[InstanceId, PodView] = {}
        self._job: Job | None = None
        self._objects: JobObjects | None = None

    async def observe(self, now: float) -> Observed | Pause | None:
        """Returns the job's pods; None once there is no job of this uid."""
        with self._calls():
            return await self._observe(now)

    async def recall(self) -> tuple[JobStanding, JobPlan | None]:
        """Returns what the previous operator wrote."""
        status = self._writer.status
        standing = standing_of(status)
        if standing.reason == _INVALID:  # it says nothing of where the job stands
            standing = replace(standing, reason="", message="")
        return standing, plan_of(status.plan)

    async def address_of(self, master: InstanceId) -> MasterAddress:
        """Returns the address of a master's pod, with what the job's Secret holds."""
        try:
            with self._calls():
                known = await self._makes.credentials(self._current())
        except (RefusedError, NamespaceEndsError) as error:
            _log.warning("master_not_called", job=str(self.key), problem=str(error))
            raise BackendUnavailableError(str(error), 2 * _RETRY_SECONDS) from error
        return MasterAddress(
            f"{self._views[master].address}:{names.MASTER_PORT}", known.operator_token, known.authority
        )

    async def report(self, news: News, now: float) -> float:
        """Writes status and Events if they say something new; progress alone waits."""
        job, before, after = self._current(), news.before, news.decision.standing
        ended: list[PodView] = []
        if not before.rests:
            views, members = self._views.values(), self._writer.status.members
            stories.tell_pods(self._recorder, job, views, members)
            ended = stories.tell_exits(self._recorder, job, views, members, before, after)
        if news.plan is not None and news.plan is not news.plan_before:
            stories.tell_scaling(self._recorder, job, news.plan_before, news.plan)
            stories.tell_steps(self._recorder, job, self._writer.status.plan, news.plan)
        self._observation.mark_ends(
            [self._views[action.id] for action in news.decision.actions if isinstance(action, Delete)],
            [self._views[action.id] for action in news.decision.actions if isinstance(action, Kill)],
        )
        servers = news.plan.routed_ps if news.plan is not None else 0
        with self._calls():
            delay = await self._write(job, self._facts(job, news, now), now)
            if after.rests:
                await self._budget.lower(job, now)
            else:
                await self._budget.keep(job, servers, now)
        for view in ended:
            self._tallies.count_pod_end(view)
        if after.phase is not before.phase and after.phase in ENDED:
            self._tallies.count_job_end(self._writer.status)
            if not after.told:  # nor could its master tell the brain
                self._tenancy.release(self.uid)
        return delay

    async def act(self, actions: Sequence[Action], now: float) -> float | None:
        """Creates, deletes and resizes pods."""
        if self._objects is None:
            return None
        try:
            with self._calls():
                return await self._actuator.act(self._current(), self._objects, actions, self._views, now)
        except NamespaceEndsError as error:
            # the deletion of a namespace cannot be undone, and deletes the job, too
            self._namespace_ends = True
            _log.info("namespace_terminating", job=str(self.key), problem=str(error))
            return self._settings.resync

    async def _observe(self, now: float) -> Observed | Pause | None:
        body = self._cluster.job(self.key, self.uid)
        if body is None:
            return None
        self._writer.note_version(body)
        if self._namespace_ends or "deletionTimestamp" in body["metadata"]:
            return Pause(self._settings.resync)
        if not self._writer.is_read:
            try:
                self._writer.read(body)
            except UnreadableStatusError as error:
                why = f"{error}; only an operator of the version that wrote it can continue the job"
                _log.warning("job_left_alone", job=str(self.key), problem=why)
                await self._writer.leave_alone(body, why, now)
                return Pause(self._settings.resync)
            self._observation.take_over(self._writer.status.members)
        try:
            job = read_job(body, runs_newer=self._runs_another_version())
        except UnreadableJobError as error:
            await self._refuse(body, str(error), now)
            return Pause(self._settings.resync, known=True)
        objects = JobObjects.of(job, self._settings, self._writer.status.image)
        if (problem := too_large(job.spec, objects.manifest)) is not None:
            await self._refuse(body, problem, now)
            return Pause(self._settings.resync, known=True)
        self._tallies.count_reconciliation()
        self._job, self._objects = job, objects
        if self._observation.is_unsure(now):
            # a watch may be late by minutes, and a second pod for each that it does not show would make that worse
            self._observation.confirm_made(await self._makes.pods(job), now)
        views = await self._with_warnings(self._observation.observe(self._cluster.pods(self.key), self.uid, now), now)
        self._views = {view.id: view for view in views}
        masters = [view for view in views if view.id.role is Role.MASTER and view.running and view.address]
        members = self._writer.status.members
        return Observed(
            job=self._intent(job, self._objects),
            instances=tuple(with_limits(_of_today(view.instance, self._objects), members) for view in views),
            master=max((view.id for view in masters), default=None),
        )

    def _intent(self, job: Job, objects: JobObjects) -> JobIntent:
        run_policy = job.spec.run_policy
        return JobIntent(
            spec=job.spec,
            suspend=job.spec.suspend,
            policy=self._policy or Policy(backoff_limit=run_policy.backoff_limit),
            planned=bool(self._settings.brain_address),
            revisions=objects.restart_keys,
            keeps_ended=run_policy.clean_pod_policy is not CleanPodPolicy.ALL,
            ttl=run_policy.ttl_after_finished,
            waits=self._observation.obstacle(self._views.values(), self._actuator.problems)[:_LONGEST_OBSTACLE],
        )

    def _runs_another_version(self) -> bool:
        """Whether the job has begun with the image of another version, such as the one before a rollback."""
        status = self._writer.status
        return bool(status.members) and status.image not in ("", self._settings.image)

    def _current(self) -> Job:
        if self._job is None:
            raise ValueError("the job has not been observed yet")
        return self._job

    async def _refuse(self, body: Mapping[str, Any], problem: str, now: float) -> None:
        """Reports a spec that the API server accepted but that cannot run, with the remedy; the job's pods run on.

        A job that has ended keeps its outcome: nothing remedies that.
        """
        status = self._writer.status
        if status.phase in ENDED:
            return
        views = self._observation.observe(self._cluster.pods(self.key), self.uid, now)
        fixed = any(path in problem for path in fixed_fields(Keeper.RESOURCE))
        problem += (
            "; this field is immutable: delete the TrainingJob and apply a corrected one"
            if fixed
            else "; edit the TrainingJob to continue"
        )
        facts = Facts(
            name=self.key.name,
            generation=body["metadata"].get("generation", 1),
            standing=standing_of(status),
            reason=_INVALID,
            message=problem,
            demands=None,
            members=status.members,
            now=now,
            ready=self._observation.ready(views, None),
            blocked=(_INVALID, problem),
        )
        await self._writer.write(build_status(status, facts))

    async def _with_warnings(self, views: Sequence[PodView], now: float) -> tuple[PodView, ...]:
        """Returns the pods, with the last Warning about the first one that is slow to be prepared."""
        slow = next((view for view in views if view.mounting), None)
        if slow is None:
            return tuple(views)
        waiting = await self._warnings.last(self.key.namespace, slow.uid, now)
        return tuple(replace(view, waiting=waiting) if view is slow else view for view in views)

    def _facts(self, job: Job, news: News, now: float) -> Facts:
        standing, demands, status = news.decision.standing, news.decision.demands, self._writer.status
        views = tuple(self._views.values())
        slots = {(demand.role, index) for demand in demands for index in range(demand.replicas)}
        problems = {slot: problem for slot, problem in self._actuator.problems.items() if slot in slots}
        real = [view for view in views if view.name]
        members = members_of(standing.history, real, problems, status.members, self._observation.asked_to_end)
        if not standing.rests:
            members = tuple(
                member
                for member in members
                if (Role(member.role), member.index) in slots or member.pod or member.counted
            )
        waits = self._observation.waits(views, slots, problems, status.members, standing.history, now)
        ready = self._observation.ready(views, news.status if news.answers else None)
        # a job whose every worker waits for something outside of it stands still, whatever its master is about to do
        trains = standing.phase in _TRAINS and (standing.phase is JobPhase.SAVING or ready[Role.WORKER] > 0)
        reason, message = standing.reason, standing.message
        if waits and not standing.rests:
            message = f"{message}; {waits[1]}" if trains and message else waits[1]
            if not trains:
                reason = waits[0]
        notes = (_unknown(job) if job.unknown else None, None if standing.rests else self._tenancy.fills(self.uid))
        message = "; ".join(part for part in (message, *notes) if part)
        expelled = self._tenancy.expelled(self.uid)
        if expelled is not None and not standing.rests:
            reason, message = _EXPELLED, expelled
        return Facts(
            name=self.key.name,
            generation=job.generation,
            standing=standing,
            reason=reason,
            message=message,
            demands=demands,
            members=members,
            now=now,
            ready=ready,
            blocked=(_EXPELLED, expelled) if expelled is not None else waits if waits and not trains else None,
            master=news.status,
            plan=news.plan,
            image=self._settings.image,
            parity=job.spec.fault_tolerance.parity,
        )

    async def _write(self, job: Job, facts: Facts, now: float) -> float:
        before = self._writer.status
        status = build_status(before, facts)
        delay = self._writer.schedule(status, now)
        if delay is None:
            return self._settings.resync
        if delay:
            return delay
        if status.phase is not before.phase:
            stories.tell_phase(self._recorder, job, before.phase, status)
        for kind in (ConditionType.SLOW, ConditionType.LOW_MEMORY):
            stories.tell_condition(self._recorder, job, kind, before, status)
        stories.tell_flash(self._recorder, job, before, status)
        stories.tell_waiting(self._recorder, job, facts.blocked, status.conditions[0].last_transition_time)
        await self._recorder.flush()
        await self._writer.write(status)
        return self._settings.resync

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Guards calls to the API server: unanswered or refused ones are retried after a while."""
        try:
            yield
        except ApiUnavailableError as error:
            _log.warning("api_server_unavailable", job=str(self.key), problem=str(error))
            raise BackendUnavailableError(str(error), _RETRY_SECONDS) from error
        except ApiError as error:
            _log.error("api_server_refused", job=str(self.key), status=error.status, problem=str(error))
            raise BackendUnavailableError(str(error), 2 * _RETRY_SECONDS) from error


def control(backend: KubernetesBackend, clock: Callable[[], float]) -> JobController:
    """Returns what drives a job's pods; `clock` is in seconds since 1970."""
    return JobController(
        backend, clock, lambda master, wake: MasterLink(master, wake, clock, status_seconds=STATUS_SECONDS)
    )


def _unknown(job: Job) -> str:
    fields = ", ".join(map(str, job.unknown))
    return (
        f"version {VERSION} does not know {fields}: the job continues with its own image, and is managed as with "
        "the default; upgrade the operator"
    )


def _of_today(instance: Instance, objects: JobObjects) -> Instance:
    """Returns the instance with its pod's present revision."""
    if not instance.revision:
        return instance
    return replace(instance, revision=objects.restart_key(instance.id.role, instance.revision))
