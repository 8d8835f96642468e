"""Samples a part of a data set: FAE's sparse input sampler (section 4.1.1), which reads x = 5%.

A unit of sampling is a block or, if blocks can only be reached through those before them (Parquet's row groups), the
whole stretch from its entry point on, if there are enough stretches. The data is divided into equal parts, and one unit
is drawn from each, since ids come and go with time. A compressed file must be decompressed up to its last drawn block.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.records import DataUnavailableError, RecordFormat, empty_columns
from emberscale_trainer.hot.access import AccessLog, IdRecords, log_accesses

_ENOUGH_UNITS = 640
_FEWEST_UNITS = 32
_LARGEST_BLOCK = 1024
_RECORD_BYTES = 256
"""The approximate bytes of a text record, for the size of blocks in small data."""

Progress = Callable[[str, int, int], None]
"""Called with the current activity, how much of it is done, and the total."""


@dataclass(frozen=True, slots=True)
class IndexedData:
    """Files cut into blocks. Opened by `index_data`."""

    files: Sequence[DataFile]
    blocks: Sequence[Block]
    reader: RecordFormat

    @property
    def records(self) -> int:
        """The records of all files, including malformed ones."""
        return sum(block.records for block in self.blocks)

    def units(self) -> list[list[Block]]:
        """Returns the units of sampling in the order of the files, each with its blocks in order."""
        stretches = [
            list(blocks)
            for _, blocks in groupby(
                self.blocks,
                lambda block: (
                    block.file_number,
                    self.reader.entry_point(self.files[block.file_number], block),
                ),
            )
        ]
        return stretches if len(stretches) >= _ENOUGH_UNITS else [[block] for block in self.blocks]

    def read(self, blocks: Sequence[Block], bad_records: list[BadRecord]) -> Iterator[IdRecords]:
        """Yields the ids of each block, and adds malformed records to `bad_records`. Raises DataUnavailableError."""
        for block in blocks:
            columns = empty_columns(block.records, self.reader.columns, self.reader.raw)
            read = self.reader.read_block(self.files[block.file_number], block)
            good, bad = read.read(np.arange(block.records), columns)
            bad_records += bad
            yield IdRecords.of(columns.rows(0, good))


def index_data(files: Sequence[DataFile], reader: RecordFormat, progress: Progress) -> IndexedData:
    """Finds the blocks of files. Raises DataUnavailableError for a file that cannot be read, or holds no record."""
    size = sum(file.bytes for file in files) // (2 * _ENOUGH_UNITS * _RECORD_BYTES)
    block_records = min(_LARGEST_BLOCK, max(_FEWEST_UNITS, size))
    blocks: list[Block] = []
    for number, file in enumerate(files):
        progress("looking for records", number, len(files))
        reader.check_file(file)
        blocks += reader.index_file(file, number, block_records)
    if not blocks:
        raise DataUnavailableError(files[0].uri, "contains no records")
    return IndexedData(files, blocks, reader)


def draw(units: int, rate: float, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Draws the units to profile, a ratio `rate` of them, and up to `held_out` others; both ascending.

    At least 32 units are profiled if there are twice as many; a single unit is in both.
    """
    if units == 1:
        return [0], [0]
    wanted = max(round(rate * units), min(_FEWEST_UNITS, (units + 1) // 2))
    random = np.random.default_rng(seed)
    edges = np.arange(wanted + 1) * units // wanted
    profiled = random.integers(edges[:-1], edges[1:])
    rest = np.setdiff1d(np.arange(units), profiled)
    others = np.sort(random.choice(rest, min(held_out, rest.size), replace=False)) if rest.size else profiled
    return profiled.tolist(), others.tolist()


@dataclass(slots=True)
class Sample:
    """A sample of a data set: a log of accesses for each column, and the ids of records that are in no log.

    `share` is the ratio of the records that were profiled. Hot sets are evaluated on `held_out` records, since more of
    the records that determined a hot set are hot than of others. They are separate (`apart`) unless there is only one
    block.
    """

    logs: list[AccessLog]
    held_out: IdRecords
    apart: bool
    profiled: int
    share: float
    bad_records: list[BadRecord] = field(default_factory=list)


def take_sample(data: IndexedData, rate: float, held_out: int, seed: int, progress: Progress) -> Sample:
    """Profiles a ratio `rate` of the records, and keeps the ids of about `held_out` others.

    Raises DataUnavailableError, also if no record of the sample is well-formed.
    """
    units = data.units()
    kept_units = -(-held_out * len(units) // data.records)
    profiled, others = draw(len(units), rate, kept_units, seed)
    logs = [AccessLog() for _ in data.reader.columns.id_columns]
    bad: list[BadRecord] = []
    parts: list[IdRecords] = []
    wanted: dict[int, list[Block]] = {number: units[number] for number in {*profiled, *others}}
    counted, kept = set(profiled), set(others)
    good = drawn = 0
    for done, number in enumerate(sorted(wanted)):
        progress("reading a sample", done, len(wanted))
        for records in data.read(wanted[number], bad):
            if number in counted:
                log_accesses(records, logs)
                good += len(records)
            if number in kept:
                parts.append(records)
        drawn += sum(block.records for block in wanted[number]) if number in counted else 0
    if not good or not any(len(part) for part in parts):
        problem = f"no record of the sample is well-formed; the first: {bad[0]}" if bad else "contains no records"
        raise DataUnavailableError(data.files[0].uri, problem)
    return Sample(logs, IdRecords.join(parts), not counted & kept, good, drawn / data.records, bad)
