"""What the masters keep in Redis, as far as it concerns the operator: what a deleted job left there is removed."""

import asyncio
from dataclasses import astuple

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from emberscale_api.state_keys import DEPOSED_BY_DELETION, StateKeys

_TIMEOUT_SECONDS = 5.0
_ATTEMPTS = 5
_RETRY_SECONDS = 10.0
_DEPOSED_SECONDS = 600
_log = structlog.get_logger()


class JobStateStore:
    """The Redis of the masters. Nothing ever waits for it: a job is gone when Kubernetes says so.

    That is why no finalizer is involved, which would hold up the deletion of a namespace while the operator is away.
    What is left behind then expires. Raises ValueError for a URL that is none.
    """

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
        )

    async def remove(self, job_uid: str) -> None:
        """Removes what a deleted job left; tries again for a while where Redis does not answer."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_SECONDS)
            try:
                await self._remove(StateKeys.of(job_uid))
            except (RedisError, OSError) as error:
                problem = str(error)
            else:
                return
        _log.warning("the state of a deleted job stays until it expires", job_uid=job_uid, problem=problem)

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _remove(self, keys: StateKeys) -> None:
        """In one step, with which a master that still runs is deposed: it would put everything back otherwise."""
        transaction = self._redis.pipeline()
        transaction.delete(*astuple(keys))
        transaction.set(keys.term, DEPOSED_BY_DELETION, ex=_DEPOSED_SECONDS)
        await transaction.execute()
