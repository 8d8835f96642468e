import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.dataset import Block, DataFile
from emberscale_trainer.data import lines
from emberscale_trainer.data.lines import LineIndexer, index_lines
from emberscale_trainer.data.records import DataUnavailableError

texts = st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bcd\t"]), max_size=60).map(b"".join)


def reference_blocks(text: bytes, file_number: int, block_records: int) -> list[Block]:
    lines = re.findall(rb"[^\n]*\n|[^\n]+$", text)
    blocks = []
    offset = 0
    for first in range(0, len(lines), block_records):
        part = lines[first : first + block_records]
        length = sum(map(len, part))
        blocks.append(
            Block(file_number=file_number, offset=offset, length=length, first_record=first, records=len(part))
        )
        offset += length
    return blocks


@given(texts, st.integers(1, 20), st.lists(st.integers(0, 200), max_size=5))
def test_blocks_are_those_of_the_reference_however_the_bytes_arrive(
    text: bytes, block_records: int, cuts: list[int]
) -> None:
    indexer = LineIndexer(3, block_records)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in pairwise(bounds):
        indexer.feed(text[start:stop])
    assert indexer.finish() == reference_blocks(text, 3, block_records)


@given(st.lists(st.integers(0, 9000), max_size=12), st.integers(1, 4), st.booleans())
def test_lines_longer_than_a_window_are_one_record(
    lengths: list[int], block_records: int, newline_at_end: bool
) -> None:
    text = b"\n".join(b"x" * length for length in lengths) + (b"\n" if newline_at_end else b"")
    indexer = LineIndexer(0, block_records)
    indexer.feed(text)
    assert indexer.line_bytes == len(text) - (text.rfind(b"\n") + 1)
    assert indexer.finish() == reference_blocks(text, 0, block_records)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_file_is_indexed_through_any_file_system(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setattr(lines, "CHUNK_BYTES", 64)
    text = b"".join(b"line %d\n" % number for number in range(1000)) + b"last"
    uri = f"{scheme}{tmp_path}/data.tsv"
    with fsspec.open(uri, "wb") as stream:
        stream.write(text)
    assert index_lines(DataFile(uri=uri, bytes=len(text)), 5, 64) == reference_blocks(text, 5, 64)


def test_an_empty_file_has_no_blocks(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    assert index_lines(DataFile(str(tmp_path / "empty.tsv"), 0), 0, 10) == []


@pytest.mark.parametrize(
    ("content", "size", "problem"),
    [
        (b"\x1f\x8b\x08 and so on", 13, "is compressed with gzip"),
        (b"\x28\xb5\x2f\xfd and so on", 14, "is compressed with zstd"),
        (b"x" * 300, 300, "is not a file of lines"),
        (b"a\nb\n", 8, "changed while it was read: 8 bytes became 4"),
        (None, 8, "cannot be read: No such file"),
    ],
)
def test_what_is_no_file_of_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, size: int, problem: str
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    path = tmp_path / "a.tsv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataUnavailableError, match=rf"a\.tsv: {problem}"):
        index_lines(DataFile(uri=str(path), bytes=size), 0, 10)
