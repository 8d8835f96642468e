"""Snapshots, which readers take while training continues: all rows or changed ones as of one moment, and retired keys.

A snapshot copies nothing when it begins. A *read* walks the segments of a table and copies their rows without the
caller's lock; a push that changes a row before the read has passed it saves the row's old bytes first (`rows`). For
each segment, the read briefly takes the lock to learn which rows have changed meanwhile, drops their copies, and
declares the rest passed. Pushes therefore wait for microseconds, however many rows there are, and a snapshot takes only
the memory of the rows that change while it is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.table import kernels
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.slab import Segment, SpareMemory


class Changes:
    """For each table, a bitmap with one bit per slot, which the kernels write, and the keys that were retired.

    `entries` are the reader's entries in the tables' descriptors. A bit may stay set for a slot whose row was retired.
    """

    def __init__(self, entries: Sequence[np.void], slots: Sequence[int]) -> None:
        """Begins to record; `slots` is one more than the highest slot of each table."""
        self._bitmaps = [_bitmap(count) for count in slots]
        self._retired: list[list[NDArray[np.int64]]] = [[] for _ in entries]
        self.record(entries)

    def record(self, entries: Sequence[np.void]) -> None:
        """Makes the kernels record here, and nowhere else."""
        self._entries = entries
        for entry, bitmap in zip(entries, self._bitmaps, strict=True):
            entry["changed"] = address_of(bitmap)

    def make_room(self, table: int, slots: int) -> None:
        """Makes room in the bitmap of a table for `slots` slots. Raises MemoryError."""
        old = self._bitmaps[table]
        if slots > 8 * len(old):
            grown = _bitmap(max(slots, 16 * len(old)))
            grown[: len(old)] = old
            self._bitmaps[table] = grown
            if self._entries:
                self._entries[table]["changed"] = address_of(grown)

    def retire(self, table: int, keys: NDArray[np.int64]) -> None:
        """Notes that the rows of keys were retired."""
        if len(keys):
            self._retired[table].append(keys)

    def bitmap(self, table: int) -> NDArray[np.uint8]:
        """The slots of a table that changed, one bit each, the lowest first."""
        return self._bitmaps[table]

    def retired_keys(self) -> list[NDArray[np.int64]]:
        """By table, the distinct keys that were retired, sorted; some may have a row again."""
        return [_distinct(keys) for keys in self._retired]

    def retired_bytes(self) -> int:
        """Bytes of the keys that were retired; of changes that were joined, of the distinct ones."""
        return sum(key.nbytes for keys in self._retired for key in keys)

    def rows(self, earlier: "Changes | None" = None) -> list[int]:
        """By table, the number of rows that changed; with `earlier`, also those that changed in it, each once."""
        return [
            _rows(bitmap, None if earlier is None else earlier._bitmaps[table])
            for table, bitmap in enumerate(self._bitmaps)
        ]

    def merge(self, earlier: "Changes") -> None:
        """Adds changes that were recorded earlier. Raises MemoryError, and may then have added some of them."""
        for table, bits in enumerate(earlier._bitmaps):
            self.make_room(table, 8 * len(bits))
            self._bitmaps[table][: len(bits)] |= bits
            self._retired[table] = earlier._retired[table] + self._retired[table]

    def add_unchanged(self, earlier: "Changes", table: int, used: NDArray[np.uint8]) -> None:
        """Adds the rows in `used` slots of a table, a bitmap, that did not change in `earlier`. Raises MemoryError."""
        self.make_room(table, 8 * len(used))
        bits, old = self._bitmaps[table], earlier._bitmaps[table][: len(used)]
        bits[: len(old)] |= used[: len(old)] & ~old
        bits[len(old) : len(used)] |= used[len(old) :]

    def joined(self, earlier: "Changes | None") -> "Changes":
        """Returns these changes together with earlier ones, and changes neither; each retired key is there once.

        Neither records any more. Raises MemoryError.
        """
        both = Changes((), ())
        both._bitmaps = [bits.copy() for bits in self._bitmaps]
        both._retired = [[*keys] for keys in self._retired]
        if earlier is not None:
            both.merge(earlier)
        both._retired = [[keys] for keys in both.retired_keys()]
        return both

    def stop(self) -> None:
        """Stops recording."""
        for entry in self._entries:
            entry["changed"] = 0
        self._entries = ()

    def replaced(self) -> None:
        """Notes that the kernels record into other bitmaps from now on."""
        self._entries = ()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the bitmaps and of the retired keys."""
        return sum(bits.nbytes for bits in self._bitmaps) + self.retired_bytes()


