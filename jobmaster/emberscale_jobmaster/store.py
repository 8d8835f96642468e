"""The durable state in Redis, written by one master at a time.

Keys of a job: `emberscale:<uid>:term` counts masters, and is the fencing token of the one that writes; `:state` is the
state; `:blocks` holds the index of each data file; `:bad` the malformed records. The last two are written ahead of the
state that refers to them, and writing the same thing twice changes nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import redis
import structlog
from pydantic import TypeAdapter, ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from emberscale_jobmaster.state import JobState

_SAVE = """
local term = redis.call('GET', KEYS[1])
if not term then return -1 end
if term ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""
_SAVED, _EMPTY = 1, -1
_TIMEOUT_SECONDS = 5.0

_log = structlog.get_logger()
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
    """What one master reads and writes. All methods may raise StoreUnavailableError.

    What was written ahead is kept in memory too: a Redis that lost everything gets it back from the master.
    """

    def __init__(self, url: str, job_uid: str) -> None:
        self.url = redacted(url)
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 1),
        )
        self._save = self._redis.register_script(_SAVE)
        prefix = f"emberscale:{job_uid}"
        self._term_key, self._state_key = f"{prefix}:term", f"{prefix}:state"
        self._blocks_key, self._bad_key = f"{prefix}:blocks", f"{prefix}:bad"
        self._blocks: dict[str, bytes] = {}
        self._bad: set[str] = set()
        self.term = 0
        """How many masters the job has had, this one included; 0 before `open`."""

    def open(self) -> JobState | None:
        """Deposes the master before, if any, and returns the state that it left. Raises UnreadableStateError."""
        with self._answering():
            self.term = self._redis.incr(self._term_key)
            document = cast(bytes | None, self._redis.get(self._state_key))
            blocks = cast(dict[bytes, bytes], self._redis.hgetall(self._blocks_key))
            bad = cast(set[bytes], self._redis.smembers(self._bad_key))
        self._blocks = {name.decode(): content for name, content in blocks.items()}
        self._bad = {entry.decode() for entry in bad}
        try:
            return None if document is None else _state_json.validate_json(document)
        except ValidationError as error:
            problem = f"{error.error_count()} fields are not as this version of Emberscale writes them"
            raise UnreadableStateError(f"{self._state_key} in Redis at {self.url}: {problem}") from error

    def save(self, state: JobState) -> None:
        """Replaces the state. Raises DeposedError."""
        document = _state_json.dump_json(state)
        with self._answering():
            outcome = self._write(document)
            if outcome == _EMPTY:
                _log.warning("Redis has lost the job's state and gets it back", redis=self.url)
                self._restore()
                outcome = self._write(document)
        if outcome != _SAVED:
            raise DeposedError(f"another master writes the state in Redis at {self.url}")

    def confirm(self) -> None:
        """Raises DeposedError if another master has started."""
        with self._answering():
            term = cast(bytes | None, self._redis.get(self._term_key))
        if term is not None and int(term) != self.term:
            raise DeposedError(f"the master with term {int(term)} has started after the one with term {self.term}")

    def save_blocks(self, split: str, file_number: int, blocks: bytes) -> None:
        """Keeps the index of one file."""
        name = f"{split}/{file_number}"
        with self._answering():
            self._redis.hset(self._blocks_key, name, blocks)
        self._blocks[name] = blocks

    def blocks(self) -> Mapping[tuple[str, int], bytes]:
        """The indexes of all files, by split and file number."""
        parted = ((name.partition("/"), content) for name, content in self._blocks.items())
        return {(split, int(number)): content for (split, _, number), content in parted}

    def add_bad_records(self, records: Iterable[tuple[str, int]]) -> None:
        """Remembers malformed records, by file and line."""
        entries = {f"{line}:{file}" for file, line in records}
        with self._answering():
            self._redis.sadd(self._bad_key, *entries)
        self._bad |= entries

    def bad_records(self) -> set[tuple[str, int]]:
        """All malformed records that were ever reported."""
        parted = (entry.partition(":") for entry in self._bad)
        return {(file, int(line)) for line, _, file in parted}

    def close(self) -> None:
        """Ends the connections."""
        self._redis.close()

    def _write(self, document: bytes) -> int:
        return cast(int, self._save(keys=[self._term_key, self._state_key], args=[self.term, document]))

    def _restore(self) -> None:
        transaction = self._redis.pipeline()
        transaction.set(self._term_key, self.term, nx=True)
        for name, content in self._blocks.items():
            transaction.hset(self._blocks_key, name, content)
        if self._bad:
            transaction.sadd(self._bad_key, *self._bad)
        transaction.execute()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailableError(self.url, str(error)) from error


def redacted(url: str) -> str:
    """A Redis URL as it may be shown: without its password."""
    scheme, separator, rest = url.partition("://")
    credentials, _, place = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if credentials else ''}{place}"
