"""Finds hot rows, and records that access only hot rows: FAE's classifiers (section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_trainer.hot.access import Accesses, IdRecords
from emberscale_trainer.hot.kernels import fill_set, tag_ids, tag_lists
from emberscale_trainer.hot.optimizer import Calibration

_STEP = 1.02
"""If the size of a hot set was underestimated, the threshold grows by this factor until the set fits."""

_LEAST_INT64 = -(2**63)


@dataclass(frozen=True, slots=True)
class HotTable:
    """The hot rows of a column: `keys` int64[n], ascending; if `whole`, all rows, including unseen ones.

    `accesses` is the ratio of the logged accesses that went to hot rows.
    """

    keys: npt.NDArray[np.int64]
    whole: bool
    accesses: float


@dataclass(frozen=True, slots=True)
class HotSet:
    """The hot rows of a model, one HotTable per column of ids; `bytes` is their memory.

    `threshold` is that of the calibration, or larger if the estimate was too small for the budget.
    """

    tables: tuple[HotTable, ...]
    bytes: int
    threshold: float

    @property
    def rows(self) -> int:
        """The number of hot rows of all tables that were seen."""
        return sum(table.keys.size for table in self.tables)


def classify_rows(logs: Sequence[Accesses], row_bytes: Sequence[int], calibration: Calibration) -> HotSet:
    """Classifies rows by FAE's embedding classifier: one pass through each logger.

    A row of column c takes `row_bytes[c]` in all of the column's tables.
    """
    totals = [log.total for log in logs]
    threshold = calibration.threshold
    while True:
        chosen = [
            np.ones(log.counts.size, dtype=np.bool_) if number in calibration.whole else log.counts >= threshold * total
            for number, (log, total) in enumerate(zip(logs, totals, strict=True))
        ]
        size = sum(int(hot.sum()) * one for hot, one in zip(chosen, row_bytes, strict=True))
        if size <= calibration.budget or threshold > 1:
            break
        threshold *= _STEP
    return HotSet(
        tuple(
            HotTable(np.sort(log.keys[hot]), number in calibration.whole, float(log.counts[hot].sum() / max(total, 1)))
            for number, (log, hot, total) in enumerate(zip(logs, chosen, totals, strict=True))
        ),
        size,
        threshold,
    )


class InputProcessor:
    """FAE's input classifier: finds the records that access only hot rows. Threads may share one.

    `columns` is the number of the hot set's columns with one id per record; columns of lists follow.
    """

    def __init__(self, hot: HotSet, columns: int) -> None:
        # the column with the most cold accesses comes first, since it soonest rules most cold records out
        looked_at = [number for number, table in enumerate(hot.tables) if not table.whole]
        single = sorted((n for n in looked_at if n < columns), key=lambda number: hot.tables[number].accesses)
        sets = [_IdSet.of(hot.tables[number].keys) for number in single]
        sizes = np.array([one.slots.size for one in sets], dtype=np.int64)
        self._columns = np.array(single, dtype=np.int64)
        self._begins = np.cumsum(sizes) - sizes
        self._masks = sizes - 1
        self._empties = np.array([one.empty for one in sets], dtype=np.int64)
        self._slots = np.concatenate([np.empty(0, np.int64), *(one.slots for one in sets)])
        self._lists = [(n - columns, _IdSet.of(hot.tables[n].keys)) for n in looked_at if n >= columns]

    def tag(self, records: IdRecords) -> npt.NDArray[np.bool_]:
        """Returns bool[n]: whether every id of a record is hot."""
        tags = np.ones(len(records), dtype=np.bool_)
        if self._columns.size:
            tag_ids(records.ids, self._columns, self._begins, self._masks, self._empties, self._slots, tags)
        for number, ids in self._lists:
            lists = records.lists[number]
            tag_lists(lists.values, lists.offsets, ids.empty, ids.slots, tags)
        return tags


@dataclass(frozen=True, slots=True)
class _IdSet:
    """A set of ids for the kernels: open-addressed `slots` int64[2^k]; `empty` marks unused ones."""

    slots: npt.NDArray[np.int64]
    empty: int

    @classmethod
    def of(cls, keys: npt.NDArray[np.int64]) -> "_IdSet":
        empty = _LEAST_INT64
        for key in keys.tolist():  # ascending
            if key != empty:
                break
            empty += 1
        slots = np.full(1 << max(4, int(2 * keys.size).bit_length()), empty, dtype=np.int64)
        fill_set(keys, empty, slots)
        return cls(slots, empty)
