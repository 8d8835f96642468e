"""Removes rows that a server has given away from its tables, bucket by bucket, while training continues.

Nothing waits for the removal but a move that brings one of the buckets back. Whoever reads the rows of a server leaves
out what it does not own, as a move also brings rows before the switch: checkpoints and saves when they are written,
flash checkpoints when they are loaded, and moves, rebuilds and eviction. Rows that are removed after a checkpoint are
among the retired keys of the next.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import structlog

from emberscale_api.errors import problem_of
from emberscale_trainer.partition import Ownership
from emberscale_trainer.table import TableStore, compact

_log = structlog.get_logger()

_RETRY_SECONDS = 1.0
"""The pause after a removal for which there was no memory."""


class Retirement:
    """The rows that a server has given away and still holds. The caller holds the lock, which must be re-entrant.

    * `changed`: the lock, and the condition that is notified when a bucket is removed.
    * `moves`: whether a move is under way; it ends a compaction, as the move would have to send the compacted rows.
    * `catch_up`: is called between two removals, without the lock, and may wait.
    * `fatal`: gets an error that leaves the tables half changed.
    """

    def __init__(
        self,
        changed: threading.Condition,
        moves: Callable[[], bool],
        catch_up: Callable[[], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._changed = changed
        self._moves = moves
        self._catch_up = catch_up
        self._fatal = fatal
        self._tables: TableStore | None = None
        self._left, self._first = Ownership.of_nothing(), Ownership.of_nothing()
        self._runs = False

    def serve(self, tables: TableStore | None) -> None:
        """Serves these rows, or none, from now on."""
        self._tables = tables
        self._left, self._first = Ownership.of_nothing(), Ownership.of_nothing()
        self._runs = False  # a thread that removes rows of other tables ends

    def begin(self, left: Ownership) -> None:
        """Retires the rows of these pieces, and begins to retire those of these buckets."""
        if self._tables is None or not left:
            return
        self._left = Ownership(self._left.buckets | left.buckets, self._left.pieces | left.pieces)
        with suppress(MemoryError):  # the thread tries again
            self._retire_pieces(self._tables)
        if not self._runs:
            threading.Thread(target=self._run, args=(self._tables,), name="retire", daemon=True).start()
            self._runs = True

    def hurry(self, first: Ownership) -> None:
        """Retires these rows, as far as they are left, before all others."""
        self._first = first

    def has(self, some: Ownership) -> bool:
        """Whether rows of any of these buckets and pieces may be left."""
        return bool((self._left.buckets & some.buckets).any() or (self._left.pieces & some.pieces).any())

    def _run(self, tables: TableStore) -> None:
        """Retires what is left, and returns the memory."""
        try:
            while self._goes_on(tables):
                self._retire_all(tables)
                compact(tables, self._changed, lambda: self._may_compact(tables), self._catch_up)
        except BaseException as error:
            self._fatal(error)
            raise

    def _goes_on(self, tables: TableStore) -> bool:
        """Whether anything is left; if not, the next `begin` starts another thread."""
        with self._changed:
            if self._tables is not tables:
                return False
            self._runs = bool(self._left)
            return self._runs

    def _retire_all(self, tables: TableStore) -> None:
        """Retires all that is left, and rests as long as it works, so that others get the lock."""
        rest = threading.Event()
        while True:
            with self._changed:
                if self._tables is not tables or not self._left:
                    return
                began = time.monotonic()
                try:
                    self._retire_some(tables)
                    seconds = time.monotonic() - began
                except MemoryError as error:
                    _log.warning("rows_not_removed", problem=problem_of(error))
                    seconds = _RETRY_SECONDS
            rest.wait(seconds)
            self._catch_up()

    def _may_compact(self, tables: TableStore) -> bool:
        return self._tables is tables and not self._left and not self._moves()

    def _retire_some(self, tables: TableStore) -> None:
        """Retires the rows of a bucket in one table. Raises MemoryError, and then they are still left."""
        if self._left.pieces.any():
            self._retire_pieces(tables)
            return
        hurried = np.flatnonzero(self._left.buckets & self._first.buckets)
        bucket = int(hurried[0] if len(hurried) else np.argmax(self._left.buckets))
        embeddings = range(len(tables.specs) - 1)
        filled = [table for table in embeddings if tables.bucket_rows(table)[bucket]]
        if len(filled) > 1:
            tables.remove_bucket(filled[0], bucket)
            return
        for table in embeddings:  # those without rows, too, which may have an index
            tables.remove_bucket(table, bucket)
        self._left.buckets[bucket] = False  # only now, so that a removal without memory is repeated
        self._changed.notify_all()

    def _retire_pieces(self, tables: TableStore) -> None:
        tables.retire(len(tables.specs) - 1, np.flatnonzero(self._left.pieces))
        self._left.pieces[:] = False
        self._changed.notify_all()
