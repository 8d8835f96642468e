"""The jobs in the Redis for flash checkpoints: each has a user that reaches its own keys and nothing else.

This Redis keeps nothing: its users are created again after each restart, and keys that nobody renews expire.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping
from typing import Any, cast

import structlog
from redis.exceptions import RedisError

from emberscale_api.compatibility import FlashKeys
from emberscale_operator.kubernetes.names import digest
from emberscale_operator.kubernetes.roster import Roster, acl_rules, remove_each

_LOOK_SECONDS = 2.0
_REMOVED_AT_ONCE = 500
_VALUES = ("+get", "+set", "+expire", "+strlen", "+unlink", "+sadd", "+srem", "+smembers")
_CONNECTION = ("+ping", "+watch", "+unwatch", "+multi", "+exec", "+discard")
_COMMANDS = ("-@all", *_VALUES, *_CONNECTION)
"""What the writers and readers of flash checkpoints do. No command makes a value larger than what was sent."""
_log = structlog.get_logger()


def flash_user(installation: str, job_uid: str) -> str:
    """The name of a job's user; `installation` tells operators that share one Redis apart."""
    return f"emberscale-flash-{digest(installation)}-{job_uid}"


def flash_password(store_password: str) -> str:
    """The password of that user: parameter servers have it, and must not learn that of the master's state."""
    return hashlib.sha256(f"flash checkpoints {store_password}".encode()).hexdigest()


def flash_rules(job_uid: str, password: str) -> tuple[str, ...]:
    """The arguments of ACL SETUSER."""
    return acl_rules(password, [f"{FlashKeys.of(job_uid).prefix}*"], _COMMANDS)


class FlashTenants:
    """The users and the keys of jobs in the Redis that `url` names. Nothing waits for this Redis or fails without it.

    Raises ValueError for a malformed URL.
    """

    def __init__(self, url: str, installation: str) -> None:
        self._roster = Roster(url, flash_user(installation, ""), flash_rules)
        self._redis = self._roster.redis
        self._installation = installation
        self._looking = asyncio.Lock()
        self._gone: dict[str, str | None] = {}
        """The jobs whose remains are still there, by uid, each with the problem that was last logged, if any."""
        self._run_id = ""
        self._problem = ""

    def admit(self, job_uid: str, namespace: str, store_password: str) -> None:
        """Ensures that a job's user exists, now and whenever Redis has forgotten it."""
        self._roster.admit(job_uid, namespace, flash_password(store_password))

    def remove(self, job_uid: str) -> None:
        """Requests the removal of what a deleted job left."""
        self._roster.dismiss(job_uid)
        self._gone.setdefault(job_uid, None)

    async def keep(self) -> None:
        """Looks at Redis until it is cancelled."""
        task = cast(asyncio.Task[None], asyncio.current_task())
        while True:
            await self.look()
            if task.cancelling():  # redis-py, by asyncio.wait_for, may lose a cancellation before Python 3.12
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Creates missing users, and removes what deleted jobs left, once an earlier look has ended.

        Of two looks at once, one could remove a deleted job before the other makes its user.
        """
        async with self._looking:
            try:
                await self._make()
                await self._clear()
                self._problem = ""
            except (RedisError, OSError) as error:
                self._tell(str(error))

    async def sweep(self, jobs: Mapping[str, Collection[str]]) -> None:
        """Removes remains of jobs that were deleted while no operator ran; `jobs` are as in `Roster.find_gone`."""
        try:
            gone = await self._roster.find_gone(jobs)
        except (RedisError, OSError) as error:
            self._tell(str(error))
            return
        for job_uid in gone:
            self._gone.setdefault(job_uid, None)

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _make(self) -> None:
        server = cast(Mapping[str, Any], await self._redis.info("server"))
        if server["run_id"] != self._run_id:
            self._roster.missing = set(self._roster.admitted)
            self._run_id = server["run_id"]
        if due := self._roster.due():
            await self._roster.enter(due)
            self._roster.settle(due)

    async def _clear(self) -> None:
        problems = await remove_each(tuple(self._gone), self._remove)
        for job_uid, problem in problems.items():
            if problem != self._gone[job_uid]:
                _log.warning("flash_redis_state_not_removed", job_uid=job_uid, problem=problem)
            self._gone[job_uid] = problem

    async def _remove(self, job_uid: str) -> None:
        await self._redis.acl_deluser(flash_user(self._installation, job_uid))
        found = self._redis.scan_iter(f"{FlashKeys.of(job_uid).prefix}*", count=_REMOVED_AT_ONCE)
        async for key in found:
            await self._redis.unlink(key)
        await self._redis.hdel(self._roster.key, job_uid)
        del self._gone[job_uid]

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("flash_redis_users_not_kept", problem=problem)
        self._problem = problem
