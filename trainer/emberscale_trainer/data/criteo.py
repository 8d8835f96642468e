"""The Criteo format: lines of `label \t 13 integers \t 26 categories`, read straight from bytes.

A label is 0 or 1. An integer may be negative or empty; a category is a 32-bit hexadecimal number or empty. A block in
memory stays text: only the records of a batch are parsed, in the batch's order, directly into its arrays.
"""

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from emberscale_api.dataset import Block, DataFile
from emberscale_api.job import ColumnMapping
from emberscale_api.job.data import BadRecord
from emberscale_api.job.resolved import CRITEO_CATEGORICAL, CRITEO_COLUMNS, CRITEO_DENSE
from emberscale_trainer.data.lines import find_lines, index_lines, refuse_unreadable_head
from emberscale_trainer.data.records import MISSING_ID, Columns, DataUnavailableError
from emberscale_trainer.data.streams import TextRanges, compression_of
from emberscale_trainer.jit import kernel
from emberscale_trainer.jit.memory import CACHE_LINE, element_address, load_int64, prefetch

MAX_LINE_BYTES = 1024
"""The longest well-formed line has 495 bytes; a much longer line is not in this format."""

_DENSE = len(CRITEO_DENSE)
_CATEGORICAL = len(CRITEO_CATEGORICAL)
_FIELDS = 1 + _DENSE + _CATEGORICAL
_MAX_DIGITS = 18
_TAB, _RETURN, _MINUS, _ZERO = 9, 13, 45, 48
_NOT_HEX = 0x80

# The records of a batch are scattered over the block: prefetching their cache lines some records ahead nearly doubles
# the speed. Most lines are shorter than `_USUAL_BYTES`.
_READ_AHEAD = 6
_USUAL_BYTES = 320

# Problems of a line; a positive number is the number of the malformed field, plus one.
_GOOD, _BLANK, _TOO_LONG, _WRONG_FIELDS = 0, -1, -2, -3


def _hex_digits() -> npt.NDArray[np.uint8]:
    table = np.full(256, _NOT_HEX, dtype=np.uint8)
    for value, digit in enumerate("0123456789abcdef"):
        table[ord(digit)] = table[ord(digit.upper())] = value
    return table


_HEX = _hex_digits()


def _bytes(byte: int) -> np.uint64:
    """Returns a word of eight equal bytes."""
    return np.uint64(byte * 0x0101010101010101)


