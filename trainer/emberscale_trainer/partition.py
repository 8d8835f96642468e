"""A parameter server's share of a job's parameters, and the batches that it has applied to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import BUCKETS, DENSE_PIECES, MIX_1, MIX_2, RoutingTable

Runs = list[tuple[int, int, int]]
"""`(first, stop, times)`: each batch in [first, stop) was applied `times` times."""

_START_CAPACITY = 1024


class AppliedBatches:
    """Counts, per epoch and batch number, the pushes that changed rows.

    A count above 1 would be a defect; it is counted rather than flagged so that an audit can see one.
    """

    def __init__(self) -> None:
        self._counts: dict[int, NDArray[np.uint8]] = {}
        self.total = 0
        """How many batches are applied, each counted once."""

    def __contains__(self, batch: tuple[int, int]) -> bool:
        epoch, number = batch
        counts = self._counts.get(epoch)
        return counts is not None and number < len(counts) and counts[number] > 0

    def record(self, epoch: int, number: int) -> None:
        """Notes that a batch was applied."""
        counts = self._counts.get(epoch)
        if counts is None or number >= len(counts):
            counts = self._grow(epoch, number + 1)
        self.total += not counts[number]
        if counts[number] < 255:
            counts[number] += 1

    def make_room(self, epoch: int, stop: int) -> None:
        """Prepares to record batches below `stop`, which then needs no memory. Raises MemoryError."""
        self._grow(epoch, stop)

    def lacking(self, ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
        """The (epoch, number) of batches in (epoch, first, stop) ranges that are not applied."""
        return [
            (epoch, number)
            for epoch, first, stop in ranges
            for number in range(first, stop)
            if (epoch, number) not in self
        ]

    def beyond(self, other: "AppliedBatches") -> list[tuple[int, int]]:
        """The (epoch, number) of batches that are applied here and not in the other record, ascending."""
        found = []
        for epoch in self.epochs():
            counts = self._counts[epoch]
            lacks = counts > 0
            theirs = other._counts.get(epoch, counts[:0])[: len(counts)]
            lacks[: len(theirs)] &= theirs == 0
            found += [(epoch, number) for number in np.flatnonzero(lacks).tolist()]
        return found

    def ranges(self, epoch: int) -> list[tuple[int, int]]:
        """The applied batches of an epoch as ascending [first, stop) pairs."""
        counts = self._counts.get(epoch)
        if counts is None:
            return []
        applied = np.zeros(len(counts) + 2, np.bool_)
        applied[1:-1] = counts
        edges = np.flatnonzero(applied[1:] != applied[:-1]).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))

    def epochs(self) -> list[int]:
        """The epochs of which something is recorded, ascending."""
        return sorted(self._counts)

    def copy(self) -> "AppliedBatches":
        """An independent copy."""
        duplicate = AppliedBatches()
        duplicate._counts = {epoch: counts.copy() for epoch, counts in self._counts.items()}
        duplicate.total = self.total
        return duplicate

    def runs(self, epoch: int) -> Runs:
        """The counts of an epoch as runs; batches in no run were applied zero times."""
        return [run for run in _runs(self._counts[epoch]) if run[2]]

    @classmethod
    def from_runs(cls, epochs: Iterable[tuple[int, Sequence[Sequence[int]]]]) -> "AppliedBatches":
        """The inverse of `runs`, for several epochs."""
        applied = cls()
        for epoch, runs in epochs:
            for first, stop, times in runs:
                applied._grow(epoch, stop)[first:stop] = times
        applied._count()
        return applied

    @classmethod
    def merged(cls, records: Sequence["AppliedBatches"]) -> "AppliedBatches":
        """Merges several servers' records: a batch counts as applied if all have it, and as often as any has it."""
        merged = cls()
        for epoch in sorted({epoch for record in records for epoch in record.epochs()}):
            longest = max(len(record._counts.get(epoch, ())) for record in records)
            counts = [record._grow(epoch, longest)[:longest] for record in records]
            fewest, most = np.minimum.reduce(counts), np.maximum.reduce(counts)
            merged._counts[epoch] = np.where(fewest > 0, most, 0).astype(np.uint8)
        merged._count()
        return merged

    def _count(self) -> None:
        self.total = sum(int(np.count_nonzero(counts)) for counts in self._counts.values())

    def _grow(self, epoch: int, batches: int) -> NDArray[np.uint8]:
        old = self._counts.get(epoch, np.zeros(0, dtype=np.uint8))
        if batches <= len(old):
            return old
        grown = np.zeros(max(_START_CAPACITY, 2 * len(old), batches), dtype=np.uint8)
        grown[: len(old)] = old
        self._counts[epoch] = grown
        return grown


