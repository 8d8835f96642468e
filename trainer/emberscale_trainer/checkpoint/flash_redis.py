"""A connection to the Redis for flash checkpoints that pipelines commands and never waits for long."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from emberscale_api.errors import UnavailableError
from emberscale_api.readable import duration_text

PATIENCE_SECONDS = 5.0
"""How long Redis may neither accept nor answer anything."""
_WINDOW = 8
"""The most unanswered commands: enough that neither side waits for the other, in little memory. Half of the writing
commands carry a file."""
_COPIED_BYTES = 6000
"""Longer values are sent from where they lie; hiredis copies all."""

Command = tuple[str | int | memoryview, ...]


class FlashUnusableError(UnavailableError):
    """Redis cannot be used for a flash checkpoint now; the text says why, for people."""


class RedisFullError(FlashUnusableError):
    """Redis has no room."""


class FlashRedis:
    """One connection, for one piece of work in one thread. All methods raise FlashUnusableError."""

    def __init__(self, url: str) -> None:
        """Connects when the context is entered."""
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=PATIENCE_SECONDS,
            socket_connect_timeout=PATIENCE_SECONDS,
            retry=Retry(NoBackoff(), 0),
            command_packer=PythonRespSerializer(_COPIED_BYTES, _encoded),
        )
        self._connection: Any = None
        self._waiting = 0
        self._refusal: FlashUnusableError | None = None

    def __enter__(self) -> Self:
        try:
            self._connection = self._client.connection_pool.get_connection()
        except (RedisError, OSError) as error:
            self._client.close()
            raise _unusable(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.disconnect()
        self._client.close()

    def send(self, command: Command) -> None:
        """Sends a command, and reads older answers if many are outstanding. The arguments may change afterwards."""
        if self._waiting >= _WINDOW:
            self._answer()
        self._send(command)

    def flush(self) -> None:
        """Reads all answers; raises the first refusal."""
        while self._waiting:
            self._answer()
        self._raise()

    def pipelined(self, commands: Iterable[Command]) -> Iterator[Any]:
        """Yields the answers to commands, in order."""
        for command in commands:
            if self._waiting >= _WINDOW:
                yield self._answer()
            self._send(command)
        while self._waiting:
            yield self._answer()

    def remove(self, keys: Sequence[str]) -> None:
        """Removes keys, even after refused commands."""
        self._refusal = None
        while self._waiting:
            self._answer(raises=False)
        answers = deque(self.pipelined(("UNLINK", key) for key in keys), maxlen=0)
        answers.clear()

    def _send(self, command: Command) -> None:
        try:
            self._connection.send_command(*command)
        except (RedisError, OSError) as error:
            raise self._broken(error) from error
        self._waiting += 1

    def _answer(self, raises: bool = True) -> Any:
        self._waiting -= 1
        try:
            return self._connection.read_response()
        except ResponseError as error:
            self._refusal = self._refusal or _unusable(error)
        except (RedisError, OSError) as error:
            raise self._broken(error) from error
        if raises:
            self._raise()
        return None

    def _raise(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _broken(self, error: Exception) -> FlashUnusableError:
        self._waiting = 0
        self._connection.disconnect()
        return _unusable(error)


def _encoded(argument: str | int | bytes | memoryview) -> bytes | memoryview:
    return argument if isinstance(argument, bytes | memoryview) else str(argument).encode()


def _unusable(error: Exception) -> FlashUnusableError:
    if isinstance(error, OutOfMemoryError):
        return RedisFullError("Redis is full: give it more memory, or lower spec.checkpoint.flash.maxBytes")
    if isinstance(error, redis.TimeoutError):
        return FlashUnusableError(f"Redis does not answer within {duration_text(PATIENCE_SECONDS)}")
    return FlashUnusableError(f"Redis cannot be used: {error}")
