"""The redis-servers of the tests end with the block that started them."""

import signal
from pathlib import Path

import pytest
import redis

from redis_process import RedisProcess


@pytest.mark.parametrize("has_port", [False, True])
def test_a_server_ends_with_its_block_though_that_fails(tmp_path: Path, has_port: bool) -> None:
    server = RedisProcess(tmp_path, password="a/b@c", has_port=has_port)

    def fail() -> None:
        with server:
            redis.Redis.from_url(server.url).set("key", "value")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert server.process.returncode is not None
    with pytest.raises(redis.ConnectionError):
        redis.Redis.from_url(server.url).ping()


def test_a_server_that_does_not_start_is_told_of_at_once(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path, "--no-such-setting", "1")
    with pytest.raises(AssertionError, match="redis-server has ended"), server:
        pass
    assert server.process.returncode


def test_a_server_that_is_started_again_has_its_url_and_what_it_saved(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always") as server:
        redis.Redis.from_url(server.url).set("key", "value")
        server.kill()
        server.start()
        assert redis.Redis.from_url(server.url).get("key") == b"value"


def test_a_server_that_hangs_ends_too(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as server:
        server.process.send_signal(signal.SIGSTOP)
    assert server.process.returncode == -signal.SIGKILL
