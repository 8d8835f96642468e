"""Gives the memory of rows that left a table back to the system.

Rows of one bucket lie anywhere in a table, so that a segment hardly ever becomes empty by itself. Rows of the last
segments therefore move into free slots of the first ones, as any other rows that are retired and loaded. An empty slot
is all zero, and so is memory that was given back: an empty segment stays where it is, and takes no memory.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

from emberscale_trainer.table.snapshot import Lock
from emberscale_trainer.table.store import TableStore

_SLOTS_A_STEP = 2048
"""Slots that are looked at under one hold of the lock."""
_WORTH_TRIMMING = 16 << 20
"""Bytes that tables must have given back for the heap to be trimmed, too."""


class Compaction:
    """One pass over a table. The caller holds the lock of the tables around each call, and may let go between two."""

    def __init__(self, tables: TableStore, table: int) -> None:
        self._tables = tables
        self._table = table
        self._slots = tables.slots[table]
        self._segment = self._slots.segments_in_use - 1
        self._first = 0
        self.released_bytes = 0
        self._deferred = self._slots.defer(self._slots.segments_needed)

    def step(self, slots: int) -> bool:
        """Moves the rows of so many slots, and returns whether there is more to do.

        Raises MemoryError, nothing being done. After any other error the tables must not be used any more.
        """
        if self._segment < self._slots.segments_needed:
            return False
        records = self._slots.records(self._segment, self._first, slots)
        if len(records):
            self._deferred = self._tables.relocate(self._table, records, self._deferred)
        self._first += slots
        if self._first >= self._slots.layout.segment_rows:
            self.released_bytes += self._slots.release(self._segment)
            self._segment, self._first = self._segment - 1, 0
        return True


def compact(tables: TableStore, lock: Lock, wanted: Callable[[], bool], catch_up: Callable[[], None]) -> None:
    """Gives back what rows have left in all tables but the dense one, unless `wanted`, under the lock, ends it.

    Rests as long as it works; `catch_up` is called without the lock, and may make it rest for longer. After an error
    the tables must not be used any more.
    """
    released, rest = 0, threading.Event()
    for table in range(len(tables.specs) - 1):
        with lock:
            if not wanted():
                return
            compaction, more = Compaction(tables, table), True
        while more:
            began = time.monotonic()
            with lock:
                if not wanted():
                    return
                try:
                    more = compaction.step(_SLOTS_A_STEP)
                except MemoryError:
                    return
            rest.wait(time.monotonic() - began)
            catch_up()
        released += compaction.released_bytes
    if released >= _WORTH_TRIMMING:
        trim_heap()  # of what the move needed


def trim_heap() -> None:
    """Returns free memory of the C library's heap to the system, where the library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
