"""One job: observe its pods, reconcile, write its status, act. Level-triggered, and safe to end between any two calls.

What an action needs to be known for later is written to the job's status before the action is taken, and every object
has a name that follows from that: to do it again is a conflict, not a second object.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.kubernetes import names, stories
from emberscale_operator.kubernetes.actuator import Actuator
from emberscale_operator.kubernetes.client import (
    ApiClient,
    ApiError,
    ApiUnavailableError,
    group,
)
from emberscale_operator.kubernetes.creation import NamespaceEndsError, ObjectMaker
from emberscale_operator.kubernetes.decision import applied_ps, decide, ended_at, outdated, outlived, still_wanted
from emberscale_operator.kubernetes.demands import demands_of, masked
from emberscale_operator.kubernetes.job import Job, JobKey, UnreadableJobError, read_job, read_status
from emberscale_operator.kubernetes.master_link import MasterLink
from emberscale_operator.kubernetes.observation import Observation, plan_of
from emberscale_operator.kubernetes.pod_spec import JobObjects
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.record import history_of, members_of, memory_limit_of
from emberscale_operator.kubernetes.recorder import Recorder
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.status import (
    ENDED,
    RESTING,
    Facts,
    build_status,
    merge_patch,
    to_document,
    without_progress,
)
from emberscale_operator.kubernetes.tallies import Tallies
from emberscale_operator.kubernetes.warnings import PodWarnings
from emberscale_operator.machine import (
    Action,
    Delete,
    Demand,
    Desired,
    ExitReason,
    Fail,
    Policy,
    Role,
    advance,
    grown_memory,
    reconcile,
)

_PROGRESS_SECONDS = 5.0
_STATUS_POLL_SECONDS = 3.0
_RETRY_SECONDS = 5.0
_log = structlog.get_logger()


class ClusterView(Protocol):
    """What is known of the cluster without asking it."""

    def job(self, key: JobKey) -> Mapping[str, Any] | None:
        """The TrainingJob as it was last seen; None if there is none."""

    def pods(self, key: JobKey) -> Sequence[Mapping[str, Any]]:
        """The pods that carry the job's label."""


