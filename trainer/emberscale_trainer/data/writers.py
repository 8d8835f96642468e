"""Writes raw records (see RecordFormat) to files of every format."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat
from emberscale_trainer.data.arrow_columns import nullable_ids
from emberscale_trainer.data.records import MISSING_ID, Columns
from emberscale_trainer.jit import kernel

MISSING_INTEGER = np.iinfo(np.int64).min

_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_TAB, _NEWLINE, _MINUS, _ZERO = 9, 10, 45, 48
_INTEGER_BYTES = 21
_CATEGORY_BYTES = 9


def criteo_lines(
    labels: npt.NDArray[np.uint8], integers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Formats records as text, uint8[bytes], each with its newline.

    labels uint8[n]; integers int64[n, d], or MISSING_INTEGER; ids int64[n, c] of 32 bits, or MISSING_ID.
    """
    count = labels.size
    room = np.empty(count * (2 + integers.shape[1] * _INTEGER_BYTES + ids.shape[1] * _CATEGORY_BYTES + 1), np.uint8)
    length = _format(labels, integers, ids, room)
    return room[:length]


@kernel
def _format(
    labels: npt.NDArray[np.uint8],
    integers: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    text: npt.NDArray[np.uint8],
) -> int:
    end = 0
    for row in range(labels.size):
        text[end] = _ZERO + labels[row]
        end += 1
        for column in range(integers.shape[1]):
            text[end] = _TAB
            end += 1
            value = integers[row, column]
            if value == MISSING_INTEGER:
                continue
            if value < 0:
                text[end] = _MINUS
                end += 1
                value = -value
            digits = 1
            bound = 10
            while value >= bound:
                digits += 1
                bound *= 10
            for place in range(end + digits - 1, end - 1, -1):
                text[place] = _ZERO + value % 10
                value //= 10
            end += digits
        for column in range(ids.shape[1]):
            text[end] = _TAB
            end += 1
            key = ids[row, column]
            if key == MISSING_ID:
                continue
            for place in range(8):
                text[end + place] = _DIGITS[(key >> (28 - 4 * place)) & 15]
            end += 8
        text[end] = _NEWLINE
        end += 1
    return end


ROW_GROUP_RECORDS = 32_768
"""The default number of records of a block, so that each row group is a block with random access."""

_MAX_INTEGER = 10**18


class UnwritableRecordError(Exception):
    """The format cannot hold a record; `row` counts from 0 within the records to write."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


Write = Callable[[Columns], object]
"""Appends raw records. Raises UnwritableRecordError and OSError."""


@contextmanager
def open_writer(
    path: Path, target: DataFormat, columns: ColumnMapping, csv: CSVSpec, compression: str, integers: bool
) -> Iterator[Write]:
    """Opens a file of records with these columns, which is complete when the context is left.

    Dense features are written as integers if `integers`.
    """
    if target is DataFormat.PARQUET:
        schema = _schema(columns, pa.list_(pa.int64()), integers)
        with pq.ParquetWriter(path, schema, compression=compression) as parquet:
            yield lambda records: parquet.write_table(_table(records, schema, integers, None))
        return
    with pa.output_stream(str(path), compression=None if compression == "none" else compression) as sink:
        if target is DataFormat.CRITEO_TSV:
            yield lambda records: sink.write(_checked_lines(records, columns).data)
            return
        schema = _schema(columns, pa.string(), integers)
        options = pa_csv.WriteOptions(include_header=csv.header, delimiter=csv.delimiter)
        with pa_csv.CSVWriter(sink, schema, write_options=options) as text:
            yield lambda records: text.write_table(_table(records, schema, integers, csv.list_separator))


def _schema(columns: ColumnMapping, lists: pa.DataType, integers: bool) -> pa.Schema:
    return pa.schema(
        [
            (columns.label, pa.int8()),
            *((name, pa.int64() if integers else pa.float64()) for name in columns.dense),
            *((name, pa.int64()) for name in columns.categorical),
            *((column.name, lists) for column in columns.lists),
        ]
    )


def _table(records: Columns, schema: pa.Schema, integers: bool, separator: str | None) -> pa.Table:
    """Converts records to a schema; lists become texts with the separator, if there is one."""
    arrays = [pa.array(records.labels.astype(np.int8))]
    for values in np.ascontiguousarray(records.dense.T):
        missing = np.isnan(values)
        whole = np.where(missing, 0, values).astype(np.int64) if integers else values
        arrays.append(pa.array(whole, mask=missing))
    arrays += [nullable_ids(ids) for ids in np.ascontiguousarray(records.ids.T)]
    for room in records.lists:
        lists = room.lists()
        offsets, items = pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values)
        if separator is None:
            arrays.append(pa.ListArray.from_arrays(offsets, items))
        else:
            arrays.append(pc.binary_join(pa.ListArray.from_arrays(offsets, items.cast(pa.string())), separator))
    return pa.table(arrays, schema=schema)


def _checked_lines(records: Columns, columns: ColumnMapping) -> npt.NDArray[np.uint8]:
    """As `criteo_lines`. Raises UnwritableRecordError for a number that CriteoTSV cannot hold."""
    missing = np.isnan(records.dense)
    numbers = np.where(missing, 0, records.dense)
    _refuse(
        (numbers != np.floor(numbers)) | (np.abs(numbers) >= _MAX_INTEGER),
        columns.dense,
        records.dense,
        "not an integer of at most 18 digits, as CriteoTSV requires",
    )
    _refuse(
        (records.ids != MISSING_ID) & ((records.ids < 0) | (records.ids >= 1 << 32)),
        columns.categorical,
        records.ids,
        "not an id from 0 to 2**32 - 1, as CriteoTSV requires",
    )
    integers = np.where(missing, MISSING_INTEGER, numbers.astype(np.int64))
    return criteo_lines(records.labels.astype(np.uint8), integers, records.ids)


def _refuse(wrong: npt.NDArray[np.bool_], names: tuple[str, ...], values: npt.NDArray[Any], problem: str) -> None:
    rows, places = np.nonzero(wrong)
    if rows.size:
        value = values[rows[0], places[0]]
        raise UnwritableRecordError(int(rows[0]), f"{names[places[0]]} is {value}, {problem}")
