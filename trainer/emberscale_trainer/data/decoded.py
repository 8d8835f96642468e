"""Blocks whose columns are decoded as a whole, and the gathering and conversion of records from them.

Ids are gathered directly from Arrow's memory: a copy of them all would cost nearly half as much as decoding them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.records import MISSING_ID, Columns, IdLists
from emberscale_trainer.jit import kernel
from emberscale_trainer.jit.memory import load_int64, load_uint8

LOG1P_TABLE = np.log1p(np.arange(1024, dtype=np.float64)).astype(np.float32)
"""log1p of small integers, rounded like in all readers."""


@kernel
def _is_null(validity: npt.NDArray[np.uint8], place: int) -> bool:
    return not (validity[place >> 3] >> (place & 7)) & 1


@kernel
def fill_dense(
    values: npt.NDArray[Any],
    validity: npt.NDArray[np.uint8],
    first_bit: int,
    missing: float,
    log1p: bool,
    into: npt.NDArray[np.floating],
) -> None:
    """Writes numbers with an Arrow validity bitmap (empty: none is null) as dense features.

    `log1p` turns x into log1p(max(x, 0)), equal to the CriteoTSV reader's value of the same integer in every bit.
    """
    for place in range(values.size):
        if validity.size and _is_null(validity, first_bit + place):
            into[place] = missing
            continue
        value = np.float64(values[place])
        if not log1p:
            into[place] = value
        elif value <= 0:
            into[place] = 0.0
        elif value < LOG1P_TABLE.size and value == np.floor(value):
            into[place] = LOG1P_TABLE[int(value)]
        else:
            into[place] = np.log1p(value)


@kernel
def fill_log1p_of_integers(
    values: npt.NDArray[np.integer], validity: npt.NDArray[np.uint8], first_bit: int, into: npt.NDArray[np.float32]
) -> None:
    """The same for integers, with 0 for nulls; fast since nearly all of them are small."""
    for place in range(values.size):
        value = np.int64(values[place])
        if value < 0 or (validity.size and _is_null(validity, first_bit + place)):
            value = np.int64(0)
        into[place] = LOG1P_TABLE[value] if value < LOG1P_TABLE.size else np.log1p(np.float64(value))


@kernel
def fill_ids(
    values: npt.NDArray[np.integer],
    validity: npt.NDArray[np.uint8],
    first_bit: int,
    missing: int,
    into: npt.NDArray[np.int64],
) -> None:
    """Writes integers with an Arrow validity bitmap (empty: none is null) as ids."""
    if not validity.size:
        for place in range(values.size):
            into[place] = values[place]
        return
    for place in range(values.size):
        into[place] = missing if _is_null(validity, first_bit + place) else values[place]


@dataclass(frozen=True, slots=True)
class IdColumn:
    """values int64[n], and an Arrow validity bitmap (empty: none is null); `first_bit` is that of the first value."""

    values: npt.NDArray[np.int64]
    validity: npt.NDArray[np.uint8]
    first_bit: int


class IdColumns:
    """Columns of ids, side by side, for a kernel that accesses them by address."""

    def __init__(self, columns: Sequence[IdColumn]) -> None:
        # keeps the arrays alive as long as their addresses
        self._columns = tuple(columns)
        self.places = np.zeros((3, len(columns)), dtype=np.int64)
        for number, column in enumerate(columns):
            if column.values.dtype != np.int64 or not column.values.flags.c_contiguous:
                raise ValueError("ids must be contiguous 64-bit integers")
            bitmap = column.validity.ctypes.data if column.validity.size else 0
            self.places[:, number] = column.values.ctypes.data, bitmap, column.first_bit


@dataclass(frozen=True, slots=True)
class DecodedBlock:
    """The columns of n records: labels float32[n], dense float32 or float64[d, n], c columns of ids, and lists.

    `longest[i]` is the most ids that are taken from list column i. `problems` describes malformed records.
    """

    file: str
    first_record: int
    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.floating]
    ids: IdColumns
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
        _gather(self.labels, self.dense, self.ids.places, records, into.labels, into.dense, into.ids)
        for room, lists, longest in zip(into.lists, self.lists, self.longest, strict=True):
            lengths = np.diff(lists.offsets)[records]
            kept = np.minimum(lengths, longest)
            values = np.empty(int(kept.sum()), dtype=np.int64)
            _gather_lists(lists.values, lists.offsets, records, kept, values)
            room.append(values, kept, lengths > longest)
        return good, bad


@kernel
def _gather(
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.floating],
    id_places: npt.NDArray[np.int64],
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
    for column in range(id_places.shape[1]):
        values, bitmap, first_bit = id_places[:, column]
        if bitmap == 0:
            for row in range(records.size):
                ids_out[row, column] = load_int64(values + 8 * records[row])
        else:
            for row in range(records.size):
                bit = first_bit + records[row]
                there = (load_uint8(bitmap + (bit >> 3)) >> (bit & 7)) & 1
                ids_out[row, column] = load_int64(values + 8 * records[row]) if there else MISSING_ID


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
