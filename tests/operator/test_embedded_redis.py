"""When the local operator decides that a Redis cannot start."""

import asyncio
from pathlib import Path

import pytest
import redis

from emberscale_api.errors import UnavailableError
from emberscale_api.job.roles import Role
from emberscale_operator.local.embedded_redis import RedisWatch
from emberscale_operator.machine import ExitReason, Instance, InstanceExit, InstanceId, InstanceState, Resources


def ended(*, deleted: bool) -> Instance:
    over = InstanceExit(ExitReason.COMPLETED, 0, 1.0, deleted=deleted)
    return Instance(InstanceId(Role.REDIS, 0, 1), InstanceState.EXITED, Resources(), 0.0, over)


def test_a_server_that_is_ended_before_it_answers_is_no_failure_to_start(tmp_path: Path) -> None:
    watch = RedisWatch("redis://127.0.0.1:1", tmp_path / "redis-0.log", tmp_path)
    assert watch.watch([ended(deleted=True)], 2.0) == (ended(deleted=True),)


def test_a_server_that_ends_by_itself_before_it_answers_cannot_start(tmp_path: Path) -> None:
    watch = RedisWatch("redis://127.0.0.1:1", tmp_path / "redis-0.log", tmp_path)
    with pytest.raises(UnavailableError, match="could not start"):
        watch.watch([ended(deleted=False)], 2.0)


def test_a_server_that_cannot_start_from_its_file_is_said_to_need_it_removed(tmp_path: Path) -> None:
    file = tmp_path / "appendonly.aof"
    file.write_text("*1")
    watch = RedisWatch("redis://127.0.0.1:1", tmp_path / "redis-0.log", tmp_path)
    with pytest.raises(UnavailableError, match=f"{file} is damaged, remove that: --resume"):
        watch.watch([ended(deleted=False)], 2.0)


async def test_a_server_that_loads_its_file_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Instance(InstanceId(Role.REDIS, 0, 1), InstanceState.RUNNING, Resources(), 0.0)
    watch = RedisWatch("redis://127.0.0.1:1", tmp_path / "redis-0.log", tmp_path)
    now = 0.0

    async def ping() -> None:
        raise redis.BusyLoadingError if now < 60.0 else redis.ConnectionError

    monkeypatch.setattr(watch._client, "ping", ping)
    for now in (*range(60), 79.0):
        assert watch.watch([runs], now) == (runs,)
        await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="could not start"):
        watch.watch([runs], 100.0)
