"""Estimates the size of the hot set at a threshold: FAE's profiler (section 4.1.2, equations 1 to 4).

The estimate needs only a few chunks of a table's embedding logger, not all of its entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from emberscale_trainer.hot.access import Accesses

CHUNKS = 35
"""n of the paper: from 30 on, the mean of samples counts as normally distributed."""

CHUNK_ENTRIES = 1024
"""m of the paper."""

CONFIDENCE = 0.999
"""The confidence of the interval, as in the paper's figure 10."""

LARGE_TABLE_BYTES = 1 << 20
"""A smaller table is hot as a whole ("de-facto hot")."""


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """A number of rows, or of bytes, is `mean` plus or minus `half_width` with the given confidence."""

    mean: float
    half_width: float

    @property
    def upper(self) -> float:
        """The upper end of the interval, for which a budget must have room."""
        return self.mean + self.half_width


@dataclass(frozen=True, slots=True)
class TableProfile:
    """The chunks of one table's logger: int64[n, m], or all entries, int64[1, entries], of a logger of at most n * m.

    `accesses` is T * x / 100: the logged accesses to the table. `entries` is the number of rows that they went to, in
    `chunk_count` (N) chunks. `row_bytes` is the memory of one row.
    """

    chunks: npt.NDArray[np.int64]
    accesses: int
    entries: int
    chunk_count: int
    row_bytes: int
    estimated_bytes: float

    @classmethod
    def of(cls, accesses: Accesses, row_bytes: int, random: np.random.Generator) -> "TableProfile":
        """Draws chunks of a logger. The last entries, which do not fill a chunk, are left out."""
        entries = accesses.counts.size
        count = entries // CHUNK_ENTRIES
        if count <= CHUNKS:
            chunks = accesses.counts.reshape(1, entries)
        else:
            drawn = np.sort(random.choice(count, CHUNKS, replace=False))
            chunks = accesses.counts[: count * CHUNK_ENTRIES].reshape(count, CHUNK_ENTRIES)[drawn]
        size = accesses.estimated_rows * row_bytes
        return cls(chunks, accesses.total, entries, count, row_bytes, size)

    @property
    def small(self) -> bool:
        """Whether the table, including unseen rows, is small enough to be hot as a whole."""
        return self.estimated_bytes < LARGE_TABLE_BYTES

    def cutoff(self, threshold: float) -> float:
        """H_zt: the fewest accesses in the sample that make a row hot at a threshold t (equation 1)."""
        return threshold * self.accesses

    def hot_rows(self, threshold: float, confidence: float = CONFIDENCE) -> SizeEstimate:
        """Estimates the rows that are hot at a threshold t (equations 2 to 4). Exact if all entries were drawn."""
        hot = (self.chunks >= self.cutoff(threshold)).sum(axis=1)
        chunks, chunk_entries = self.chunks.shape
        if chunks == 1:
            return SizeEstimate(float(hot[0]), 0.0)
        scale = self.entries / chunk_entries
        quantile = float(stdtrit(chunks - 1, 1 - (1 - confidence) / 2))
        finite = (self.chunk_count - chunks) / self.chunk_count
        return SizeEstimate(
            float(hot.mean()) * scale, quantile * math.sqrt(finite * float(hot.var(ddof=1)) / chunks) * scale
        )


def hot_bytes(tables: Sequence[TableProfile], whole: frozenset[int], threshold: float) -> SizeEstimate:
    """Estimates the bytes of all tables' hot rows at a threshold; tables in `whole` count with all their rows.

    The chunks of tables are drawn independently, so the squares of the half widths add up.
    """
    mean = square = 0.0
    for number, table in enumerate(tables):
        if number in whole:
            mean += table.estimated_bytes
            continue
        rows = table.hot_rows(threshold)
        mean += rows.mean * table.row_bytes
        square += (rows.half_width * table.row_bytes) ** 2
    return SizeEstimate(mean, math.sqrt(square))
