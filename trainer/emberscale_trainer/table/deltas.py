"""The log of changes of a table's rows, as `old ^ new`, from which parity of the rows is computed.

A log has a fixed number of *lanes*, one for each choice of the servers that hold parity of a row; the segment of a row
determines the lane of its deltas. A delta is `slot: uint32 | rows: uint16 | table: uint16 | old ^ new: uint8[rows,
stride]`, little-endian, with the rows of consecutive slots. Deltas commute, and a row may have any number of them.

The deltas of a row telescope: `a ^ b` and `b ^ c` are together `a ^ c`. In a log that merges, the first change of a row
since the last `take` opens its delta, which has the old bytes as they are; later changes add nothing; and `take` closes
it with the bytes as of then. So a row has one delta, however many pushes have changed it.

Rows that existed before the log are *filled in*: their bytes are a delta from nothing. They are filled in slot by slot
while training continues; changes are logged in slots below `logged`, since rows that are not filled in yet need no
deltas. `withdraw` is the inverse, and leaves nothing of these rows in the parity. Callers hold the lock of the store.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit import entry, part
from emberscale_trainer.jit.memory import (
    CACHE_LINE,
    address_of,
    copy,
    load_int64,
    load_uint8,
    load_uint32,
    prefetch,
    shift_right,
    store_int64,
    store_uint8,
    store_uint32,
    zero,
)
from emberscale_trainer.table.slab import (
    LOGGED,
    LOGS,
    NUMBER,
    OPENED,
    PUSHES,
    SEGMENT_COUNT,
    SEGMENTS,
    SLOT_BITS,
    STRIDE,
    TABLE_BYTES,
    Segment,
)

DELTA_BYTES = 8
"""Bytes of a delta before its rows."""

EVERY_SLOT = 1 << 40
"""More than the highest slot."""

_MOST_ROWS = 0xFFFF
_OPEN = 1 << 31
"""The bit of an open delta, beside the number of its table."""
_LOWEST_BITS, _OTHER_BITS = 0x0101010101010101, 0x7F7F7F7F7F7F7F7F
"""Of eight bytes: the lowest bit of each, and all but the highest."""
_AHEAD = 12
"""Deltas between the one that is applied and the one whose row is prefetched."""
_CHUNK_BYTES = 1 << 20
"""Bytes by which a lane's memory grows."""

APPLIED = -1
"""All deltas are applied."""
MALFORMED = -2
"""The next bytes are no delta of these tables."""

TableDeltas = np.dtype(
    [
        ("stride", "<i8"),
        ("slot_bits", "<i8"),
        ("segment_rows", "<i8"),
        ("blocks", "<i8"),  # address of int64[]: where the block of each segment is; 0: there is none yet
        ("doublings", "<i8"),  # address of int64[]: how often each byte is doubled in GF(2^8), as in `parity.code`
        ("segments", "<i8"),  # length of both
    ]
)
"""The description, for `apply_deltas`, of a table of the server whose deltas it applies."""

_ENTRY_BYTES = TableDeltas.itemsize
_NONE = np.zeros(0, np.uint8)


@part
def begin_delta(table: int, slot: int, row: int) -> int:
    """Begins the delta of a row that is about to change; returns the address for its bytes, 0 if none are to follow.

    A slot that holds no live row counts as all zero, whatever it contains.
    """
    if slot >= load_int64(table + LOGGED):
        return 0
    opened = load_int64(table + OPENED)
    if opened != 0:
        byte, bit = opened + (slot >> 3), 1 << (slot & 7)
        known = load_uint8(byte)
        if known & bit:
            return 0
        store_uint8(byte, known | bit)
    lane = load_int64(load_int64(table + LOGS) + 8 * (slot >> load_int64(table + SLOT_BITS)))
    at = load_int64(lane)
    stride = load_int64(table + STRIDE)
    store_uint32(at, slot)
    word = 1 | load_int64(table + NUMBER) << 16
    store_uint32(at + 4, word | _OPEN if opened != 0 else word)
    if load_uint32(row + load_int64(table + PUSHES)) != 0:
        copy(at + DELTA_BYTES, row, stride)
    else:
        zero(at + DELTA_BYTES, stride)
    store_int64(lane, at + DELTA_BYTES + stride)
    return at + DELTA_BYTES if opened == 0 else 0


