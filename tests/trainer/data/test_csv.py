"""The CSV parser against Python's, field by field."""

import csv
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.dataset import DataFile
from emberscale_api.job import ColumnMapping, CSVSpec, DenseTransform, ListColumn, ListOverflow
from emberscale_trainer.data.csv_text import CSV
from emberscale_trainer.data.hashing import hash_bytes, is_utf8
from emberscale_trainer.data.lines import LineIndexer
from emberscale_trainer.data.records import Columns, DataUnavailableError, empty_columns

MAPPING = ColumnMapping(label="y", dense=("x",), categorical=("u",), lists=(ListColumn(name="h", max_length=2),))
HEADER = "y,x,u,h\n"


def read(
    path: Path, text: str, mapping: ColumnMapping = MAPPING, spec: CSVSpec | None = None, raw: bool = False
) -> "tuple[Columns, list[str]]":
    path.write_bytes(text.encode())
    file = DataFile(uri=str(path), bytes=path.stat().st_size)
    reader = CSV(mapping, spec or CSVSpec(), raw)
    (block,) = reader.index_file(file, 0, 1000)
    room = empty_columns(block.records, mapping, raw)
    good, bad = reader.read_block(file, block).read(np.arange(block.records), room)
    return room.rows(0, good), [str(record).removeprefix(f"{path}:") for record in bad]


def reference_id(text: str) -> int:
    if not text:
        return -1
    try:
        number = int(text)
    except ValueError:
        return hash_bytes(text.encode())
    if str(number) != text or not -(2**63) <= number < 2**64:
        return hash_bytes(text.encode())
    return (number + 2**63) % 2**64 - 2**63


texts = st.one_of(
    st.text(st.sampled_from('a",\n\r |;é0'), max_size=8),
    st.integers(-(2**65), 2**65).map(str),
    st.sampled_from(["-0", "007", "+1", "1.0", "-", str(2**63), str(2**64), str(-(2**63)), str(2**64 - 1)]),
)


@given(
    st.lists(st.tuples(texts, st.lists(st.integers(-9, 10**18), max_size=4)), min_size=1, max_size=6),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_fields_are_those_that_pythons_reader_finds(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, list[int]]],
    delimiter: str,
    newline: str,
    quote_all: bool,
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(
        text,
        delimiter=delimiter,
        lineterminator=newline,
        quoting=csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL,
    )
    writer.writerow(["y", "x", "u", "h"])
    for category, items in rows:
        writer.writerow([1, 0.5, category, "|".join(map(str, items))])
    columns, bad = read(tmp_path_factory.mktemp("csv") / "a.csv", text.getvalue(), spec=CSVSpec(delimiter=delimiter))
    assert bad == []
    assert columns.ids[:, 0].tolist() == [reference_id(category) for category, _ in rows]
    lists = columns.lists[0].lists()
    assert lists.values.tolist() == [item for _, items in rows for item in items[:2]]
    assert columns.lists[0].cut.tolist() == [len(items) > 2 for _, items in rows]