def _bitmap(slots: int) -> NDArray[np.uint8]:
    """A bitmap of whole 64-bit words, so that its bits can be counted by words."""
    return np.zeros(max(-(-slots // 64), 1), np.uint64).view(np.uint8)


def _distinct(keys: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The distinct ones of these keys, sorted. numpy.unique takes 40 times as long, by hashing."""
    ordered = np.concatenate([*keys, np.zeros(0, np.int64)])
    ordered.sort()
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _rows(bitmap: NDArray[np.uint8], earlier: NDArray[np.uint8] | None) -> int:
    words = bitmap.view(np.uint64)
    if earlier is None:
        return int(np.bitwise_count(words).sum(dtype=np.int64))
    old = earlier.view(np.uint64)
    both = min(len(words), len(old))
    rest = words[both:] if len(words) > both else old[both:]
    return int(sum(np.bitwise_count(part).sum(dtype=np.int64) for part in (words[:both] | old[:both], rest)))


Records = NDArray[np.uint8]
Lock = AbstractContextManager[Any]


class SnapshotAbandonedError(Exception):
    """The snapshot was given back, or its reader has begun another."""


@dataclass(frozen=True, eq=False)
class _Saved:
    """Old rows, and the memory that they begin in: `uint8[n, stride]` and `uint8[]`."""

    records: Records
    memory: NDArray[np.uint8]


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
        spare: SpareMemory,
    ) -> None:
        """Begins to save old bytes. `used_rows` slots of each of `segments`, which others may extend, are in use."""
        self.layout = layout
        self.is_read = False
        self._entry = entry
        self._segments = segments
        self._used_rows = used_rows
        self._segment_bytes = 1 << layout.slot_bits >> 3
        self._scope = scope
        self._passed = np.zeros((next_slot + 7) // 8 + 1, np.uint8)
        self._all = b"\xff" * (self._segment_bytes if used_rows else 0)
        self._spare = spare
        self._saving: NDArray[np.uint8] | None = None
        self._full: list[_Saved] = []
        entry["scope"] = 0 if scope is None else address_of(scope)
        entry["end"] = next_slot
        entry["saved_count"] = entry["saved_room"] = 0
        entry["passed"] = address_of(self._passed)

    def make_room(self, rows: int) -> None:
        """Makes room for the old bytes of `rows` rows. Raises MemoryError, and then has done nothing."""
        if not self._entry["passed"] or self._entry["saved_room"] - self._entry["saved_count"] >= rows:
            return
        memory = self._spare.take(rows * self.layout.stride)
        self._end_piece()
        self._saving = memory
        self._entry["saved"] = address_of(memory)
        self._entry["saved_room"] = len(memory) // self.layout.stride

    def close(self) -> list[_Saved]:
        """Stops saving, and releases the segments; returns what was saved and not taken yet."""
        self._end_piece()
        self._segments = ()
        self._entry["passed"] = self._entry["scope"] = 0
        self._passed, self._scope = np.zeros(0, np.uint8), None
        return self.take_full()

    def take_full(self) -> list[_Saved]:
        """Returns saved rows whose memory is full; the caller owns them, until it gives the memory back."""
        full, self._full = self._full, []
        return full

    def give_back(self, saved: Iterable[_Saved]) -> None:
        """Takes memory back that the caller has read."""
        for one in saved:
            self._spare.give_back(one.memory)

    def passed_in(self, segment: int, rows: int) -> NDArray[np.uint8]:
        """Declares the first rows of a segment passed; returns the bitmap of rows that had passed before."""
        first, size = segment * self._segment_bytes, (rows + 7) // 8
        # not by numpy, which releases the interpreter for this, and then waits for it while it holds the lock
        bits = self._passed.data[first : first + size]
        before = bits.tobytes()
        bits[:] = self._all[:size]
        return np.frombuffer(before, np.uint8)

    @property
    def most_rows(self) -> int:
        """The number of rows of the fullest segment."""
        return max(self._used_rows)

    def segments(self) -> Iterator[tuple[int, Segment, int, int]]:
        """Yields, for each segment with rows in scope, its number, itself, its rows, and their scope's address or 0.

        Yields no more once any thread has closed the share.
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

    def _end_piece(self) -> None:
        size, memory, self._saving = int(self._entry["saved_count"]) * self.layout.stride, self._saving, None
        self._entry["saved_count"] = self._entry["saved_room"] = 0
        if memory is not None:
            self._full.append(_Saved(memory[:size].reshape(-1, self.layout.stride), memory))


class Snapshot:
    """One reader's snapshot: all rows, or the rows that changed since its last take, and the keys that were retired.

    The snapshot stays open, and pushes save old bytes for it, until it is read or given back. It ends with `commit`
    once the reader has stored it, or with `give_back`: the reader's next take then has the changes again.
    """

    def __init__(
        self, shares: Sequence[TableShare], lock: Lock, changes: Changes | None, current: Changes | None, *, whole: bool
    ) -> None:
        """`changes` are those that the snapshot takes; `give_back` returns them to `current`."""
        self._shares = shares
        self._lock = lock
        self._changes = changes
        if changes is not None:
            changes.replaced()
        self._current = current
        self.ended = False
        """Whether the snapshot was committed or given back."""
        self._retired = None if whole else changes

    @cached_property
    def retired(self) -> tuple[NDArray[np.int64], ...]:
        """By table, the keys whose rows were retired: int64[]. Apply them before the records, which may have a new row
        of such a key. A snapshot of all rows has none.

        The first access sorts them: not at the barrier, where all pushes would wait for it.
        """
        if self._retired is None:
            return tuple(np.zeros(0, np.int64) for _ in self._shares)
        found, self._retired = self._retired.retired_keys(), None
        return tuple(found)

    def read(self, table: int) -> Iterator[Records]:
        """Yields the rows of a table as `uint8[n, stride]`, in no particular order; the next chunk overwrites each.

        A chunk may have rows of several segments if few of them changed, since chunks have a fixed cost. Call it once
        for each table, without the lock. Raises SnapshotAbandonedError.
        """
        share = self._shares[table]
        stride, pushes, most = share.layout.stride, share.layout.pushes_offset, share.most_rows
        records = np.empty((2 * most, stride), np.uint8)
        places = np.empty(most, np.uint32)
        filled = 0
        saved: list[_Saved] = []
        for number, segment, rows, scope in share.segments():
            target = address_of(records) + filled * stride
            count = kernels.read_rows(segment.address, rows, stride, pushes, scope, target, address_of(places))
            with self._lock:
                self._check_open()
                changed = share.passed_in(number, rows)
                share.give_back(saved)
                saved = share.take_full()
            filled += kernels.drop_records(target, count, stride, address_of(places), address_of(changed))
            if filled >= most:  # there may be no room for what the next segment holds
                yield records[:filled]
                filled = 0
            yield from (one.records for one in saved if len(one.records))
        if filled:
            yield records[:filled]
        with self._lock:
            self._check_open()
            share.give_back(saved)
            saved = share.close()
            share.is_read = True
        yield from (one.records for one in saved if len(one.records))
        with self._lock:
            share.give_back(saved)

    @property
    def changes(self) -> Changes | None:
        """The changes that it took, also as one of all rows; None if they were not tracked, or it has ended."""
        return self._changes

    def commit(self) -> None:
        """Ends the snapshot: the reader has stored it.

        Raises SnapshotAbandonedError, and RuntimeError before all tables are read.
        """
        with self._lock:
            self._check_open()
            if not all(share.is_read for share in self._shares):
                raise RuntimeError("a snapshot is committed when all of its tables are read")
            self._end()

    def give_back(self) -> None:
        """Ends the snapshot, and returns its changes to the reader's changes. Does nothing once it has ended."""
        with self._lock:
            if not self.ended:
                if self._changes is not None and self._current is not None:
                    self._current.merge(self._changes)
                self._end()

    def make_room(self, table: int, rows: int) -> None:
        """Makes room, for the store, for changes of `rows` rows of a table. Raises MemoryError."""
        self._shares[table].make_room(rows)

    def _check_open(self) -> None:
        if self.ended:
            raise SnapshotAbandonedError("the snapshot was given back, or its reader has begun another")

    def _end(self) -> None:
        for share in self._shares:
            share.give_back(share.close())
        self.ended = True
        self._changes = self._current = None
