"""The jobs that have users in a Redis: who they are, and the namespaces that are kept there beside the users.

The namespaces that an operator watches may become fewer while jobs run. So a job that is in no listing is gone only if
its namespace was listed.
"""

import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import NamedTuple, cast

import redis.asyncio
import structlog
from redis.exceptions import RedisError

UNKNOWN = ""
"""Stands for the namespace of a user that has none in Redis, as in one that lost its newest writes."""
EVERYWHERE = ""
"""Stands for the whole cluster, in a listing of jobs by namespace."""
_TIMEOUT_SECONDS = 5.0
_log = structlog.get_logger()


class Admission(NamedTuple):
    """A job that has a user: its namespace, and the user's password."""

    namespace: str
    password: str


def acl_rules(password: str, keys: Iterable[str], commands: Iterable[str]) -> tuple[str, ...]:
    """The arguments of ACL SETUSER: they replace the whole user, so that no earlier rule is left."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return ("reset", "on", f"#{hashed}", *(f"~{key}" for key in keys), "resetchannels", *commands)


async def remove_each(job_uids: Iterable[str], remove: Callable[[str], Awaitable[None]]) -> dict[str, str]:
    """Removes what each of these jobs left in Redis, although others fail; returns the problems of those, by uid."""
    problems = {}
    for job_uid in job_uids:
        try:
            await remove(job_uid)
        except (RedisError, OSError) as error:
            problems[job_uid] = str(error)
    return problems


class Roster:
    """The jobs whose users are named `prefix` and their uid, in the Redis that `url` names.

    `rules` returns the arguments of ACL SETUSER by uid and password. The users reach only the database of `url`. Raises
    ValueError for a malformed URL.
    """

    def __init__(self, url: str, prefix: str, rules: Callable[[str, str], tuple[str, ...]]) -> None:
        self.redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS, decode_responses=True
        )
        self._prefix = prefix
        self._rules = rules
        # nobody measures or removes what a job has in another database; a client that uses the first selects none
        database = self.redis.connection_pool.connection_kwargs.get("db") or 0
        self._selects = (f"+select|{database}",) if database else ()
        self._left: dict[str, str] = {}
        self.admitted: dict[str, Admission] = {}
        """The jobs that exist, by uid."""
        self.missing: set[str] = set()
        """The uids of those that may have no user."""
        self.key = f"{prefix}namespaces"
        """The hash in Redis: namespaces by uid."""

    def admit(self, job_uid: str, namespace: str, password: str) -> bool:
        """Notes a job that must have a user of this password; returns whether the user has yet to be made."""
        admission = Admission(namespace, password)
        if self.admitted.get(job_uid) == admission:
            return False
        self.admitted[job_uid] = admission
        self.missing.add(job_uid)
        return True

    def dismiss(self, job_uid: str) -> None:
        """Notes that a job is gone."""
        self.admitted.pop(job_uid, None)
        self.missing.discard(job_uid)

    def due(self, without: Collection[str] = ()) -> dict[str, Admission]:
        """Returns the jobs whose users must be made, by uid, but for some."""
        return {job_uid: self.admitted[job_uid] for job_uid in self.missing if job_uid not in without}

    async def enter(self, due: Mapping[str, Admission]) -> None:
        """Makes the users of jobs, and notes the namespaces. A full Redis refuses the notes, and makes the users."""
        steps = self.redis.pipeline(transaction=False)
        for job_uid, job in due.items():  # first: a connection that breaks leaves no user without a note
            steps.hset(self.key, job_uid, job.namespace)
        for job_uid, job in due.items():
            rules = self._rules(job_uid, job.password)
            steps.execute_command("ACL SETUSER", f"{self._prefix}{job_uid}", *rules, *self._selects)
        answers = await steps.execute(raise_on_error=False)
        noted, made = answers[: len(due)], answers[len(due) :]
        for answer in made:
            if isinstance(answer, Exception):
                raise answer
        problem = next((str(answer) for answer in noted if isinstance(answer, Exception)), None)
        if problem is not None:
            _log.warning("namespaces_of_redis_users_not_kept", users=f"{self._prefix}*", problem=problem)

    def settle(self, entered: Mapping[str, Admission]) -> None:
        """Notes that jobs have their users, but for those whose admission has changed while Redis answered."""
        self.missing -= {job_uid for job_uid, job in entered.items() if self.admitted.get(job_uid) == job}

    async def find_gone(self, jobs: Mapping[str, Collection[str]]) -> set[str]:
        """Returns the uids of jobs that have a user or a note, and are gone.

        `jobs` are the uids of existing jobs, by each namespace that was listed; those of other namespaces may exist.
        Logs, once per change, which jobs' users and keys stay for that reason.
        """
        tenants = await self._tenants()
        self.missing |= {job_uid for job_uid in self.admitted if not tenants.get(job_uid)}  # Redis was full
        known = {job_uid for uids in jobs.values() for job_uid in uids} | self.admitted.keys()
        unlisted = {job_uid: namespace for job_uid, namespace in tenants.items() if job_uid not in known}
        gone = {job_uid for job_uid, namespace in unlisted.items() if EVERYWHERE in jobs or namespace in jobs}
        left = {job_uid: namespace or "unknown" for job_uid, namespace in unlisted.items() if job_uid not in gone}
        if left and left != self._left:
            _log.warning(
                "redis_users_left",
                users=f"{self._prefix}*",
                job_uids=left,
                consequence="they stay, with the jobs' keys: the jobs may exist in namespaces that were not listed",
            )
        self._left = left
        return gone

    async def _tenants(self) -> dict[str, str]:
        """Returns the namespaces of all jobs that have a user or a note, by uid."""
        users = cast(list[str], await self.redis.acl_users())
        unknown = {user.removeprefix(self._prefix): UNKNOWN for user in users if user.startswith(self._prefix)}
        return unknown | await cast(Awaitable[dict[str, str]], self.redis.hgetall(self.key))