@part
def end_delta(table: int, delta: int, row: int) -> None:
    """Ends the delta of a row that has changed."""
    if delta != 0:
        _xor(delta, row, load_int64(table + STRIDE))


@part
def _xor(target: int, source: int, size: int) -> None:
    """`size` is a multiple of 8."""
    for at in range(0, size, 8):
        store_int64(target + at, load_int64(target + at) ^ load_int64(source + at))


@part
def _xor_doubled(target: int, source: int, size: int, times: int) -> None:
    """Doubles the bytes of eight numbers of GF(2^8) at once; `size` is a multiple of 8.

    A byte whose highest bit leaves it when it is shifted is reduced by the rest of the polynomial, 0x1d.
    """
    for at in range(0, size, 8):
        value = load_int64(source + at)
        for _ in range(times):
            left = shift_right(value, 7) & _LOWEST_BITS
            value = (value & _OTHER_BITS) << 1 ^ left ^ left << 2 ^ left << 3 ^ left << 4
        store_int64(target + at, load_int64(target + at) ^ value)


@part
def _prefetch_row(delta: int, tables: int, table_count: int) -> None:
    """Prefetches the memory that a delta changes; bytes that are no delta prefetch something useless."""
    slot, number = load_uint32(delta), load_uint32(delta + 4) >> 16
    if number >= table_count:
        return
    table = tables + _ENTRY_BYTES * number
    stride, bits = load_int64(table), load_int64(table + 8)
    segment = slot >> bits
    if segment < load_int64(table + 40):
        row = load_int64(load_int64(table + 24) + 8 * segment) + stride * (slot & ((1 << bits) - 1))
        for at in range(0, stride, CACHE_LINE):
            prefetch(row + at)


@entry
def apply_deltas(deltas: int, first: int, size: int, tables: int, table_count: int) -> int:
    """Applies the deltas from offset `first` on to the blocks of `tables: TableDeltas[table_count]`.

    Returns APPLIED, MALFORMED, or the offset of the first delta whose block does not exist.
    """
    at = first
    while at < size:
        if size - at < DELTA_BYTES:
            return MALFORMED
        slot, word = load_uint32(deltas + at), load_uint32(deltas + at + 4)
        rows, number = word & _MOST_ROWS, word >> 16
        if number >= table_count:
            return MALFORMED
        table = tables + _ENTRY_BYTES * number
        stride, bits = load_int64(table), load_int64(table + 8)
        segment, row = slot >> bits, slot & ((1 << bits) - 1)
        if row + rows > load_int64(table + 16) or size - at - DELTA_BYTES < rows * stride:
            return MALFORMED
        if segment >= load_int64(table + 40):
            return at
        block = load_int64(load_int64(table + 24) + 8 * segment)
        if block == 0:
            return at
        ahead = at + _AHEAD * (DELTA_BYTES + stride)  # a delta, where those until there are of one row each
        if ahead + DELTA_BYTES <= size:
            _prefetch_row(deltas + ahead, tables, table_count)
        doublings = load_int64(load_int64(table + 32) + 8 * segment)
        if doublings == 0:
            _xor(block + stride * row, deltas + at + DELTA_BYTES, stride * rows)
        else:
            _xor_doubled(block + stride * row, deltas + at + DELTA_BYTES, stride * rows, doublings)
        at += DELTA_BYTES + stride * rows
    return APPLIED


@part
def _prefetch_logged(delta: int, tables: int, table_count: int) -> None:
    """Prefetches the row of an open delta; bytes that are no delta prefetch something useless."""
    slot, number = load_uint32(delta), (load_uint32(delta + 4) & ~_OPEN) >> 16
    if number >= table_count:
        return
    table = tables + TABLE_BYTES * number
    stride, bits = load_int64(table + STRIDE), load_int64(table + SLOT_BITS)
    segment = slot >> bits
    if segment < load_int64(table + SEGMENT_COUNT):
        row = load_int64(load_int64(table + SEGMENTS) + 8 * segment) + stride * (slot & ((1 << bits) - 1))
        for at in range(0, stride, CACHE_LINE):
            prefetch(row + at)


