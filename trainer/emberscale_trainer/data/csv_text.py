"""The CSV format (RFC 4180): quoted fields, any delimiter, with a header or without.

As with CriteoTSV, a block in memory stays text, and only the records of a batch are parsed.
"""

import csv
import io
import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job import ColumnMapping, CSVSpec, DenseTransform, ListOverflow
from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.csv_kernels import (
    BAD_QUOTES,
    BLANK,
    KINDS,
    NOT_A_LABEL,
    NOT_A_NUMBER,
    NOT_FINITE,
    NOT_UTF8,
    WRONG_FIELDS,
    parse_items,
    parse_records,
)
from emberscale_trainer.data.lines import find_lines, find_quoted_lines, index_lines, refuse_unreadable_head
from emberscale_trainer.data.records import Columns, DataUnavailableError, wrong_column
from emberscale_trainer.data.streams import TextRanges, TextStream, compression_of

_HEADER_BYTES = 1 << 20
_SHOWN_CHARACTERS = 24
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_UNLIMITED = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class _ColumnPlaces:
    """The places of the columns among a file's fields: the label and dense columns, categorical and list columns."""

    fields: int
    numbers: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    lists: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CSVBlock:
    """The text of one block: `starts[i]` is where record i begins, `starts[i + 1] - 1` where it ends."""

    file: str
    first_record: int
    text: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    layout: "CSV"
    places: _ColumnPlaces

    def read(self, records: npt.NDArray[np.int64], into: Columns) -> tuple[int, list[BadRecord]]:
        """Parses the given records; see RecordBlock."""
        layout, lists = self.layout, self.layout.columns.lists
        problems = np.empty(records.size, dtype=np.int32)
        marks = np.empty((len(lists), records.size, 3), dtype=np.int64)
        lengths = np.empty((len(lists), records.size), dtype=np.int64)
        longest = [one.max_length if one.overflow is ListOverflow.REFUSE else _UNLIMITED for one in lists]
        good = parse_records(
            self.text,
            self.starts,
            records,
            ord(layout.csv.delimiter),
            ord(layout.csv.list_separator),
            self.places.fields,
            self.places.numbers,
            self.places.ids,
            self.places.lists,
            np.array(longest, dtype=np.int64),
            np.nan if layout.raw else 0.0,
            np.array(
                [one is DenseTransform.LOG1P and not layout.raw for one in layout.columns.transforms], dtype=np.bool_
            ),
            into.labels,
            into.dense,
            into.ids,
            marks,
            lengths,
            problems,
        )
        for number, (room, column) in enumerate(zip(into.lists, lists, strict=True)):
            kept = np.minimum(lengths[number, :good], column.max_length)
            values = np.empty(int(kept.sum()), dtype=np.int64)
            parse_items(self.text, marks[number, :good], kept, ord(layout.csv.list_separator), values)
            room.append(values, kept, lengths[number, :good] > column.max_length)
        if good == records.size:
            return good, []
        return good, [self._describe(int(records[at]), int(problems[at])) for at in np.flatnonzero(problems)]

    def _describe(self, record: int, problem: int) -> BadRecord:
        text = (
            self.text[self.starts[record] : self.starts[record + 1] - 1].tobytes().decode("utf-8", "backslashreplace")
        )
        line = self.first_record + record + 1 + self.layout.csv.header
        return BadRecord(self.file, line, self._problem(text.removesuffix("\r"), problem))

    def _problem(self, record: str, problem: int) -> str:
        if problem == BLANK:
            return "the line is blank"
        if problem == BAD_QUOTES:
            return "a quoted field is not closed, or has text after its closing quote"
        fields = next(csv.reader([record], delimiter=self.layout.csv.delimiter, strict=False))
        if problem == WRONG_FIELDS:
            return f"expected {self.places.fields} fields, found {len(fields)}"
        role, kind = divmod(problem - 1, KINDS)
        columns = self.layout.columns
        numbers = (columns.label, *columns.dense)
        if kind == NOT_UTF8:
            return f"{(*numbers, *columns.id_columns)[role]} is not UTF-8 text"
        if role >= len(numbers):
            column = columns.lists[role - len(numbers) - len(columns.categorical)]
            return f"{column.name} has more ids than maxLength {column.max_length:,}"
        shown = repr(fields[int(self.places.numbers[role])][:_SHOWN_CHARACTERS])
        if kind == NOT_A_LABEL or role == 0:
            return f"the label, {columns.label}, is {shown}, neither 0 nor 1"
        what = {NOT_A_NUMBER: "a number", NOT_FINITE: "a finite number of 32 bits"}[kind]
        return f"{numbers[role]} is {shown}, not {what}"


