"""What every format must do, tested on the same records: a position names the same record for every reader."""

import csv
import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_api.dataset import Block, DataFile, Dataset, Split
from emberscale_api.job import ColumnMapping, CSVSpec, ListColumn
from emberscale_api.job.resolved import CRITEO_COLUMNS
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.csv_text import CSV
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.hashing import hash_bytes
from emberscale_trainer.data.parquet import Parquet
from emberscale_trainer.data.records import RecordFormat, empty_columns
from emberscale_trainer.data.source import Batch, BatchSource

COLUMNS = ColumnMapping(
    label="clicked",
    dense=("price", "age"),
    categorical=("item", "shop"),
    lists=(ListColumn(name="history", max_length=3),),
)
BLOCK_RECORDS = 10
RECORDS = 91
FILES = ((0, 57), (57, 57), (57, 91))
EVALUATION = ((1000, 1025),)


def shop(number: int) -> str:
    return f'the "{number % 5}"\nth shop, of many'


def history(number: int) -> list[int]:
    return [number + place for place in range(number % 5)]


def criteo_text(start: int, stop: int) -> bytes:
    lines = []
    for number in range(start, stop):
        integers = "\t".join(str(number % (column + 7)) for column in range(13))
        categories = "\t".join(f"{number if column == 0 else number % (column + 3):08x}" for column in range(26))
        lines.append(f"{number % 2}\t{integers}\t{categories}\n")
    return "".join(lines).encode()


def csv_text(start: int, stop: int, header: bool = True, quoted: bool = True, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writerow(["history", "item", "unused", "price", "clicked", "age", "shop"])
    for number in range(start, stop):
        name = shop(number) if quoted else f"shop {number % 5}"
        items = "|".join(map(str, history(number)))
        writer.writerow([items, number, "x", number / 4, number % 2, number % 7, name])
    return text.getvalue().encode()


def parquet_bytes(start: int, stop: int, row_group: int) -> bytes:
    numbers = range(start, stop)
    table = pa.table(
        {
            "unused": pa.array(["x"] * len(numbers)),
            "clicked": pa.array([number % 2 for number in numbers], pa.int8()),
            "price": pa.array([number / 4 for number in numbers], pa.float64()),
            "age": pa.array([number % 7 for number in numbers], pa.int32()),
            "item": pa.array(numbers, pa.int64()),
            "shop": pa.array([shop(number) for number in numbers], pa.string()),
            "history": pa.array([history(number) for number in numbers], pa.list_(pa.int64())),
        }
    )
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema) as writer:
        for first in range(0, table.num_rows, row_group):
            writer.write_table(table.slice(first, row_group))
    return sink.getvalue()


def zstd(text: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text)
    return bytes(sink.getvalue())


@dataclass(frozen=True)
class Case:
    """A format, the ending of its files' names, and how they are written."""

    suffix: str
    make: Callable[[], RecordFormat]
    write: Callable[[int, int], bytes]
    shops: Callable[[int], str] = shop


