"""Finds where the blocks of a file of lines begin, without looking into the lines."""

import numpy as np

from emberscale_api.rpc.master_pb2 import Block, DataFile
from emberscale_trainer.data.errors import DataUnavailableError
from emberscale_trainer.data.lines import FIELD_BEGINS, NEWLINE, UNQUOTED, find_block_ends, find_quoted_block_ends
from emberscale_trainer.data.streams import compression_of, open_text

CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 20
"""A file with a longer line than this is no file of lines."""


class LineIndexer:
    """Cuts a stream of bytes into blocks of at most `block_records` lines.

    A line ends with a newline or with the file; bytes after the last newline are a line of their own. Blank lines are
    records too (the parser reports them), so that line numbers are record numbers.

    With a `delimiter` the lines are those of CSV: newlines within quotes do not end them. With `header` the first line
    is in no block.
    """

    def __init__(
        self, file_number: int, block_records: int, delimiter: str | None = None, header: bool = False
    ) -> None:
        if block_records < 1:
            raise ValueError("a block holds at least one record")
        self._file_number = file_number
        self._block_records = block_records
        self._delimiter = None if delimiter is None else ord(delimiter)
        self._blocks: list[Block] = []
        self._offset = 0
        self._begin = 0
        self._in_header = header
        self._lines = block_records - 1 if header else 0
        self._line_begin = 0
        self._state = FIELD_BEGINS

    @property
    def line_bytes(self) -> int:
        """The length so far of the line that has not ended yet."""
        return self._offset - self._line_begin

    def feed(self, chunk: bytes | bytearray) -> None:
        """Takes the next bytes."""
        data = np.frombuffer(chunk, dtype=np.uint8)
        ends = np.empty(data.size // self._block_records + 2, dtype=np.int64)
        if self._delimiter is None or (self._state <= UNQUOTED and b'"' not in chunk):
            full, lines, last_end = find_block_ends(data, self._lines, self._block_records, ends)
            if data.size:
                self._state = FIELD_BEGINS if data[-1] in (NEWLINE, self._delimiter) else UNQUOTED
        else:
            full, lines, last_end, self._state = find_quoted_block_ends(
                data, self._delimiter, self._state, self._lines, self._block_records, ends
            )
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
        if self._in_header:
            self._in_header = False
            self._begin = end
            return
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


def index_lines(
    file: DataFile, file_number: int, block_records: int, delimiter: str | None = None, header: bool = False
) -> list[Block]:
    """The blocks of one file, in order; together they are the whole file but its header. Raises DataUnavailableError.

    `delimiter` and `header` are those of LineIndexer. Offsets in compressed files are those in their text.
    """
    indexer = LineIndexer(file_number, block_records, delimiter, header)
    with open_text(file.uri) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            indexer.feed(chunk)
            if indexer.line_bytes > MAX_LINE_BYTES:
                raise DataUnavailableError(
                    file.uri,
                    f"is not a file of lines: no newline in {indexer.line_bytes:,} bytes"
                    + ("" if delimiter is None else " outside quotes; is a quote left open?"),
                )
        if compression_of(file.uri) is None and stream.position != file.bytes:
            raise DataUnavailableError(
                file.uri, f"changed while it was read: {file.bytes:,} bytes became {stream.position:,}"
            )
    return indexer.finish()
