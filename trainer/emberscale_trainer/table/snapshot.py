"""What readers take while training continues: changed rows and retired keys, and the rows as of one moment.

A snapshot copies nothing when it begins. A *read* walks the segments of a table and copies their rows without the
caller's lock; a push that changes a row before the read has passed it saves the row's old bytes first (`rows`). Per
segment the read takes the lock for a moment, to learn which rows have changed meanwhile, whose copies it drops, and to
declare the rest passed. So pushes wait for microseconds, however many rows there are, and the memory that a snapshot
takes is that of the rows that change while it is read.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table import kernels
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.memory import address_of
from emberscale_trainer.table.slab import SEGMENT_BYTES, Segment, zeroed


class Changes:
    """Table by table, a bitmap with a bit a slot, which the kernels write, and the keys that were retired.

    `entries` are the reader's entries in the tables' descriptors. A bit may stay set for a slot whose row was retired.
    """

    def __init__(self, entries: Sequence[np.void], slots: Sequence[int]) -> None:
        """Begins to record: `slots` is one more than the highest slot of each table."""
        self._entries = entries
        self._bitmaps = [np.zeros(max(count // 8, 1), np.uint8) for count in slots]
        self._retired: list[list[NDArray[np.int64]]] = [[] for _ in entries]
        for entry, bitmap in zip(entries, self._bitmaps, strict=True):
            entry["changed"] = address_of(bitmap)

    def make_room(self, table: int, slots: int) -> None:
        """Sees that the bitmap of a table has a bit for so many slots. Raises MemoryError."""
        old = self._bitmaps[table]
        if slots > 8 * len(old):
            grown = np.zeros(max(slots // 8, 2 * len(old)), np.uint8)
            grown[: len(old)] = old
            self._bitmaps[table] = grown
            self._entries[table]["changed"] = address_of(grown)

    def retire(self, table: int, keys: NDArray[np.int64]) -> None:
        """Notes that the rows of keys were retired."""
        if len(keys):
            self._retired[table].append(keys)

    def bitmap(self, table: int) -> NDArray[np.uint8]:
        """The slots of a table that changed, one bit each, the lowest first."""
        return self._bitmaps[table]

    def retired_keys(self) -> list[NDArray[np.int64]]:
        """By table, the distinct keys that were retired; some may have a row again."""
        return [np.unique(np.concatenate([*keys, np.zeros(0, np.int64)])) for keys in self._retired]

    def merge(self, earlier: "Changes") -> None:
        """Adds the changes that were recorded before these."""
        for table, bits in enumerate(earlier._bitmaps):
            self.make_room(table, 8 * len(bits))
            self._bitmaps[table][: len(bits)] |= bits
            self._retired[table] = earlier._retired[table] + self._retired[table]

    def stop(self) -> None:
        """Records no more."""
        for entry in self._entries:
            entry["changed"] = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the bitmaps and of the retired keys."""
        return sum(bits.nbytes for bits in self._bitmaps) + sum(key.nbytes for keys in self._retired for key in keys)


Records = NDArray[np.uint8]
Lock = AbstractContextManager[Any]


class SnapshotAbandonedError(Exception):
    """The snapshot was given back, or its reader has begun another."""


