"""The slots of one table: their segments, which of them hold rows, and which were given back."""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.table import kernels
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.slab import Segment


class Slots:
    """The slots of one table, which kernels give out and take back. The caller holds the lock of the store."""

    def __init__(self, descriptor: np.void, layout: RowLayout) -> None:
        """`descriptor` is the table's entry of `slab.TABLE`; it gets the description of the slots for kernels."""
        self.layout = layout
        self.segments: list[Segment] = []
        self._descriptor = descriptor
        self._addresses = np.zeros(8, np.int64)
        self._free = np.zeros(0, np.uint32)
        self._released = False
        descriptor["segments"] = address_of(self._addresses)
        descriptor["segment_rows"] = layout.segment_rows
        descriptor["slot_bits"] = layout.slot_bits

    @property
    def count(self) -> int:
        """Slots of all segments, including slot numbers between the segments."""
        return len(self.segments) << self.layout.slot_bits

    @property
    def next(self) -> int:
        """The first slot that was never given out."""
        return int(self._descriptor["next_slot"])

    @property
    def free(self) -> NDArray[np.uint32]:
        """The slots that were given back, a view; the last is used first."""
        return self._free[: int(self._descriptor["free_count"])]

    @property
    def rows(self) -> int:
        """Slots that hold a row."""
        return sum(self.used()) - len(self.free)

    def used(self) -> list[int]:
        """The number of slots in each segment that hold or held a row; later segments were never used."""
        bits = self.layout.slot_bits
        return [self.layout.segment_rows] * (self.next >> bits) + [self.next & ((1 << bits) - 1)]

    def used_bitmap(self) -> NDArray[np.uint8]:
        """The slots that hold or held a row, one bit each, the lowest first."""
        bits = np.zeros(self.count + 7 >> 3, np.uint8)
        for number, rows in enumerate(self.used()):
            first = number << self.layout.slot_bits >> 3
            bits[first : first + (rows >> 3)] = 0xFF
            if rows & 7:
                bits[first + (rows >> 3)] = (1 << (rows & 7)) - 1
        return bits

    @property
    def segments_in_use(self) -> int:
        """Segments in which a slot holds or held a row."""
        return sum(rows > 0 for rows in self.used())

    @property
    def segments_needed(self) -> int:
        """Segments that all rows would fill."""
        return -(-self.rows // self.layout.segment_rows)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the slots take: touched memory, not reserved memory."""
        used = self.used()
        if self._released:  # of these segments, those without a row take none
            free = np.bincount(self.free >> np.uint32(self.layout.slot_bits), minlength=len(used))
            used = [rows * (rows > count) for rows, count in zip(used, free.tolist(), strict=True)]
        touched = (segment.touched_bytes(rows) for segment, rows in zip(self.segments, used, strict=False))
        return sum(touched) + self._free.nbytes + self._addresses.nbytes

    def add_segment(self) -> None:
        """Makes room for more rows. Raises MemoryError, and then has done nothing."""
        # small tables stay small: huge pages begin with the second segment
        segment = Segment(self.layout.segment_rows, self.layout.stride, huge=bool(self.segments))
        if len(self.segments) == len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.zeros_like(self._addresses)])
            self._descriptor["segments"] = address_of(self._addresses)
        self._addresses[len(self.segments)] = segment.address
        self.segments.append(segment)
        self._descriptor["segment_count"] = len(self.segments)

    def make_room_to_free(self, slots: int) -> None:
        """Makes room for `slots` slots to be given back. Raises MemoryError."""
        needed = len(self.free) + slots
        if needed > len(self._free):
            grown = np.zeros(max(needed, 2 * len(self._free)), np.uint32)
            grown[: len(self._free)] = self._free
            self._free = grown
            self._descriptor["free"] = address_of(grown)

    def records(self, segment: int, first: int, count: int) -> NDArray[np.uint8]:
        """Returns the rows in `count` slots of a segment as `uint8[n, stride]`, in their order."""
        layout = self.layout
        count = max(0, min(count, self.used()[segment] - first))
        records, places = layout.empty(count), np.empty(count, np.uint32)
        start = self.segments[segment].address + first * layout.stride
        addresses = (address_of(records), address_of(places))
        found = kernels.read_rows(start, count, layout.stride, layout.pushes_offset, 0, *addresses)
        return records[:found]

    def defer(self, segment: int) -> int:
        """Defers the free slots from this segment on until all others are used; returns how many are deferred."""
        late = self.free >> np.uint32(self.layout.slot_bits) >= segment
        self.free[:] = np.concatenate([self.free[late], self.free[~late]])
        return int(np.count_nonzero(late))

    def defer_last(self, slots: int, deferred: int) -> int:
        """Defers the slots that were given back last until all but the first `deferred` of the list are used.

        Returns how many are deferred then.
        """
        free = self.free
        left = free[-slots:].copy()
        if len(free) - deferred >= 2 * slots:  # else there are only a few others, and what is left is used again
            free[-slots:] = free[deferred : deferred + slots]
            free[deferred : deferred + slots] = left
            return deferred + slots
        free[deferred + slots :] = free[deferred:-slots].copy()
        free[deferred : deferred + slots] = left
        return deferred

    def use_first_slots_first(self) -> None:
        """Sorts the free slots, so that new rows fill one segment after the other."""
        self.free[::-1].sort()

    def release(self, segment: int) -> int:
        """Gives the memory of a segment back to the system; returns its bytes, 0 if it holds a row and stays."""
        if len(self.records(segment, 0, self.layout.segment_rows)):
            return 0
        self._released = True
        return self.segments[segment].release()