NO_HEADER = COLUMNS.model_copy(
    update={
        "label": "column_5",
        "dense": ("column_4", "column_6"),
        "categorical": ("column_2", "column_7"),
        "lists": (ListColumn(name="column_1", max_length=3),),
    }
)
CASES = {
    "CriteoTSV": Case(".tsv", CriteoTSV, criteo_text),
    "CriteoTSV, gzip": Case(".tsv.gz", CriteoTSV, lambda start, stop: gzip.compress(criteo_text(start, stop))),
    "CriteoTSV, zstd": Case(".tsv.zst", CriteoTSV, lambda start, stop: zstd(criteo_text(start, stop))),
    "CSV": Case(".csv", lambda: CSV(COLUMNS), csv_text),
    "CSV without quotes": Case(
        ".csv",
        lambda: CSV(COLUMNS),
        lambda start, stop: csv_text(start, stop, quoted=False),
        lambda number: f"shop {number % 5}",
    ),
    "CSV without header": Case(
        ".csv",
        lambda: CSV(NO_HEADER, CSVSpec(header=False, delimiter=";")),
        lambda start, stop: csv_text(start, stop, header=False, delimiter=";"),
    ),
    "CSV, gzip": Case(".csv.gz", lambda: CSV(COLUMNS), lambda start, stop: gzip.compress(csv_text(start, stop))),
    "CSV, zstd": Case(".csv.zst", lambda: CSV(COLUMNS), lambda start, stop: zstd(csv_text(start, stop))),
    "Parquet": Case(".parquet", lambda: Parquet(COLUMNS), lambda start, stop: parquet_bytes(start, stop, row_group=10)),
    "Parquet, small row groups": Case(
        ".parquet", lambda: Parquet(COLUMNS), lambda start, stop: parquet_bytes(start, stop, row_group=4)
    ),
    "Parquet, large row groups": Case(
        ".parquet", lambda: Parquet(COLUMNS), lambda start, stop: parquet_bytes(start, stop, row_group=37)
    ),
}
every_format = pytest.mark.parametrize("name", CASES)


def index(
    reader: RecordFormat, place: str, suffix: str, contents: Sequence[bytes]
) -> tuple[tuple[DataFile, ...], tuple[Block, ...]]:
    """Writes the contents of files, and indexes them."""
    paths = [f"{place}-{number:03d}{suffix}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        with fsspec.open(path, "wb") as file:
            file.write(content)
    files = tuple(expand(paths))
    blocks = (reader.index_file(file, number, BLOCK_RECORDS) for number, file in enumerate(files))
    return files, tuple(chain.from_iterable(blocks))


def write_case(case: Case, folder: str) -> Dataset:
    training, evaluation = (
        index(case.make(), f"{folder}/{split}", case.suffix, [case.write(start, stop) for start, stop in parts])
        for split, parts in (("training", FILES), ("evaluation", EVALUATION))
    )
    return Dataset(*training, *evaluation)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """Three training files of 57, 0 and 34 records; the first id of each record is its number."""
    return {name: write_case(case, str(tmp_path_factory.mktemp("formats"))) for name, case in CASES.items()}


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.ids[:, 0].tolist()]


@every_format
def test_the_index_counts_every_record_once(datasets: dict[str, Dataset], name: str) -> None:
    blocks = datasets[name].training_blocks
    assert sum(block.records for block in blocks) == RECORDS
    assert all(1 <= block.records <= BLOCK_RECORDS for block in blocks)
    for one, other in pairwise(blocks):
        if one.file_number == other.file_number:
            assert other.first_record == one.first_record + one.records
            assert other.offset >= one.offset
        else:
            assert other.first_record == 0


@every_format
@settings(max_examples=15)
@given(
    batch_size=st.integers(1, 40),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    cuts=st.lists(st.integers(0, 100), max_size=6),
    order=st.randoms(),
)
def test_any_shards_read_by_anyone_cover_every_record_once(
    datasets: dict[str, Dataset],
    name: str,
    batch_size: int,
    seed: int,
    epoch: int,
    cuts: list[int],
    order: "np.random.RandomState",
) -> None:
    dataset, make = datasets[name], CASES[name].make
    whole = list(BatchSource(dataset, make(), batch_size, seed).batches(Split.TRAINING, epoch, 0, RECORDS))
    bounds = sorted({0, RECORDS, *(cut * batch_size for cut in cuts if cut * batch_size < RECORDS)})
    shards = list(pairwise(bounds))
    order.shuffle(shards)
    workers = [BatchSource(dataset, make(), batch_size, seed) for _ in range(2)]
    parts = [
        batch
        for turn, (start, stop) in enumerate(shards)
        for batch in workers[turn % 2].batches(Split.TRAINING, epoch, start, stop)
    ]
    assert sorted(numbers(parts)) == list(range(RECORDS))
    by_number = {batch.number: batch for batch in parts}
    assert sorted(by_number) == [batch.number for batch in whole]
    for batch in whole:
        part = by_number[batch.number]
        assert batch.number == batch.start // batch_size
        assert (batch.start, batch.stop) == (part.start, part.stop)
        for array in ("labels", "dense", "ids"):
            np.testing.assert_array_equal(getattr(batch, array), getattr(part, array))
        for one, other in zip(batch.lists, part.lists, strict=True):
            np.testing.assert_array_equal(one.values, other.values)
            np.testing.assert_array_equal(one.offsets, other.offsets)


