"""Converts data from one format to another, file by file; each file appears whole or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emberscale_api.dataset import Block, DataFile
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.job import CSVSpec, DataFormat
from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.files import Target
from emberscale_trainer.data.records import RecordFormat, empty_columns
from emberscale_trainer.data.writers import ROW_GROUP_RECORDS, UnwritableRecordError, Write, open_writer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion: `targets[i]` is the new file of source i."""

    targets: tuple[Target, ...]
    format: DataFormat
    csv: CSVSpec
    compression: str
    max_bad_records: int


@dataclass(frozen=True, slots=True)
class Converted:
    """The records of each written file, the number of records with a cut list, and the malformed ones left out."""

    records: tuple[int, ...]
    truncated_records: int
    bad_records: tuple[BadRecord, ...]


def convert_files(
    sources: Sequence[DataFile],
    reader: RecordFormat,
    conversion: Conversion,
    progress: Progress = lambda stage, done, total: None,
) -> Converted:
    """Converts each source; `reader` must read raw records. Existing files are replaced.

    `progress` is called with what is being done, and how much of it is. Raises DataUnavailableError, and
    InvalidError for too many malformed records, for a record that the format cannot hold, and for a path that cannot
    be written.
    """
    blocks = []
    for number, source in enumerate(sources):
        progress("counting records", number, len(sources))
        blocks.append(reader.index_file(source, number, ROW_GROUP_RECORDS))
    tally = _Tally(conversion.max_bad_records, sum(block.records for found in blocks for block in found), progress)
    for source, target, found in zip(sources, conversion.targets, blocks, strict=True):
        tally.records.append(0)
        with (
            os_errors_named(f"{target}: cannot be written"),
            target.draft() as draft,
            open_writer(
                draft,
                conversion.format,
                reader.columns,
                conversion.csv,
                conversion.compression,
                integers=isinstance(reader, CriteoTSV),
            ) as write,
        ):
            for block in found:
                _copy(reader, source, block, write, tally)
    return Converted(tuple(tally.records), tally.truncated_records, tuple(tally.bad_records))


class _Tally:
    def __init__(self, max_bad_records: int, total: int, progress: Progress) -> None:
        self.records: list[int] = []
        self.truncated_records = 0
        self.bad_records: list[BadRecord] = []
        self._allowed = max_bad_records
        self._total = total
        self._done = 0
        self._progress = progress

    def add(self, block: Block, good: int, bad: list[BadRecord], truncated: int) -> None:
        self.records[-1] += good
        self.truncated_records += truncated
        self.bad_records += bad
        if len(self.bad_records) > self._allowed:
            allowed = f"malformed records allowed: {self._allowed:,}; --max-bad-records sets another number"
            raise InvalidError(f"{self.bad_records[self._allowed]} ({allowed})")
        self._done += block.records
        self._progress("converting records", self._done, self._total)


def _copy(reader: RecordFormat, source: DataFile, block: Block, write: Write, tally: _Tally) -> None:
    columns = empty_columns(block.records, reader.columns, raw=True)
    records = np.arange(block.records)
    good, bad = reader.read_block(source, block).read(records, columns)
    tally.add(block, good, bad, columns.truncated_records)
    try:
        write(columns.rows(0, good))
    except UnwritableRecordError as error:
        raise InvalidError(f"{source.uri}: record {block.first_record + error.row + 1:,}: {error}") from error