def _runs(values: NDArray[np.generic]) -> Runs:
    """Runs of equal values, as (first, stop, value)."""
    if not len(values):
        return []
    edges = np.flatnonzero(values[1:] != values[:-1]) + 1
    firsts = [0, *edges.tolist()]
    return [(first, stop, int(values[first])) for first, stop in zip(firsts, [*firsts[1:], len(values)], strict=True)]


def buckets_of(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the bucket of each key, the lowest 10 bits of its hash, int64 [n]."""
    values = keys.view(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return ((values ^ (values >> np.uint64(31))) & np.uint64(BUCKETS - 1)).view(np.int64)


@dataclass(frozen=True, eq=False)
class Ownership:
    """The server's own buckets and dense pieces.

    * `buckets`: bool [BUCKETS], true where the server owns the bucket.
    * `pieces`: bool [DENSE_PIECES], the same for dense pieces.
    """

    buckets: NDArray[np.bool_]
    pieces: NDArray[np.bool_]

    @classmethod
    def of(cls, routing: RoutingTable, index: int) -> "Ownership":
        """Returns what the server with this index owns under `routing`."""
        return cls(
            np.array(routing.bucket_owners, dtype=np.int64) == index,
            np.array(routing.piece_owners, dtype=np.int64) == index,
        )

    @classmethod
    def of_nothing(cls) -> "Ownership":
        """Returns what a server outside of the routing table owns."""
        return cls(np.zeros(BUCKETS, dtype=np.bool_), np.zeros(DENSE_PIECES, dtype=np.bool_))

    def __bool__(self) -> bool:
        """Whether anything is owned."""
        return bool(self.buckets.any() or self.pieces.any())

    def without(self, other: "Ownership") -> "Ownership":
        """Returns the difference: owned here and not there."""
        return Ownership(self.buckets & ~other.buckets, self.pieces & ~other.pieces)

    def within(self, other: "Ownership") -> "Ownership":
        """Returns the intersection: owned here and there."""
        return Ownership(self.buckets & other.buckets, self.pieces & other.pieces)

    def with_all(self, other: "Ownership") -> "Ownership":
        """Returns the union: owned here or there."""
        return Ownership(self.buckets | other.buckets, self.pieces | other.pieces)

    def copy(self) -> "Ownership":
        """Returns one that can change by itself."""
        return Ownership(self.buckets.copy(), self.pieces.copy())

    def add(self, keys: NDArray[np.int64], dense: bool) -> None:
        """Adds the buckets of `keys`, int64 [n]. With `dense` they are numbers of dense pieces."""
        if dense:
            self.pieces[keys] = True
        else:
            self.buckets[buckets_of(keys)] = True

    def among(self, keys: NDArray[np.int64], dense: bool) -> NDArray[np.bool_]:
        """Which of `keys`, int64 [n], are owned: bool [n]. With `dense` they are numbers of dense pieces."""
        return self.pieces[keys] if dense else self.buckets[buckets_of(keys)]

    def of_request(self, counts: NDArray[np.uint32], keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which keys of a request are owned: bool [n].

        `counts` uint32 [tables], the dense table last, `keys` int64 [n].
        """
        rows = len(keys) - int(counts[-1])
        return np.concatenate([self.among(keys[:rows], False), self.among(keys[rows:], True)])

    def owns(self, counts: NDArray[np.uint32], keys: NDArray[np.int64]) -> bool:
        """Whether every key of a request is owned: `counts` uint32 [tables], the dense table last, `keys` int64 [n]."""
        rows = len(keys) - int(counts[-1]) if len(counts) else 0
        return self.owns_pieces(keys[rows:]) and bool(self.buckets[buckets_of(keys[:rows])].all())

    def owns_pieces(self, pieces: NDArray[np.int64]) -> bool:
        """Whether every piece, int64 [n], exists and is owned."""
        if not len(pieces) or pieces.tobytes() == self._all_pieces:
            return True
        if int(pieces.min()) < 0 or int(pieces.max()) >= len(self.pieces):
            return False
        return bool(self.pieces[pieces].all())

    @cached_property
    def _all_pieces(self) -> bytes:
        """All own pieces as bytes of a request, which nearly every request names."""
        return np.flatnonzero(self.pieces).astype(np.int64).tobytes()