@entry
def close_deltas(deltas: int, size: int, tables: int, table_count: int) -> int:
    """Closes the open ones of these deltas with the rows of `tables: slab.TABLE[table_count]`; returns how many.

    A slot that holds no live row counts as all zero, whatever it contains.
    """
    at, closed = 0, 0
    while at < size:
        slot, word = load_uint32(deltas + at), load_uint32(deltas + at + 4)
        table = tables + TABLE_BYTES * ((word & ~_OPEN) >> 16)
        stride = load_int64(table + STRIDE)
        if word & _OPEN:
            following = at + _AHEAD * (DELTA_BYTES + stride)
            if following + DELTA_BYTES <= size:
                _prefetch_logged(deltas + following, tables, table_count)
            bits = load_int64(table + SLOT_BITS)
            segment = slot >> bits
            row = load_int64(load_int64(table + SEGMENTS) + 8 * segment) + stride * (slot & ((1 << bits) - 1))
            if load_uint32(row + load_int64(table + PUSHES)) != 0:
                _xor(deltas + at + DELTA_BYTES, row, stride)
            byte = load_int64(table + OPENED) + (slot >> 3)
            store_uint8(byte, load_uint8(byte) & ~(1 << (slot & 7)))
            store_uint32(deltas + at + 4, word ^ _OPEN)
            closed += 1
        at += DELTA_BYTES + stride * (word & _MOST_ROWS)
    return closed


def _is_always_needed(table: int, segment: int) -> bool:
    """Says that a segment's rows are to leave the parity."""
    return True


