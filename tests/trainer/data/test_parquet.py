"""How types and values of Parquet columns are read."""

import decimal
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.dataset import DataFile
from emberscale_api.job import ColumnMapping, DenseTransform, ListColumn, ListOverflow
from emberscale_trainer.data.hashing import hash_bytes
from emberscale_trainer.data.parquet import Parquet
from emberscale_trainer.data.records import Columns, DataUnavailableError, empty_columns


def write(folder: Path, **columns: Any) -> DataFile:
    """Writes a file of the given columns; adds a label and an id if they are not given."""
    records = len(next(iter(columns.values())))
    table = pa.table({"y": [0] * records, "u": list(range(records)), **columns})
    path = folder / "a.parquet"
    pq.write_table(table, path)
    return DataFile(uri=str(path), bytes=path.stat().st_size)


def read(file: DataFile, columns: ColumnMapping, raw: bool = False) -> tuple[Columns, list[str]]:
    """Reads all well-formed records, and the problems of the others."""
    reader = Parquet(columns, raw)
    (block,) = reader.index_file(file, 0, 1000)
    room = empty_columns(block.records, columns, raw)
    good, bad = reader.read_block(file, block).read(np.arange(block.records), room)
    return room.rows(0, good), [f"{record.line}: {record.problem}" for record in bad]


def ids_of(folder: Path, array: pa.Array) -> list[int]:
    columns, bad = read(write(folder, u=array), ColumnMapping(label="y", categorical=("u",)))
    assert bad == []
    found: list[int] = columns.ids[:, 0].tolist()
    return found


def dense_of(folder: Path, array: pa.Array, **options: Any) -> tuple[list[float], list[str]]:
    columns, bad = read(write(folder, x=array), ColumnMapping(label="y", dense=("x",), categorical=("u",), **options))
    return columns.dense[:, 0].tolist(), bad


@given(st.text())
def test_a_text_becomes_its_xxh64(text: str) -> None:
    assert hash_bytes(text.encode()) % 2**64 == xxhash.xxh64_intdigest(text.encode())


@pytest.mark.parametrize("kind", [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()])
def test_integers_are_their_own_ids_and_missing_ones_are_minus_one(tmp_path: Path, kind: pa.DataType) -> None:
    assert ids_of(tmp_path, pa.array([0, 100, None, 7], kind)) == [0, 100, -1, 7]


def test_ids_keep_all_64_bits_whatever_their_sign(tmp_path: Path) -> None:
    assert ids_of(tmp_path, pa.array([-(2**63), -5, 2**63 - 1], pa.int64())) == [-(2**63), -5, 2**63 - 1]
    assert ids_of(tmp_path, pa.array([2**64 - 2, 2**63, None], pa.uint64())) == [-2, -(2**63), -1]


def test_booleans_are_the_ids_0_and_1(tmp_path: Path) -> None:
    assert ids_of(tmp_path, pa.array([True, False, None])) == [1, 0, -1]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
)
def test_texts_are_hashed_however_they_are_stored(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["shop", "", None, "é" * 40, "shop", "7"]
    expected = [-1 if text is None else hash_bytes(text.encode()) for text in texts]
    assert ids_of(tmp_path, pa.array(texts, pa.string()).cast(kind)) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1.5, None, -2.0]), [1.5, 0.0, -2.0]),
        (pa.array([1.5, None, -2.0], pa.float32()), [1.5, 0.0, -2.0]),
        (pa.array([3, None, -2], pa.int64()), [3.0, 0.0, -2.0]),
        (pa.array([3, None], pa.uint8()), [3.0, 0.0]),
        (pa.array([True, None, False]), [1.0, 0.0, 0.0]),
        (pa.array([decimal.Decimal("1.25"), None]), [1.25, 0.0]),
    ],
)
def test_dense_features_are_numbers_as_they_are_and_0_where_missing(
    tmp_path: Path, array: pa.Array, expected: list[float]
) -> None:
    assert dense_of(tmp_path, array) == (expected, [])


