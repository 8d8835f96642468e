"""Summarizes data files: the number of records, malformed ones, and the values of each column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job import ColumnMapping
from emberscale_api.job.data import BadRecord
from emberscale_trainer.data.hashing import hash_bytes
from emberscale_trainer.data.records import MISSING_ID, Columns, IdLists, RecordFormat, empty_columns

SHOWN_BAD_RECORDS = 20
SHOWN_IDS = 3
_BLOCK_RECORDS = 8192
_MERGE_RECORDS = 1 << 19
_BLOCKS_WITH_TEXTS = 8


@dataclass(frozen=True, slots=True)
class DenseSummary:
    """A column of numbers; `missing` is a ratio, the others are None if no record has a value."""

    name: str
    missing: float
    minimum: float | None
    mean: float | None
    maximum: float | None


@dataclass(frozen=True, slots=True)
class FrequentId:
    """An id, its share of the records (of lists: of all items), and its text, if the id is a hash."""

    id: int
    share: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class CategoricalSummary:
    """A column of ids: the ratio of empty fields, the distinct ids, the most frequent and their share of records."""

    name: str
    missing: float
    distinct: int
    top: tuple[FrequentId, ...]


@dataclass(frozen=True, slots=True)
class ListSummary:
    """A column of lists: the ratio of empty lists, the lengths up to maxLength, and the ratio of longer ones."""

    name: str
    empty: float
    mean_length: float
    longest: int
    truncated: float
    distinct: int
    top: tuple[FrequentId, ...]


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One file."""

    uri: str
    bytes: int
    records: int


@dataclass(frozen=True, slots=True)
class DataSummary:
    """`records` is the number in the files; the fields after it are about the `examined` records.

    Distinct ids are exact for the examined records, and so a lower bound unless all were examined. If all of these are
    malformed, there is nothing to say of columns: `positive_rate` is None, and there are no summaries of columns.
    """

    files: tuple[FileSummary, ...]
    records: int
    examined: int
    bad_records: int
    bad_record_samples: tuple[BadRecord, ...]
    positive_rate: float | None
    dense: tuple[DenseSummary, ...]
    categorical: tuple[CategoricalSummary, ...]
    lists: tuple[ListSummary, ...]


class RecordTally:
    """Accumulates raw records. Its memory grows with the distinct ids, not with the records."""

    def __init__(self, columns: ColumnMapping) -> None:
        self._columns = columns
        self._good = 0
        self._positives = 0
        self._bad = 0
        self._samples: list[BadRecord] = []
        self._present = np.zeros(len(columns.dense), dtype=np.int64)
        self._sum = np.zeros(len(columns.dense))
        self._minimum = np.full(len(columns.dense), np.inf)
        self._maximum = np.full(len(columns.dense), -np.inf)
        self._counts = [_IdCounts() for _ in columns.categorical]
        self._lists = [_ListCounts() for _ in columns.lists]

    def add(self, columns: Columns, bad_records: Sequence[BadRecord]) -> None:
        """Adds records."""
        self._bad += len(bad_records)
        self._samples += bad_records[: SHOWN_BAD_RECORDS - len(self._samples)]
        self._good += len(columns)
        self._positives += int(columns.labels.sum(dtype=np.float64))
        if len(columns):
            present = ~np.isnan(columns.dense)
            self._present += present.sum(axis=0)
            self._sum += np.where(present, columns.dense, 0.0).sum(axis=0)
            self._minimum = np.minimum(self._minimum, np.where(present, columns.dense, np.inf).min(axis=0))
            self._maximum = np.maximum(self._maximum, np.where(present, columns.dense, -np.inf).max(axis=0))
        for counts, ids in zip(self._counts, columns.ids.T, strict=True):
            counts.add(ids)
        for lists, room in zip(self._lists, columns.lists, strict=True):
            lists.add(room.lists(), int(np.count_nonzero(room.cut)))

    def summary(self, files: Sequence[FileSummary]) -> DataSummary:
        """Returns the totals, as a summary of `files`."""
        whole = DataSummary(
            files=tuple(files),
            records=sum(file.records for file in files),
            examined=self._good + self._bad,
            bad_records=self._bad,
            bad_record_samples=tuple(self._samples),
            positive_rate=None,
            dense=(),
            categorical=(),
            lists=(),
        )
        if not self._good:
            return whole
        return replace(
            whole,
            positive_rate=self._positives / self._good,
            dense=tuple(self._dense(column, name) for column, name in enumerate(self._columns.dense)),
            categorical=tuple(
                counts.summary(name, self._good)
                for counts, name in zip(self._counts, self._columns.categorical, strict=True)
            ),
            lists=tuple(
                lists.summary(column.name, self._good)
                for lists, column in zip(self._lists, self._columns.lists, strict=True)
            ),
        )

    def _dense(self, column: int, name: str) -> DenseSummary:
        present = int(self._present[column])
        if not present:
            return DenseSummary(name, 1.0, None, None, None)
        return DenseSummary(
            name,
            1 - present / self._good,
            float(self._minimum[column]),
            float(self._sum[column]) / present,
            float(self._maximum[column]),
        )


