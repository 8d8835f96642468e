"""The namespaces of the jobs that have users in a Redis, kept there beside the users.

The namespaces that an operator watches may become fewer while jobs run. So a job that is in no listing is gone only if
its namespace was listed.
"""

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import NamedTuple, cast

import redis.asyncio
import structlog

UNKNOWN = ""
"""Stands for the namespace of a user that has none in Redis, as in one that lost its newest writes."""
EVERYWHERE = ""
"""Stands for the whole cluster, in a listing of jobs by namespace."""
_log = structlog.get_logger()


class Admission(NamedTuple):
    """A job that has a user: its namespace, and the user's password."""

    namespace: str
    password: str


def made(entered: Mapping[str, Admission], admitted: Mapping[str, Admission]) -> set[str]:
    """Returns the uids of entered jobs whose admission is still the entered one: it may change while Redis answers."""
    return {uid for uid, admission in entered.items() if admitted.get(uid) == admission}


def missing_jobs(
    tenants: Mapping[str, str], jobs: Mapping[str, Collection[str]], admitted: Collection[str]
) -> tuple[set[str], dict[str, str]]:
    """Returns the uids of jobs that are gone, and the namespaces, by uid, of those that may exist where nobody looked.

    `tenants` are the namespaces of all jobs in Redis, by uid; `jobs` the uids of existing jobs, by each namespace that
    was listed. `admitted` are jobs that exist, listed or not.
    """
    known = {uid for uids in jobs.values() for uid in uids} | set(admitted)
    missing = {uid: namespace for uid, namespace in tenants.items() if uid not in known}
    if EVERYWHERE in jobs:
        return set(missing), {}
    gone = {uid for uid, namespace in missing.items() if namespace in jobs}
    return gone, {uid: namespace for uid, namespace in missing.items() if uid not in gone}


class Roster:
    """The jobs whose users are named `prefix` and their uid, in one hash: namespaces by uid."""

    def __init__(self, connection: redis.asyncio.Redis, prefix: str) -> None:
        self._redis = connection
        self._prefix = prefix
        self._left: dict[str, str] = {}
        self.key = f"{prefix}namespaces"
        """The hash."""

    async def enter(self, namespaces: Mapping[str, str], rules: Mapping[str, Sequence[str]]) -> None:
        """Makes users of the given ACL rules, and notes their jobs' namespaces; both are by uid.

        A full Redis refuses the note, and makes the users all the same.
        """
        steps = self._redis.pipeline(transaction=False)
        for job_uid, namespace in namespaces.items():
            steps.hset(self.key, job_uid, namespace)  # first: a connection that breaks leaves no user without a note
        for job_uid, rule in rules.items():
            steps.execute_command("ACL SETUSER", f"{self._prefix}{job_uid}", *rule)
        answers = await steps.execute(raise_on_error=False)
        noted, made = answers[: len(namespaces)], answers[len(namespaces) :]
        for answer in made:
            if isinstance(answer, Exception):
                raise answer
        problem = next((str(answer) for answer in noted if isinstance(answer, Exception)), None)
        if problem is not None:
            _log.warning("namespaces_of_redis_users_not_kept", users=f"{self._prefix}*", problem=problem)

    async def tenants(self) -> dict[str, str]:
        """Returns the namespaces of all jobs that have a user or a note, by uid."""
        users = cast(list[str], await self._redis.acl_users())
        unknown = {user.removeprefix(self._prefix): UNKNOWN for user in users if user.startswith(self._prefix)}
        return unknown | await cast(Awaitable[dict[str, str]], self._redis.hgetall(self.key))

    def tell_left(self, left: Mapping[str, str]) -> None:
        """Says, once per change, which jobs' users and keys stay; `left` has their namespaces, by uid."""
        if left and left != self._left:
            _log.warning(
                "redis_users_left",
                users=f"{self._prefix}*",
                jobs={uid: namespace or "unknown" for uid, namespace in left.items()},
                consequence="they stay, with the jobs' keys: the jobs may exist in namespaces that were not listed",
            )
        self._left = dict(left)
