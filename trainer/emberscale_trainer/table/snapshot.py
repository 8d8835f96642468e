"""A copy of a table's rows, for a checkpoint that is written while training goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.rows import Tracker
from emberscale_trainer.table.slab import Segment


@dataclass(frozen=True)
class TableSnapshot:
    """The rows of one table as they were: `records: uint8[rows, stride]`, contiguous, in no particular order."""

    name: str
    layout: RowLayout
    records: NDArray[np.uint8]

    @classmethod
    def of(
        cls,
        name: str,
        layout: RowLayout,
        segments: Sequence[Segment],
        used: Sequence[int],
        changed_for: Tracker | None,
    ) -> "TableSnapshot":
        """Copies the rows of segments, of whose slots the first `used` each were given out."""
        chosen = []
        for segment, count in zip(segments, used, strict=False):
            rows = segment.rows[:count]
            wanted = layout.fields(rows)["pushes"] != 0
            if changed_for is not None:
                wanted &= segment.bits(changed_for, len(rows))
            chosen.append(rows if wanted.all() else rows[wanted])
        # one block for all: numpy asks for huge pages, which halves the time
        return cls(name, layout, np.concatenate([*chosen, layout.empty(0)]))

    @property
    def rows(self) -> int:
        """Rows in the snapshot."""
        return len(self.records)

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return self.records.nbytes

    def chunks(self, rows: int = 1 << 16) -> Iterator[NDArray[np.uint8]]:
        """All records as contiguous `uint8[n, stride]`, n being at most `rows`; no copies."""
        for start in range(0, len(self.records), rows):
            yield self.records[start : start + rows]