_ONES, _NIBBLES, _HIGH_BITS, _CASE = _bytes(1), _bytes(0x0F), _bytes(0x80), _bytes(0x20)
_FROM_0, _ABOVE_9 = _bytes(0x80 - ord("0")), _bytes(0x7F - ord("9"))
_FROM_A, _ABOVE_F = _bytes(0x80 - ord("a")), _bytes(0x7F - ord("f"))
_PAIRS, _FOURS, _LOW_HALF = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFFFFFF)
_FOUR, _SIX, _EIGHT, _NINE = np.uint64(4), np.uint64(6), np.uint64(8), np.uint64(9)
_SIXTEEN, _THIRTY_TWO = np.uint64(16), np.uint64(32)
_LOG1P = np.log1p(np.arange(1024, dtype=np.float64)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class LineBlock:
    """The text of one block: `starts[i]` is where line i begins, `starts[i + 1] - 1` where it ends."""

    file: str
    first_record: int
    text: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    raw: bool = False

    def read(self, records: npt.NDArray[np.int64], into: Columns) -> tuple[int, list[BadRecord]]:
        """Parses the given lines; see RecordBlock. Unless raw, integers become log1p(max(x, 0)), 0 where missing."""
        problems = np.empty(records.size, dtype=np.int32)
        good = _parse(self.text, self.starts, records, into.labels, into.dense, into.ids, problems, not self.raw)
        if good == records.size:
            return good, []
        bad = [self._describe(int(records[place]), int(problems[place])) for place in np.flatnonzero(problems)]
        return good, bad

    def _describe(self, record: int, problem: int) -> BadRecord:
        line = self.text[self.starts[record] : self.starts[record + 1] - 1].tobytes().removesuffix(b"\r")
        fields = line.split(b"\t")
        if problem == _BLANK:
            text = "the line is blank"
        elif problem == _TOO_LONG:
            text = f"the line has {len(line):,} bytes, more than {MAX_LINE_BYTES:,}"
        elif problem == _WRONG_FIELDS:
            text = f"expected {_FIELDS} fields separated by tabs, found {len(fields)}"
        else:
            number = problem - 1
            shown = repr(fields[number][:24].decode("utf-8", "backslashreplace"))
            if number == 0:
                text = f"the label {shown} is neither 0 nor 1"
            elif number <= _DENSE:
                text = f"{CRITEO_DENSE[number - 1]} {shown} is not an integer of at most {_MAX_DIGITS} digits"
            else:
                name = CRITEO_CATEGORICAL[number - 1 - _DENSE]
                text = f"{name} {shown} is not a hexadecimal number of at most 8 digits"
        return BadRecord(self.file, self.first_record + record + 1, text)


def split_lines(text: bytes, records: int, file: str = "", first_record: int = 0, raw: bool = False) -> LineBlock:
    """Splits the text of a block into lines. Raises DataUnavailableError unless there are `records` lines."""
    data = np.frombuffer(text, dtype=np.uint8)
    starts = np.empty(records + 1, dtype=np.int64)
    if find_lines(data, starts) != records:
        raise DataUnavailableError(
            file,
            f"changed since it was indexed: {records:,} lines are not where they were, from line {first_record + 1:,}",
        )
    return LineBlock(file, first_record, data, starts, raw)


@dataclass(frozen=True, slots=True)
class CriteoTSV:
    """The `CriteoTSV` format; a RecordFormat."""

    raw: bool = False
    columns: ColumnMapping = CRITEO_COLUMNS
    _ranges: TextRanges = field(default_factory=TextRanges, repr=False, compare=False)

    def check_file(self, file: DataFile) -> None:
        """Raises DataUnavailableError for a file whose first lines are all malformed."""
        refuse_unreadable_head(file, self)

    def index_file(self, file: DataFile, file_number: int, block_records: int) -> list[Block]:
        """The blocks of one file. Raises DataUnavailableError."""
        return index_lines(file, file_number, block_records)

    def entry_point(self, file: DataFile, block: Block) -> int:
        """A compressed file is read from its first byte on."""
        return block.offset if compression_of(file.uri) is None else 0

    def read_block(self, file: DataFile, block: Block) -> LineBlock:
        """Reads a block into memory. Raises DataUnavailableError."""
        text = self._ranges.read(file.uri, block.offset, block.length)
        return split_lines(text, block.records, file.uri, block.first_record, self.raw)

    def texts(self, file: DataFile, block: Block, columns: Collection[str]) -> Mapping[str, Set[bytes]]:
        """Returns no texts: ids are numbers."""
        return {}


@kernel
def _is_hex(word: np.uint64) -> bool:
    """Whether all eight bytes are hexadecimal digits.

    A byte below 0x80 and a summand below 0x80 have no carry; the sum's high bit says whether the byte reaches a bound.
    """
    lower = word | _CASE
    digits = (word + _FROM_0) & ~(word + _ABOVE_9)
    letters = (lower + _FROM_A) & ~(lower + _ABOVE_F)
    return bool((digits | letters) & ~word & _HIGH_BITS == _HIGH_BITS)


@kernel
def _hex_value(word: np.uint64) -> np.int64:
    """Returns the number of eight hexadecimal digits, the first one in the lowest byte, by joining halves."""
    nibbles = (word & _NIBBLES) + _NINE * ((word >> _SIX) & _ONES)
    pairs = ((nibbles << _FOUR) | (nibbles >> _EIGHT)) & _PAIRS
    fours = ((pairs << _EIGHT) | (pairs >> _SIXTEEN)) & _FOURS
    return np.int64(((fours << _SIXTEEN) | (fours >> _THIRTY_TWO)) & _LOW_HALF)


@kernel
def _fault(data: npt.NDArray[np.uint8], begin: int, end: int, field: int) -> int:
    """Returns the problem of a line that failed in a field: a wrong number of fields takes precedence."""
    fields = 1
    for place in range(begin, end):
        fields += data[place] == _TAB
    return field + 1 if fields == _FIELDS else _WRONG_FIELDS


@kernel
def _parse_line(
    data: npt.NDArray[np.uint8],
    begin: int,
    end: int,
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.floating],
    ids: npt.NDArray[np.int64],
    row: int,
    transform: bool,
) -> int:
    """Parses the line in bytes [begin, end), without its end of line, to a row; returns its problem or _GOOD."""
    if begin == end:
        return _BLANK
    if end - begin > MAX_LINE_BYTES:
        return _TOO_LONG
    label = data[begin] - _ZERO
    if label < 0 or label > 1 or begin + 1 == end or data[begin + 1] != _TAB:
        return _fault(data, begin, end, 0)
    labels[row] = label
    place = begin + 2
    for column in range(_DENSE):
        negative = place < end and data[place] == _MINUS
        place += negative
        first = place
        value = 0
        while place < end:
            digit = data[place] - _ZERO
            if digit < 0 or digit > 9:
                break
            value = value * 10 + digit
            place += 1
        digits = place - first
        if place == end or data[place] != _TAB or digits > _MAX_DIGITS or (negative and digits == 0):
            return _fault(data, begin, end, 1 + column)
        place += 1
        if transform:
            if negative or value == 0:
                dense[row, column] = 0.0
            elif value < _LOG1P.size:
                dense[row, column] = _LOG1P[value]
            else:
                dense[row, column] = np.log1p(np.float64(value))
        elif digits == 0:
            dense[row, column] = np.nan
        else:
            dense[row, column] = -value if negative else value
    for column in range(_CATEGORICAL):
        first = place
        key = np.int64(0)
        if place + 8 <= end:
            word = np.uint64(load_int64(element_address(data, place)))
            if _is_hex(word):
                key = _hex_value(word)
                place += 8
        if place == first:
            while place < end and place < first + 8:
                nibble = np.int64(_HEX[data[place]])
                if nibble == _NOT_HEX:
                    break
                key = (key << 4) | nibble
                place += 1
        if column == _CATEGORICAL - 1:
            if place != end:
                return _fault(data, begin, end, 1 + _DENSE + column)
        elif place == end or data[place] != _TAB:
            return _fault(data, begin, end, 1 + _DENSE + column)
        ids[row, column] = MISSING_ID if place == first else key
        place += 1
    return _GOOD


@kernel
def _parse(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    records: npt.NDArray[np.int64],
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.floating],
    ids: npt.NDArray[np.int64],
    problems: npt.NDArray[np.int32],
    transform: bool,
) -> int:
    """Parses lines to rows without gaps; returns their number. `problems` says for each line what is wrong with it."""
    row = 0
    for place in range(records.size):
        if place + _READ_AHEAD < records.size:
            ahead = starts[records[place + _READ_AHEAD]]
            for line in range(ahead, min(ahead + _USUAL_BYTES, data.size), CACHE_LINE):
                prefetch(element_address(data, line))
        begin = starts[records[place]]
        end = starts[records[place] + 1] - 1
        if end > begin and data[end - 1] == _RETURN:
            end -= 1
        problem = _parse_line(data, begin, end, labels, dense, ids, row, transform)
        problems[place] = problem
        row += problem == _GOOD
    return row