class _IdCounts:
    """The frequency of each id of a column."""

    def __init__(self) -> None:
        self._ids = np.empty(0, dtype=np.int64)
        self._times = np.empty(0, dtype=np.int64)
        self._waiting: list[npt.NDArray[np.int64]] = []
        self._waiting_records = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        self._waiting.append(ids.copy())
        self._waiting_records += ids.size
        if self._waiting_records >= _MERGE_RECORDS:
            self._merge()

    def summary(self, name: str, records: int) -> CategoricalSummary:
        self._merge()
        missing = int(self._times[self._ids == MISSING_ID].sum())
        ids, times = self._ids[self._ids != MISSING_ID], self._times[self._ids != MISSING_ID]
        first = np.lexsort((ids, -times))[:SHOWN_IDS]
        top = tuple(FrequentId(int(ids[place]), int(times[place]) / records) for place in first)
        return CategoricalSummary(name, missing / records if records else 0.0, ids.size, top)

    def _merge(self) -> None:
        ids, times = np.unique(np.concatenate([np.empty(0, np.int64), *self._waiting]), return_counts=True)
        together, places = np.unique(np.concatenate([self._ids, ids]), return_inverse=True)
        counts = np.zeros(together.size, dtype=np.int64)
        np.add.at(counts, places, np.concatenate([self._times, times]))
        self._ids, self._times = together, counts
        self._waiting, self._waiting_records = [], 0


class _ListCounts:
    """The lengths of a column's lists, and the frequency of each id in them."""

    def __init__(self) -> None:
        self._ids = _IdCounts()
        self._items = self._empty = self._longest = self._truncated = 0

    def add(self, lists: IdLists, truncated: int) -> None:
        lengths = np.diff(lists.offsets)
        self._ids.add(lists.values)
        self._items += lists.values.size
        self._empty += int(np.count_nonzero(lengths == 0))
        self._longest = max(self._longest, int(lengths.max(initial=0)))
        self._truncated += truncated

    def summary(self, name: str, records: int) -> ListSummary:
        ids = self._ids.summary(name, self._items)
        return ListSummary(
            name,
            self._empty / records,
            self._items / records,
            self._longest,
            self._truncated / records,
            ids.distinct,
            ids.top,
        )


def inspect_files(
    files: Sequence[DataFile],
    record_format: RecordFormat,
    max_records: int,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> DataSummary:
    """Counts the records of all files, and examines at most `max_records` of them, in blocks spread evenly over all.

    `record_format` must read raw records.
    `progress` is called with the current activity, and how much of it is done. Raises DataUnavailableError, and
    ValueError if `max_records` is below 1.
    """
    if max_records < 1:
        raise ValueError("max_records must be at least 1")
    block_records = min(_BLOCK_RECORDS, max_records)
    blocks: list[Block] = []
    summaries = []
    for number, file in enumerate(files):
        progress("counting records", number, len(files))
        found = record_format.index_file(file, number, block_records)
        summaries.append(FileSummary(file.uri, file.bytes, sum(block.records for block in found)))
        blocks += found
    tally = RecordTally(record_format.columns)
    chosen = _choose(blocks, max_records)
    for done, block in enumerate(chosen):
        progress("examining records", done, len(chosen))
        columns = empty_columns(block.records, record_format.columns, raw=True)
        good, bad = record_format.read_block(files[block.file_number], block).read(np.arange(block.records), columns)
        tally.add(columns.rows(0, good), bad)
    return _with_texts(tally.summary(summaries), record_format, files, chosen[:_BLOCKS_WITH_TEXTS])


def _with_texts(
    summary: DataSummary, record_format: RecordFormat, files: Sequence[DataFile], blocks: Sequence[Block]
) -> DataSummary:
    """Returns the summary with the texts of frequent ids, which a few blocks suffice to find."""
    columns: list[CategoricalSummary | ListSummary] = [*summary.categorical, *summary.lists]
    wanted = {one.name: {top.id for top in one.top} for one in columns}
    found: dict[tuple[str, int], str] = {}
    for block in blocks:
        missing = [name for name, ids in wanted.items() if any((name, one) not in found for one in ids)]
        if not missing:
            break
        for name, texts in record_format.texts(files[block.file_number], block, missing).items():
            for text in texts:
                if (identifier := hash_bytes(text)) in wanted[name]:
                    found[name, identifier] = text.decode("utf-8", "backslashreplace")

    def told(name: str, top: tuple[FrequentId, ...]) -> tuple[FrequentId, ...]:
        return tuple(replace(one, text=found.get((name, one.id))) for one in top)

    return replace(
        summary,
        categorical=tuple(replace(one, top=told(one.name, one.top)) for one in summary.categorical),
        lists=tuple(replace(one, top=told(one.name, one.top)) for one in summary.lists),
    )


def _choose(blocks: Sequence[Block], max_records: int) -> list[Block]:
    """Returns evenly spaced blocks with at most `max_records` records in total; all blocks if they have no more."""
    if sum(block.records for block in blocks) <= max_records:
        return list(blocks)
    count = max(1, max_records // max(block.records for block in blocks))
    return [blocks[len(blocks) * place // count] for place in range(count)]
