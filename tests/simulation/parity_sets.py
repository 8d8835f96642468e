"""The parity that one simulated server holds: rows are sets of batches, and a segment has a few slots.

A parity block maps each batch of each row to a number: the sum of the factors under which the batch was added, which
is what the code makes of a byte 1. So parity shows which row and server each batch belongs to: a row that was not
withdrawn, or changed without a delta, leaves something behind in rebuilt rows.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from tests.simulation.units import UNITS, Batch, Unit
from tests.simulation.world import SimulationError

from emberscale_trainer.parity import ParityLayout
from emberscale_trainer.parity.code import coefficient, decode_one, decode_two

Element = tuple[Unit, Batch]
Block = dict[Element, int]
"""The non-zero numbers of a block."""

Deltas = tuple[tuple[int, frozenset[Element]], ...]
"""The changes to the row of each slot."""

Columns = NDArray[np.uint8]
"""The number of the unit of each row, and the number of its batches: uint8[n, 2]."""

TABLE = 0
SLOT_BITS = 1
PLACES = 1 << SLOT_BITS
"""The slots of a segment."""


def columns_of(elements: Iterator[tuple[int, Element]]) -> Columns:
    """Returns the columns of a segment or block, given its elements with their places."""
    rows: dict[tuple[int, Unit], int] = {}
    for place, (unit, _) in elements:
        rows[place, unit] = rows.get((place, unit), 0) + 1
    columns = np.zeros((PLACES, 2), np.uint8)
    for (place, unit), count in rows.items():
        columns[place] ^= np.array([UNITS.index(unit) + 1, count], np.uint8)
    return columns


class ParitySets:
    """A member's parity, by stripe and place."""

    def __init__(self, layout: ParityLayout, member: int) -> None:
        self._layout = layout
        self._member = member
        self._blocks: dict[tuple[int, int], Block] = {}
        self.halves: dict[tuple[int, int], Block] = {}

    def apply(self, source: int, deltas: Deltas) -> None:
        """Applies deltas. Raises ValueError if another member holds the row's parity."""
        for slot, changed in deltas:
            stripe = self._layout.stripe(source, TABLE, slot >> SLOT_BITS)
            role = self._layout.role(self._member, TABLE, stripe)
            if role is None:
                raise ValueError(f"member {source} sends deltas of slot {slot} to member {self._member}")
            block = self._blocks.setdefault((stripe, slot & (PLACES - 1)), {})
            factor = coefficient(role, self._layout.position(source, TABLE, stripe))
            for element in changed:
                value = block.pop(element, 0) ^ factor
                if value:
                    block[element] = value

    def lost_keys(self, lost: int, columns: Mapping[tuple[int, int], Columns]) -> Iterator[tuple[int, dict[int, Unit]]]:
        """Yields the stripes in which this member decodes rows of one lost member, with the unit at each place.

        `columns` has, by table and stripe, the sum of the columns of all live members.
        """
        stripes = sorted({stripe for stripe, _ in self._blocks})
        for stripe in stripes:
            if not self._layout.lost_rows(frozenset((lost,)), TABLE, stripe):
                continue
            if self._layout.decoding_member(frozenset((lost,)), TABLE, stripe) != self._member:
                continue
            blocks = [(place, self._blocks.get((stripe, place), {})) for place in range(PLACES)]
            own = columns_of((place, element) for place, block in blocks for element in block)
            if (others := columns.get((TABLE, stripe))) is not None:
                own ^= others
            found = {place: _unit(int(own[place, 0])) for place in range(PLACES) if own[place, 1]}
            if found:
                yield stripe, found

    def alone(self, stripe: int, places: list[int]) -> dict[Unit, frozenset[Batch]]:
        """Returns the rows at these places of a stripe, of which one lost member's are left."""
        found: dict[Unit, set[Batch]] = {}
        for place in places:
            units = {unit for unit, _ in self._blocks.get((stripe, place), {})}
            if len(units) > 1:
                raise SimulationError(f"a row is decoded while the parity has others there: {sorted(units)}")
            for (unit, (epoch, number)), value in self._blocks.get((stripe, place), {}).items():
                found.setdefault(unit, set()).add((epoch if value == 1 else -value, number))
        return {unit: frozenset(batches) for unit, batches in found.items()}

    def halves_for_others(self, lost: frozenset[int]) -> Iterator[tuple[tuple[int, int], Block]]:
        """Yields what another holder needs to decode two lost rows, by stripe and place."""
        for (stripe, place), block, role in self._held():
            if len(self._layout.lost_rows(lost, TABLE, stripe)) > 1 and role != self._decoder(lost, stripe):
                yield (stripe, place), dict(block)

    def decoded(self, lost: frozenset[int], member: int) -> Iterator[Element]:
        """Yields the content of a lost member's rows that this member decodes; a partial batch is another batch."""
        for (stripe, place), block, role in self._held():
            rows_of = self._layout.lost_rows(lost, TABLE, stripe)
            if member not in rows_of or role != self._decoder(lost, stripe):
                continue
            half = self.halves.get((stripe, place), {})
            elements = sorted(block.keys() | half.keys())
            p, q = (np.array([one.get(element, 0) for element in elements], np.uint8) for one in (half, block))
            positions = [self._layout.position(one, TABLE, stripe) for one in rows_of]
            if len(rows_of) == 2:
                found = decode_two(p, q, *positions)[rows_of.index(member)]
            else:
                found = q if role == 0 else decode_one(q, positions[0])
            for (unit, (epoch, number)), value in zip(elements, found.tolist(), strict=True):
                if value:
                    yield unit, (epoch if value == 1 else -value, number)

    def _held(self) -> Iterator[tuple[tuple[int, int], Block, int]]:
        for (stripe, place), block in sorted(self._blocks.items()):
            role = self._layout.role(self._member, TABLE, stripe)
            assert role is not None
            yield (stripe, place), block, role

    def _decoder(self, lost: frozenset[int], stripe: int) -> int:
        return self._layout.decoder(lost, TABLE, stripe)


def _unit(number: int) -> Unit:
    if not 0 < number <= len(UNITS):
        raise SimulationError(f"the parity tells a key that no row has: {number}")
    return UNITS[number - 1]
