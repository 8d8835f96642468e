"""Where parity is, and the bytes of it that one server holds: a block for each stripe, as large as a segment.

The members of a group are its servers, numbered from 0. Stripe `s` of a table has a segment of every member but one,
which holds the parity of the stripe. That is another one for each stripe, so that all hold as much: the left-symmetric
rotation of RAID 5, shifted by the table so that tables of a single segment are spread, too.

A member without rows in a stripe adds nothing to its parity: empty slots are zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.deltas import APPLIED, MALFORMED, TableDeltas, apply_deltas
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.memory import address_of
from emberscale_trainer.table.slab import Segment, rows_per_segment

_MOST_SEGMENTS = 1 << 20
"""More than a table can have; a delta that names a later one is no delta."""


@dataclass(frozen=True)
class ParityLayout:
    """The stripes of a group of `members`, two or more."""

    members: int

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"parity takes two servers or more, not {self.members}")

    def holder(self, table: int, stripe: int) -> int:
        """Returns the member that holds the parity of a stripe."""
        return (stripe + table) % self.members

    def stripe(self, member: int, table: int, segment: int) -> int:
        """Returns the stripe that a member's segment is in. Its segments skip the stripes whose parity it holds."""
        whole, rest = divmod(segment, self.members - 1)
        held = (member - table) % self.members
        return whole * self.members + rest + (rest >= held)

    def lane(self, member: int, table: int, segment: int) -> int:
        """Returns who holds the parity of a member's segment."""
        return self.holder(table, self.stripe(member, table, segment))


@dataclass(frozen=True)
class TableShape:
    """What parity has to know of a table: the layout of its rows."""

    layout: RowLayout

    @property
    def segment_rows(self) -> int:
        """Rows of a segment."""
        return rows_per_segment(self.layout.stride)

    @property
    def slot_bits(self) -> int:
        """Bits of a slot that say which row of a segment it is."""
        return (self.segment_rows - 1).bit_length()


class ParityBlocks:
    """The parity that `member` of a group holds of `tables`. Not thread-safe."""

    def __init__(self, layout: ParityLayout, member: int, tables: Sequence[TableShape]) -> None:
        self._layout = layout
        self._member = member
        self._shapes = tuple(tables)
        self._blocks: dict[tuple[int, int], Segment] = {}
        self.nbytes = 0
        """Bytes of all blocks; what was never written takes no memory."""
        self._directories = {source: _Directory(self._shapes) for source in range(layout.members) if source != member}

    def apply(self, source: int, deltas: NDArray[np.uint8]) -> None:
        """Applies deltas of another member.

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
                self._add(source, table, slot >> self._shapes[table].slot_bits)
            except MemoryError:  # what is applied twice is undone
                apply_deltas(address_of(deltas), 0, at, *directory.arguments)
                raise

    def blocks(self, table: int) -> Iterator[NDArray[np.uint8]]:
        """The blocks of a table: uint8[rows, stride] each."""
        for (number, _), block in sorted(self._blocks.items()):
            if number == table:
                yield block.rows

    def _add(self, source: int, table: int, segment: int) -> None:
        """Has the deltas of a segment find the block of its stripe."""
        stripe = self._layout.stripe(source, table, segment)
        if segment >= _MOST_SEGMENTS or self._layout.holder(table, stripe) != self._member:
            raise ValueError(f"server {source} sends deltas of segment {segment} of table {table}, not held here")
        block = self._blocks.get((table, stripe))
        if block is None:
            shape = self._shapes[table]
            block = Segment(shape.segment_rows, shape.layout.stride, huge=segment > 0)
            self._blocks[table, stripe] = block
            self.nbytes += block.rows.nbytes
        self._directories[source].put(table, segment, block.address)


class _Directory:
    """Where the deltas of one source go."""

    def __init__(self, shapes: Sequence[TableShape]) -> None:
        self._tables = np.zeros(len(shapes), TableDeltas)
        self._addresses = [np.zeros(8, np.int64) for _ in shapes]
        for number, shape in enumerate(shapes):
            self._tables[number] = (shape.layout.stride, shape.slot_bits, shape.segment_rows, 0, 0)
            self._point(number)
        self.arguments = (address_of(self._tables), len(shapes))

    def put(self, table: int, segment: int, address: int) -> None:
        known = self._addresses[table]
        if segment >= len(known):
            self._addresses[table] = np.zeros(max(2 * len(known), segment + 1), np.int64)
            self._addresses[table][: len(known)] = known
            self._point(table)
        self._addresses[table][segment] = address

    def _point(self, table: int) -> None:
        self._tables[table]["blocks"] = address_of(self._addresses[table])
        self._tables[table]["segments"] = len(self._addresses[table])
