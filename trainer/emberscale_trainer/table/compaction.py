"""Gives the memory of rows that left a table back to the system.

Rows of one bucket lie anywhere in a table, so a segment rarely becomes empty by itself. Rows of the last segments
therefore move into free slots of the first ones, like rows that are retired and loaded. An empty slot is all zero, and
so is memory that was given back: an empty segment keeps its address and takes no memory.
"""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

from emberscale_trainer.table.snapshot import Lock
from emberscale_trainer.table.store import TableStore

_SLOTS_A_STEP = 2048
"""Slots that are examined during one hold of the lock."""
_WORTH_TRIMMING = 16 << 20
"""The heap is trimmed, too, if the tables have given back at least this many bytes."""


class Compaction:
    """One pass over a table. The caller holds the lock of the tables during each call, and may release it between."""

    def __init__(self, tables: TableStore, table: int) -> None:
        self._tables = tables
        self._table = table
        self._slots = tables.slots[table]
        self._segment = self._slots.segments_in_use - 1
        self._first = 0
        self.released_bytes = 0
        self._deferred = self._slots.defer(self._slots.segments_needed)

    def step(self, slots: int) -> bool:
        """Moves the rows of `slots` slots, and returns whether there is more to do.

        Raises MemoryError, and then has done nothing. After any other error the tables must not be used any more.
        """
        if self._segment < self._slots.segments_needed:
            self._slots.use_first_slots_first()  # else new rows would soon touch every segment that was given back
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
    """Compacts all tables but the dense one; ends early once `wanted`, called under the lock, is False.

    It pauses for as long as it works; `catch_up` is called without the lock, and may make the pause longer. After an
    error the tables must not be used any more.
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
        trim_heap()  # of the memory that the moves needed


def trim_heap() -> None:
    """Returns free memory of the C library's heap to the system, if the library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
