"""The jobs in the Redis for flash checkpoints: each has a user that reaches its own keys and nothing else.

This Redis keeps nothing: its users are created again after each restart, and keys that nobody renews expire.
"""

import asyncio
import hashlib
from collections.abc import Collection, Mapping
from typing import Any, cast

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from emberscale_api.compatibility import FlashKeys
from emberscale_operator.kubernetes.names import digest
from emberscale_operator.kubernetes.roster import Admission, Roster, made, missing_jobs

_TIMEOUT_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_REMOVED_AT_ONCE = 500
_VALUES = ("+get", "+set", "+expire", "+strlen", "+unlink", "+sadd", "+srem", "+smembers")
_CONNECTION = ("+ping", "+select", "+watch", "+unwatch", "+multi", "+exec", "+discard")
_COMMANDS = ("-@all", *_VALUES, *_CONNECTION)
"""What the writers and readers of flash checkpoints do. No command makes a value larger than what was sent."""
_log = structlog.get_logger()


def flash_user(installation: str, job_uid: str) -> str:
    """The name of a job's user; `installation` tells operators that share one Redis apart."""
    return f"{_prefix(installation)}{job_uid}"


def flash_password(store_password: str) -> str:
    """The password of that user: parameter servers have it, and must not learn that of the master's state."""
    return hashlib.sha256(f"flash checkpoints {store_password}".encode()).hexdigest()


def flash_rules(job_uid: str, password: str) -> tuple[str, ...]:
    """What ACL SETUSER is told: the user as a whole."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return ("reset", "on", f"#{hashed}", f"~{FlashKeys.of(job_uid).prefix}*", "resetchannels", *_COMMANDS)


class FlashTenants:
    """The users and the keys of jobs in the Redis that `url` names. Nothing waits for this Redis or fails without it.

    Raises ValueError for a malformed URL.
    """

    def __init__(self, url: str, installation: str, look: float = _LOOK_SECONDS) -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS, decode_responses=True
        )
        self._installation = installation
        self._look = look
        self._roster = Roster(self._redis, _prefix(installation))
        self._admitted: dict[str, Admission] = {}
        self._missing: set[str] = set()
        self._gone: set[str] = set()
        self._run_id = ""
        self._problem = ""

    def admit(self, job_uid: str, namespace: str, store_password: str) -> None:
        """Ensures that a job's user exists, now and whenever Redis has forgotten it."""
        admission = Admission(namespace, flash_password(store_password))
        if self._admitted.get(job_uid) != admission:
            self._admitted[job_uid] = admission
            self._missing.add(job_uid)

    def remove(self, job_uid: str) -> None:
        """Requests the removal of what a deleted job left."""
        self._admitted.pop(job_uid, None)
        self._missing.discard(job_uid)
        self._gone.add(job_uid)

    async def keep(self) -> None:
        """Creates missing users, and removes what deleted jobs left, for ever."""
        task = cast(asyncio.Task[None], asyncio.current_task())
        while not task.cancelling():
            try:
                await self._catch_up()
                self._problem = ""
            except (RedisError, OSError) as error:
                self._tell(str(error))
            await asyncio.sleep(self._look)

    async def sweep(self, jobs: Mapping[str, Collection[str]]) -> None:
        """Removes remains of jobs that were deleted while no operator ran.

        `jobs` are the uids of existing jobs, by each namespace that was listed; those of other namespaces may exist.
        """
        try:
            tenants = await self._roster.tenants()
        except (RedisError, OSError) as error:
            self._tell(str(error))
            return
        self._missing |= {job_uid for job_uid in self._admitted if not tenants.get(job_uid)}  # Redis was full
        gone, left = missing_jobs(tenants, jobs, self._admitted)
        self._roster.tell_left(left)
        self._gone |= gone

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _catch_up(self) -> None:
        server = cast(Mapping[str, Any], await self._redis.info("server"))
        if server["run_id"] != self._run_id:
            self._missing = set(self._admitted)
            self._run_id = server["run_id"]
        if missing := {job_uid: self._admitted[job_uid] for job_uid in self._missing}:
            await self._roster.enter(
                {job_uid: one.namespace for job_uid, one in missing.items()},
                {job_uid: flash_rules(job_uid, one.password) for job_uid, one in missing.items()},
            )
            self._missing -= made(missing, self._admitted)
        for job_uid in tuple(self._gone):
            await self._redis.acl_deluser(flash_user(self._installation, job_uid))
            found = self._redis.scan_iter(f"{FlashKeys.of(job_uid).prefix}*", count=_REMOVED_AT_ONCE)
            async for key in found:
                await self._redis.unlink(key)
            await self._redis.hdel(self._roster.key, job_uid)
            self._gone.discard(job_uid)

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("flash_redis_users_not_kept", problem=problem)
        self._problem = problem


def _prefix(installation: str) -> str:
    return f"emberscale-flash-{digest(installation)}-"