@every_format
def test_blocks_can_be_read_in_any_order(datasets: dict[str, Dataset], name: str) -> None:
    dataset, reader = datasets[name], CASES[name].make()
    for block in reversed(dataset.training_blocks):
        columns = empty_columns(block.records, reader.columns)
        records = np.arange(block.records)[::-1].copy()
        file = dataset.training_files[block.file_number]
        assert reader.read_block(file, block).read(records, columns) == (block.records, [])
        first = FILES[block.file_number][0] + block.first_record
        expected = [first + record for record in records.tolist()]
        assert columns.ids[:, 0].tolist() == expected


@every_format
def test_each_epoch_is_shuffled_anew_and_evaluation_data_never(datasets: dict[str, Dataset], name: str) -> None:
    source = BatchSource(datasets[name], CASES[name].make(), 16, 0)
    epochs = [numbers(list(source.batches(Split.TRAINING, epoch, 0, RECORDS))) for epoch in range(2)]
    assert epochs[0] != epochs[1] != sorted(epochs[1])
    for epoch in range(2):
        assert numbers(list(source.batches(Split.EVALUATION, epoch, 0, 25))) == list(range(1000, 1025))


@pytest.mark.parametrize("name", [name for name in CASES if "Criteo" not in name])
def test_a_record_has_the_same_features_in_every_format_with_columns(datasets: dict[str, Dataset], name: str) -> None:
    case = CASES[name]
    source = BatchSource(datasets[name], case.make(), 16, 0)
    truncated = 0
    for batch in source.batches(Split.TRAINING, 0, 0, RECORDS):
        truncated += batch.truncated_records
        (lists,) = batch.lists
        for row, number in enumerate(batch.ids[:, 0].tolist()):
            assert batch.labels[row] == number % 2
            assert batch.dense[row].tolist() == [number / 4, number % 7]
            assert batch.ids[row, 1] == hash_bytes(case.shops(number).encode())
            assert lists.values[lists.offsets[row] : lists.offsets[row + 1]].tolist() == history(number)[:3]
    assert truncated == sum(len(history(number)) > 3 for number in range(RECORDS))


@pytest.mark.parametrize("scheme", ["file://", "memory://"])
@every_format
def test_files_are_read_through_any_file_system(tmp_path: Path, scheme: str, name: str) -> None:
    folder = f"{scheme}{tmp_path}" if scheme == "file://" else f"{scheme}/{uuid4()}"
    dataset = write_case(CASES[name], folder)
    source = BatchSource(dataset, CASES[name].make(), 16, 0)
    assert sorted(numbers(list(source.batches(Split.TRAINING, 0, 0, RECORDS)))) == list(range(RECORDS))


def test_a_criteo_record_reads_the_same_plain_and_compressed(datasets: dict[str, Dataset]) -> None:
    whole = []
    for name in ("CriteoTSV", "CriteoTSV, gzip", "CriteoTSV, zstd"):
        source = BatchSource(datasets[name], CriteoTSV(), 16, 0, shuffle=False)
        whole.append(list(source.batches(Split.TRAINING, 0, 0, RECORDS)))
    for batches in whole[1:]:
        for one, other in zip(whole[0], batches, strict=True):
            np.testing.assert_array_equal(one.dense, other.dense)
            np.testing.assert_array_equal(one.ids, other.ids)
    assert whole[0][0].ids.shape[1] == len(CRITEO_COLUMNS.categorical)
