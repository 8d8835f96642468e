"""A copy of a table's rows, for a checkpoint that is written while training goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.rows import LIVE_BITMAP, Tracker, bitmap_of
from emberscale_trainer.table.slab import Segment


@dataclass(frozen=True)
class TableSnapshot:
    """The rows of one table as they were; `parts` are `uint8[n, stride]`, contiguous, a segment's rows at most each."""

    name: str
    layout: RowLayout
    parts: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(
        cls,
        name: str,
        layout: RowLayout,
        segments: Sequence[Segment],
        used: int,
        changed_for: Tracker | None,
        *,
        holes: bool,
    ) -> "TableSnapshot":
        """Copies the rows of segments, of which the last has `used` rows; with `holes` some slots hold no row."""
        parts = []
        for number, segment in enumerate(segments):
            rows = used if number == len(segments) - 1 else len(segment.rows)
            if changed_for is None and not holes:
                part = segment.rows[:rows].copy()
            else:
                bitmap = LIVE_BITMAP if changed_for is None else bitmap_of(changed_for)
                part = np.take(segment.rows[:rows], segment.chosen(bitmap, rows), axis=0)
            if len(part):
                parts.append(part)
        return cls(name, layout, tuple(parts))

    @property
    def rows(self) -> int:
        """Rows in the snapshot."""
        return sum(len(part) for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return sum(part.nbytes for part in self.parts)

    def chunks(self, rows: int = 1 << 16) -> Iterator[NDArray[np.uint8]]:
        """All records as contiguous `uint8[n, stride]`, n being at most `rows`; no copies."""
        for part in self.parts:
            for start in range(0, len(part), rows):
                yield part[start : start + rows]
