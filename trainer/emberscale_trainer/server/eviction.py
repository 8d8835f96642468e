"""Evicts rows from a server's tables between batches: a thread sweeps what a batch has made due, some rows at a time.

Everything due must be swept before the next batch is applied, or the result would depend on the thread. The thread
mostly succeeds, as batches are milliseconds apart. An earlier push, or a reader of the rows as of a moment, sweeps the
rest first.
"""

import threading
from collections import deque
from contextlib import suppress

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.errors import problem_of
from emberscale_trainer.table import Eviction, Sweep, TableStore

_log = structlog.get_logger()

_RETRY_SECONDS = 1.0
"""The longest pause after a sweep for which there was no memory."""


class BackgroundEviction:
    """The eviction of the rows that a server serves. The caller holds the lock, which must be re-entrant."""

    def __init__(self, lock: threading.RLock) -> None:
        self._due_now = threading.Condition(lock)
        self._due: deque[Sweep] = deque()
        self._eviction: Eviction | None = None

    @property
    def active(self) -> bool:
        """Whether any served table has eviction."""
        return self._eviction is not None

    def serve(self, tables: TableStore | None) -> None:
        """Serves these rows, or none, from now on; drops what was due."""
        self._due.clear()
        eviction = None if tables is None else Eviction(tables)
        self._eviction = eviction if eviction else None
        self._due_now.notify_all()
        if eviction:
            threading.Thread(target=self._run, args=(eviction,), name="evict", daemon=True).start()

    def applied(self, clock: int, owned: NDArray[np.bool_]) -> None:
        """Adds what the `clock`-th batch makes due among the `owned` buckets; `finish` sweeps it before the next."""
        if self._eviction is not None:
            self._due.extend(self._eviction.due(clock, owned))
            if self._due:
                self._due_now.notify_all()

    def finish(self) -> None:
        """Sweeps all that is due."""
        while self._due:
            self._sweep()

    def _run(self, eviction: Eviction) -> None:
        while True:
            with self._due_now:
                while self._eviction is eviction and not self._due:
                    self._due_now.wait()
                if self._eviction is not eviction:
                    return
                problem = ""
                try:
                    self._sweep()
                except MemoryError as error:
                    problem = problem_of(error)
                if problem:  # only now is the memory of the failed sweep free again
                    with suppress(MemoryError):
                        _log.warning("rows_not_evicted", problem=problem)
                    self._due_now.wait(_RETRY_SECONDS)

    def _sweep(self) -> None:
        if self._eviction is None:
            return
        self._eviction.sweep(self._due[0])
        self._due.popleft()  # only now, so that a sweep without memory is retried
