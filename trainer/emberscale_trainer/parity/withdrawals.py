"""What the live members of a group have taken out of the parity, so that rows of a lost member are left alone in it.

Each live member *withdraws* its rows: from its last slot downwards, and before that the rows at slots that are asked
for. A row of the lost member is decoded once all live members have withdrawn their rows at its place in the stripe.

This module has no clock, thread, socket or row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.parity.decodable import DecodableRows, Places, require_places
from emberscale_trainer.parity.layout import ParityLayout


@dataclass(frozen=True)
class SlotNumbers:
    """How a table numbers its slots: `segment << bits | place`, with `places` of them in a segment.

    A row takes `row_bytes`.
    """

    bits: int
    places: int
    row_bytes: int


class Withdrawals:
    """What one holder knows of the withdrawals of all live members, for the stripes whose rows it decodes.

    * `columns`: by table and stripe, the sum of the `key_columns` that live members have told.
    * `decodable`: the rows of the lost member that can be decoded by now.
    """

    def __init__(self, layout: ParityLayout, tables: Sequence[SlotNumbers]) -> None:
        self._layout = layout
        self._tables = tables
        self.columns: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self.decodable = DecodableRows([one.row_bytes for one in tables])
        self._ends: dict[tuple[int, int], int] = {}
        self._out: dict[tuple[int, int], dict[int, NDArray[np.bool_]]] = {}

    def tell_keys(self, table: int, stripe: int, columns: NDArray[np.uint8]) -> None:
        """Takes the `key_columns` of the first places of a member's segment, uint8[n, k]. Raises ValueError."""
        if not 0 <= table < len(self._tables) or not len(columns) <= self._tables[table].places:
            raise ValueError(f"stripe {stripe} of table {table} has no {len(columns)} places")
        known = self.columns.get((table, stripe))
        if known is None:
            known = self.columns[table, stripe] = np.zeros((self._tables[table].places, columns.shape[1]), np.uint8)
        known[: len(columns)] ^= columns

    def tell_ends(self, source: int, ends: Sequence[int]) -> None:
        """Takes the slot of each table from which on a live member has no rows in the parity. Raises ValueError."""
        if len(ends) != len(self._tables):
            raise ValueError(f"{len(ends)} tables are withdrawn, and there are {len(self._tables)}")
        self._ends |= {(source, table): end for table, end in enumerate(ends)}

    def begin(self, stripes: Iterable[tuple[int, int]]) -> None:
        """Begins to look for rows that can be decoded in these stripes (table and number): all members have told.

        May be repeated after a MemoryError.
        """
        self.columns.clear()
        self.decodable.clear()
        for table, stripe in stripes:
            places = self._tables[table].places
            self.decodable.begin(table, stripe, places)
            self._out[table, stripe] = {
                source: np.arange(places) >= self._end_in(source, table, stripe)
                for source, number in self._ends
                if number == table and self._layout.has_segment(source, table, stripe)
            }
            self._look(table, stripe, np.arange(places))

    def withdrew_to(self, source: int, ends: Sequence[int]) -> None:
        """Notes that a member has withdrawn its rows down to these slots, by table. Raises ValueError."""
        before = {table: self._ends.get((source, table), 0) for table in range(len(ends))}
        self.tell_ends(source, ends)
        for table, end in enumerate(ends):
            if end < before[table]:
                self._withdrew_between(source, table, end, before[table])

    def _withdrew_between(self, source: int, table: int, end: int, before: int) -> None:
        bits = self._tables[table].bits
        for segment in range(end >> bits, (before - 1 >> bits) + 1):
            stripe = self._layout.stripe(source, table, segment)
            if (out := self._out.get((table, stripe))) is not None:
                first = self._end_in(source, table, stripe)
                places = first + np.flatnonzero(~out[source][first:])
                out[source][first:] = True
                self._look(table, stripe, places)

    def withdrew(self, source: int, table: int, stripe: int, places: Places) -> None:
        """Notes that a member has withdrawn its rows at these places. Raises ValueError if one does not exist."""
        out = self._out.get((table, stripe), {}).get(source)
        if out is None:
            return
        require_places(table, stripe, places, len(out))
        out[places] = True
        self._look(table, stripe, places)

    def _look(self, table: int, stripe: int, places: Places) -> None:
        """Finds the rows at those of these places where all live members have withdrawn theirs."""
        is_alone = np.ones(len(places), np.bool_)
        for out in self._out[table, stripe].values():
            is_alone &= out[places]
        self.decodable.add(table, stripe, places[is_alone])

    def _end_in(self, source: int, table: int, stripe: int) -> int:
        """Returns the first place of a stripe whose row the member has withdrawn."""
        numbers, segment = self._tables[table], self._layout.segment(source, table, stripe)
        assert segment is not None
        return min(max(self._ends[source, table] - (segment << numbers.bits), 0), numbers.places)
