"""Limits how a cluster may evict a job's pods: one parameter server at a time, after it has given its rows away."""

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from emberscale_api.job.roles import Role
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import PAUSE_FACTOR, ApiClient, ApiError, ApiInternalError, path_of
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_state import GRACE_SECONDS
from emberscale_operator.machine import Resources, leave_seconds

_GROUP, _PLURAL = "policy/v1", "poddisruptionbudgets"
_RETRY_SECONDS = 15.0
_LOOK_SECONDS = 300.0
"""How long a budget that was written is taken to be unchanged: nobody watches it, and people may delete it."""
_log = structlog.get_logger()


def grace_seconds(role: Role, resources: Resources) -> int:
    """Returns how long a pod that is told to end may take until it is killed."""
    return GRACE_SECONDS + (round(leave_seconds(resources)) if role is Role.PS else 0)


def build_budget(job: Job, servers: int) -> dict[str, Any]:
    """The PodDisruptionBudget that lets one of this number of parameter servers go.

    It states a number, since Kubernetes takes nothing else for pods that no built-in controller owns.
    """
    spec = {
        "minAvailable": servers - 1,
        "selector": {"matchLabels": {names.JOB_LABEL: job.key.name, names.ROLE_LABEL: str(Role.PS)}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return job.owned(_GROUP, "PodDisruptionBudget", names.budget_name(job.key.name), spec=spec)


class DisruptionBudget:
    """Keeps the PodDisruptionBudget of one job's parameter servers; a refused budget does not delay the job."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._servers = 0
        self._refused = 0
        self._again_at = 0.0
        self._problem: str | None = None

    async def keep(self, job: Job, servers: int, now: float) -> None:
        """Lets the cluster evict one of this number of servers at a time; makes no call if that was so lately.

        `servers` counts the servers with rows and those that will get some. With a larger number, such as that of a
        larger shape, the cluster could evict none while one cannot be placed. 0 changes nothing: no server has rows, or
        the number is unknown. A refused budget is tried again after a while: its name may still belong to an earlier
        job, whose objects are being deleted.
        """
        if servers:
            await self._keep(job, servers, now, self._make, _LOOK_SECONDS)

    async def lower(self, job: Job, now: float) -> None:
        """Lets the cluster evict all servers of a job at rest; makes no budget.

        Common alerts report each budget that wants more pods than there are.
        """
        await self._keep(job, 1, now, self._change, math.inf)

    async def _keep(
        self,
        job: Job,
        servers: int,
        now: float,
        write: Callable[[Job, dict[str, Any]], Awaitable[str | None]],
        holds_seconds: float,
    ) -> None:
        if servers in (self._servers, self._refused) and now < self._again_at:
            return
        self._servers = 0  # a call whose answer is lost may have changed it
        began = time.monotonic()
        try:
            problem = await write(job, build_budget(job, servers))
        except (ApiError, ApiInternalError) as error:
            problem = str(error)
        if problem is None:
            self._servers, self._refused = servers, 0
            self._again_at = now + holds_seconds
        else:
            pause = _RETRY_SECONDS + PAUSE_FACTOR * (time.monotonic() - began)
            self._refused, self._again_at = servers, now + pause
            if problem != self._problem:
                _log.warning("no_disruption_budget", job=str(job.key), problem=problem)
        self._problem = problem

    async def _make(self, job: Job, body: dict[str, Any]) -> str | None:
        """Makes the budget, or changes the one that is there; returns why it could not.

        Raises ApiError and ApiInternalError.
        """
        try:
            await self._client.create(path_of(_GROUP, _PLURAL, job.key.namespace), body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
        else:
            return None
        found = await self._client.get(_path(job, body))
        if not names.is_owned_by(found, job.uid):
            return "its name belongs to something else"
        await self._adapt(found, job, body)
        return None

    async def _change(self, job: Job, body: dict[str, Any]) -> None:
        """Changes the job's budget if there is one. Raises ApiError and ApiInternalError."""
        try:
            found = await self._client.get(_path(job, body))
        except ApiError as error:
            if error.status != 404:
                raise
            return
        if names.is_owned_by(found, job.uid):
            await self._adapt(found, job, body)

    async def _adapt(self, found: dict[str, Any], job: Job, body: dict[str, Any]) -> None:
        if found["spec"].get("minAvailable") != body["spec"]["minAvailable"]:
            change = {"metadata": {"uid": found["metadata"]["uid"]}, "spec": body["spec"]}
            await self._client.patch(_path(job, body), change)


def _path(job: Job, body: dict[str, Any]) -> str:
    return path_of(_GROUP, _PLURAL, job.key.namespace, body["metadata"]["name"])