class DeltaLog:
    """The log of one store; `lane_of(table, segment)` is the lane of the deltas of a segment."""

    def __init__(
        self,
        tables: NDArray[np.void],
        segments: Sequence[Sequence[Segment]],
        lanes: int,
        lane_of: Callable[[int, int], int],
        *,
        merges: bool = False,
    ) -> None:
        """Begins a log of `tables: slab.TABLE[n]`, of which no row is filled in yet; the caller keeps `segments`.

        With `merges`, a row has one delta for all changes between two calls of `take`.
        """
        self._tables = tables
        self._segments = segments
        self._lane_of = lane_of
        self._cells = np.zeros(lanes, np.int64)
        self._starts, self._stops = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)  # of the chunks: addresses
        self._chunks = [np.zeros(0, np.uint8) for _ in range(lanes)]
        self._full: list[list[NDArray[np.uint8]]] = [[] for _ in range(lanes)]
        self._lanes_of = [np.zeros(0, np.int64) for _ in segments]
        self._merges = merges
        self._is_needed: Callable[[int, int], bool] = _is_always_needed
        self._opened = [np.zeros(0, np.uint8) for _ in segments]
        tables["opened"] = 0
        for lane in range(lanes):
            self._begin_chunk(lane, 0)
        for table, known in enumerate(segments):
            self.add_segments(table, len(known))

    def add_segments(self, table: int, count: int) -> None:
        """Prepares for a table to have `count` segments. Raises MemoryError, and then a later call does the rest."""
        known = self._lanes_of[table]
        if count > len(known):
            self._make_room_to_open(table, count)
            cells = address_of(self._cells)
            added = [cells + 8 * self._lane_of(table, segment) for segment in range(len(known), count)]
            self._lanes_of[table] = np.concatenate([known, np.array(added, np.int64)])
            self._tables[table]["logs"] = address_of(self._lanes_of[table])

    def _make_room_to_open(self, table: int, segments: int) -> None:
        room = segments << int(self._tables[table]["slot_bits"]) >> 3
        if self._merges and room > len(self._opened[table]):
            grown = np.zeros(2 * room, np.uint8)
            grown[: len(self._opened[table])] = self._opened[table]
            self._opened[table] = grown
            self._tables[table]["opened"] = address_of(grown)

    def make_room(self, size: int) -> None:
        """Makes room for deltas of `size` bytes, including headers. Raises MemoryError."""
        for lane in np.flatnonzero(self._stops - self._cells < size).tolist():
            self._begin_chunk(lane, size)

    def take(self, receivers: Sequence[Sequence[int]]) -> list[NDArray[np.uint8]]:
        """Returns the deltas written since the last call, lane after lane for each receiver: uint8[].

        `receivers` has the lanes of each. The caller owns the deltas. Raises MemoryError, and then takes nothing.
        """
        self._close()
        # copies: the chunks have room for several times these bytes, and are written again, while they are cached
        taken = [
            np.concatenate([_NONE, *(part for lane in lanes for part in self._parts(lane))]) for lanes in receivers
        ]
        self._full = [[] for _ in self._full]
        self._cells[:] = self._starts
        return taken

    def _close(self) -> None:
        """Closes all open deltas; what changes from then on has deltas of its own."""
        if self._merges:
            tables = address_of(self._tables)
            for lane in range(len(self._full)):
                for part in self._parts(lane):
                    close_deltas(address_of(part), len(part), tables, len(self._tables))

    @property
    def pending_bytes(self) -> int:
        """Bytes of the deltas that were written and not taken yet."""
        full = sum(len(part) for parts in self._full for part in parts)
        return full + int((self._cells - self._starts).sum())

    @property
    def is_whole(self) -> bool:
        """Whether all rows are filled in."""
        return bool((self._tables["logged"] == EVERY_SLOT).all())

    @property
    def is_empty(self) -> bool:
        """Whether no row is filled in."""
        return not self._tables["logged"].any()

    def fill(self, most_bytes: int) -> None:
        """Fills in the next rows, about `most_bytes` bytes of them. Raises MemoryError, and then has lost nothing."""
        for table in range(len(self._tables)):
            entry = self._tables[table]
            first, end = int(entry["logged"]), int(entry["next_slot"])
            if first == EVERY_SLOT:
                continue
            if first >= end:
                entry["logged"] = EVERY_SLOT
                continue
            bits = int(entry["slot_bits"])
            rest = min(end, (first >> bits << bits) + int(entry["segment_rows"])) - first
            count = self._count(table, rest, most_bytes)
            self._write(table, first, count)
            following = first + count
            in_segment = following & ((1 << bits) - 1)
            entry["logged"] = following if in_segment < int(entry["segment_rows"]) else ((first >> bits) + 1) << bits
            return

    def begin_withdrawal(self, is_needed: Callable[[int, int], bool]) -> list[int]:
        """Lets `withdraw` and `withdraw_slots` take rows of a whole log out of the parity.

        Segments of a table that are not needed are left in it. Returns, by table, the slot from which on the parity has
        no rows, and takes none any more. Raises MemoryError, and then a later call does the rest.
        """
        self._merges = True
        for table in range(len(self._segments)):
            self._make_room_to_open(table, len(self._segments[table]))
        self._is_needed = is_needed
        np.minimum(self._tables["logged"], self._tables["next_slot"], out=self._tables["logged"])
        return self.ends

    @property
    def ends(self) -> list[int]:
        """By table, the slot from which on the parity has no rows."""
        ends: list[int] = self._tables["logged"].tolist()
        return ends

    def withdraw(self, most_bytes: int) -> None:
        """Withdraws the last rows that were filled in, about `most_bytes` bytes of them. Raises as `fill` does."""
        self._close()  # rows that are withdrawn change without further deltas
        for table in range(len(self._tables)):
            entry = self._tables[table]
            bits = int(entry["slot_bits"])
            while (end := self._end(table)) and not self._is_needed(table, end - 1 >> bits):
                entry["logged"] = (end - 1 >> bits) << bits
            if end == 0:
                entry["logged"] = 0
                continue
            in_segment = (end - 1 & ((1 << bits) - 1)) + 1
            count = self._count(table, in_segment, most_bytes)
            self._write(table, end - count, count)
            entry["logged"] = end - count
            return

    def withdraw_slots(self, table: int, slots: NDArray[np.int64]) -> None:
        """Withdraws the rows at these slots of a table that are still in the parity. Raises as `fill` does."""
        self._close()
        opened, bits = self._opened[table], int(self._tables[table]["slot_bits"])
        slots = slots[slots < self._end(table)]
        slots = slots[opened[slots >> 3] >> (slots & 7).astype(np.uint8) & 1 == 0]
        stride = int(self._tables[table]["stride"])
        self.make_room(len(slots) * (DELTA_BYTES + stride))
        for segment in np.unique(slots >> bits).tolist():
            within = slots[slots >> bits == segment]
            rows = self._segments[table][segment].rows[within & ((1 << bits) - 1)]
            deltas = np.empty((len(within), DELTA_BYTES + stride), np.uint8)
            deltas[:, :4] = within.astype("<u4")[:, None].view(np.uint8)
            deltas[:, 4:DELTA_BYTES] = np.array([1 | table << 16], "<u4").view(np.uint8)
            deltas[:, DELTA_BYTES:] = rows
            lane = self._lane_of(table, segment)
            at = self._size(lane)
            self._chunks[lane][at : at + deltas.nbytes] = deltas.reshape(-1)
            np.bitwise_or.at(opened, within >> 3, np.uint8(1) << (within & 7).astype(np.uint8))
            self._cells[lane] += deltas.nbytes  # last: without memory for the rest, they were not withdrawn

    def _end(self, table: int) -> int:
        """Returns the slot after the last one that is filled in."""
        entry = self._tables[table]
        end = min(int(entry["logged"]), int(entry["next_slot"]))
        bits = int(entry["slot_bits"])
        if end & ((1 << bits) - 1) == 0 and end:  # the slots between two segments are none
            end = ((end >> bits) - 1 << bits) + int(entry["segment_rows"])
        return end

    def stop(self) -> None:
        """Stops logging."""
        self._tables["logged"] = 0
        self._is_needed = _is_always_needed  # lets go of whoever asked otherwise

    def _count(self, table: int, rows: int, most_bytes: int) -> int:
        return min(rows, _MOST_ROWS, max(1, most_bytes // int(self._tables[table]["stride"])))

    def _write(self, table: int, first: int, count: int) -> None:
        """Writes one delta of rows of one segment, from nothing or to nothing."""
        entry = self._tables[table]
        stride, bits = int(entry["stride"]), int(entry["slot_bits"])
        size = DELTA_BYTES + count * stride
        self.make_room(size)
        segment, row = first >> bits, first & ((1 << bits) - 1)
        lane = self._lane_of(table, segment)
        at = self._size(lane)
        delta = self._chunks[lane][at : at + size]
        delta[:DELTA_BYTES] = np.array([first, count | table << 16], "<u4").view(np.uint8)
        delta[DELTA_BYTES:] = self._segments[table][segment].rows[row : row + count].reshape(-1)
        if len(opened := self._opened[table]):  # of closed deltas, these rows are withdrawn already
            bits_of = np.unpackbits(opened[first >> 3 : (first + count + 7) >> 3], bitorder="little")
            withdrawn = bits_of[first & 7 :][:count] != 0
            if withdrawn.any():
                delta[DELTA_BYTES:].reshape(count, stride)[withdrawn] = 0
        self._cells[lane] += size

    def _parts(self, lane: int) -> list[NDArray[np.uint8]]:
        """Returns the deltas of a lane that were written and not taken yet, in order."""
        return [*self._full[lane], self._written(lane)]

    def _written(self, lane: int) -> NDArray[np.uint8]:
        """Returns what is written in a lane's present chunk."""
        return self._chunks[lane][: self._size(lane)]

    def _size(self, lane: int) -> int:
        """Returns the bytes that are written in a lane's present chunk."""
        return int(self._cells[lane] - self._starts[lane])

    def _begin_chunk(self, lane: int, size: int) -> None:
        chunk = np.empty(max(size, _CHUNK_BYTES), np.uint8)
        if self._size(lane):
            self._full[lane].append(self._written(lane))
        self._chunks[lane] = chunk
        self._starts[lane] = self._cells[lane] = address_of(chunk)
        self._stops[lane] = self._starts[lane] + len(chunk)
