"""The users of jobs in a Redis: what holds for that of the masters' states and for that for flash checkpoints."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from structlog.testing import capture_logs
from tests.operator.kubernetes.redis_servers import FlashRedis, RedisServer, StateRedis

from emberscale_operator.kubernetes.roster import Admission, Roster
from eventually import until
from redis_attacker import outcomes, refused

Server = RedisServer[Any]


@pytest.fixture(params=[StateRedis, FlashRedis])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with request.param(tmp_path) as started:
        yield started


def reach(server: Server, job: str, password: str = "") -> None:
    """Raises an error unless the job has a user with this password."""
    redis.Redis.from_url(server.url_of(job, password)).ping()


async def test_a_jobs_user_reaches_nothing_of_another_job_or_of_the_server(server: Server) -> None:
    async with server.operator("victim", "mallory"):
        server.write("victim")
        before = server.contents()
        mallory = server.url_of("mallory")
        for name, outcome in outcomes(mallory, f"victim{server.scope}", f"mallory{server.scope}").items():
            assert refused(outcome), (name, outcome)
        assert server.contents() == before
        reach(server, "victim")


async def test_a_job_stores_nothing_in_another_database_where_nobody_looks(server: Server) -> None:
    async with server.operator("mallory"):
        other = urlsplit(server.url_of("mallory"))._replace(path="/7").geturl()
        with pytest.raises(redis.ResponseError, match=r"no permissions|can't run this command"):
            redis.Redis.from_url(other).set(f"emberscale:mallory{server.scope}:term", "x")


async def test_the_users_of_an_operator_with_another_database_reach_that_one(server: Server) -> None:
    server.url = urlsplit(server.url)._replace(path="/7").geturl()
    async with server.operator("job-1"):
        reach(server, "job-1")


async def test_a_redis_that_has_forgotten_the_users_gets_them_back(server: Server) -> None:
    async with server.operator("job-1") as tenants:
        server.kill()
        await tenants.look()
        server.start()
        assert not server.has_user_of("job-1")
        await tenants.look()
        server.write("job-1")


async def test_an_operator_looks_at_redis_again_and_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with server.operator("job-1") as tenants:
        monkeypatch.setattr(f"{type(tenants).__module__}._LOOK_SECONDS", 0.01)
        keeps = asyncio.create_task(tenants.keep())
        server.kill()
        server.start()
        await until(lambda: server.has_user_of("job-1"))
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


async def test_an_operator_that_ends_while_it_looks_ends_at_once_though_the_look_loses_that(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = asyncio.Event()

    async def lose_the_cancellation() -> None:
        looks.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async with server.operator() as tenants:
        monkeypatch.setattr(f"{type(tenants).__module__}._LOOK_SECONDS", 3600.0)
        monkeypatch.setattr(tenants, "look", lose_the_cancellation)
        keeps = asyncio.create_task(tenants.keep())
        await looks.wait()
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


async def test_nothing_of_a_deleted_job_is_left(server: Server) -> None:
    async with server.operator("job-1") as tenants:
        server.write("job-1")
        await server.remove(tenants, "job-1")
        await tenants.look()
        assert not server.has_user_of("job-1")
        assert server.contents() == {}


async def test_a_redis_that_has_forgotten_the_users_does_not_get_that_of_a_deleted_job(server: Server) -> None:
    async with server.operator("job-1", "job-2") as tenants:
        await server.remove(tenants, "job-1")
        await tenants.look()
        server.kill()
        await tenants.look()
        server.start()
        await tenants.look()
        assert server.users() == {"default", server.user_of("job-2")}


async def test_what_was_deleted_while_no_operator_ran_is_swept_and_nothing_else(server: Server) -> None:
    async with server.operator("still-there", "gone"):
        server.admin.acl_setuser("somebody-else", enabled=True)
        for job in ("still-there", "gone"):
            server.write(job)
    before = server.contents_of("still-there")
    async with server.operator("new") as tenants:
        await tenants.sweep({"ours": ["still-there"]})
        await tenants.look()
    kept = {server.user_of(job) for job in ("still-there", "new")}
    assert server.users() == {"default", "somebody-else", *kept}
    assert server.contents("emberscale:*") == before
    assert server.namespaces() == {"still-there": "ours", "new": "ours"}


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> None:
    """Lets `happens` run once, after an operator has chosen which users to make and before Redis makes them."""
    enter, first = Roster.enter, [happens]

    async def slow(roster: Roster, due: Mapping[str, Admission]) -> None:
        if first:
            await first.pop()()
        await enter(roster, due)

    monkeypatch.setattr(Roster, "enter", slow)


async def test_a_job_whose_admission_changes_while_its_user_is_made_gets_the_later_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server.operator() as tenants:

        async def change() -> None:
            tenants.admit("job-1", "theirs", "another-password")

        meanwhile(monkeypatch, change)
        tenants.admit("job-1", "ours", "password-job-1")
        await tenants.look()
        assert server.namespaces() == {"job-1": "ours"}
        await tenants.look()
        assert server.namespaces() == {"job-1": "theirs"}
        reach(server, "job-1", "another-password")


async def test_a_job_that_is_deleted_while_its_user_is_made_has_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server.operator() as tenants:
        meanwhile(monkeypatch, lambda: server.remove(tenants, "job-1"))
        tenants.admit("job-1", "ours", "password-job-1")
        await tenants.look()
        assert not server.has_user_of("job-1")
        assert server.namespaces() == {}


@asynccontextmanager
async def upgraded(server: Server) -> AsyncIterator[Any]:
    """Runs an operator of jobs of two namespaces, and then one that has yet to see a job."""
    async with server.operator("a", "gone") as tenants:
        tenants.admit("b", "theirs", "password-b")
        await tenants.look()
        for job in ("a", "gone", "b"):
            server.write(job)
    async with server.operator() as tenants:
        yield tenants


def left_users(logs: list[Any]) -> list[dict[str, str]]:
    """Returns the jobs that each warning of users that stay names, with their namespaces."""
    return [entry["job_uids"] for entry in logs if entry["event"] == "redis_users_left"]


async def test_jobs_of_a_namespace_that_is_no_longer_watched_keep_their_users_and_what_they_wrote(
    server: Server,
) -> None:
    async with upgraded(server) as tenants:
        before = server.contents_of("b")
        with capture_logs() as logs:
            for _ in range(2):
                await tenants.sweep({"ours": ["a"]})
                await tenants.look()
    assert server.users() == {"default", server.user_of("a"), server.user_of("b")}
    assert server.contents_of("b") == before
    assert server.contents_of("gone") == {}
    assert server.namespaces() == {"a": "ours", "b": "theirs"}
    assert left_users(logs) == [{"b": "theirs"}]


@pytest.mark.parametrize("listing", [{"ours": ["a"], "theirs": []}, {"": ["a"]}], ids=["by name", "cluster"])
async def test_jobs_go_with_their_namespace(server: Server, listing: dict[str, list[str]]) -> None:
    """A namespace that no longer exists has an empty listing, or none of its own."""
    async with upgraded(server) as tenants:
        await tenants.sweep(listing)
        await tenants.look()
    assert server.users() == {"default", server.user_of("a")}
    assert server.namespaces() == {"a": "ours"}


async def test_a_user_of_unknown_namespace_stays_unless_all_namespaces_are_watched(server: Server) -> None:
    """Redis may have lost its newest writes, and has its users in a file of their own."""
    async with upgraded(server) as tenants:
        server.admin.hdel(f"{server.user_of('')}namespaces", "b")
        with capture_logs() as logs:
            await tenants.sweep({"ours": ["a"], "theirs": []})
            await tenants.look()
        assert server.has_user_of("b")
        assert left_users(logs) == [{"b": "unknown"}]
        await tenants.sweep({"": ["a"]})
        await tenants.look()
        assert not server.has_user_of("b")


async def test_keys_of_a_deleted_job_are_swept_though_redis_has_lost_its_user(server: Server) -> None:
    async with upgraded(server) as tenants:
        server.admin.acl_deluser(server.user_of("gone"))
        await tenants.sweep({"ours": ["a"]})
        await tenants.look()
        assert server.contents_of("gone") == {}
        assert server.namespaces() == {"a": "ours", "b": "theirs"}


async def test_operators_of_different_namespaces_share_a_redis(server: Server) -> None:
    other = "other/operator"
    async with (
        server.operator("a", namespace="ours") as ours,
        server.operator("b", installation=other, namespace="theirs") as theirs,
    ):
        with capture_logs() as logs:
            await ours.sweep({"ours": ["a"]})
            await ours.look()
            await theirs.sweep({"theirs": ["b"]})
            await theirs.look()
        assert server.users() == {"default", server.user_of("a"), server.user_of("b", other)}
        assert left_users(logs) == []


async def test_a_redis_that_is_full_gets_users_and_later_their_namespaces_and_loses_what_is_gone(
    server: Server,
) -> None:
    async with server.operator("gone", "gone-too"):
        for job in ("gone", "gone-too"):
            server.write(job)
    server.admin.config_set("maxmemory", 1)
    async with server.operator("job-1") as tenants:
        await tenants.sweep({"ours": ["job-1"]})
        await tenants.look()
        assert server.users() == {"default", server.user_of("job-1")}
        assert server.contents() == {}
        server.admin.config_set("maxmemory", 0)
        await tenants.sweep({"ours": ["job-1"]})
        await tenants.look()
        assert server.namespaces() == {"job-1": "ours"}
