"""Finds the records of text and the blocks of a file of lines, and checks that its first records can be read.

A record begins after every newline or, in CSV, after every newline that is not within quotes. Blocks are found without
looking into the lines.
"""

from contextlib import closing

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile
from emberscale_trainer.data.records import DataUnavailableError, RecordFormat, empty_columns
from emberscale_trainer.data.streams import TextStream, compression_of
from emberscale_trainer.jit import kernel

NEWLINE = 10
QUOTE = 34

# States of a CSV reader (RFC 4180): a quote opens a quoted field only at the beginning of a field; within one, two
# quotes stand for one.
FIELD_BEGINS, UNQUOTED, QUOTED, QUOTE_WITHIN = 0, 1, 2, 3

_NEWLINES, _ONES, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (NEWLINE, 1, 0x80))
_WINDOW = 4096


@kernel
def find_lines(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> int:
    """Finds where each line begins, and the end of the last; returns the number of lines, or -1 if more than fit.

    Looks at eight bytes at a time: a byte is a newline where the word, XORed with newlines, has a zero byte.
    """
    room = starts.size - 1
    starts[0] = 0
    lines = 0
    words = data[: data.size // 8 * 8].view(np.uint64)
    for number in range(words.size + 1):
        if number < words.size:
            word = words[number] ^ _NEWLINES
            if not (word - _ONES) & ~word & _HIGH_BITS:
                continue
        for place in range(8 * number, min(8 * number + 8, data.size)):
            if data[place] == NEWLINE:
                if lines == room:
                    return -1
                lines += 1
                starts[lines] = place + 1
    if starts[lines] < data.size:
        if lines == room:
            return -1
        lines += 1
        starts[lines] = data.size + 1
    return lines


@kernel
def find_quoted_lines(data: npt.NDArray[np.uint8], delimiter: int, starts: npt.NDArray[np.int64]) -> int:
    """The same if newlines within quotes are part of a record."""
    room = starts.size - 1
    starts[0] = 0
    lines = 0
    state = FIELD_BEGINS
    for place in range(data.size):
        byte = data[place]
        if state == QUOTED:
            if byte == QUOTE:
                state = QUOTE_WITHIN
        elif byte == NEWLINE:
            if lines == room:
                return -1
            lines += 1
            starts[lines] = place + 1
            state = FIELD_BEGINS
        elif byte == QUOTE and state != UNQUOTED:
            state = QUOTED
        elif byte == delimiter:
            state = FIELD_BEGINS
        else:
            state = UNQUOTED
    if starts[lines] < data.size:
        if lines == room:
            return -1
        lines += 1
        starts[lines] = data.size + 1
    return lines


@kernel
def find_block_ends(
    data: npt.NDArray[np.uint8], lines: int, block_records: int, ends: npt.NDArray[np.int64]
) -> tuple[int, int, int]:
    """Writes where in `data` blocks end; the open block had `lines` lines before.

    Returns the number of blocks that ended, the lines of the open block now, and the end of the last line (0 if none).
    Windows without a block's end are only counted, which compiles to vector instructions.
    """
    full = 0
    last_end = 0
    for begin in range(0, data.size, _WINDOW):
        stop = min(begin + _WINDOW, data.size)
        count = 0
        for place in range(begin, stop):
            count += data[place] == NEWLINE
        if count == 0:
            continue
        if lines + count < block_records:
            lines += count
            last_end = stop
            continue
        for place in range(begin, stop):
            if data[place] == NEWLINE:
                lines += 1
                last_end = place + 1
                if lines == block_records:
                    ends[full] = place + 1
                    full += 1
                    lines = 0
    while last_end and data[last_end - 1] != NEWLINE:
        last_end -= 1
    return full, lines, last_end


@kernel
def find_quoted_block_ends(
    data: npt.NDArray[np.uint8],
    delimiter: int,
    state: int,
    lines: int,
    block_records: int,
    ends: npt.NDArray[np.int64],
) -> tuple[int, int, int, int]:
    """The same if newlines within quotes are part of a record; `state` carries over from chunk to chunk."""
    full = 0
    last_end = 0
    for place in range(data.size):
        byte = data[place]
        if state == QUOTED:
            if byte == QUOTE:
                state = QUOTE_WITHIN
        elif byte == NEWLINE:
            lines += 1
            last_end = place + 1
            state = FIELD_BEGINS
            if lines == block_records:
                ends[full] = place + 1
                full += 1
                lines = 0
        elif byte == QUOTE and state != UNQUOTED:
            state = QUOTED
        elif byte == delimiter:
            state = FIELD_BEGINS
        else:
            state = UNQUOTED
    return full, lines, last_end, state


CHUNK_BYTES = 4 << 20
MAX_LINE_BYTES = 16 << 20
"""A file with a longer line than this is not a file of lines."""


class LineIndexer:
    """Cuts a stream of bytes into blocks of at most `block_records` lines.

    A line ends with a newline or with the file; bytes after the last newline are a line of their own. Blank lines are
    records too (the parser reports them), so that line numbers are record numbers.

    With a `delimiter`, lines are CSV records: newlines within quotes do not end them. With `header`, the first line is
    in no block.
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
        """Adds the next bytes."""
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
        """Returns the blocks; to be called after the last bytes."""
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
    """Returns the blocks of one file, in order: the whole file except its header. Raises DataUnavailableError.

    `delimiter` and `header` as in LineIndexer. Offsets in compressed files count the bytes of their text.
    """
    indexer = LineIndexer(file_number, block_records, delimiter, header)
    with closing(TextStream(file.uri)) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            if b"\n" not in chunk and b"\r" in chunk[:-1]:
                raise DataUnavailableError(
                    file.uri,
                    "its lines end in carriage returns alone; convert it, for example with `tr '\\r' '\\n'`",
                )
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


_HEAD_BYTES = 1 << 18
_RECORDS = 100
_ENOUGH = 10


def refuse_unreadable_head(
    file: DataFile, reader: RecordFormat, delimiter: str | None = None, header: bool = False
) -> None:
    """Raises DataUnavailableError if the first records of a file are all malformed, or are not UTF-8 text.

    Such a file has another format, or a column has another type. `spec.data.maxBadRecords` covers a few malformed
    records. `delimiter` and `header` as in LineIndexer.
    """
    with closing(TextStream(file.uri)) as stream:
        head = stream.read(_HEAD_BYTES)
    whole = head if len(head) < _HEAD_BYTES else head[: head.rfind(b"\n") + 1]
    try:
        whole.decode("utf-8")
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise DataUnavailableError(
            file.uri,
            f"is not UTF-8 text: line {line:,} has the byte {whole[error.start]:#x}; convert it, for example with "
            "`iconv -f LATIN1 -t UTF-8`, or its ids would not be those of the same texts elsewhere",
        ) from None
    indexer = LineIndexer(0, _RECORDS, delimiter, header)
    indexer.feed(whole)
    for block in indexer.finish()[:1]:
        columns = empty_columns(block.records, reader.columns, reader.raw)
        good, bad = reader.read_block(file, block).read(np.arange(block.records), columns)
        if not good and len(bad) >= _ENOUGH:
            raise DataUnavailableError(file.uri, f"none of its first {len(bad)} records can be read; {bad[0]}")