@given(st.one_of(st.floats(-3e38, 3e38), st.integers(-(10**25), 10**25)), st.booleans())
def test_numbers_are_those_that_python_reads_but_for_the_last_bits(
    tmp_path_factory: pytest.TempPathFactory, number: float, spaces: bool
) -> None:
    text = f"  {number!r} " if spaces else repr(number)
    columns, bad = read(tmp_path_factory.mktemp("csv") / "a.csv", f"{HEADER}1,{text},1,\n", raw=True)
    assert bad == []
    # the last bits of a denormal number are a large part of it
    assert columns.dense[0, 0] == pytest.approx(float(number), rel=2**-50, abs=1e-307)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("2,1,u,", "the label, y, is '2', neither 0 nor 1"),
        (",1,u,", "the label, y, is '', neither 0 nor 1"),
        ("yes,1,u,", "the label, y, is 'yes', neither 0 nor 1"),
        ("1,abc,u,", "x is 'abc', not a number"),
        ("1,1e,u,", "x is '1e', not a number"),
        ("1,.,u,", "x is '.', not a number"),
        ("1,1.2.3,u,", "x is '1.2.3', not a number"),
        ("1,nan,u,", "x is 'nan', not a finite number of 32 bits"),
        ("1,-Infinity,u,", "x is '-Infinity', not a finite number of 32 bits"),
        ("1,1e300,u,", "x is '1e300', not a finite number of 32 bits"),
        ("1,1,u", "expected 4 fields, found 3"),
        ("1,1,u,,", "expected 4 fields, found 5"),
        ('1,1,"u" ,', "a quoted field is not closed, or has text after its closing quote"),
        ("", "the line is blank"),
    ],
)
def test_a_malformed_record_says_what_is_wrong(tmp_path: Path, line: str, problem: str) -> None:
    columns, bad = read(tmp_path / "a.csv", f"{HEADER}1,2,3,4\n{line}\n0,2,3,4\n")
    assert bad == [f"3: {problem}"]
    assert columns.labels.tolist() == [1.0, 0.0]