class TableShare:
    """One table's part of a snapshot. `entry` is the reader's entry in the table's descriptor."""

    def __init__(
        self,
        entry: np.void,
        layout: RowLayout,
        segments: Sequence[Segment],
        used_rows: Sequence[int],
        next_slot: int,
        scope: NDArray[np.uint8] | None,
    ) -> None:
        """Begins to save old bytes. Of `segments`, which others extend, the first slots are in use: `used_rows`."""
        self.layout = layout
        self.is_read = False
        self._entry = entry
        self._segments = segments
        self._used_rows = used_rows
        self._segment_bytes = 1 << layout.slot_bits >> 3
        self._scope = scope
        self._passed = np.zeros((next_slot + 7) // 8 + 1, np.uint8)
        self._all = b"\xff" * (self._segment_bytes if used_rows else 0)
        self._saved = layout.empty(0)
        self._full: list[Records] = []
        entry["scope"] = 0 if scope is None else address_of(scope)
        entry["end"] = next_slot
        entry["saved_count"] = entry["saved_room"] = 0
        entry["passed"] = address_of(self._passed)

    def make_room(self, rows: int) -> None:
        """Sees that the old bytes of so many rows can be saved. Raises MemoryError, nothing being done."""
        if not self._entry["passed"] or self._entry["saved_room"] - self._entry["saved_count"] >= rows:
            return
        stride = self.layout.stride
        room = max(rows, SEGMENT_BYTES // stride)
        saved = zeroed(room * stride).reshape(room, stride)
        self._full += self._take_saved()
        self._saved = saved
        self._entry["saved"] = address_of(saved)
        self._entry["saved_room"] = len(saved)

    def close(self) -> list[Records]:
        """Saves no more, and holds no segment; returns the records that were saved and not taken yet."""
        left = self._full + self._take_saved()
        self._segments = ()
        self._entry["passed"] = self._entry["scope"] = 0
        self._full, self._saved, self._passed, self._scope = [], self.layout.empty(0), np.zeros(0, np.uint8), None
        return left

    def take_full(self) -> list[Records]:
        """The saved records for which the memory is full; they are the caller's now."""
        full, self._full = self._full, []
        return full

    def passed_in(self, segment: int, rows: int) -> NDArray[np.uint8]:
        """Declares the first rows of a segment passed; returns the bitmap of those that were so before."""
        first, size = segment * self._segment_bytes, (rows + 7) // 8
        # not by numpy, which releases the interpreter for this, and then waits for it while it holds the lock
        bits = self._passed.data[first : first + size]
        before = bits.tobytes()
        bits[:] = self._all[:size]
        return np.frombuffer(before, np.uint8)

    @property
    def most_rows(self) -> int:
        """Rows of the segment that has most of them."""
        return max(self._used_rows)

    def segments(self) -> Iterator[tuple[int, Segment, int, int]]:
        """The number of each segment with rows in scope, the segment, its rows, and the address of their scope or 0.

        There are none any more once it is closed, by whatever thread.
        """
        in_scope = self._scope
        for number, rows in enumerate(self._used_rows):
            scope = 0
            if in_scope is not None:
                bits = in_scope[number * self._segment_bytes :][: (rows + 7) // 8]
                if not bits.any():
                    continue
                scope = address_of(bits)
            if rows:
                for segment in self._segments[number : number + 1]:
                    yield number, segment, rows, scope

    def _take_saved(self) -> list[Records]:
        count = int(self._entry["saved_count"])
        self._entry["saved_count"] = self._entry["saved_room"] = 0
        return [self._saved[:count]] if count else []


class Snapshot:
    """What a reader gets: all rows, or those that changed since its last take, and the keys that were retired.

    It stays open, and pushes save old bytes for it, until it is read or given back. Then it ends: with `commit` when
    the reader has put it where it belongs, or with `give_back`, and the reader's next take brings the changes again.
    """

    def __init__(
        self, shares: Sequence[TableShare], lock: Lock, changes: Changes | None, current: Changes | None, *, whole: bool
    ) -> None:
        """`changes` are those that the snapshot takes away, `current` are those to which they may have to return."""
        self._shares = shares
        self._lock = lock
        self._changes = changes
        self._current = current
        self._ended = False
        nothing: list[NDArray[np.int64]] = [np.zeros(0, np.int64) for _ in shares]
        self.retired = tuple(nothing if whole or changes is None else changes.retired_keys())
        """By table, the keys whose rows were retired: int64[]. To be applied before the records, which may have made
        a key anew. None in a snapshot of all rows."""

    def read(self, table: int) -> Iterator[Records]:
        """Yields the rows of a table as `uint8[n, stride]`, in no particular order; the next chunk overwrites each.

        Rows of several segments are in a chunk where few of them changed: what a chunk costs does not follow the rows.
        To be called once for each table, without the lock. Raises SnapshotAbandonedError.
        """
        share = self._shares[table]
        stride, pushes, most = share.layout.stride, share.layout.pushes_offset, share.most_rows
        records = np.empty((2 * most, stride), np.uint8)
        places = np.empty(most, np.uint32)
        filled = 0
        for number, segment, rows, scope in share.segments():
            target = address_of(records) + filled * stride
            count = kernels.read_rows(segment.address, rows, stride, pushes, scope, target, address_of(places))
            with self._lock:
                self._check_open()
                changed = share.passed_in(number, rows)
                saved = share.take_full()
            filled += kernels.drop_records(target, count, stride, address_of(places), address_of(changed))
            if filled >= most:  # there may be no room for what the next segment holds
                yield records[:filled]
                filled = 0
            yield from saved
        if filled:
            yield records[:filled]
        with self._lock:
            self._check_open()
            saved = share.close()
            share.is_read = True
        yield from saved

    def commit(self) -> None:
        """Ends the snapshot: the reader has it safe.

        Raises SnapshotAbandonedError, and RuntimeError before all tables are read.
        """
        with self._lock:
            self._check_open()
            if not all(share.is_read for share in self._shares):
                raise RuntimeError("a snapshot is committed when all of its tables are read")
            self._end()

    def give_back(self) -> None:
        """Ends the snapshot: what it took away is among the reader's changes again. Does nothing once it has ended."""
        with self._lock:
            if not self._ended:
                if self._changes is not None and self._current is not None:
                    self._current.merge(self._changes)
                self._end()

    def make_room(self, table: int, rows: int) -> None:
        """Sees that so many rows of a table can change, for the store. Raises MemoryError."""
        self._shares[table].make_room(rows)

    @property
    def ended(self) -> bool:
        """Whether it was committed or given back."""
        return self._ended

    def _check_open(self) -> None:
        if self._ended:
            raise SnapshotAbandonedError("the snapshot was given back, or its reader has begun another")

    def _end(self) -> None:
        for share in self._shares:
            share.close()
        self._ended = True
        self._changes = self._current = None
