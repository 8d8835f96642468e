"""The order of the records in one epoch.

The records of a split are in blocks, and an epoch is a line of positions 0..records-1. Position by position, the line
walks through the blocks in a shuffled order, and through each block in a shuffled order of its records. Any range of
positions can thus be found without walking the positions before it, and a reader touches few blocks.

Some files can only be read forwards: compressed text, Parquet's row groups. The blocks of such a stretch form a chain.
Chains are shuffled among each other, while the blocks of a chain keep the order of the file.

The order depends only on the block sizes, the seed and the epoch. It uses its own counter-based generator, not numpy's,
so that it is the same with every version of numpy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_api.routing import MIX_1, MIX_2, mix64

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Span:
    """Places [start, stop) of a block's own shuffled order: the records `permutation(block)[start:stop]`."""

    block: int
    start: int
    stop: int


class EpochOrder:
    """The record at each position of an epoch.

    With `enabled` False (evaluation), positions follow the files. `chains[i]` is the number of block i's chain,
    ascending from 0; by default each block is its own chain. Raises ValueError for a negative block size.
    """

    def __init__(
        self, block_records: Sequence[int], seed: int, epoch: int, enabled: bool, chains: Sequence[int] | None = None
    ) -> None:
        sizes = np.asarray(block_records, dtype=np.int64)
        if sizes.size and int(sizes.min()) < 0:
            raise ValueError("a block cannot hold a negative number of records")
        self._key = mix64(mix64(seed + _GOLDEN) + epoch)
        self._enabled = enabled
        self._sizes = sizes
        self._order = self._chained(np.arange(sizes.size) if chains is None else np.asarray(chains, dtype=np.int64))
        self._ends = np.cumsum(sizes[self._order])

    @property
    def records(self) -> int:
        """The number of positions."""
        return int(self._ends[-1]) if self._ends.size else 0

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yields the spans of the positions [start, stop), in order, as few as possible, none of them empty.

        Raises ValueError for positions that the epoch does not have.
        """
        if not 0 <= start <= stop <= self.records:
            raise ValueError(f"positions [{start}, {stop}) are not within the epoch's {self.records}")
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            block, end = int(self._order[place]), int(self._ends[place])
            size = int(self._sizes[block])
            begin = end - size
            if size:
                yield Span(block, start - begin, min(stop, end) - begin)
                start = min(stop, end)
            place += 1

    def permutation(self, block: int) -> npt.NDArray[np.int64]:
        """Returns the block's own records, numbered from 0, in the order of their positions."""
        return self._shuffled(int(self._sizes[block]), mix64(self._key ^ mix64(block + 1)))

    def _chained(self, chains: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the blocks in the order of their chains, and within a chain in the order of the file."""
        count = int(chains[-1]) + 1 if chains.size else 0
        rank = np.empty(count, dtype=np.int64)
        rank[self._shuffled(count, self._key)] = np.arange(count)
        return np.argsort(rank[chains], kind="stable")

    def _shuffled(self, count: int, key: int) -> npt.NDArray[np.int64]:
        """Sorts 0..count-1 by a hash of (key, number). The hash is a bijection of the number, so there are no ties."""
        numbers = np.arange(count, dtype=np.int64)
        if not self._enabled:
            return numbers
        hashes = np.uint64(key) + numbers.astype(np.uint64) * np.uint64(_GOLDEN)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(MIX_1)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(MIX_2)
        return np.argsort(hashes ^ (hashes >> np.uint64(31)))
