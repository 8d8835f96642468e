"""Finds where the blocks of a file of lines begin, without looking into the lines."""

from typing import Any

import numpy as np
import numpy.typing as npt

from emberscale_api.rpc.master_pb2 import Block, DataFile
from emberscale_trainer.data.compiled import kernel
from emberscale_trainer.data.errors import DataUnavailableError
from emberscale_trainer.data.files import open_filesystem

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 20
"""A file with a longer line than this is no file of lines."""

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
_NEWLINE = 10
_WINDOW = 4096


class LineIndexer:
    """Cuts a stream of bytes into blocks of at most `block_records` lines.

    A line ends with a newline or with the file; bytes after the last newline are a line of their own. Blank lines are
    records too (the parser reports them), so that line numbers are record numbers.
    """

    def __init__(self, file_number: int, block_records: int) -> None:
        if block_records < 1:
            raise ValueError("a block holds at least one record")
        self._file_number = file_number
        self._block_records = block_records
        self._blocks: list[Block] = []
        self._offset = 0
        self._begin = 0
        self._lines = 0
        self._line_begin = 0

    @property
    def line_bytes(self) -> int:
        """The length so far of the line that has not ended yet."""
        return self._offset - self._line_begin

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes."""
        data = np.frombuffer(chunk, dtype=np.uint8)
        ends = np.empty(data.size // self._block_records + 1, dtype=np.int64)
        full, lines, last_end = _find_block_ends(data, self._lines, self._block_records, ends)
        for end in ends[:full].tolist():
            self._close(self._offset + end, self._block_records)
        self._lines = lines
        if last_end:
            self._line_begin = self._offset + last_end
        self._offset += data.size

    def finish(self) -> list[Block]:
        """The blocks, after the last bytes."""
        lines = self._lines + (1 if self.line_bytes else 0)
        if lines:
            self._close(self._offset, lines)
        return self._blocks

    def _close(self, end: int, lines: int) -> None:
        first = self._blocks[-1].first_record + self._blocks[-1].records if self._blocks else 0
        self._blocks.append(
            Block(
                file_number=self._file_number,
                offset=self._begin,
                length=end - self._begin,
                first_record=first,
                records=lines,
            )
        )
        self._begin = end


def index_lines(file: DataFile, file_number: int, block_records: int) -> list[Block]:
    """The blocks of one file, in order; together they are the whole file. Raises DataUnavailableError."""
    filesystem, path = open_filesystem(file.uri)
    indexer = LineIndexer(file_number, block_records)
    try:
        with filesystem.open(path, "rb") as stream:
            _feed_all(stream, indexer, file)
    except OSError as error:
        raise DataUnavailableError(file.uri, f"cannot be read: {error.strerror or error}") from error
    return indexer.finish()


def _feed_all(stream: Any, indexer: LineIndexer, file: DataFile) -> None:
    read = 0
    while chunk := stream.read(CHUNK_BYTES):
        if not read:
            for magic, name in _COMPRESSED.items():
                if chunk.startswith(magic):
                    raise DataUnavailableError(file.uri, f"is compressed with {name}: decompress it, ranges are read")
        indexer.feed(chunk)
        read += len(chunk)
        if indexer.line_bytes > MAX_LINE_BYTES:
            raise DataUnavailableError(file.uri, f"is not a file of lines: no newline in {indexer.line_bytes:,} bytes")
    if read != file.bytes:
        raise DataUnavailableError(file.uri, f"changed while it was read: {file.bytes:,} bytes became {read:,}")


@kernel
def _find_block_ends(
    data: npt.NDArray[np.uint8], lines: int, block_records: int, ends: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    """Writes where in `data` blocks end; `lines` of the open block came before.

    Returns how many blocks ended, how many lines the open block has now, and the end of the last line (0 if none).
    Windows without a block's end are only counted, which compiles to vector instructions.
    """
    full = 0
    last_end = 0
    for begin in range(0, data.size, _WINDOW):
        stop = min(begin + _WINDOW, data.size)
        count = 0
        for place in range(begin, stop):
            count += data[place] == _NEWLINE
        if count == 0:
            continue
        if lines + count < block_records:
            lines += count
            last_end = stop
            continue
        for place in range(begin, stop):
            if data[place] == _NEWLINE:
                lines += 1
                last_end = place + 1
                if lines == block_records:
                    ends[full] = place + 1
                    full += 1
                    lines = 0
    while last_end and data[last_end - 1] != _NEWLINE:
        last_end -= 1
    return full, lines, last_end