@pytest.mark.parametrize("transform", DenseTransform)
def test_a_dense_feature_that_is_not_finite_makes_its_record_malformed(
    tmp_path: Path, transform: DenseTransform
) -> None:
    values = pa.array([1.0, math.nan, None, math.inf, -math.inf, 1e300, 2.0])
    found, bad = dense_of(tmp_path, values, dense_transform=transform)
    expected = [1.0, 0.0, 2.0] if transform is DenseTransform.NONE else [math.log1p(1), 0.0, math.log1p(2)]
    assert found == pytest.approx(expected)
    assert bad == [
        "2: x is nan, not a finite number of 32 bits",
        "4: x is inf, not a finite number of 32 bits",
        "5: x is -inf, not a finite number of 32 bits",
        "6: x is 1e+300, not a finite number of 32 bits",
    ]


@pytest.mark.parametrize("kind", [pa.int64(), pa.int16(), pa.float64()])
def test_log1p_is_taken_of_what_is_positive(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([0, -5, None, 3, 2000], kind)
    found, bad = dense_of(tmp_path, values, dense_transform=DenseTransform.LOG1P)
    assert (found[:3], bad) == ([0.0, 0.0, 0.0], [])
    assert found[3:] == pytest.approx([math.log1p(3), math.log1p(2000)])


def test_raw_numbers_are_untouched_and_nan_where_missing(tmp_path: Path) -> None:
    mapping = ColumnMapping(label="y", dense=("x",), categorical=("u",), dense_transform=DenseTransform.LOG1P)
    columns, bad = read(write(tmp_path, x=pa.array([-5.5, None, math.nan, 1e38])), mapping, raw=True)
    np.testing.assert_array_equal(columns.dense[:, 0], [-5.5, math.nan, 1e38])
    assert len(bad) == 1


@pytest.mark.parametrize("label", [pa.array([1, 0], pa.int64()), pa.array([True, False]), pa.array([1.0, 0.0])])
def test_labels_may_be_integers_booleans_or_floats(tmp_path: Path, label: pa.Array) -> None:
    columns, bad = read(write(tmp_path, y=label), ColumnMapping(label="y", categorical=("u",)))
    assert (columns.labels.tolist(), bad) == ([1.0, 0.0], [])


def test_a_label_that_is_neither_0_nor_1_makes_its_record_malformed(tmp_path: Path) -> None:
    file = write(tmp_path, y=pa.array([1.0, 0.5, None, -1.0]))
    columns, bad = read(file, ColumnMapping(label="y", categorical=("u",)))
    assert columns.labels.tolist() == [1.0]
    assert bad == [
        "2: the label, y, is 0.5, neither 0 nor 1",
        "3: the label, y, is missing",
        "4: the label, y, is -1, neither 0 nor 1",
    ]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint8())])
def test_lists_without_their_missing_ids_and_empty_where_missing(tmp_path: Path, kind: pa.DataType) -> None:
    array = pa.array([[1, None, 3], None, [], [4, 5, 6]], pa.list_(pa.int64())).cast(kind)
    columns, _ = read(write(tmp_path, h=array), ColumnMapping(label="y", lists=(ListColumn(name="h", max_length=2),)))
    lists = columns.lists[0].lists()
    assert lists.values.tolist() == [1, 3, 4, 5]
    assert lists.offsets.tolist() == [0, 2, 2, 2, 4]
    assert columns.lists[0].cut.tolist() == [False, False, False, True]


def test_lists_of_texts_are_hashed(tmp_path: Path) -> None:
    columns, _ = read(write(tmp_path, h=[["a", "b"], ["a"]]), ColumnMapping(label="y", lists=(ListColumn(name="h"),)))
    assert columns.lists[0].lists().values.tolist() == [hash_bytes(text.encode()) for text in ("a", "b", "a")]


