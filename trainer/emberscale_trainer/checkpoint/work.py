"""Background work on checkpoint storage.

`Work` has the progress of background work, its current problem, and a way to end it. `ahead` reads the next items while
the caller uses the previous ones.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import structlog
import tenacity

from emberscale_api.errors import UnavailableError

log = structlog.get_logger()

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


def _is_of_storage(error: BaseException) -> bool:
    """Whether the storage failed: with an OSError, or with an error of the library behind a file system.

    For example, the library behind s3fs raises its own errors if it cannot connect. Other errors of Python, and those
    of this project, do not mean that the storage failed.
    """
    library = type(error).__module__.partition(".")[0]
    is_foreign = library != "builtins" and not library.startswith("emberscale")
    return isinstance(error, OSError) or (is_foreign and isinstance(error, Exception))


class Work:
    """The progress of reading or writing a checkpoint. Other threads may read it meanwhile.

    * `moved_bytes`: the bytes read or written so far.
    * `examined_rows`: the rows examined so far to choose those to write.
    * `problem`: the failure that is being retried, for people; empty if there is none.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS, missing_seconds: float | None = None) -> None:
        """Retries missing files for `missing_seconds` (MISSING_SECONDS), all other errors for `patience_seconds`."""
        self._patience_seconds = patience_seconds
        self._missing_seconds = MISSING_SECONDS if missing_seconds is None else missing_seconds
        self._abandoned = threading.Event()
        self._counting = threading.Lock()
        self.moved_bytes = 0
        self.examined_rows = 0
        self.problem = ""

    def abandon(self) -> None:
        """Makes the work end soon, with AbandonedError."""
        self._abandoned.set()

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
            missing = state.outcome is not None and isinstance(state.outcome.exception(), FileNotFoundError)
            waited = state.seconds_since_start or 0.0
            return waited >= (self._missing_seconds if missing else self._patience_seconds)

        def note(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            self.problem = f"{what}: {error}; trying again"
            log.warning("storage_failed", what=what, problem=str(error), attempt=state.attempt_number)

        def pause(seconds: float) -> None:
            if self._abandoned.wait(seconds):
                raise AbandonedError

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_of_storage),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE),
            stop=is_over,
            before_sleep=note,
            sleep=pause,
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