class JobController:
    """Everything that the operator knows of one job, and does for it. `reconcile` is called by one task only."""

    def __init__(
        self,
        key: JobKey,
        uid: str,
        cluster: ClusterView,
        client: ApiClient,
        recorder: Recorder,
        warnings: PodWarnings,
        tallies: Tallies,
        settings: Settings,
        policy: Policy | None = None,
    ) -> None:
        self.key = key
        self.uid = uid
        self._cluster = cluster
        self._client = client
        self._recorder = recorder
        self._warnings = warnings
        self._tallies = tallies
        self._settings = settings
        self._policy = policy
        self._makes = ObjectMaker(client, settings)
        self._observation = Observation()
        self._actuator = Actuator(client, self._makes, self._observation, recorder)
        self._woken = asyncio.Event()
        self._status: TrainingJobStatus | None = None
        self._written: dict[str, Any] = {}
        self._progress_at = 0.0
        self._link: MasterLink | None = None
        self._link_uid = ""
        self._plan: pb.Plan | None = None
        self._namespace_ends = False
        self.busy_since: float | None = None
        """When the look at the job that is under way began, by the monotonic clock; None between looks."""

    @property
    def phase(self) -> JobPhase:
        """Where the job stood when it was last looked at."""
        return self._status.phase if self._status else JobPhase.PENDING

    @property
    def status(self) -> TrainingJobStatus | None:
        """The status as it was last built; None before the job was looked at."""
        return self._status

    def wake(self) -> None:
        """There may be something to do."""
        self._woken.set()

    async def run(self) -> None:
        """Reconciles until the job is gone."""
        try:
            while True:
                self._woken.clear()
                self.busy_since = time.monotonic()
                try:
                    delay = await self.reconcile(time.time())
                except ApiUnavailableError as error:
                    _log.warning("API server unavailable", job=str(self.key), problem=str(error))
                    delay = _RETRY_SECONDS
                except ApiError as error:
                    _log.error("API server refuses", job=str(self.key), status=error.status, problem=str(error))
                    delay = 2 * _RETRY_SECONDS
                self.busy_since = None
                if delay is None:
                    return
                try:
                    await asyncio.wait_for(self._woken.wait(), timeout=min(delay, self._settings.resync))
                except TimeoutError:
                    continue
        finally:
            await self._close_link()

    async def reconcile(self, now: float) -> float | None:
        """Does what is due; returns the seconds until there may be more, None when the job is gone."""
        body = self._cluster.job(self.key)
        if body is None or body["metadata"]["uid"] != self.uid:
            return None
        if self._namespace_ends or "deletionTimestamp" in body["metadata"]:
            return self._settings.resync
        status = self._status or self._take_over(body)
        try:
            job = read_job(body)
        except UnreadableJobError as error:
            return await self._refuse(body, status, str(error), now)
        try:
            return await self._reconcile(job, status, now)
        except NamespaceEndsError as error:
            # a namespace never comes back from this, and deletes the job like everything else
            self._namespace_ends = True
            _log.info("namespace is being deleted", job=str(self.key), said=str(error))
            return self._settings.resync

    async def _reconcile(self, job: Job, status: TrainingJobStatus, now: float) -> float:
        self._tallies.job_reconciled()
        policy = self._policy or Policy(backoff_limit=job.spec.run_policy.backoff_limit)
        active = status.phase not in RESTING
        views = await self._with_warnings(self._observation.observe(self._cluster.pods(self.key), self.uid, now), now)
        before = self._observation.history
        instances = tuple(view.instance for view in views)
        self._observation.history = advance(before, instances, policy.backoff)
        if active:
            self._tell_of_pods(job, status, views)
            self._note_exits(job, status, views, before.lives)
        if outlived(job, status, now):
            await self._client.delete(
                group(names.API_VERSION, self.key.namespace, names.PLURAL, self.key.name), self.uid
            )
            return self._settings.resync
        objects = JobObjects.of(job, self._settings)
        await self._follow_master(job, status, views)
        phase, reason, message = decide(job, status, views, self._link, now)
        if phase is JobPhase.PENDING and status.phase is JobPhase.SUSPENDED:
            self._plan = None
        servers = applied_ps(job, status, phase)
        grown = self._grown(status)
        demands = (
            ()
            if phase in RESTING
            else demands_of(job.spec, self._plan, servers, grown, planned_by_brain=bool(self._settings.brain_address))
        )
        desired = Desired(demands, ended_at(status, phase, now))
        actions = reconcile(policy, desired, masked(instances, demands), self._observation.history, now)
        actions = still_wanted(actions, views, self._link)
        failure = next((action for action in actions if isinstance(action, Fail)), None)
        if failure is not None and phase not in RESTING:
            phase, reason, message = JobPhase.FAILED, failure.reason, failure.message
            actions = ()
        actions = (*actions, *outdated(objects, views, phase))
        self._note_deletions(actions, views)
        delay = await self._write(
            job, self._facts(job, status, phase, reason, message, demands, views, servers, now), now
        )
        if phase is not status.phase:
            if phase in ENDED and self._status is not None:
                self._tallies.job_ended(self._status)
            if failure is not None:
                delay = 0.0
        if phase is JobPhase.PENDING and status.phase is JobPhase.SUSPENDED:
            await self._close_link()
        sooner = await self._actuator.act(job, objects, actions, views, self._link, phase, now)
        await self._recorder.flush()
        return delay if sooner is None else min(delay, sooner)

    def _take_over(self, body: Mapping[str, Any]) -> TrainingJobStatus:
        """What an operator before this one left."""
        status = read_status(body)
        self._written = to_document(status) if body.get("status") else {}
        self._observation.take_over(history_of(status.members), status.members)
        self._plan = plan_of(status.plan)
        self._status = status
        return status

    async def _refuse(self, body: Mapping[str, Any], status: TrainingJobStatus, problem: str, now: float) -> float:
        """A spec that the API server took and that cannot run: says so, until it is edited."""
        generation = body["metadata"].get("generation", 1)
        facts = Facts(
            name=self.key.name,
            generation=generation,
            phase=status.phase,
            reason="InvalidSpec",
            message=problem,
            demands=(),
            members=status.members,
            now=now,
            blocked=("InvalidSpec", problem),
            applied_ps=status.applied_ps,
        )
        await self._send(build_status(status, facts))
        return self._settings.resync

    def _tell_of_pods(self, job: Job, status: TrainingJobStatus, views: Sequence[PodView]) -> None:
        """Tells of pods that the status does not know yet, or knows with other limits."""
        known = {(Role(member.role), member.index): member for member in status.members}
        for view in views:
            member = known.get((view.id.role, view.id.index))
            if member is None or member.incarnation < view.id.incarnation:
                stories.tell_creation(self._recorder, job, view)
            elif member.uid == view.uid:
                stories.tell_resize(self._recorder, job, view, member)

    def _note_exits(
        self,
        job: Job,
        status: TrainingJobStatus,
        views: Sequence[PodView],
        before: Mapping[tuple[Role, int], Any],
    ) -> None:
        """Counts and tells of ends that nobody asked for; running out of memory asks for more of it."""
        for view in views:
            ended, slot = view.instance.exit, (view.id.role, view.id.index)
            past = before.get(slot)
            if ended is None or ended.deleted or (past is not None and past.counted >= view.id.incarnation):
                continue
            if ended.reason is not ExitReason.COMPLETED:  # who is done may know sooner that the job is over
                self._observation.restarts[slot] = self._observation.restarts.get(slot, 0) + 1
            stories.tell_exit(self._recorder, job, view)
            self._tallies.pod_ended(view)
            limit = memory_limit_of(view, status.members)
            if ended.reason is ExitReason.OOM_KILLED and limit is not None:
                grown = grown_memory(limit)
                if grown > self._grown(status).get(view.id.role, 0):
                    self._observation.grown[view.id.role] = grown
                    stories.tell_growth(self._recorder, job, view, limit, grown)

    def _note_deletions(self, actions: Sequence[Action], views: Sequence[PodView]) -> None:
        doomed = {action.id for action in actions if isinstance(action, Delete)}
        for view in views:
            if view.id in doomed and view.instance.live:
                self._observation.deletes(view)

    def _grown(self, status: TrainingJobStatus) -> dict[Role, int]:
        of_status = {Role.MASTER: status.master, Role.PS: status.ps, Role.WORKER: status.worker}
        grown = {role: part.memory_bytes for role, part in of_status.items() if part and part.memory_bytes}
        return {**grown, **self._observation.grown}

    async def _follow_master(self, job: Job, status: TrainingJobStatus, views: Sequence[PodView]) -> None:
        """Keeps up the conversation with the master's pod, and takes its plan."""
        masters = [view for view in views if view.id.role is Role.MASTER and view.running and view.address]
        newest = max(masters, key=lambda view: view.id, default=None)
        if newest is not None and newest.uid != self._link_uid:
            await self._close_link()
            known = await self._makes.credentials(job)
            address = f"{newest.address}:{names.MASTER_PORT}"
            self._link = MasterLink(address, known.token, self.wake, _STATUS_POLL_SECONDS, known.authority)
            self._link_uid = newest.uid
        elif newest is None and status.phase in RESTING:
            await self._close_link()
        if self._link is not None and self._link.plan is not None:
            stories.tell_scaling(self._recorder, job, self._plan, self._link.plan)
            self._plan = self._link.plan

    async def _with_warnings(self, views: Sequence[PodView], now: float) -> tuple[PodView, ...]:
        """With what keeps the first pod that is slow to be prepared."""
        slow = next((view for view in views if view.mounting), None)
        if slow is None:
            return tuple(views)
        waiting = await self._warnings.last(self.key.namespace, slow.uid, now)
        return tuple(replace(view, waiting=waiting) if view is slow else view for view in views)

    async def _close_link(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link, self._link_uid = None, ""

    def _facts(
        self,
        job: Job,
        status: TrainingJobStatus,
        phase: JobPhase,
        reason: str,
        message: str,
        demands: tuple[Demand, ...],
        views: Sequence[PodView],
        applied_ps: int | None,
        now: float,
    ) -> Facts:
        history = self._observation.history
        slots = {(demand.role, index) for demand in demands for index in range(demand.replicas)}
        problems = {slot: problem for slot, problem in self._actuator.problems.items() if slot in slots}
        real = [view for view in views if view.name]
        members = members_of(
            history, real, self._observation.restarts, problems, status.members, self._observation.asked_to_end
        )
        if phase not in RESTING:
            members = tuple(
                member
                for member in members
                if (Role(member.role), member.index) in slots or member.pod or member.counted
            )
        waits = self._observation.waits(views, slots, problems, status.members, history, now)
        trains = phase in (JobPhase.TRAINING, JobPhase.EVALUATING, JobPhase.SAVING)
        if waits and phase not in RESTING:
            message = f"{message}; {waits[1]}" if trains and message else waits[1]
            if not trains:
                reason = waits[0]
        answering = self._link is not None and self._link.answers
        return Facts(
            name=self.key.name,
            generation=job.generation,
            phase=phase,
            reason=reason,
            message=message,
            demands=demands,
            members=members,
            now=now,
            ready=self._observation.ready(views, self._link.status if self._link and answering else None),
            grown=self._grown(status),
            blocked=waits if waits and not trains else None,
            master=self._link.status if self._link is not None else None,
            plan=self._plan,
            applied_ps=applied_ps,
        )

    async def _write(self, job: Job, facts: Facts, now: float) -> float:
        """Writes the status if it says something new; progress alone waits. Returns seconds to the next look."""
        before = self._status or TrainingJobStatus()
        status = build_status(before, facts)
        document = to_document(status)
        if without_progress(document) == without_progress(self._written):
            self._status = status
            if document == self._written:
                return self._settings.resync
            wait = self._progress_at + _PROGRESS_SECONDS - now
            if wait > 0:
                return wait
        self._progress_at = now
        if status.phase is not before.phase:
            stories.tell_phase(self._recorder, job, before.phase, status)
        stories.tell_waiting(self._recorder, job, facts.blocked, facts.generation)
        await self._recorder.flush()
        await self._send(status)
        return self._settings.resync

    async def _send(self, status: TrainingJobStatus) -> None:
        document = to_document(status)
        patch = merge_patch(self._written, document)
        if patch:
            path = group(names.API_VERSION, self.key.namespace, names.PLURAL, self.key.name) + "/status"
            try:
                await self._client.patch(path, {"metadata": {"uid": self.uid}, "status": patch})
            except ApiError as error:
                if error.status not in (404, 409):  # gone, or another job of the same name: the watch will tell
                    raise
        self._written, self._status = document, status