def test_missing_numbers_are_0_and_booleans_are_numbers(tmp_path: Path) -> None:
    columns, bad = read(tmp_path / "a.csv", f"{HEADER}true,,u,\nFalse,TRUE,,\n1.0,0,u,\n")
    assert (columns.labels.tolist(), bad) == ([1.0, 0.0, 1.0], [])
    assert columns.dense[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert columns.ids[:, 0].tolist() == [hash_bytes(b"u"), -1, hash_bytes(b"u")]


@pytest.mark.parametrize("raw", [False, True])
def test_a_number_beyond_32_bits_is_malformed_whatever_is_made_of_it(tmp_path: Path, raw: bool) -> None:
    mapping = MAPPING.model_copy(update={"dense_transform": DenseTransform.LOG1P})
    columns, bad = read(tmp_path / "a.csv", f"{HEADER}1,1e300,u,\n1,1e38,u,\n", mapping, raw=raw)
    assert (len(columns), bad) == (1, ["2: x is '1e300', not a finite number of 32 bits"])


def test_log1p_is_taken_of_what_is_positive(tmp_path: Path) -> None:
    mapping = MAPPING.model_copy(update={"dense_transform": DenseTransform.LOG1P})
    columns, _ = read(tmp_path / "a.csv", f"{HEADER}1,-3,u,\n1,7,u,\n1,0.5,u,\n1,5000,u,\n", mapping)
    expected = [0.0, math.log1p(7), math.log1p(0.5), math.log1p(5000)]
    assert columns.dense[:, 0].tolist() == pytest.approx(expected)


def test_a_list_that_is_too_long_is_refused_where_the_manifest_says_so(tmp_path: Path) -> None:
    column = ListColumn(name="h", max_length=2, overflow=ListOverflow.REFUSE)
    mapping = MAPPING.model_copy(update={"lists": (column,)})
    columns, bad = read(tmp_path / "a.csv", f"{HEADER}1,1,u,1|2|3\n1,1,u,4||5\n", mapping)
    assert bad == ["2: h has more ids than maxLength 2"]
    assert columns.lists[0].lists().values.tolist() == [4, 5]


@given(
    st.lists(st.lists(st.sampled_from(["a", 'q"q', "n\nn", "", ","]), min_size=1, max_size=3), max_size=8),
    st.integers(1, 5),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_blocks_are_the_same_however_the_bytes_arrive(
    rows: list[list[str]], block_records: int, cuts: list[int]
) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    data = text.getvalue().encode()
    indexer = LineIndexer(0, block_records, delimiter=",")
    bounds = sorted(min(cut, len(data)) for cut in cuts)
    for start, stop in zip([0, *bounds], [*bounds, len(data)], strict=True):
        indexer.feed(data[start:stop])
    blocks = indexer.finish()
    assert sum(block.records for block in blocks) == len(rows)
    found = []
    for block in blocks:
        part = data[block.offset : block.offset + block.length].decode()
        found += list(csv.reader(io.StringIO(part, newline="")))
    assert [row or [""] for row in found] == rows


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty: it has no header"),
        ("y,x,u\n1,1,1\n", "has no column 'h', which spec.data.columns.lists names; it has y, x, u"),
        ("y,x,u,h,u\n", "has 2 columns 'u', which spec.data.columns.categorical names"),
        (
            f"{HEADER}" + "1,cheap,u,\n" * 12,
            "none of its first 12 records can be read; .*:2: x is 'cheap', not a number",
        ),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataUnavailableError, match=rf"a\.csv: {problem}"):
        CSV(MAPPING).check_file(DataFile(uri=str(path), bytes=path.stat().st_size))


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from emberscale_trainer.data import lines

    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(lines, "CHUNK_BYTES", 500)
    path = tmp_path / "a.csv"
    path.write_text(HEADER + '1,1,"u,\n' + "0,1,v,\n" * 1000)
    with pytest.raises(DataUnavailableError, match=r"a\.csv: is not a file of lines.*is a quote left open"):
        CSV(MAPPING).index_file(DataFile(uri=str(path), bytes=path.stat().st_size), 0, 10)


@given(st.binary(max_size=6) | st.text(max_size=4).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_utf8_is_what_python_decodes(data: bytes) -> None:
    try:
        data.decode("utf-8")
        valid = True
    except UnicodeDecodeError:
        valid = False
    assert is_utf8(np.frombuffer(data, dtype=np.uint8), 0, len(data)) == valid


def test_a_text_in_another_encoding_is_malformed_by_its_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    lines = ["1,2,M\u00fcller,a|b", "1,2,Meier,caf\u00e9", "1,2,Schulz,c"]
    path.write_bytes((HEADER + "\n".join(lines) + "\n").encode("latin-1"))
    file = DataFile(uri=str(path), bytes=path.stat().st_size)
    reader = CSV(MAPPING)
    (block,) = reader.index_file(file, 0, 1000)
    room = empty_columns(block.records, MAPPING)
    good, bad = reader.read_block(file, block).read(np.arange(block.records), room)
    assert good == 1
    assert [str(record) for record in bad] == [f"{path}:2: u is not UTF-8 text", f"{path}:3: h is not UTF-8 text"]
    with pytest.raises(DataUnavailableError, match=r"is not UTF-8 text: line 2 has the byte 0xfc; .*iconv"):
        reader.check_file(file)


def test_each_dense_column_may_have_a_transform_of_its_own(tmp_path: Path) -> None:
    mapping = ColumnMapping(
        label="y",
        dense=("a", "b"),
        categorical=("u",),
        dense_transform=DenseTransform.LOG1P,
        dense_transforms={"b": DenseTransform.NONE},
    )
    columns, _ = read(tmp_path / "a.csv", "y,a,b,u\n1,7,7,1\n", mapping)
    assert columns.dense.tolist() == [[pytest.approx(math.log1p(7)), 7.0]]
    raw, _ = read(tmp_path / "a.csv", "y,a,b,u\n1,7,7,1\n", mapping, raw=True)
    assert raw.dense.tolist() == [[7.0, 7.0]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1\x15\x04", "is a Parquet file: set spec.data.format to Parquet"),
        ("y,x\n1,2\n".encode("utf-16"), "is UTF-16 text: convert it"),
        (b"y,x\n\0\0\0\n", "is a binary file, not text"),
        (b"\x1f\x8b\x08", "is compressed with gzip: give it a name that ends in .gz"),
    ],
)
def test_a_file_that_is_no_text_is_named_for_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataUnavailableError, match=re.escape(words)):
        CSV(MAPPING).check_file(DataFile(uri=str(path), bytes=len(content)))
