"""Flash checkpoints in a real redis-server: what a job's parameter servers and master may do there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.kubernetes.redis_servers import FlashRedis

from emberscale_jobmaster.flash_manifests import FlashManifests


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FlashRedis]:
    started = FlashRedis(tmp_path)
    yield started
    started.end()


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
