"""Decides which rows leave a table, and when: a function of the applied batches alone.

The clock is the number of batches that a server has applied. All servers agree on it at every barrier, and checkpoints
restore it. Each batch makes some buckets *due*, so that each is due once in a period. A due bucket is swept before the
next batch is applied: first the rows that no push has touched for the time to live leave, then, if more are left than
the bucket's share of the table's rows, those pushed least frequently. Buckets do not depend on each other. The result
is therefore the same whichever server owns a bucket and whichever thread sweeps it, and with a move or a restore
between two batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import EvictionSpec
from emberscale_api.routing import BUCKETS
from emberscale_trainer.table.store import TableStore

HALF_LIFE_BATCHES = 4096
"""The pushes of a row count half after this many batches without one, so that rows that were once frequent leave."""

_TTL_PARTS = 8
"""The number of times that a bucket is due within a time to live."""

_SPARE_PARTS = 8
"""A sweep frees one part in this many of a bucket's share, so that not every new row leads to a sweep."""

_PERIODS = (16, BUCKETS)
"""The fewest and the most batches between two checks of a bucket against its share."""

ROWS_A_SWEEP = 1024
"""The approximate number of rows that one hold of the lock examines, in buckets that are swept together; all rows of a
bucket are examined together, however many they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Buckets of a table that are due, int64 [n], and the clock at which they became due."""

    table: int
    buckets: NDArray[np.int64]
    clock: int


class _Rule:
    """Determines when the buckets of one table are due, and which of their rows leave."""

    def __init__(self, spec: EvictionSpec) -> None:
        self._ttl = spec.ttl_batches
        self._shares: NDArray[np.int64] | None = None
        periods = []
        if self._ttl is not None:
            periods.append(max(1, self._ttl // _TTL_PARTS))
        if spec.max_rows is not None:
            each, rest = divmod(spec.max_rows, BUCKETS)
            self._shares = np.full(BUCKETS, each, np.int64)
            self._shares[:rest] += 1
            least, most = _PERIODS
            periods.append(min(max(least, each), most))
        self._period = min(periods)

    def due(self, clock: int, rows: NDArray[np.uint32], owned: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the owned buckets that a batch makes due and that may lose rows; `rows` is uint32 [BUCKETS]."""
        place = clock % self._period
        first, stop = -(-place * BUCKETS // self._period), -(-(place + 1) * BUCKETS // self._period)
        mine = rows[first:stop] * owned[first:stop]
        least: NDArray[np.int64] | int = 0
        if self._ttl is None and self._shares is not None:
            least = self._shares[first:stop]
        return first + np.flatnonzero(mine > least)

    def leaving(
        self, buckets: NDArray[np.int64], sizes: NDArray[np.int64], marks: NDArray[np.int64], clock: int
    ) -> NDArray[np.int64]:
        """Returns the keys of the rows that leave.

        `sizes`, int64 [buckets], is the number of rows of each bucket; `marks`, int64 [rows, 3], is (key, pushes,
        touched) of each row.
        """
        ages = np.maximum(0, clock - marks[:, 2])  # rows from a lost server may have a batch that this one lacks
        stale = np.zeros(len(marks), np.bool_) if self._ttl is None else ages >= self._ttl
        if self._shares is None:
            expired: NDArray[np.int64] = marks[stale, 0]
            return expired
        bucket = np.repeat(np.arange(len(buckets)), sizes)
        count = np.bincount(bucket[stale], minlength=len(buckets))
        shares = self._shares[buckets]
        surplus = sizes - count - (shares - shares // _SPARE_PARTS)
        count += np.where(sizes - count > shares, surplus, 0)
        frequencies = np.where(stale, -1, marks[:, 1] >> np.minimum(ages // HALF_LIFE_BATCHES, 32))
        # of equally frequent rows, older ones leave first, then those with lower keys
        order = np.lexsort((marks[:, 0], marks[:, 2], frequencies, bucket))
        rank = np.arange(len(marks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        keys: NDArray[np.int64] = marks[order[rank < np.repeat(count, sizes)], 0]
        return keys


class Eviction:
    """The rules of a store's tables. The caller holds the store's lock."""

    def __init__(self, store: TableStore) -> None:
        self._store = store
        self._rules = {
            table: _Rule(spec.eviction) for table, spec in enumerate(store.specs) if spec.eviction.removes_rows
        }

    def __bool__(self) -> bool:
        """Whether a row is ever removed."""
        return bool(self._rules)

    def due(self, clock: int, owned: NDArray[np.bool_]) -> Iterator[Sweep]:
        """Yields the sweeps between the batch that advanced the clock and the next; `owned` is bool [BUCKETS]."""
        for table, rule in self._rules.items():
            rows = self._store.bucket_rows(table)
            buckets = rule.due(clock, rows, owned)
            if len(buckets):
                sweeps = np.cumsum(rows[buckets]) // ROWS_A_SWEEP
                for some in np.split(buckets, 1 + np.flatnonzero(np.diff(sweeps))):
                    yield Sweep(table, some, clock)

    def sweep(self, due: Sweep) -> int:
        """Retires the rows of due buckets that must leave; returns how many."""
        sizes = self._store.bucket_rows(due.table)[due.buckets].astype(np.int64)
        marks = self._store.marks_of_buckets(due.table, due.buckets)
        keys = self._rules[due.table].leaving(due.buckets, sizes, marks, due.clock)
        return self._store.evict(due.table, keys) if len(keys) else 0
