"""Flash checkpoints in a real redis-server: what a job's parameter servers and master may do there."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.operator.kubernetes.redis_servers import FlashRedis

from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_operator.kubernetes.roster import Roster


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
