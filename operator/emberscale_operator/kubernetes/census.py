"""Detects dead watches, which are silent: compares the API server's objects with what the watches delivered."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from emberscale_api.job.training_job import API_VERSION, PLURAL
from emberscale_api.readable import duration_text
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, path_of

_PATIENCE_INTERVALS = 2
_log = structlog.get_logger()


@dataclass(frozen=True)
class WatchedKind:
    """A kind of object that is watched."""

    api_version: str
    plural: str
    label: str = ""


TRAINING_JOB = WatchedKind(API_VERSION, PLURAL)
POD = WatchedKind("v1", "pods", names.JOB_LABEL)


class Watched(Protocol):
    """The objects that the watches have delivered."""

    def versions(self, kind: WatchedKind, namespace: str) -> Mapping[str, str]:
        """The resourceVersion of every object of a kind, by uid, in a namespace; "" stands for the whole cluster."""


class Lag:
    """How long a watch has missed the same change. A live watch is late only briefly, each time by another change."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._compared_at = 0.0

    def compare(self, held: Mapping[str, str], seen: Mapping[str, str], now: float) -> None:
        """Compares the API server's objects with those that the watch delivered, resourceVersions by uid, at `now`."""
        missed = {(uid, seen.get(uid, "")) for uid in held.keys() | seen.keys() if held.get(uid) != seen.get(uid)}
        self._since = {change: self._since.get(change, now) for change in missed}
        self._compared_at = now

    @property
    def seconds(self) -> float:
        """How long the oldest missed change had been missing at the last comparison; 0 without a missed change."""
        return self._compared_at - min(self._since.values(), default=self._compared_at)


class Census:
    """Lists the metadata of all TrainingJobs and pods once an `interval`, in seconds, each namespace for itself.

    An empty list of namespaces stands for the whole cluster, as "" does among them. `counted` follows each census that
    could list jobs, with their uids by each namespace that could be listed.
    """

    def __init__(
        self,
        client: ApiClient,
        watched: Watched,
        namespaces: Sequence[str],
        interval: float,
        counted: Callable[[Mapping[str, Collection[str]]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._watched = watched
        self._interval = interval
        self._counted = counted
        self._lags = {(kind, name): Lag() for name in (namespaces or ("",)) for kind in (TRAINING_JOB, POD)}
        self._problems: dict[str, str] = {}

    async def keep(self) -> None:
        """Takes the census for ever."""
        while True:
            await asyncio.sleep(self._interval)
            await self.take(asyncio.get_running_loop().time())

    async def take(self, now: float) -> None:
        """Takes one census. A namespace that cannot be listed says nothing about its watches."""
        jobs: dict[str, Collection[str]] = {}
        problems: dict[str, str] = {}
        for (kind, namespace), lag in self._lags.items():
            try:
                held = await self._held(kind, namespace)
            except (ApiError, ApiUnavailableError) as error:
                problems[namespace] = str(error)
                continue
            lag.compare(held, self._watched.versions(kind, namespace), now)
            if kind is TRAINING_JOB:
                jobs[namespace] = held.keys()
        self._tell(problems)
        if jobs:
            await self._counted(jobs)

    def behind(self) -> str | None:
        """Describes a watch that has missed a change for too long; None if there is none."""
        for (kind, namespace), lag in self._lags.items():
            if (seconds := lag.seconds) >= _PATIENCE_INTERVALS * self._interval:
                where = f" in {namespace}" if namespace else ""
                return f"the watch of {kind.plural}{where} has missed a change for {duration_text(seconds)}"
        return None

    def _tell(self, problems: Mapping[str, str]) -> None:
        """Warns of namespaces that cannot be listed, once per change.

        A dead watch there goes unnoticed, and keys of jobs that were deleted while no operator ran stay in Redis.
        """
        for namespace in problems.keys() - self._problems.keys():
            _log.warning(
                "listing_unavailable",
                namespace=namespace or "all",
                problem=problems[namespace],
                consequence="a dead watch is not noticed there, and what deleted jobs left in Redis stays",
            )
        for namespace in self._problems.keys() - problems.keys():
            _log.info("listing_available", namespace=namespace or "all")
        self._problems = dict(problems)

    async def _held(self, kind: WatchedKind, namespace: str) -> dict[str, str]:
        query = {"labelSelector": kind.label} if kind.label else {}
        return await self._client.versions(path_of(kind.api_version, kind.plural, namespace), **query)
