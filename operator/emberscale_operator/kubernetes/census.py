"""What the API server holds against what the watches have brought: a watch that is dead does not say so."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, everywhere

_PATIENCE_INTERVALS = 2
_log = structlog.get_logger()


@dataclass(frozen=True)
class WatchedKind:
    """A kind of object that is watched."""

    api_version: str
    plural: str
    label: str = ""


TRAINING_JOB = WatchedKind(names.API_VERSION, names.PLURAL)
POD = WatchedKind("v1", "pods", names.JOB_LABEL)


class Watched(Protocol):
    """What the watches have brought."""

    def versions(self, kind: WatchedKind) -> Mapping[str, str]:
        """The resourceVersion of every object of a kind, by uid."""


class Lag:
    """How long a watch has missed the same change: one that is alive is late by moments, and by another change each."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def compare(self, held: Mapping[str, str], seen: Mapping[str, str], now: float) -> None:
        """Takes what the API server holds and what the watch has brought, resourceVersions by uid, at `now`."""
        missed = {(uid, seen.get(uid, "")) for uid in held.keys() | seen.keys() if held.get(uid) != seen.get(uid)}
        self._since = {change: self._since.get(change, now) for change in missed}

    def seconds(self, now: float) -> float:
        """For how long the change that was missed first has been missing; 0 where none is."""
        return now - min(self._since.values(), default=now)


class Census:
    """Lists the metadata of all TrainingJobs and pods once an `interval`, in seconds.

    An empty list of namespaces stands for the whole cluster. `counted` follows each census with the uids of all jobs.
    """

    def __init__(
        self,
        client: ApiClient,
        watched: Watched,
        namespaces: Sequence[str],
        interval: float,
        counted: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._watched = watched
        self._namespaces = namespaces or ("",)
        self._interval = interval
        self._counted = counted
        self._lags = {kind: Lag() for kind in (TRAINING_JOB, POD)}

    async def keep(self) -> None:
        """Takes the census for ever. A cluster that does not answer is no news of the watches."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval)
            try:
                held = {kind: await self._held(kind) for kind in self._lags}
            except (ApiError, ApiUnavailableError) as error:
                _log.warning("no census", problem=str(error))
                continue
            for kind, lag in self._lags.items():
                lag.compare(held[kind], self._watched.versions(kind), loop.time())
            await self._counted(held[TRAINING_JOB].keys())

    def behind(self, now: float) -> str | None:
        """The watch that has missed something for long, in words; None where none has."""
        for kind, lag in self._lags.items():
            if (seconds := lag.seconds(now)) > _PATIENCE_INTERVALS * self._interval:
                return f"the watch of {kind.plural} has missed a change for {seconds:.0f} s"
        return None

    async def _held(self, kind: WatchedKind) -> dict[str, str]:
        query = {"labelSelector": kind.label} if kind.label else {}
        held: dict[str, str] = {}
        for namespace in self._namespaces:
            held |= await self._client.versions(everywhere(kind.api_version, kind.plural, namespace), **query)
        return held
