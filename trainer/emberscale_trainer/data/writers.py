"""Writes raw records (see RecordFormat) to files of every format."""

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat
from emberscale_trainer.data.arrow_columns import nullable_ids
from emberscale_trainer.data.compiled import kernel
from emberscale_trainer.data.records import MISSING_ID, Columns

MISSING_INTEGER = np.iinfo(np.int64).min

_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_TAB, _NEWLINE, _MINUS, _ZERO = 9, 10, 45, 48
_INTEGER_BYTES = 21
_CATEGORY_BYTES = 9


def criteo_lines(
    labels: npt.NDArray[np.uint8], integers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Records as text, uint8[bytes], each with its newline.

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
"""The records of a block by default, so that blocks can be read at random."""

_MAX_INTEGER = 10**18


class UnwritableRecordError(Exception):
    """A record that the format cannot hold; `row` counts from 0 within what was to be written."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


class RecordWriter(AbstractContextManager["RecordWriter"], Protocol):
    """A file that is being written; it is whole when the context is left."""

    def write(self, columns: Columns) -> None:
        """Appends raw records. Raises UnwritableRecordError and OSError."""
        ...


def open_writer(
    path: Path, target: DataFormat, columns: ColumnMapping, csv: CSVSpec, compression: str, integers: bool
) -> RecordWriter:
    """A writer of records with these columns; dense ones are written as integers if `integers`."""
    if target is DataFormat.CRITEO_TSV:
        return _CriteoWriter(path, columns, compression)
    return _ArrowWriter(path, target, columns, csv, compression, integers)


class _ArrowWriter:
    def __init__(
        self,
        path: Path,
        target: DataFormat,
        columns: ColumnMapping,
        csv: CSVSpec,
        compression: str,
        integers: bool,
    ) -> None:
        self._columns = columns
        self._separator = csv.list_separator if target is DataFormat.CSV else None
        self._integers = integers
        dense = pa.int64() if integers else pa.float64()
        lists = pa.string() if self._separator is not None else pa.list_(pa.int64())
        self._schema = pa.schema(
            [
                (columns.label, pa.int8()),
                *((name, dense) for name in columns.dense),
                *((name, pa.int64()) for name in columns.categorical),
                *((column.name, lists) for column in columns.lists),
            ]
        )
        self._stack = ExitStack()
        if target is DataFormat.PARQUET:
            self._writer: Any = self._stack.enter_context(pq.ParquetWriter(path, self._schema, compression=compression))
        else:
            sink = self._stack.enter_context(
                pa.output_stream(str(path), compression=None if compression == "none" else compression)
            )
            options = pa_csv.WriteOptions(include_header=csv.header, delimiter=csv.delimiter)
            self._writer = self._stack.enter_context(pa_csv.CSVWriter(sink, self._schema, write_options=options))

    def write(self, columns: Columns) -> None:
        arrays = [pa.array(columns.labels.astype(np.int8))]
        for values in np.ascontiguousarray(columns.dense.T):
            missing = np.isnan(values)
            whole = np.where(missing, 0, values).astype(np.int64) if self._integers else values
            arrays.append(pa.array(whole, mask=missing))
        arrays += [nullable_ids(ids) for ids in np.ascontiguousarray(columns.ids.T)]
        for room in columns.lists:
            lists = room.lists()
            offsets = pa.array(lists.offsets.astype(np.int32))
            if self._separator is None:
                arrays.append(pa.ListArray.from_arrays(offsets, pa.array(lists.values)))
            else:
                texts = pa.ListArray.from_arrays(offsets, pa.array(lists.values).cast(pa.string()))
                arrays.append(pc.binary_join(texts, self._separator))
        self._writer.write_table(pa.table(arrays, schema=self._schema))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _CriteoWriter:
    def __init__(self, path: Path, columns: ColumnMapping, compression: str) -> None:
        self._columns = columns
        self._sink: Any = pa.output_stream(str(path), compression=None if compression == "none" else compression)

    def write(self, columns: Columns) -> None:
        missing = np.isnan(columns.dense)
        numbers = np.where(missing, 0, columns.dense)
        self._refuse(
            (numbers != np.floor(numbers)) | (np.abs(numbers) >= _MAX_INTEGER),
            self._columns.dense,
            columns.dense,
            "not an integer of at most 18 digits, as CriteoTSV requires",
        )
        self._refuse(
            (columns.ids != MISSING_ID) & ((columns.ids < 0) | (columns.ids >= 1 << 32)),
            self._columns.categorical,
            columns.ids,
            "not an id from 0 to 2**32 - 1, as CriteoTSV requires",
        )
        integers = np.where(missing, MISSING_INTEGER, numbers.astype(np.int64))
        self._sink.write(criteo_lines(columns.labels.astype(np.uint8), integers, columns.ids).data)

    def _refuse(self, wrong: Any, names: tuple[str, ...], values: Any, problem: str) -> None:
        rows, places = np.nonzero(wrong)
        if rows.size:
            value = values[rows[0], places[0]]
            raise UnwritableRecordError(int(rows[0]), f"{names[places[0]]} is {value}, {problem}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._sink.close()
