"""Counts the accesses to each row of a table: FAE's embedding logger (section 4.1.2).

Tables here grow with the ids that occur, whereas the paper's have a fixed number of rows. The logger is therefore a
hash table from id to count with only the seen ids; an unseen id has no accesses and is never hot.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.records import Columns, IdLists
from emberscale_trainer.hot.kernels import count_ids, move_counts

_FIRST_SLOTS = 1 << 10


@dataclass(frozen=True, slots=True)
class IdRecords:
    """The ids of n records: ids int64[n, c], one per column, and one IdLists of n lists for each column of lists."""

    ids: npt.NDArray[np.int64]
    lists: tuple[IdLists, ...] = ()

    @classmethod
    def of(cls, columns: Columns) -> "IdRecords":
        """Returns the ids of records that were read; shares their memory."""
        return cls(columns.ids, tuple(room.lists() for room in columns.lists))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def column_ids(self) -> list[npt.NDArray[np.int64]]:
        """All ids of each column, columns of single ids first."""
        return [*self.ids.T, *(lists.values for lists in self.lists)]

    def take(self, records: npt.NDArray[np.int64]) -> "IdRecords":
        """Returns the given records, int64[k], in their order."""
        return IdRecords(self.ids[records], tuple(_take(lists, records) for lists in self.lists))

    @classmethod
    def join(cls, parts: "list[IdRecords]") -> "IdRecords":
        """Joins the records of all parts, at least one, in their order."""
        return cls(
            np.concatenate([part.ids for part in parts]),
            tuple(IdLists.join(column) for column in zip(*(part.lists for part in parts), strict=True)),
        )


def _take(lists: IdLists, records: npt.NDArray[np.int64]) -> IdLists:
    lengths = np.diff(lists.offsets)[records]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(lists.offsets[records] - offsets[:-1], lengths)
    return IdLists(lists.values[places], offsets)


class AccessLog:
    """Counts the accesses to each row of one table, in 24 to 48 bytes per id."""

    def __init__(self) -> None:
        self._keys = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self._counts = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.rows = 0
        self.accesses = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Counts ids, int64[n]."""
        counted = 0
        while True:
            limit = self._keys.size * 2 // 3
            counted, self.rows = count_ids(ids, counted, self._keys, self._counts, self.rows, limit)
            if counted == ids.size:
                break
            self._grow()
        self.accesses += ids.size

    def _grow(self) -> None:
        keys, counts = (np.zeros(2 * self._keys.size, dtype=np.int64) for _ in range(2))
        move_counts(self._keys, self._counts, keys, counts)
        self._keys, self._counts = keys, counts

    def entries(self) -> "Accesses":
        """Returns the counts so far."""
        seen = self._counts > 0
        return Accesses(self._keys[seen], self._counts[seen])


@dataclass(frozen=True, slots=True)
class Accesses:
    """The rows of one table that were accessed: distinct keys int64[n], and their counts int64[n], at least 1.

    They are in the order of a hash of their keys, so any stretch of them is a random sample of the rows.
    """

    keys: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """All accesses: T of the paper for a whole data set, T * x / 100 for a sample."""
        return int(self.counts.sum())

    @property
    def estimated_rows(self) -> float:
        """A lower bound on the table's rows, by Chao's estimator: rows seen once indicate how many were never seen.

        Bias-corrected form of Chao (1984), `rows + f1 * (f1 - 1) / (2 * (f2 + 1))`, with f1 and f2 the rows seen once
        and twice.
        """
        once, twice = int((self.counts == 1).sum()), int((self.counts == 2).sum())
        return self.keys.size + once * (once - 1) / (2 * (twice + 1))

    def rows_covering(self, share: float) -> int:
        """The smallest number of rows that take at least `share` of the accesses."""
        falling = np.sort(self.counts)[::-1]
        if not falling.size:
            return 0
        return int(np.searchsorted(np.cumsum(falling), share * falling.sum() - 1e-9)) + 1


def log_accesses(records: IdRecords, logs: "list[AccessLog]") -> None:
    """Counts the ids of records, `logs[c]` those of column c."""
    for log, ids in zip(logs, records.column_ids, strict=True):
        log.add(ids)
