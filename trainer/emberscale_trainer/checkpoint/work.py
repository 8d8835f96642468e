"""Background work on checkpoint storage.

`Work` has the progress of background work, its current problem, and a way to end it. `TokenBucket` limits the bytes per
second that a parameter server writes. `ahead` and `each_ahead` read the next items while the caller uses the previous
ones.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog
import tenacity

from emberscale_api.errors import UnavailableError, is_of_storage

_log = structlog.get_logger()

PATIENCE_SECONDS = 600.0
"""How long a failing operation of the storage is retried."""

MISSING_SECONDS = 20.0
"""The same for a missing file: a file that another machine has just written may not be visible at once."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

_END: Any = object()


class StorageUnreachableError(UnavailableError):
    """The storage has refused an operation for too long; its content is unknown."""


class AbandonedError(Exception):
    """The work is no longer wanted."""


class TokenBucket:
    """A token is a byte. A file takes its tokens at once, which may leave a debt; the next file waits until it is paid.

    So the files that begin within `t` seconds have at most `t * rate` bytes and those of one file more. Saves that
    overlap share the bucket.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` returns seconds that never decrease."""
        self._now = now
        self._turn = threading.Lock()
        self._paid_at = -math.inf

    def take(self, size: int, bytes_per_second: int) -> float:
        """Takes the tokens of a file; returns the seconds after which it may be written."""
        with self._turn:
            now = self._now()
            begins = max(now, self._paid_at)
            self._paid_at = begins + size / bytes_per_second
            return begins - now


@dataclass(frozen=True)
class WriteLimit:
    """A bucket, and the rate at which a save takes from it."""

    bucket: TokenBucket
    bytes_per_second: int


class Work:
    """The progress of reading or writing a checkpoint. Other threads may read it meanwhile.

    * `moved_bytes`: the bytes read or written so far.
    * `examined_rows`: the rows examined so far to choose those to write.
    * `waited_seconds`: the time for which the limit of bandwidth kept the writer from working.
    * `problem`: the failure that is being retried, for people; empty if there is none.
    """

    def __init__(
        self,
        patience_seconds: float = PATIENCE_SECONDS,
        missing_seconds: float | None = None,
        limit: WriteLimit | None = None,
    ) -> None:
        """Retries missing files for `missing_seconds` (MISSING_SECONDS), all other errors for `patience_seconds`.

        With `missing_seconds`, so are local files to which access is refused, which also lasts until somebody acts.
        `limit` applies to files that are written; None: they are written at full speed.
        """
        self.limit = limit
        self._patience_seconds = patience_seconds
        self._missing_seconds = MISSING_SECONDS if missing_seconds is None else missing_seconds
        self._refused_seconds = patience_seconds if missing_seconds is None else missing_seconds
        self._abandoned = threading.Event()
        self._is_unlimited = threading.Event()
        self._counting = threading.Lock()
        self.moved_bytes = 0
        self.examined_rows = 0
        self.waited_seconds = 0.0
        self.problem = ""

    def abandon(self) -> None:
        """Makes the work end soon, with AbandonedError."""
        self._abandoned.set()
        self.lift_limit()

    def lift_limit(self) -> None:
        """Lets the writer go on at full speed, at once if it waits for bandwidth. Another thread may call this."""
        self._is_unlimited.set()

    def pause(self, seconds: float) -> None:
        """Waits. Raises AbandonedError, as soon as the work is abandoned."""
        if self._abandoned.wait(seconds):
            raise AbandonedError

    def await_turn(self, seconds: float) -> float:
        """Waits, but no longer than the limit applies or the work is wanted; returns the seconds waited."""
        began = time.monotonic()
        self._is_unlimited.wait(seconds)
        return time.monotonic() - began

    def await_bandwidth(self, size: int) -> None:
        """Waits until a file of `size` bytes may be written. Raises AbandonedError."""
        if self.limit is None:
            return
        if not self._is_unlimited.is_set():
            self.waited_seconds += self.await_turn(self.limit.bucket.take(size, self.limit.bytes_per_second))
        self.pause(0.0)

    def advance(self, count: int) -> None:
        """Counts bytes that were read or written. May be called by several threads. Raises AbandonedError."""
        with self._counting:
            self.moved_bytes += count
        if self._abandoned.is_set():
            raise AbandonedError

    def examine(self, rows: int) -> None:
        """Counts rows that were compared with others, by one thread. Raises AbandonedError."""
        self.examined_rows += rows
        self.advance(0)

    def patiently(self, what: str, operation: Callable[[], _Result]) -> _Result:
        """Returns what `operation` returns, and retries it while the storage fails; errors call it `what`.

        Raises AbandonedError, FileNotFoundError for a file that stays missing, and StorageUnreachableError for other
        persistent errors.
        """

        def is_over(state: tenacity.RetryCallState) -> bool:
            waited = state.seconds_since_start or 0.0
            match None if state.outcome is None else state.outcome.exception():
                case FileNotFoundError():
                    return waited >= self._missing_seconds
                case PermissionError(filename=str()):  # of a local file system: libraries of stores name no file
                    return waited >= self._refused_seconds
                case _:
                    return waited >= self._patience_seconds

        def note(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            self.problem = f"{what}: {error}; trying again"
            _log.warning("storage_failed", operation=what, problem=str(error), attempts=state.attempt_number)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_of_storage),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
            stop=is_over,
            before_sleep=note,
            sleep=self.pause,
        )
        try:
            result = retrying(operation)
        except tenacity.RetryError as error:
            cause = error.last_attempt.exception()
            if isinstance(cause, FileNotFoundError):
                raise cause from None
            raise StorageUnreachableError(f"{what}: {cause}") from cause
        self.problem = ""
        return result


def ahead(source: Iterator[_Item], count: int) -> Generator[_Item, None, None]:
    """Yields the items of `source`, of which up to `count` are read ahead. Raises what the source raises, in its place.

    The source runs in its own thread. If the generator is closed before its end, the thread ends once the source has
    yielded or raised.
    """
    pool = ThreadPoolExecutor(1, "read-ahead")
    read = partial(next, source, _END)
    try:
        ready = deque(pool.submit(read) for _ in range(count))
        while (item := ready.popleft().result()) is not _END:
            ready.append(pool.submit(read))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def each_ahead(use: Callable[[_Item], _Result], items: Sequence[_Item], count: int) -> Generator[_Result, None, None]:
    """Yields `use` of each item, in order, of which up to `count` are under way or ready, each in a thread of its own.

    Raises what `use` raises for any of these at once, and waits for none of the others: one may be of a storage that
    does not answer. Otherwise no thread outlives the generator.
    """
    pool = ThreadPoolExecutor(count, "each-ahead")
    ready: deque[Future[_Result]] = deque()
    has_failed = False
    try:
        for item in items:
            ready.append(pool.submit(use, item))
            if len(ready) > count:
                yield _first(ready)
        while ready:
            yield _first(ready)
    except Exception:
        has_failed = True
        raise
    finally:
        pool.shutdown(wait=not has_failed, cancel_futures=True)


def _first(ready: deque[Future[_Result]]) -> _Result:
    """Removes and returns the first result, once it is there. Raises the error of any that fails before."""
    pending = set(ready)
    while not ready[0].done():
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for one in done:
            one.result()
    return ready.popleft().result()
