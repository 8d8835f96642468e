"""Where records begin in text: after every newline or, in CSV, after every newline that is not within quotes."""

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.compiled import kernel

NEWLINE = 10
QUOTE = 34

# States of a reader of CSV (RFC 4180): a quote opens a quoted field only where a field begins; within one, two quotes
# stand for one.
FIELD_BEGINS, UNQUOTED, QUOTED, QUOTE_WITHIN = 0, 1, 2, 3

_NEWLINES, _ONES, _HIGH_BITS = (np.uint64(byte * 0x0101010101010101) for byte in (NEWLINE, 1, 0x80))
_WINDOW = 4096


@kernel
def find_lines(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> int:
    """Where each line begins, and where one after the last would; the number of lines, or -1 if more than fit.

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
    """The same where newlines within quotes are part of a record."""
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
    """The same where newlines within quotes are part of a record; the state is passed on from chunk to chunk."""
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