def test_a_list_that_is_too_long_is_refused_where_the_manifest_says_so(tmp_path: Path) -> None:
    column = ListColumn(name="h", max_length=2, overflow=ListOverflow.REFUSE)
    columns, bad = read(write(tmp_path, h=[[1], [1, 2, 3], [4, 5]]), ColumnMapping(label="y", lists=(column,)))
    assert bad == ["2: h has 3 ids, more than maxLength 2"]
    assert columns.lists[0].lists().values.tolist() == [1, 4, 5]
    assert columns.lists[0].lists().offsets.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"dense": ("age",)},
            r"has no column 'age', which spec.data.columns.dense names; it has y \(int64\), u \(int64\), v",
        ),
        ({"dense": ("x",)}, "column 'x', which spec.data.columns.dense names, is string; dense features are numbers"),
        ({"categorical": ("f",)}, "column 'f', .*categorical names, is double; ids are integers.*pandas"),
        ({"categorical": ("t",)}, "column 't', .*categorical names, is timestamp"),
        ({"categorical": ("h",)}, "column 'h', .*is list<.*name it in spec.data.columns.lists"),
        (
            {"lists": (ListColumn(name="v"),)},
            "column 'v', which spec.data.columns.lists names, is int64; lists hold ids",
        ),
        ({"label": "x"}, "column 'x', which spec.data.columns.label names, is string; a label is a number"),
    ],
)
def test_a_column_that_is_missing_or_of_the_wrong_type_is_named(
    tmp_path: Path, columns: dict[str, Any], problem: str
) -> None:
    file = write(tmp_path, v=[1], x=["a"], f=[1.5], t=pa.array([0], pa.timestamp("ms")), h=[[1]])
    mapping = ColumnMapping(**{"label": "y", "categorical": ("u",), **columns})
    for check in (lambda: Parquet(mapping).check_file(file), lambda: Parquet(mapping).index_file(file, 0, 10)):
        with pytest.raises(DataUnavailableError, match=rf"a\.parquet: {problem}"):
            check()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"no parquet" * 10, "is not a Parquet file"),
        (b"PAR1 and no end", "is a Parquet file that was cut short"),
        (b"PAR1 and a wrong endPAR1", "is a damaged Parquet file"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_parquet_file_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "a.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataUnavailableError, match=rf"a\.parquet: {problem}"):
        Parquet(ColumnMapping(label="y", categorical=("u",))).check_file(DataFile(str(path), 0))


def test_a_damaged_page_is_named_by_its_file(tmp_path: Path) -> None:
    file = write(tmp_path, u=list(range(1000)))
    reader = Parquet(ColumnMapping(label="y", categorical=("u",)))
    (block,) = reader.index_file(file, 0, 1000)
    damaged = bytearray(Path(file.uri).read_bytes())
    damaged[4 : len(damaged) // 2] = bytes(len(damaged) // 2 - 4)
    Path(file.uri).write_bytes(damaged)
    with pytest.raises(DataUnavailableError, match=r"a\.parquet: (is no sound Parquet file|cannot be read)"):
        Parquet(reader.columns).read_block(file, block)


def test_a_large_row_group_is_never_decoded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, u=list(range(5000)))
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", None)
    reader = Parquet(ColumnMapping(label="y", categorical=("u",)))
    blocks = reader.index_file(file, 0, 300)
    found = []
    for block in blocks:
        room = empty_columns(block.records, reader.columns)
        reader.read_block(file, block).read(np.arange(block.records), room)
        found += room.ids[:, 0].tolist()
    assert found == list(range(5000))
    assert len({reader.entry_point(file, block) for block in blocks}) == 1


def test_row_groups_without_rows_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = pa.table({"y": [1, 0], "x": [2.0, 3.0], "u": [7, 8], "h": [[1], []]})
    with pq.ParquetWriter(path, rows.schema) as writer:
        for part in (rows[:0], rows, rows[:0]):
            writer.write_table(part)
    columns = ColumnMapping(label="y", dense=("x",), categorical=("u",), lists=(ListColumn(name="h"),))
    for block_records in (1, 100):
        reader, file = Parquet(columns), DataFile(uri=str(path), bytes=path.stat().st_size)
        ids = []
        for block in reader.index_file(file, 0, block_records):
            room = empty_columns(block.records, columns)
            good, _ = reader.read_block(file, block).read(np.arange(block.records), room)
            ids += room.ids[:good, 0].tolist()
        assert ids == [7, 8]
    pq.write_table(rows[:0], path)
    empty = DataFile(uri=str(path), bytes=path.stat().st_size)
    Parquet(columns).check_file(empty)
    assert Parquet(columns).index_file(empty, 0, 100) == []
