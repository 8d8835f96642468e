"""Blocks whose columns have been decoded as a whole, and the gathering of records from them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.compiled import kernel
from emberscale_trainer.data.errors import BadRecord
from emberscale_trainer.data.records import Columns, IdLists


@dataclass(frozen=True, slots=True)
class DecodedBlock:
    """The columns of n records: labels float32[n], dense float32 or float64[d, n], ids int64[c, n], and lists.

    `longest[i]` is how many ids of list column i are taken. `problems` says what is wrong with malformed records.
    """

    file: str
    first_record: int
    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.floating]
    ids: npt.NDArray[np.int64]
    lists: tuple[IdLists, ...]
    longest: tuple[int, ...]
    problems: Mapping[int, str]

    def read(self, records: npt.NDArray[np.int64], into: Columns) -> tuple[int, list[BadRecord]]:
        """See RecordBlock."""
        bad: list[BadRecord] = []
        if self.problems:
            malformed = [record for record in records.tolist() if record in self.problems]
            bad = [BadRecord(self.file, self.first_record + n + 1, self.problems[n]) for n in malformed]
            records = records[~np.isin(records, malformed)]
        good = records.size
        _gather(self.labels, self.dense, self.ids, records, into.labels, into.dense, into.ids)
        for room, lists, longest in zip(into.lists, self.lists, self.longest, strict=True):
            lengths = np.diff(lists.offsets)[records]
            kept = np.minimum(lengths, longest)
            values = np.empty(int(kept.sum()), dtype=np.int64)
            _gather_lists(lists.values, lists.offsets, records, kept, values)
            room.append(values, kept, int(np.count_nonzero(lengths > longest)))
        return good, bad


@kernel
def _gather(
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.floating],
    ids: npt.NDArray[np.int64],
    records: npt.NDArray[np.int64],
    labels_out: npt.NDArray[np.float32],
    dense_out: npt.NDArray[np.floating],
    ids_out: npt.NDArray[np.int64],
) -> None:
    for row in range(records.size):
        labels_out[row] = labels[records[row]]
    for column in range(dense.shape[0]):
        for row in range(records.size):
            dense_out[row, column] = dense[column, records[row]]
    for column in range(ids.shape[0]):
        for row in range(records.size):
            ids_out[row, column] = ids[column, records[row]]


@kernel
def _gather_lists(
    values: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    records: npt.NDArray[np.int64],
    kept: npt.NDArray[np.int64],
    into: npt.NDArray[np.int64],
) -> None:
    end = 0
    for row in range(records.size):
        begin = offsets[records[row]]
        for place in range(begin, begin + kept[row]):
            into[end] = values[place]
            end += 1
