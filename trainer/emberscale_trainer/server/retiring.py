"""Removes rows that a server has given away from its tables, bucket by bucket, while training continues."""

import threading
from collections.abc import Callable

import numpy as np

from emberscale_trainer.partition import Ownership
from emberscale_trainer.table import TableStore, compact


class Retirement:
    """The rows that a server has given away and still holds. The caller holds the lock, which must be re-entrant.

    * `moves`: whether a move is under way; it ends a compaction, as the move would have to send the compacted rows.
    * `catch_up`: is called between two buckets, without the lock, and may wait.
    * `fatal`: gets an error that leaves the tables half changed.
    """

    def __init__(
        self,
        lock: threading.RLock,
        moves: Callable[[], bool],
        catch_up: Callable[[], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._lock = lock
        self._moves = moves
        self._catch_up = catch_up
        self._fatal = fatal
        self._tables: TableStore | None = None
        self._buckets: list[int] = []

    def serve(self, tables: TableStore | None) -> None:
        """Serves these rows, or none, from now on."""
        self._tables = tables
        self._buckets = []

    def begin(self, left: Ownership) -> None:
        """Retires the rows of these pieces, and begins to retire those of these buckets."""
        if self._tables is None or not left:
            return
        self._tables.retire(len(self._tables.specs) - 1, np.flatnonzero(left.pieces))
        self._buckets += np.flatnonzero(left.buckets).tolist()
        threading.Thread(target=self._run, args=(self._tables,), name="retire", daemon=True).start()

    def finish(self) -> None:
        """Retires all rows that are left."""
        while self._buckets:
            self._retire_one()

    def _run(self, tables: TableStore) -> None:
        """Retires one bucket at a time, and returns the memory."""
        while True:
            with self._lock:
                if self._tables is not tables:
                    return
                if not self._buckets:
                    break
                self._retire_one()
            self._catch_up()
        try:
            compact(tables, self._lock, lambda: self._may_compact(tables), self._catch_up)
        except BaseException as error:
            self._fatal(error)
            raise

    def _may_compact(self, tables: TableStore) -> bool:
        return self._tables is tables and not self._buckets and not self._moves()

    def _retire_one(self) -> None:
        bucket = self._buckets.pop()
        if self._tables is not None:
            for table in range(len(self._tables.specs) - 1):
                self._tables.remove_bucket(table, bucket)
