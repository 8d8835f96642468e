"""The jobs as tenants of one Redis: each has a user that reaches its own keys and nothing else.

The operator creates a job's user before its first master, and removes it, with the job's state, once the job is gone. A
Redis that restarts without its users gets those of all running jobs. Redis cannot bound what a user stores, and refuses
everyone's writes once it is full. So as it fills up, the operator measures each job's keys, and expels jobs that exceed
their share.
"""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from contextlib import suppress
from dataclasses import astuple
from typing import Any, cast
from urllib.parse import quote, urlsplit, urlunsplit

import structlog
from redis.exceptions import RedisError, ResponseError

from emberscale_api.compatibility import DEPOSED_BY_DELETION, StateKeys
from emberscale_api.readable import bytes_text
from emberscale_operator.kubernetes.claims import BrainClaims
from emberscale_operator.kubernetes.flash_tenants import FlashTenants
from emberscale_operator.kubernetes.names import digest
from emberscale_operator.kubernetes.roster import Roster, acl_rules, remove_each

_LOOK_SECONDS = 1.0
_ATTEMPTS = 5
_RETRY_SECONDS = 10.0
_DEPOSED_SECONDS = 600
_FILLS_UP = 0.5
"""The share of Redis's `maxmemory` below which the operator does not measure single jobs."""
_NEARLY_FULL = 0.7
"""A fraction of `maxmemory`, the same as in the alert EmberscaleRedisFillsUp; above it, the largest job is reported."""
_MOST_CONNECTED = 0.9
"""The share of Redis's `maxclients` above which it counts as down: whoever reaches it can hold connections."""
_CHANGED = 0.1
"""Of its size: what is said of a job does not change for less."""
_SHARE = 0.25
"""Of `maxmemory`: no job may have more."""
_COMMANDS = (
    "-@all",
    *("+get", "+set", "+mget", "+incrby", "+hset", "+hgetall", "+hlen", "+sadd", "+smembers", "+scard", "+expire"),
    *("+watch", "+unwatch", "+multi", "+exec"),
    "+ping",
)
"""What a master may do: what `JobStore` does, by name, since whole categories hold more with every version of Redis.

No scripts: one that has written and does not end cannot be killed, and what is stored of them is charged to nobody. No
command makes a value, or an answer, that is larger than what was sent to Redis and stored there.
"""
_log = structlog.get_logger()


def user_name(installation: str, job_uid: str) -> str:
    """The name of a job's user; `installation` tells operators that share one Redis apart."""
    return f"emberscale-{digest(installation)}-{job_uid}"


