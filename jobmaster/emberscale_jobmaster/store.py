"""The durable state in Redis, written by one master at a time.

The writer's fencing token is the term, which counts masters, together with the holder, a random name. A Redis that lost
everything counts from 1 again, and then two masters may have the same term. Blocks and bad records are written ahead of
the state that refers to them; writing the same thing twice changes nothing.

All keys expire when no master has written for long. By then the job was deleted while no operator ran, or can continue
from its checkpoint.
"""

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from enum import Enum, auto
from typing import cast

import redis
import structlog
from pydantic import TypeAdapter, ValidationError
from redis.backoff import NoBackoff
from redis.retry import Retry

from emberscale_api.compatibility import StateKeys
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_jobmaster.state import JobState

_ATTEMPTS = 3
"""The attempts to save, against concurrent writers or broken connections, before Redis counts as unusable."""
_TIMEOUT_SECONDS = 5.0
_KEPT_SECONDS = 14 * 24 * 3600

_log = structlog.get_logger()
_state_json = TypeAdapter(JobState)


class StoreUnavailableError(UnavailableError):
    """Redis does not answer, or answers with an error."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"Redis at {url} cannot be used: {problem}")


class UnreadableStateError(InvalidError):
    """The state in Redis was not written by this version."""


class DeposedError(Exception):
    """Another master of the same job has started; this one must exit."""


class _Found(Enum):
    """The writer that a master finds in Redis."""

    US = auto()
    ANOTHER = auto()
    NOTHING = auto()


class JobStore:
    """The state of one job in Redis. All methods may raise StoreUnavailableError.

    The store also keeps blocks and bad records in memory, to rewrite them to a Redis that lost everything or its last
    writes. They enter memory once Redis has them, so Redis has fewer only if it lost some.
    """

    def __init__(self, url: str, job_uid: str) -> None:
        self.url = redacted(url)
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 1),
        )
        self._keys = StateKeys.of(job_uid)
        self._holder = uuid.uuid4().hex
        self._ahead = threading.Lock()
        self._blocks: dict[str, bytes] = {}
        self._bad: set[str] = set()
        self.term = 0
        """How many masters the job has had, this one included; 0 before `open`."""

    def open(self) -> JobState | None:
        """Deposes the previous master, if any, and returns the state that it left. Raises UnreadableStateError."""
        with self._answering():
            transaction = self._redis.pipeline()
            transaction.incr(self._keys.term)
            transaction.set(self._keys.holder, self._holder)
            self.term = transaction.execute()[0]
            document = cast(bytes | None, self._redis.get(self._keys.state))
            blocks = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.blocks))
            bad = cast(set[bytes], self._redis.smembers(self._keys.bad))
        with self._ahead:
            self._blocks = {name.decode(): content for name, content in blocks.items()}
            self._bad = {entry.decode() for entry in bad}
        try:
            return None if document is None else _state_json.validate_json(document)
        except ValidationError as error:
            problem = f"{error.error_count()} fields do not match what this version of Emberscale writes"
            raise UnreadableStateError(f"{self._keys.state} in Redis at {self.url}: {problem}") from error

    def save(self, state: JobState) -> None:
        """Replaces the state. Raises DeposedError."""
        document = _state_json.dump_json(state)
        with self._answering():
            found = self._write(document)
            if found is _Found.NOTHING:
                _log.warning("redis_state_rewritten", address=self.url)
                self._restore()
                found = self._write(document)
        if found is not _Found.US:
            raise DeposedError(f"another master writes the state in Redis at {self.url}")

    def confirm(self) -> None:
        """Raises DeposedError if another master has started."""
        with self._answering():
            term, holder = cast(list[bytes | None], self._redis.mget(self._keys.term, self._keys.holder))
        if term is not None and (int(term), holder) != (self.term, self._holder.encode()):
            raise DeposedError(f"the master with term {int(term)} has started after the one with term {self.term}")

    def save_blocks(self, split: str, file_number: int, blocks: bytes) -> None:
        """Keeps the index of one file."""
        name = f"{split}/{file_number}"
        with self._answering():
            self._redis.hset(self._keys.blocks, name, blocks)
        with self._ahead:
            self._blocks[name] = blocks

    def blocks(self) -> Mapping[tuple[str, int], bytes]:
        """The indexes of all files, by split and file number."""
        parted = ((name.partition("/"), content) for name, content in self._written_ahead()[0].items())
        return {(split, int(number)): content for (split, _, number), content in parted}

    def add_bad_records(self, records: Iterable[tuple[str, int]]) -> None:
        """Remembers malformed records, by file and line."""
        entries = {f"{line}:{file}" for file, line in records}
        with self._answering():
            self._redis.sadd(self._keys.bad, *entries)
        with self._ahead:
            self._bad |= entries

    def bad_records(self) -> set[tuple[str, int]]:
        """Returns all malformed records that were ever reported."""
        parted = (entry.partition(":") for entry in self._written_ahead()[1])
        return {(file, int(line)) for line, _, file in parted}

    def close(self) -> None:
        """Ends the connections."""
        self._redis.close()

    def _write(self, document: bytes) -> _Found:
        """Writes if this master is the writer; returns which writer it found.

        Uses a transaction rather than a script: a script that hangs blocks all jobs, so jobs may not run scripts.
        """
        for _ in range(_ATTEMPTS - 1):
            with suppress(redis.WatchError):
                return self._compare_and_write(document)
        return self._compare_and_write(document)

    def _compare_and_write(self, document: bytes) -> _Found:
        """Raises redis.WatchError without writing if the fencing token changed meanwhile.

        First rewrites blocks and bad records that Redis has lost: the state may refer to them.
        """
        keys = self._keys
        known = self._count_ahead()
        with self._redis.pipeline() as transaction:
            transaction.watch(keys.term, keys.holder)  # type: ignore[no-untyped-call]  # so it is in redis-py
            (term, holder), *found = self._look()
            if term is None:
                return _Found.NOTHING
            if (term, holder) != (str(self.term).encode(), self._holder.encode()):
                return _Found.ANOTHER
            if any(there < ours for there, ours in zip(found, known, strict=True)):
                _log.warning("redis_blocks_rewritten", address=self.url)
                self._restore()
            transaction.multi()
            transaction.set(keys.state, document)
            for key in astuple(keys):
                transaction.expire(key, _KEPT_SECONDS)
            transaction.execute()
        return _Found.US

    def _look(self) -> tuple[list[bytes | None], int, int]:
        """Returns the fencing token, and the numbers of blocks and bad records in Redis, after a single round trip.

        A connection that watches keys would send each command by itself, so this is another one.
        """
        with self._redis.pipeline(transaction=False) as reads:
            reads.mget(self._keys.term, self._keys.holder)
            reads.hlen(self._keys.blocks)
            reads.scard(self._keys.bad)
            return cast(tuple[list[bytes | None], int, int], tuple(reads.execute()))

    def _count_ahead(self) -> tuple[int, int]:
        with self._ahead:
            return len(self._blocks), len(self._bad)

    def _written_ahead(self) -> tuple[dict[str, bytes], set[str]]:
        """Copies of the blocks and the bad records: calls of members add to them meanwhile."""
        with self._ahead:
            return dict(self._blocks), set(self._bad)

    def _restore(self) -> None:
        blocks, bad = self._written_ahead()
        transaction = self._redis.pipeline()
        transaction.set(self._keys.term, self.term, nx=True)
        transaction.set(self._keys.holder, self._holder, nx=True)
        for name, content in blocks.items():
            transaction.hset(self._keys.blocks, name, content)
        if bad:
            transaction.sadd(self._keys.bad, *bad)
        transaction.execute()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (redis.RedisError, OSError) as error:
            raise StoreUnavailableError(self.url, str(error)) from error


def redacted(url: str) -> str:
    """Returns a Redis URL without its password, fit to be shown."""
    scheme, separator, rest = url.partition("://")
    credentials, _, place = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if credentials else ''}{place}"
