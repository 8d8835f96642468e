"""The place of a row in the stripes of all tables, as one number: `table << 48 | stripe << slot_bits | place`.

A place has the bits of a slot of its table, with the stripe instead of the segment.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.layout import RowLayout

_TABLE_BITS = 48


def place_numbers(table: int, stripe: int, places: NDArray[np.int64], layout: RowLayout) -> NDArray[np.int64]:
    """Returns the numbers of these places of a stripe, from 0: int64[n]."""
    return places + (table << _TABLE_BITS | stripe << layout.slot_bits)


def split_places(
    numbers: NDArray[np.int64], layouts: Sequence[RowLayout]
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yields table, stripe and places of these numbers, int64[n], in ascending order.

    Raises ValueError for a table or a place that does not exist.
    """
    ordered = np.unique(numbers)
    tables = ordered >> _TABLE_BITS
    for table in np.unique(tables).tolist():
        if not 0 <= table < len(layouts):
            raise ValueError(f"there is no table {table} to have rows of")
        bits, rows = layouts[table].slot_bits, layouts[table].segment_rows
        slots = ordered[tables == table] & ((1 << _TABLE_BITS) - 1)
        stripes, places = slots >> bits, slots & ((1 << bits) - 1)
        if (places >= rows).any():
            raise ValueError(f"a stripe of table {table} has {rows} places, and {places.max()} is asked for")
        starts = np.flatnonzero(np.diff(stripes, prepend=-1))
        for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(stripes)], strict=True):
            yield table, int(stripes[first]), places[first:stop]
