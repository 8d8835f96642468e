"""The Parquet format: only row groups allow random access.

A block is one row group, several small ones, or a slice of a large one. Slices are decoded on request, in ascending
order from the first, so a row group of any size takes the memory of one slice, one buffer per column, and the values of
its dictionaries. Only the columns that the manifest names are read.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job import ColumnMapping
from emberscale_trainer.data.arrow_columns import check_schema, decode, distinct_texts, holds_texts
from emberscale_trainer.data.decoded import DecodedBlock
from emberscale_trainer.data.files import open_filesystem
from emberscale_trainer.data.records import DataUnavailableError

_MAGIC = b"PAR1"
_OPEN_FILES = 8
_OPEN_GROUPS = 2
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Parquet:
    """The `Parquet` format; a RecordFormat."""

    columns: ColumnMapping
    raw: bool = False
    _files: "_OpenFiles" = field(default_factory=lambda: _OpenFiles(), repr=False, compare=False)

    def check_file(self, file: DataFile) -> None:
        """Raises DataUnavailableError for a file that lacks a column, or has one of the wrong type."""
        with self._files.open(file.uri) as opened:
            check_schema(file.uri, opened.parquet.schema_arrow, self.columns)

    def index_file(self, file: DataFile, file_number: int, block_records: int) -> list[Block]:
        """The blocks of one file. Raises DataUnavailableError."""
        self.check_file(file)
        blocks: list[Block] = []
        with self._files.open(file.uri) as opened:
            first, whole = 0, False
            for rows, offset, length in opened.groups():
                if whole and rows and blocks[-1].records + rows <= block_records:
                    last = blocks[-1]
                    blocks[-1] = replace(last, records=last.records + rows, length=offset + length - last.offset)
                else:
                    whole = rows <= block_records
                    blocks += [
                        Block(
                            file_number=file_number,
                            offset=offset,
                            length=length,
                            first_record=first + start,
                            records=min(block_records, rows - start),
                        )
                        for start in range(0, rows, block_records)
                    ]
                    whole = whole and bool(blocks)
                first += rows
        return blocks

    def entry_point(self, file: DataFile, block: Block) -> int:
        """A row group is decoded from its first page on."""
        return block.offset

    def read_block(self, file: DataFile, block: Block) -> DecodedBlock:
        """Reads and decodes a block. Raises DataUnavailableError."""
        columns = self.columns
        with self._files.open(file.uri) as opened:
            check_schema(file.uri, opened.parquet.schema_arrow, columns)
            table = opened.read([columns.label, *columns.dense, *columns.id_columns], block.first_record, block.records)
        if table.num_rows != block.records:
            raise DataUnavailableError(
                file.uri, f"changed since it was indexed: it has no record {block.first_record + block.records:,}"
            )
        return decode(table, columns, self.raw, file.uri, block.first_record)

    def texts(self, file: DataFile, block: Block, columns: Collection[str]) -> Mapping[str, Set[bytes]]:
        """Returns the distinct texts of columns with texts or bytes."""
        with self._files.open(file.uri) as opened:
            names = [name for name in columns if holds_texts(opened.parquet.schema_arrow.field(name).type)]
            table = opened.read(names, block.first_record, block.records) if names else None
        return {name: distinct_texts(table.column(name)) for name in names} if table is not None else {}


class _GroupCursor:
    """A row group that is decoded forwards. `position` is the next record, counted from the first one of the group."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: list[pa.RecordBatch] = []
        self.position = 0

    def take(self, records: int, schema: pa.Schema) -> pa.Table:
        """Returns the next records; fewer at the end of the row group."""
        taken: list[pa.RecordBatch] = []
        missing = records
        while missing:
            batch = self._rest.pop() if self._rest else next(self._batches, None)
            if batch is None:
                break
            if batch.num_rows > missing:
                self._rest.append(batch.slice(missing))
                batch = batch.slice(0, missing)
            taken.append(batch)
            missing -= batch.num_rows
        self.position += records - missing
        return pa.Table.from_batches(taken, None if taken else schema)