@dataclass(frozen=True, slots=True)
class CSV:
    """The `CSV` format; a RecordFormat."""

    columns: ColumnMapping
    csv: CSVSpec = field(default_factory=CSVSpec)
    raw: bool = False
    _ranges: TextRanges = field(default_factory=TextRanges, repr=False, compare=False)
    _places: dict[str, _ColumnPlaces] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def check_file(self, file: DataFile) -> None:
        """Raises DataUnavailableError for a file that lacks a column, or whose first records are all malformed."""
        if file.bytes or self.csv.header:
            self._find_columns(file.uri)
            refuse_unreadable_head(file, self, self.csv.delimiter, self.csv.header)

    def index_file(self, file: DataFile, file_number: int, block_records: int) -> list[Block]:
        """The blocks of one file. Raises DataUnavailableError."""
        if file.bytes or self.csv.header:
            self._find_columns(file.uri)
        return index_lines(file, file_number, block_records, self.csv.delimiter, self.csv.header)

    def entry_point(self, file: DataFile, block: Block) -> int:
        """A compressed file is read from its first byte on."""
        return block.offset if compression_of(file.uri) is None else 0

    def read_block(self, file: DataFile, block: Block) -> CSVBlock:
        """Reads a block into memory. Raises DataUnavailableError."""
        places = self._find_columns(file.uri)
        text = self._ranges.read(file.uri, block.offset, block.length)
        data = np.frombuffer(text, dtype=np.uint8)
        starts = np.empty(block.records + 1, dtype=np.int64)
        quoted = b'"' in text
        found = find_quoted_lines(data, ord(self.csv.delimiter), starts) if quoted else find_lines(data, starts)
        if found != block.records:
            raise DataUnavailableError(
                file.uri,
                f"changed since it was indexed: {block.records:,} records are not where they were, "
                f"from record {block.first_record + 1:,}",
            )
        return CSVBlock(file.uri, block.first_record, data, starts, self, places)

    def texts(self, file: DataFile, block: Block, columns: Collection[str]) -> Mapping[str, Set[bytes]]:
        """Returns the texts of the fields, list items one by one."""
        names = column_names(file.uri, self.csv)
        text = self._ranges.read(file.uri, block.offset, block.length).decode("utf-8", "replace")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=self.csv.delimiter)
        records = [row for row in rows if len(row) == len(names)]
        lists = {column.name for column in self.columns.lists}
        found: dict[str, Set[bytes]] = {}
        for name in columns:
            place = names.index(name)
            fields = {row[place] for row in records}
            if name in lists:
                fields = {item for one in fields for item in one.split(self.csv.list_separator)}
            found[name] = {one.encode() for one in fields if one}
        return found

    def _find_columns(self, uri: str) -> _ColumnPlaces:
        with self._lock:
            if uri not in self._places:
                self._places[uri] = _place(uri, column_names(uri, self.csv), self.columns, self.csv.header)
            return self._places[uri]


def column_names(uri: str, spec: CSVSpec) -> list[str]:
    """Reads the columns of a file from its header or its first record. Raises DataUnavailableError."""
    with closing(TextStream(uri)) as stream:
        text = stream.read(_HEADER_BYTES).decode("utf-8-sig", "backslashreplace")
    first = next(csv.reader(io.StringIO(text, newline=""), delimiter=spec.delimiter), None)
    if not first:
        raise DataUnavailableError(uri, "is empty" + (": it has no header" if spec.header else ""))
    return first if spec.header else [f"column_{number}" for number in range(1, len(first) + 1)]


def likely_delimiter(names: Sequence[str]) -> str | None:
    """Returns the likely delimiter of columns that were all read as one, or None."""
    return next((mark for mark in ";\t|," if len(names) == 1 and mark in names[0]), None)


def _advice(names: list[str], header: bool) -> str:
    mark = likely_delimiter(names)
    if mark is not None:  # as YAML reads it, and the shell's quotes leave it
        return f": set spec.data.csv.delimiter (--delimiter) to {json.dumps(mark)}"
    if header and any(_NUMBER.fullmatch(name) for name in names):
        return (
            ": its first line seems to be a record: set spec.data.csv.header to false (--no-header), "
            "and name its columns column_1, column_2 and so on"
        )
    return ""


def _place(uri: str, names: list[str], columns: ColumnMapping, header: bool) -> _ColumnPlaces:
    def place(role: str, name: str) -> int:
        if names.count(name) != 1:
            raise wrong_column(uri, role, name, names.count(name), names, _advice(names, header))
        return names.index(name)

    numbers = [place("label", columns.label), *(place("dense", name) for name in columns.dense)]
    ids = [place("categorical", name) for name in columns.categorical]
    lists = [place("lists", column.name) for column in columns.lists]
    return _ColumnPlaces(len(names), *(np.array(part, dtype=np.int64) for part in (numbers, ids, lists)))
