"""Flash checkpoints in a real redis-server: what a job's parameter servers and master may do there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError
from tests.operator.kubernetes.redis_servers import FlashRedis

from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_operator.kubernetes.roster import Roster
from own_logs import own_logs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FlashRedis]:
    with FlashRedis(tmp_path) as started:
        yield started


async def test_servers_and_masters_work_as_the_jobs_user(server: FlashRedis) -> None:
    async with server.operator("job-1"):
        server.write("job-1")
        newest = FlashManifests(server.url_of("job-1"), "job-1").newest()
        assert newest is not None
        assert newest.id == "flash-00000002"
        assert server.admin.dbsize() > 3


async def test_a_server_sweeps_what_the_one_before_left_as_the_jobs_user(server: FlashRedis) -> None:
    async with server.operator("job-1"):
        left = "emberscale:job-1:flash:ps-0/left.rows"
        server.admin.set(left, b"x")
        server.admin.sadd("emberscale:job-1:flash:ps-0/inventory", left)
        server.write("job-1")
        assert not server.admin.exists(left)


async def test_looks_that_are_asked_for_at_once_follow_each_other(
    server: FlashRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def noting(owner: type, name: str) -> None:
        carry_out = getattr(owner, name)

        async def noted(*arguments: object) -> object:
            steps.append(name)
            return await carry_out(*arguments)

        monkeypatch.setattr(owner, name, noted)

    noting(Redis, "info")
    noting(Roster, "enter")
    async with server.operator() as tenants:
        steps.clear()
        tenants.admit("job-1", "ours", "password-job-1")
        await asyncio.gather(tenants.look(), tenants.look())
    assert steps == ["info", "enter", "info"]


async def test_a_job_that_cannot_be_removed_is_told_of_once_and_keeps_no_other_from_being_removed(
    server: FlashRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = ("gone-1", "gone-2", "gone-3")
    delete, tried = Redis.acl_deluser, list[str]()

    async def fails_for_the_first(client: Redis, user: str) -> object:
        tried.append(user)
        if user == tried[0]:
            raise ResponseError("Redis is busy")
        return await delete(client, user)

    monkeypatch.setattr(Redis, "acl_deluser", fails_for_the_first)
    async with server.operator(*jobs) as tenants:
        for job in jobs:
            server.admin.set(f"emberscale:{job}:flash:ps-0/1.rows", b"x")
            tenants.remove(job)
        with own_logs() as logs:
            await tenants.look()
            await tenants.look()
        (kept,) = (job for job in jobs if server.user_of(job) == tried[0])
        assert [(entry["job_uid"], entry["problem"]) for entry in logs] == [(kept, "Redis is busy")]
        assert server.users() == {"default", server.user_of(kept)}
        assert server.contents() == server.contents_of(kept) | server.contents("*namespaces")
        monkeypatch.undo()
        await tenants.look()
        assert server.users() == {"default"}
        assert server.contents() == {}
