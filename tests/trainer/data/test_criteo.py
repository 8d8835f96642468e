import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job.resolved import CRITEO_COLUMNS
from emberscale_trainer.data.criteo import CriteoTSV, split_lines
from emberscale_trainer.data.records import DataUnavailableError, empty_columns


@dataclass(frozen=True)
class Row:
    label: float
    integers: tuple[float, ...]
    ids: tuple[int, ...]


def reference_parse(line: bytes) -> Row | str:
    """Parses a line without its newline in plain Python: returns its row, or a part of the expected problem."""
    line = line.removesuffix(b"\r")
    if not line:
        return "the line is blank"
    if len(line) > 1024:
        return "more than 1,024"
    fields = line.split(b"\t")
    if len(fields) != 40:
        return f"expected 40 fields separated by tabs, found {len(fields)}"
    if fields[0] not in (b"0", b"1"):
        return "the label "
    integers = []
    for column, field in enumerate(fields[1:14], start=1):
        digits = field.removeprefix(b"-")
        if field and (not digits or len(digits) > 18 or any(digit not in b"0123456789" for digit in digits)):
            return f"I{column} "
        integers.append(float(int(field)) if field else math.nan)
    ids = []
    for column, field in enumerate(fields[14:], start=1):
        if len(field) > 8 or any(digit not in b"0123456789abcdefABCDEF" for digit in field):
            return f"C{column} "
        ids.append(int(field, 16) if field else -1)
    return Row(float(fields[0]), tuple(integers), tuple(ids))


labels = st.sampled_from([b"0", b"1"])
integers = st.one_of(st.just(b""), st.integers(-(10**18) + 1, 10**18 - 1).map(lambda number: b"%d" % number))
categories = st.one_of(
    st.just(b""),
    st.integers(0, (1 << 32) - 1).map(lambda number: b"%08x" % number),
    st.integers(0, (1 << 32) - 1).map(lambda number: b"%X" % number),
)
junk = st.one_of(
    st.sampled_from([b"-", b"--1", b"+1", b" 1", b"1 ", b"1.5", b"0x1f", b"g", b"123456789", b"2", b"01", b"\r"]),
    st.binary(max_size=12).filter(lambda field: not set(field) & set(b"\n")),
    st.integers(15, 25).map(lambda digits: b"9" * digits),
    st.just(b"f" * 1100),
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    fields = [draw(labels), *(draw(integers) for _ in range(13)), *(draw(categories) for _ in range(26))]
    change = draw(st.sampled_from(["good", "good", "good", "replace", "drop", "add", "cut", "blank"]))
    place = draw(st.integers(0, 39))
    if change == "replace":
        fields[place] = draw(junk)
    elif change == "drop":
        del fields[place]
    elif change == "add":
        fields.insert(place, draw(junk))
    line = b"\t".join(fields)
    if change == "cut":
        line = line[: draw(st.integers(0, len(line)))]
    return b"" if change == "blank" else line


@given(st.lists(lines(), min_size=1, max_size=4), st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.randoms())
def test_the_parser_agrees_with_the_reference(
    lines: list[bytes], newline: bytes, newline_at_end: bool, random: "np.random.RandomState"
) -> None:
    newline_at_end = newline_at_end or not lines[-1]
    text = newline.join(lines) + (newline if newline_at_end else b"")
    block = split_lines(text, len(lines), "a.tsv", first_record=100)
    records = np.arange(len(lines))
    random.shuffle(records)
    columns = empty_columns(len(lines), CRITEO_COLUMNS)

    good, bad = block.read(records, columns)

    written = text.split(b"\n")  # a line of its own may end with \r, the first half of a newline
    expected = [(record, reference_parse(written[record])) for record in records.tolist()]
    rows = [row for _, row in expected if isinstance(row, Row)]
    problems = [(record, row) for record, row in expected if isinstance(row, str)]
    assert good == len(rows)
    assert columns.labels[:good].tolist() == [row.label for row in rows]
    assert columns.ids[:good].tolist() == [list(row.ids) for row in rows]
    dense = [[math.log1p(x) if x > 0 else 0.0 for x in row.integers] for row in rows]
    np.testing.assert_allclose(columns.dense[:good], np.reshape(dense, (-1, 13)), rtol=1e-6)
    assert [(problem.file, problem.line) for problem in bad] == [("a.tsv", 101 + record) for record, _ in problems]
    for problem, (_, text_of_it) in zip(bad, problems, strict=True):
        assert text_of_it in problem.problem

    raw = empty_columns(len(lines), CRITEO_COLUMNS, raw=True)
    assert replace(block, raw=True).read(records, raw) == (good, bad)
    assert raw.labels[:good].tolist() == [row.label for row in rows]
    np.testing.assert_array_equal(raw.dense[:good], np.reshape([row.integers for row in rows], (-1, 13)))
    np.testing.assert_array_equal(raw.ids[:good], columns.ids[:good])


def test_every_byte_is_a_digit_of_a_category_only_where_it_is_hexadecimal(criteo_line: Callable[[int], bytes]) -> None:
    fields = criteo_line(0).split(b"\t")
    for place in range(8):
        for byte in set(range(256)) - set(b"\n"):
            category = bytearray(b"0aF9fA1e")
            category[place] = byte
            line = b"\t".join([*fields[:20], bytes(category), *fields[21:]])
            columns = empty_columns(1, CRITEO_COLUMNS)
            good, bad = split_lines(line + b"\n", 1).read(np.arange(1), columns)
            expected = reference_parse(line)
            if isinstance(expected, str):
                assert expected in bad[0].problem
            else:
                assert (good, columns.ids[0].tolist()) == (1, list(expected.ids))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda fields: [b"3", *fields[1:]], "the label '3' is neither 0 nor 1"),
        (lambda fields: [fields[0], b"x1", *fields[2:]], "I1 'x1' is not an integer of at most 18 digits"),
        (lambda fields: [*fields[:-1], b"xyz"], "C26 'xyz' is not a hexadecimal number of at most 8 digits"),
        (lambda fields: fields[:-2], "expected 40 fields separated by tabs, found 38"),
        (lambda fields: [*fields[:-1], b"0" * 1000], "the line has 1,253 bytes, more than 1,024"),
        (lambda fields: [], "the line is blank"),
    ],
)
def test_a_bad_record_says_what_is_wrong(
    criteo_line: Callable[[int], bytes], change: Callable[[list[bytes]], list[bytes]], problem: str
) -> None:
    line = b"\t".join(change(criteo_line(0).split(b"\t")))
    _, bad = split_lines(line + b"\n", 1, "day_0.tsv", 6).read(np.arange(1), empty_columns(1, CRITEO_COLUMNS))
    assert [str(record) for record in bad] == [f"day_0.tsv:7: {problem}"]


@pytest.mark.parametrize("content", [b"a\nb\n", b"a\nb", b"a\n\n", b"a\n\nb\n"])
def test_a_block_that_holds_other_lines_than_indexed_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    records = content.count(b"\n") + (not content.endswith(b"\n"))
    file = DataFile(uri=str(path), bytes=len(content))
    for wrong in {1, 2, 3, 4} - {records}:
        with pytest.raises(DataUnavailableError, match=r"a\.tsv: changed since it was indexed"):
            CriteoTSV().read_block(file, Block(0, 0, len(content), 0, wrong))
    with pytest.raises(DataUnavailableError, match=r"a\.tsv: is shorter than when it was indexed"):
        CriteoTSV().read_block(file, Block(0, 0, len(content) + 1, 0, records))