def user_url(url: str, user: str, password: str) -> str:
    """A Redis URL for another user than the one that it names."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{quote(password, safe='')}@{place}"))


def user_rules(job_uid: str, password: str) -> tuple[str, ...]:
    """The arguments of ACL SETUSER."""
    return acl_rules(password, astuple(StateKeys.of(job_uid)), _COMMANDS)


class Tenants:
    """The users and the state of jobs in the Redis that `url` names, as one that may change users.

    Nothing ever waits for Redis: a job is gone when Kubernetes says so, and a finalizer would hold up the deletion of a
    namespace while the operator is away. What is left behind then is removed by `sweep`. `flash` and `claims` learn of
    the same jobs. Raises ValueError for a malformed URL.
    """

    def __init__(
        self, url: str, installation: str, flash: FlashTenants | None = None, claims: BrainClaims | None = None
    ) -> None:
        self._flash = flash
        self._claims = claims
        self._roster = Roster(url, user_name(installation, ""), user_rules)
        self._redis = self._roster.redis
        self._installation = installation
        self._expelled: dict[str, str] = {}
        self._largest: tuple[str, int, str] | None = None
        self._run_id = ""
        self._news = asyncio.Event()
        self._problem = ""
        self.up: bool | None = None
        """Whether Redis last did what was asked of it; None before anything was."""
        self.fill: float | None = None
        """The share of `maxmemory` that Redis used when it last answered; None where it has no `maxmemory`."""
        self.sizes: dict[str, int] = {}
        """Bytes that each job has in Redis, by uid; empty while Redis is less than half full."""

    def admit(self, job_uid: str, namespace: str, password: str) -> None:
        """Ensures that a job's user exists, now and whenever Redis has forgotten it."""
        if self._flash is not None:
            self._flash.admit(job_uid, namespace, password)
        if self._roster.admit(job_uid, namespace, password):
            self._news.set()

    def expelled(self, job_uid: str) -> str | None:
        """Returns why an existing job has lost its user; None if it has one."""
        return self._expelled.get(job_uid)

    def fills(self, job_uid: str) -> str | None:
        """Returns a message if Redis fills up and this job has the most in it; None for any other job."""
        return self._largest[2] if self._largest is not None and self._largest[0] == job_uid else None

    def release(self, job_uid: str) -> None:
        """Requests that the brain gives the cores and memory of a job to others."""
        if self._claims is not None:
            self._claims.release(job_uid)

    async def keep(self) -> None:
        """Looks at Redis until it is cancelled."""
        task = cast(asyncio.Task[None], asyncio.current_task())
        while True:
            self._news.clear()
            await self.look()
            if task.cancelling():  # redis-py, by asyncio.wait_for, may lose a cancellation before Python 3.12
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._news.wait()

    async def look(self) -> None:
        """Creates the users that Redis lacks, as after its restart, and expels those that store too much."""
        try:
            server = cast(Mapping[str, Any], await self._redis.info())
            if server["run_id"] != self._run_id:
                self._roster.missing = set(self._roster.admitted)
            self.fill = server["used_memory"] / server["maxmemory"] if server["maxmemory"] else None
            await self._make()
            self._run_id = server["run_id"]
            await self._bound(int(server["used_memory"]), int(server["maxmemory"]))
            _check_serves(server)
            self._problem = ""
            self.up = True
        except (RedisError, OSError) as error:
            self.up = False
            self._tell(str(error))

    async def remove(self, job_uid: str) -> None:
        """Removes what a deleted job left; tries again for a while where Redis does not answer."""
        if self._flash is not None:
            self._flash.remove(job_uid)
        self.release(job_uid)
        self._roster.dismiss(job_uid)
        self._expelled.pop(job_uid, None)
        self.sizes.pop(job_uid, None)
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_RETRY_SECONDS)
            try:
                await self._remove(job_uid)
            except (RedisError, OSError) as error:
                problem = str(error)
            else:
                return
        _log.warning("redis_state_not_removed", job_uid=job_uid, problem=problem)

    async def sweep(self, jobs: Mapping[str, Collection[str]]) -> None:
        """Removes remains of jobs that were deleted while no operator ran; `jobs` are as in `Roster.find_gone`."""
        if self._flash is not None:
            await self._flash.sweep(jobs)
        try:
            gone = await self._roster.find_gone(jobs)
        except (RedisError, OSError) as error:
            self._tell(str(error))
            return
        for job_uid in gone:
            self.release(job_uid)
        problems = await remove_each(gone, self._remove)
        for job_uid, problem in problems.items():
            _log.warning("redis_state_not_removed", job_uid=job_uid, problem=problem)
        for job_uid in gone - problems.keys():
            _log.info("redis_state_removed", job_uid=job_uid)

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _make(self) -> None:
        due = self._roster.due(without=self._expelled)
        if not due:
            return
        await self._roster.enter(due)
        await self._save()
        self._roster.settle(due)
        for job_uid in due.keys() - self._roster.admitted.keys():  # deleted, perhaps before its user was made
            await self._remove(job_uid)

    async def _bound(self, used: int, most: int) -> None:
        if not most or used <= _FILLS_UP * most:
            self.sizes, self._largest = {}, None
            return
        jobs = [job_uid for job_uid in self._roster.admitted if job_uid not in self._expelled]
        asking = self._redis.pipeline(transaction=False)
        for job_uid in jobs:
            for key in astuple(StateKeys.of(job_uid)):
                asking.memory_usage(key, samples=0)  # all of it: samples could be chosen to look small
        answers = iter(await asking.execute())
        self.sizes = {job_uid: sum(next(answers) or 0 for _ in astuple(StateKeys.of(job_uid))) for job_uid in jobs}
        self._find_largest(used, most)
        for job_uid, size in tuple(self.sizes.items()):
            if size <= _SHARE * most or job_uid not in self._roster.admitted:
                continue
            self._roster.missing.add(job_uid)  # an attempt that fails may have removed the user and not the state
            await self._remove(job_uid)
            if job_uid in self._roster.admitted:  # it was not deleted meanwhile
                self._expelled[job_uid] = _too_much(size, most)
            _log.warning("job_expelled_from_redis", job_uid=job_uid, bytes=size, limit_bytes=most)

    def _find_largest(self, used: int, most: int) -> None:
        """Warns of the largest job once Redis is nearly full, and of its successors until Redis is half empty again."""
        if not self.sizes or (self._largest is None and used <= _NEARLY_FULL * most):
            return
        job_uid = max(self.sizes, key=lambda one: self.sizes[one])
        size = self.sizes[job_uid]
        if self._largest is None or self._largest[0] != job_uid or abs(size - self._largest[1]) > _CHANGED * size:
            _log.warning("redis_filling_up", job_uid=job_uid, bytes=size, used_bytes=used, limit_bytes=most)
            self._largest = (job_uid, size, _fills(size, most))

    async def _remove(self, job_uid: str) -> None:
        """Deletes the user first, which closes its connections: a running master could otherwise write it all again.

        Not as a transaction: a Redis that is full refuses one with a write in it, before there is room again.
        """
        keys = StateKeys.of(job_uid)
        steps = self._redis.pipeline(transaction=False)
        steps.acl_deluser(user_name(self._installation, job_uid))
        steps.unlink(*astuple(keys))  # frees a large value beside the commands of others
        steps.set(keys.term, DEPOSED_BY_DELETION, ex=_DEPOSED_SECONDS)
        steps.hdel(self._roster.key, job_uid)
        await steps.execute()
        await self._save()

    async def _save(self) -> None:
        """Makes Redis keep its users across a restart, if it has a file for them."""
        try:
            await cast(Awaitable[Any], self._redis.acl_save())
        except ResponseError as error:
            _log.debug("redis_users_not_saved", problem=str(error))

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("redis_users_not_kept", problem=problem)
        self._problem = problem


def _check_serves(server: Mapping[str, Any]) -> None:
    """Raises RedisError if Redis, which serves the operator, can serve no masters."""
    if server.get("aof_last_write_status", "ok") != "ok":
        raise RedisError("Redis refuses all writes, as it cannot write its append-only file: its volume may be full")
    most = int(server.get("maxclients", 0))
    if most and int(server["connected_clients"]) > _MOST_CONNECTED * most:
        raise RedisError(
            f"nearly all of {most} connections to Redis are taken, and new masters get none: `CLIENT LIST` names the "
            "addresses that hold them"
        )


def _too_much(size: int, most: int) -> str:
    return (
        f"its pods kept {bytes_text(size)} in Redis, which has {bytes_text(most)} for all jobs; a job may keep a "
        "quarter. Its state and its access were removed: delete the job, or give Redis more memory"
    )


def _fills(size: int, most: int) -> str:
    return (
        f"Redis fills up, and of all jobs this one has the most in it: {bytes_text(size)} of "
        f"{bytes_text(most)}. A full Redis refuses the writes of all jobs: give it more memory"
    )