class _OpenFile:
    def __init__(self, uri: str) -> None:
        filesystem, path = open_filesystem(uri)
        local = isinstance(filesystem, LocalFileSystem)
        # Few large reads are best over a network; for local files, small reads keep memory small.
        self._source = path if local else filesystem.open(path, "rb")
        self.parquet = pq.ParquetFile(self._source, pre_buffer=not local, buffer_size=_BUFFER_BYTES if local else 0)
        rows = [rows for rows, _, _ in self.groups()]
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rows, dtype=np.int64)])
        self._forward: list[tuple[int, list[str], _GroupCursor]] = []

    def groups(self) -> Iterator[tuple[int, int, int]]:
        """Yields each row group's records, the offset of its bytes, and their number."""
        metadata = self.parquet.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(column) for column in range(group.num_columns)]
            # a row group without rows has columns without pages
            begins = [min((x for x in (c.dictionary_page_offset, c.data_page_offset) if x), default=0) for c in chunks]
            yield group.num_rows, min(begins, default=0), sum(chunk.total_compressed_size for chunk in chunks)

    def read(self, names: list[str], first: int, records: int) -> pa.Table:
        """Reads the records [first, first + records), or as many of them as exist."""
        group = int(np.searchsorted(self._starts, first, side="right")) - 1
        if group >= self.parquet.num_row_groups:
            return self.parquet.schema_arrow.empty_table()
        if self._starts[group] == first and self._starts[group + 1] <= first + records:
            stop = int(np.searchsorted(self._starts, first + records, side="right")) - 1
            return self.parquet.read_row_groups(list(range(group, stop)), columns=names, use_threads=False)
        within = first - int(self._starts[group])
        forward = self._at_or_before(group, names, within, records)
        while forward.position < within:
            if not forward.take(min(records, within - forward.position), self.parquet.schema_arrow).num_rows:
                break
        return forward.take(records, self.parquet.schema_arrow)

    def close(self) -> None:
        self._forward.clear()
        self.parquet.close(force=True)

    def _at_or_before(self, group: int, names: list[str], position: int, records: int) -> _GroupCursor:
        for place, (known, columns, forward) in enumerate(self._forward):
            if known == group and columns == names and forward.position <= position:
                self._forward.append(self._forward.pop(place))
                return forward
        batches = self.parquet.iter_batches(records, row_groups=[group], columns=names, use_threads=False)
        forward = _GroupCursor(batches)
        self._forward = [*self._forward[1 - _OPEN_GROUPS :], (group, names, forward)]
        return forward


class _OpenFiles:
    """Keeps the last files open, with their footers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()

    @contextmanager
    def open(self, uri: str) -> Iterator[_OpenFile]:
        """Yields a file for this thread alone; raises any problem with it as DataUnavailableError."""
        with self._lock:
            try:
                if uri not in self._open:
                    self._open[uri] = _OpenFile(uri)
                    while len(self._open) > _OPEN_FILES:
                        self._open.popitem(last=False)[1].close()
                self._open.move_to_end(uri)
                yield self._open[uri]
            except OSError as error:
                self._forget(uri)
                raise DataUnavailableError(uri, f"cannot be read: {error.strerror or error}") from error
            except pa.ArrowException as error:
                self._forget(uri)
                raise DataUnavailableError(uri, _unsound(uri, error)) from error

    def _forget(self, uri: str) -> None:
        opened: Any = self._open.pop(uri, None)
        if opened is not None:
            opened.close()


def _unsound(uri: str, error: pa.ArrowException) -> str:
    """Describes a file that Arrow refuses to read."""
    filesystem, path = open_filesystem(uri)
    try:
        if filesystem.size(path) == 0:
            return "is empty: write or copy it again"
        if filesystem.cat_file(path, start=0, end=len(_MAGIC)) != _MAGIC:
            return "is not a Parquet file: set spec.data.format to CSV or CriteoTSV"
        if filesystem.cat_file(path, start=-len(_MAGIC)) != _MAGIC:
            return "is a Parquet file that was cut short: write or copy it again"
    except OSError as unreadable:
        return f"cannot be read: {unreadable.strerror or unreadable}"
    return f"is a damaged Parquet file, write or copy it again: {str(error).partition(chr(10))[0]}"


def file_schema(uri: str) -> pa.Schema:
    """Returns the columns of a file. Raises DataUnavailableError."""
    with _OpenFiles().open(uri) as opened:
        return opened.parquet.schema_arrow
