"""The bytes of parity that one server holds: a block for each stripe, as large as a segment."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.parity.code import decode_one, decode_two, doublings
from emberscale_trainer.parity.layout import ParityLayout
from emberscale_trainer.table.deltas import APPLIED, MALFORMED, TableDeltas, apply_deltas
from emberscale_trainer.table.layout import COUNTER_BYTES, KEY_BYTES, RowLayout
from emberscale_trainer.table.slab import Segment

_MOST_SEGMENTS = 1 << 20
"""More than a table can have; a delta that names a later one is invalid."""

_PIECE_BYTES = 1 << 20
"""Rows that are decoded or sent at a time."""


class ParityBlocks:
    """The parity that `member` of a group holds of `tables`. Not thread-safe."""

    def __init__(self, layout: ParityLayout, member: int, tables: Sequence[RowLayout]) -> None:
        self._layout = layout
        self._member = member
        self._tables = tuple(tables)
        self._blocks: dict[tuple[int, int], Segment] = {}
        self._halves: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self.nbytes = 0
        """The bytes of all blocks; unwritten parts take no memory."""
        self._directories = {source: _Directory(self._tables) for source in layout.sources(member)}

    def apply(self, source: int, deltas: NDArray[np.uint8]) -> None:
        """Applies deltas of another member, one of `sources`.

        Raises ValueError for bytes that are no deltas of rows whose parity is here; those before them are applied.
        After a MemoryError nothing is.
        """
        directory = self._directories[source]
        at = 0
        while True:
            at = apply_deltas(address_of(deltas), at, len(deltas), *directory.arguments)
            if at == APPLIED:
                return
            if at == MALFORMED:
                raise ValueError(f"server {source} sends what is no delta of these tables")
            slot, word = np.frombuffer(deltas[at : at + 8].tobytes(), "<u4").tolist()
            table = word >> 16
            try:
                self._add(source, table, slot >> self._tables[table].slot_bits)
            except MemoryError:  # what is applied twice is undone
                apply_deltas(address_of(deltas), 0, at, *directory.arguments)
                raise

    def lost_keys(
        self, lost: int, table: int, columns: Mapping[tuple[int, int], NDArray[np.uint8]]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yields the stripes in which this member decodes rows of one lost member, with their keys and places.

        Yields int64[n] of both. `columns` has, by table and stripe, the sum of the `key_columns` of all live members.
        """
        layout = self._tables[table]
        for stripe, block, role in self._held(table):
            is_here = self._layout.lost_rows(frozenset((lost,)), table, stripe)
            if not is_here or role != self._layout.decoder(frozenset((lost,)), table, stripe):
                continue
            own = key_columns(layout, block)
            if (others := columns.get((table, stripe))) is not None:
                own ^= others
            places = np.flatnonzero(own[:, KEY_BYTES:].any(axis=1))
            if len(places):
                yield stripe, own[places, :KEY_BYTES].copy().view(np.int64)[:, 0], places

    def alone(self, table: int, stripe: int, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns the rows at these places of a stripe, of which one lost member's are left: uint8[n, stride], a copy.

        Places without a row are left out.
        """
        rows: NDArray[np.uint8] = self._blocks[table, stripe].rows[places]
        alone: NDArray[np.uint8] = rows[self._tables[table].fields(rows)["pushes"] != 0]
        return alone

    def halves(self, lost: frozenset[int], table: int) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """Yields the parity that another holder needs to decode rows of two lost members, once only theirs are in it.

        Yields stripes, the first row in each, and uint8[rows, stride]. The rest of these stripes is zero.
        """
        for stripe, block, role in self._held(table):
            is_half = len(self._layout.lost_rows(lost, table, stripe)) > 1
            if is_half and role != self._layout.decoder(lost, table, stripe):
                for first, rows in _pieces(block):
                    if rows.any():
                        yield stripe, first, rows

    def take_half(self, table: int, stripe: int, first: int, rows: NDArray[np.uint8]) -> None:
        """Takes another holder's parity of a stripe, to decode it. Raises ValueError for another shape."""
        layout = self._tables[table] if 0 <= table < len(self._tables) else None
        if layout is None or not 0 <= first <= layout.segment_rows - len(rows) or rows.shape[1] != layout.stride:
            raise ValueError(f"rows {first} on of stripe {stripe} of table {table} are not of these tables")
        half = self._halves.get((table, stripe))
        if half is None and len(rows):
            half = self._halves[table, stripe] = np.zeros((layout.segment_rows, layout.stride), np.uint8)
        if half is not None:
            half[first : first + len(rows)] = rows

    def decoded(self, lost: frozenset[int], member: int, table: int) -> Iterator[NDArray[np.uint8]]:
        """Yields the slots of a lost member that this one decodes, once the parity has only rows of lost members.

        Yields uint8[rows, stride] of a table.
        """
        for stripe, block, role in self._held(table):
            rows_of = self._layout.lost_rows(lost, table, stripe)
            if member not in rows_of or role != self._layout.decoder(lost, table, stripe):
                continue
            positions = [self._layout.position(one, table, stripe) for one in rows_of]
            half = self._halves.get((table, stripe))
            for first, rows in _pieces(block):
                if len(rows_of) == 1:
                    yield rows if role == 0 else decode_one(rows, positions[0])
                else:
                    other = np.zeros_like(rows) if half is None else half[first : first + len(rows)]
                    yield decode_two(other, rows, *positions)[rows_of.index(member)]

    def _held(self, table: int) -> Iterator[tuple[int, NDArray[np.uint8], int]]:
        """Stripes of a table, their blocks here, and the roles of this member in them."""
        for (number, stripe), block in sorted(self._blocks.items()):
            role = self._layout.role(self._member, number, stripe)
            if number == table and role is not None:
                yield stripe, block.rows, role

    def _add(self, source: int, table: int, segment: int) -> None:
        """Has the deltas of a segment find the block of its stripe."""
        stripe = self._layout.stripe(source, table, segment)
        role = self._layout.role(self._member, table, stripe)
        if segment >= _MOST_SEGMENTS or role is None:
            raise ValueError(f"server {source} sends deltas of segment {segment} of table {table}, not held here")
        block = self._blocks.get((table, stripe))
        if block is None:
            layout = self._tables[table]
            block = Segment(layout.segment_rows, layout.stride, huge=segment > 0)
            self._blocks[table, stripe] = block
            self.nbytes += block.rows.nbytes
        times = doublings(role, self._layout.position(source, table, stripe))
        self._directories[source].put(table, segment, block.address, times)


def key_columns(layout: RowLayout, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the key and the `pushes` of each of `rows: uint8[n, stride]`, as uint8[n, KEY_BYTES + COUNTER_BYTES].

    They tell which slots hold rows, and whose, and are a small part of the bytes.
    """
    columns = np.empty((len(rows), KEY_BYTES + COUNTER_BYTES), np.uint8)
    columns[:, :KEY_BYTES] = rows[:, :KEY_BYTES]
    columns[:, KEY_BYTES:] = rows[:, layout.pushes_offset : layout.pushes_offset + COUNTER_BYTES]
    return columns


class _Directory:
    """Where the deltas of one source go."""

    def __init__(self, layouts: Sequence[RowLayout]) -> None:
        self._tables = np.zeros(len(layouts), TableDeltas)
        self._places = [np.zeros((2, 8), np.int64) for _ in layouts]
        for number, layout in enumerate(layouts):
            self._tables[number] = (layout.stride, layout.slot_bits, layout.segment_rows, 0, 0, 0)
            self._point(number)
        self.arguments = (address_of(self._tables), len(layouts))

    def put(self, table: int, segment: int, address: int, times: int) -> None:
        known = self._places[table]
        if segment >= known.shape[1]:
            self._places[table] = np.zeros((2, max(2 * known.shape[1], segment + 1)), np.int64)
            self._places[table][:, : known.shape[1]] = known
            self._point(table)
        self._places[table][:, segment] = address, times

    def _point(self, table: int) -> None:
        blocks, times = self._places[table]
        self._tables[table]["blocks"] = address_of(blocks)
        self._tables[table]["doublings"] = address_of(times)
        self._tables[table]["segments"] = len(blocks)


def _pieces(rows: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields the first row of each piece, and the piece."""
    count = max(1, _PIECE_BYTES // rows.shape[1])
    for first in range(0, len(rows), count):
        yield first, rows[first : first + count]
