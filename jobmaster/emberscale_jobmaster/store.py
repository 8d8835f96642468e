"""The durable state in Redis, written by one master at a time.

Keys of a job: `emberscale:<uid>:term` counts masters, and is the fencing token of the one that writes; `:state` is the
state; `:blocks` holds the index of each data file; `:bad` the malformed records. The last two are written ahead of the
state that refers to them, and writing the same thing twice changes nothing.
"""

from collections.abc import Iterable, Mapping
from typing import cast

import redis
from pydantic import TypeAdapter, ValidationError

from emberscale_jobmaster.state import JobState

_SAVE = """
local term = tonumber(redis.call('GET', KEYS[1]) or '0')
if term > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
_TIMEOUT_SECONDS = 5.0

_state_json = TypeAdapter(JobState)


class StoreUnavailableError(Exception):
    """Redis does not answer, or not as it should."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"Redis at {url} cannot be used: {problem}")


class UnreadableStateError(Exception):
    """The state in Redis was written by something else than this version."""


class DeposedError(Exception):
    """Another master of the same job has started; this one must go."""


class JobStore:
    """What one master reads and writes. All methods may raise StoreUnavailableError."""

    def __init__(self, url: str, job_uid: str) -> None:
        self.url = redacted(url)
        self._redis: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
        )
        self._save = self._redis.register_script(_SAVE)
        prefix = f"emberscale:{job_uid}"
        self._term_key, self._state_key = f"{prefix}:term", f"{prefix}:state"
        self._blocks_key, self._bad_key = f"{prefix}:blocks", f"{prefix}:bad"
        self.term = 0
        """How many masters the job has had, this one included; 0 before `open`."""

    def open(self) -> JobState | None:
        """Deposes the master before, if any, and returns the state that it left. Raises UnreadableStateError."""
        with self._errors():
            self.term = self._redis.incr(self._term_key)
            document = cast(bytes | None, self._redis.get(self._state_key))
        try:
            return None if document is None else _state_json.validate_json(document)
        except ValidationError as error:
            raise UnreadableStateError(f"{self._state_key} in Redis at {self.url}: {error}") from error

    def save(self, state: JobState) -> None:
        """Replaces the state. Raises DeposedError."""
        with self._errors():
            ours = self._save(
                keys=[self._term_key, self._state_key], args=[self.term, _state_json.dump_json(state, by_alias=True)]
            )
        if not ours:
            raise DeposedError(f"a master with a term above {self.term} has started")

    def confirm(self) -> None:
        """Raises DeposedError if another master has started."""
        with self._errors():
            term = int(cast(bytes | None, self._redis.get(self._term_key)) or 0)
        if term > self.term:
            raise DeposedError(f"a master with term {term} has started")

    def save_blocks(self, split: str, file_number: int, blocks: bytes) -> None:
        """Keeps the index of one file."""
        with self._errors():
            self._redis.hset(self._blocks_key, f"{split}/{file_number}", blocks)

    def load_blocks(self) -> Mapping[tuple[str, int], bytes]:
        """The indexes of all files, by split and file number."""
        with self._errors():
            entries = cast(dict[bytes, bytes], self._redis.hgetall(self._blocks_key))
        keys = (key.decode().partition("/") for key in entries)
        return {(split, int(number)): entries[f"{split}/{number}".encode()] for split, _, number in keys}

    def add_bad_records(self, records: Iterable[tuple[str, int]]) -> None:
        """Remembers malformed records, by file and line."""
        with self._errors():
            self._redis.sadd(self._bad_key, *(f"{line}:{file}" for file, line in records))

    def load_bad_records(self) -> set[tuple[str, int]]:
        """All malformed records that were ever reported."""
        with self._errors():
            members = cast(set[bytes], self._redis.smembers(self._bad_key))
        parted = (member.decode().partition(":") for member in members)
        return {(file, int(line)) for line, _, file in parted}

    def close(self) -> None:
        """Ends the connections."""
        self._redis.close()

    def _errors(self) -> "_Translated":
        return _Translated(self.url)


class _Translated:
    """Turns what the Redis client raises into StoreUnavailableError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, redis.RedisError | OSError):
            raise StoreUnavailableError(self._url, str(error)) from error


def redacted(url: str) -> str:
    """A Redis URL as it may be shown: without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at and credentials else ''}{place}"
