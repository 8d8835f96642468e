"""Conversion between formats keeps the training data the same to the bit."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from emberscale_api.dataset import Dataset, Split
from emberscale_api.errors import InvalidError
from emberscale_api.job import ColumnMapping, CSVSpec, DataFormat, ListColumn
from emberscale_api.job.resolved import CRITEO_COLUMNS
from emberscale_trainer.data.convert import Conversion, Converted, convert_files
from emberscale_trainer.data.files import Target, expand
from emberscale_trainer.data.formats import format_reader
from emberscale_trainer.data.records import DataUnavailableError
from emberscale_trainer.data.source import Batch, BatchSource
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset

ROWS = 3000
MAPPING = ColumnMapping(label="y", dense=("x",), categorical=("u",), lists=(ListColumn(name="h", max_length=3),))


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "data"
    write_dataset(folder, DatasetSpec(ROWS, 3, evaluation_fraction=0))
    return folder / "train-00000.tsv"


def convert(
    source: Path, target: Path, one: DataFormat, other: DataFormat, columns: ColumnMapping, bad: int = 0
) -> Converted:
    compression = {".gz": "gzip", ".zst": "zstd"}.get(target.suffix, "none")
    conversion = Conversion((Target.of(str(target)),), other, CSVSpec(), compression, bad)
    return convert_files(expand([str(source)]), format_reader(one, columns, CSVSpec(), raw=True), conversion)


def batches(path: Path, data_format: DataFormat, columns: ColumnMapping) -> list[Batch]:
    reader = format_reader(data_format, columns, CSVSpec())
    files = expand([str(path)])
    dataset = Dataset(tuple(files), tuple(reader.index_file(files[0], 0, 500)))
    records = sum(block.records for block in dataset.training_blocks)
    return list(BatchSource(dataset, reader, 64, 1, shuffle=False).batches(Split.TRAINING, 0, 0, records))


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(first.labels, second.labels)
        np.testing.assert_array_equal(first.dense.view(np.uint32), second.dense.view(np.uint32))
        np.testing.assert_array_equal(first.ids, second.ids)
        for lists, others in zip(first.lists, second.lists, strict=True):
            np.testing.assert_array_equal(lists.values, others.values)
            np.testing.assert_array_equal(lists.offsets, others.offsets)


@pytest.mark.parametrize(
    ("name", "data_format"),
    [
        ("a.parquet", DataFormat.PARQUET),
        ("a.csv", DataFormat.CSV),
        ("a.csv.gz", DataFormat.CSV),
        ("a.tsv.zst", DataFormat.CRITEO_TSV),
    ],
)
def test_batches_are_the_same_to_the_bit_in_every_format(
    criteo: Path, tmp_path: Path, name: str, data_format: DataFormat
) -> None:
    converted = convert(criteo, tmp_path / name, DataFormat.CRITEO_TSV, data_format, CRITEO_COLUMNS)
    assert (converted.records, converted.bad_records) == ((ROWS,), ())
    expected = batches(criteo, DataFormat.CRITEO_TSV, CRITEO_COLUMNS)
    assert_same(batches(tmp_path / name, data_format, CRITEO_COLUMNS), expected)


def test_a_way_through_all_formats_ends_with_the_bytes_that_it_began_with(criteo: Path, tmp_path: Path) -> None:
    parquet, text, back = tmp_path / "a.parquet", tmp_path / "a.csv.zst", tmp_path / "a.tsv"
    convert(criteo, parquet, DataFormat.CRITEO_TSV, DataFormat.PARQUET, CRITEO_COLUMNS)
    convert(parquet, text, DataFormat.PARQUET, DataFormat.CSV, CRITEO_COLUMNS)
    convert(text, back, DataFormat.CSV, DataFormat.CRITEO_TSV, CRITEO_COLUMNS)
    assert back.read_bytes() == criteo.read_bytes()


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    table = pa.table(
        {
            "y": [True, False, True],
            "x": [0.1, None, -1e-7],
            "u": ["a", None, "c"],
            "h": pa.array([[1, 2, 3, 4], None, [2**62]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "clicks.parquet")
    return tmp_path / "clicks.parquet"


@pytest.mark.parametrize(("name", "data_format"), [("b.csv", DataFormat.CSV), ("b.parquet", DataFormat.PARQUET)])
def test_texts_lists_and_missing_values_survive(
    clicks: Path, tmp_path: Path, name: str, data_format: DataFormat
) -> None:
    converted = convert(clicks, tmp_path / name, DataFormat.PARQUET, data_format, MAPPING)
    assert converted.truncated_records == 1
    expected = batches(clicks, DataFormat.PARQUET, MAPPING)
    assert_same(batches(tmp_path / name, data_format, MAPPING), expected)


def test_malformed_records_are_left_out_only_if_that_is_allowed(criteo: Path, tmp_path: Path) -> None:
    lines = criteo.read_bytes().splitlines(keepends=True)[:20]
    lines[7] = b"what is this?\n"
    source, target = tmp_path / "a.tsv", tmp_path / "a.parquet"
    source.write_bytes(b"".join(lines))
    with pytest.raises(
        InvalidError, match=r"a\.tsv:8: expected 40 fields.*\(malformed records allowed: 0; --max-bad-records "
    ):
        convert(source, target, DataFormat.CRITEO_TSV, DataFormat.PARQUET, CRITEO_COLUMNS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv"]
    converted = convert(source, target, DataFormat.CRITEO_TSV, DataFormat.PARQUET, CRITEO_COLUMNS, bad=1)
    assert (converted.records, [record.line for record in converted.bad_records]) == ((19,), [8])


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("I3", 0.5, r"record 2: I3 is 0\.5, not an integer"),
        ("I3", 1e18, r"record 2: I3 is 1e\+18, not an integer"),
        ("C2", -7, r"record 2: C2 is -7, not an id from 0 to 2\*\*32 - 1"),
        ("C2", 1 << 32, r"record 2: C2 is 4294967296, not an id"),
    ],
)
def test_what_criteo_lines_cannot_hold_is_named(tmp_path: Path, column: str, value: float, problem: str) -> None:
    names = (CRITEO_COLUMNS.label, *CRITEO_COLUMNS.dense, *CRITEO_COLUMNS.categorical)
    pq.write_table(pa.table({name: [1, value if name == column else 1] for name in names}), tmp_path / "a.parquet")
    with pytest.raises(InvalidError, match=rf"a\.parquet: {problem}"):
        convert(tmp_path / "a.parquet", tmp_path / "a.tsv", DataFormat.PARQUET, DataFormat.CRITEO_TSV, CRITEO_COLUMNS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet"]


def test_a_place_that_cannot_be_written_is_named(criteo: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match=r"no/a\.csv: cannot be written"):
        convert(criteo, tmp_path / "no" / "a.csv", DataFormat.CRITEO_TSV, DataFormat.CSV, CRITEO_COLUMNS)


@pytest.mark.parametrize("cut", [0.5, 0.9])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_refused(criteo: Path, tmp_path: Path, suffix: str, cut: float) -> None:
    path = tmp_path / f"a.tsv{suffix}"
    convert(criteo, path, DataFormat.CRITEO_TSV, DataFormat.CRITEO_TSV, CRITEO_COLUMNS)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(DataUnavailableError, match=rf"a\.tsv\{suffix}: is no sound (gzip|zstd) file"):
        batches(path, DataFormat.CRITEO_TSV, CRITEO_COLUMNS)
