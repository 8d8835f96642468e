from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from emberscale_trainer.data import inspect
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.inspect import DataSummary, inspect_files


def write(folder: Path, name: str, lines: list[bytes]) -> None:
    (folder / name).write_bytes(b"".join(line + b"\n" for line in lines))


def examine(folder: Path, max_records: int = 1_000_000) -> DataSummary:
    return inspect_files(expand([f"{folder}/*.tsv"]), CriteoTSV(raw=True), max_records)


@pytest.mark.parametrize("merge_records", [1, 7, 1 << 19])
def test_a_summary_says_what_counting_by_hand_says(
    tmp_path: Path, criteo_line: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch, merge_records: int
) -> None:
    monkeypatch.setattr(inspect, "_MERGE_RECORDS", merge_records)
    monkeypatch.setattr(inspect, "_BLOCK_RECORDS", 9)
    lines = [criteo_line(number % 13) for number in range(50)]
    for place in (4, 5, 6):
        fields = lines[place].split(b"\t")
        fields[2], fields[15] = b"-%d" % place, b""
        lines[place] = b"\t".join(fields)
    write(tmp_path, "a.tsv", lines[:30])
    write(tmp_path, "b.tsv", [*lines[30:], b"", b"oh"])

    summary = examine(tmp_path)

    rows = [line.split(b"\t") for line in lines]
    assert [(file.uri, file.records) for file in summary.files] == [
        (f"{tmp_path}/a.tsv", 30),
        (f"{tmp_path}/b.tsv", 22),
    ]
    assert (summary.records, summary.examined, summary.bad_records) == (52, 52, 2)
    assert [(bad.file, bad.line) for bad in summary.bad_record_samples] == [
        (f"{tmp_path}/b.tsv", 21),
        (f"{tmp_path}/b.tsv", 22),
    ]
    assert summary.positive_rate == pytest.approx(sum(row[0] == b"1" for row in rows) / 50)
    for column, dense in enumerate(summary.dense, start=1):
        values = [int(row[column]) for row in rows]
        assert (dense.name, dense.missing) == (f"I{column}", 0.0)
        assert (dense.minimum, dense.maximum) == (min(values), max(values))
        assert dense.mean == pytest.approx(sum(values) / 50)
    for column, ids in enumerate(summary.categorical, start=14):
        counts = Counter(int(row[column], 16) for row in rows if row[column])
        assert ids.name == f"C{column - 13}"
        assert ids.missing == pytest.approx((3 if column == 15 else 0) / 50)
        assert ids.distinct == len(counts)
        top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:3]
        assert tuple((one.id, one.share) for one in ids.top) == tuple((key, times / 50) for key, times in top)


def test_only_a_part_is_examined_but_all_is_counted(tmp_path: Path, criteo_line: Callable[[int], bytes]) -> None:
    write(tmp_path, "a.tsv", [criteo_line(number) for number in range(900)])
    write(tmp_path, "b.tsv", [criteo_line(number) for number in range(900, 1000)])
    summary = examine(tmp_path, max_records=7)
    assert (summary.records, summary.examined) == (1000, 7)


def test_what_is_examined_is_spread_over_all_files(
    tmp_path: Path, criteo_line: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "_BLOCK_RECORDS", 10)
    for number in range(10):
        write(tmp_path, f"{number}.tsv", [criteo_line(number)] * 100)
    summary = examine(tmp_path, max_records=100)
    assert summary.examined == 100
    assert summary.categorical[0].distinct == 10


def test_columns_without_any_value_have_no_range(tmp_path: Path) -> None:
    write(tmp_path, "a.tsv", [b"0" + b"\t" * 39] * 3)
    summary = examine(tmp_path)
    assert {(column.missing, column.minimum, column.maximum) for column in summary.dense} == {(1.0, None, None)}
    assert {(column.missing, column.distinct, column.top) for column in summary.categorical} == {(1.0, 0, ())}


@pytest.mark.parametrize("lines", [[], [b"not", b"Criteo"]])
def test_files_without_a_good_record_are_summarised_too(tmp_path: Path, lines: list[bytes]) -> None:
    write(tmp_path, "a.tsv", lines)
    summary = examine(tmp_path)
    assert (summary.records, summary.examined, summary.bad_records) == (len(lines),) * 3
    assert summary.positive_rate is None


def test_of_many_bad_records_the_first_are_shown(tmp_path: Path) -> None:
    write(tmp_path, "a.tsv", [b"bad"] * 100)
    summary = examine(tmp_path)
    assert summary.bad_records == 100
    assert [bad.line for bad in summary.bad_record_samples] == list(range(1, 21))


def test_at_least_one_record_must_be_asked_for() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        inspect_files([], CriteoTSV(raw=True), 0)
