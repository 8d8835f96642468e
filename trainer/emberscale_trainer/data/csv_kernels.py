"""Parses records of CSV (RFC 4180) directly into the arrays of a batch."""

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.decoded import LOG1P_TABLE
from emberscale_trainer.data.hashing import is_utf8, xxh64
from emberscale_trainer.data.lines import QUOTE
from emberscale_trainer.data.records import MISSING_ID
from emberscale_trainer.jit import kernel

# Problems of a record. The problem of a column is 1 + KINDS * its role + its kind; roles number the label, the dense
# columns, the categorical columns and the list columns.
GOOD, BLANK, BAD_QUOTES, WRONG_FIELDS = 0, -1, -2, -3
KINDS = 5
NOT_A_NUMBER, NOT_FINITE, NOT_A_LABEL, TOO_LONG, NOT_UTF8 = range(KINDS)

_RETURN, _SPACE, _PLUS, _MINUS, _POINT, _ZERO, _NINE = 13, 32, 43, 45, 46, 48, 57
_LOWER = 32
_NUMBER, _EMPTY, _OTHER = 0, 1, 2
_MANTISSA_DIGITS = 19
_EXACT_POWERS = 10.0 ** np.arange(23)
_UINT64_TENTH, _UINT64_LAST = np.uint64(1844674407370955161), np.uint64(5)
_INT64_SIGN = np.uint64(1 << 63)
_TEN = np.uint64(10)
_WORDS = tuple(np.frombuffer(word, dtype=np.uint8) for word in (b"nan", b"inf", b"infinity", b"true", b"false"))
_NAN, _INF, _INFINITY, _TRUE, _FALSE = _WORDS


@kernel
def _split(data: npt.NDArray[np.uint8], begin: int, end: int, delimiter: int, marks: npt.NDArray[np.int64]) -> int:
    """Finds the fields in bytes [begin, end); returns their number, or BAD_QUOTES.

    marks[i] has the begin and end of field i, without its quotes, and whether quotes within it are doubled.
    """
    fields = 0
    place = begin
    while True:
        doubled = 0
        if place < end and data[place] == QUOTE:
            place += 1
            first = place
            while True:
                if place >= end:
                    return BAD_QUOTES
                if data[place] != QUOTE:
                    place += 1
                elif place + 1 < end and data[place + 1] == QUOTE:
                    doubled = 1
                    place += 2
                else:
                    break
            last = place
            place += 1
            if place < end and data[place] != delimiter:
                return BAD_QUOTES
        else:
            first = place
            while place < end and data[place] != delimiter:
                place += 1
            last = place
        if fields < marks.shape[0]:
            marks[fields, 0], marks[fields, 1], marks[fields, 2] = first, last, doubled
        fields += 1
        if place >= end:
            return fields
        place += 1


@kernel
def _is_word(data: npt.NDArray[np.uint8], begin: int, end: int, word: npt.NDArray[np.uint8]) -> bool:
    if end - begin != word.size:
        return False
    for place in range(word.size):  # noqa: SIM110 - Numba has no generators in `all`
        if data[begin + place] | _LOWER != word[place]:
            return False
    return True


@kernel
def _number(data: npt.NDArray[np.uint8], begin: int, end: int) -> tuple[int, float]:
    """Returns the kind of a field and its value, exact up to 15 digits and 10**22, else to the last two bits."""
    while begin < end and data[begin] == _SPACE:
        begin += 1
    while end > begin and data[end - 1] == _SPACE:
        end -= 1
    if begin == end:
        return _EMPTY, 0.0
    place = begin
    negative = data[place] == _MINUS
    if negative or data[place] == _PLUS:
        place += 1
    mantissa = np.int64(0)
    kept = 0
    exponent = 0
    digits = 0
    after_point = False
    while place < end:
        byte = data[place]
        if byte == _POINT and not after_point:
            after_point = True
        elif _ZERO <= byte <= _NINE:
            digits += 1
            if kept < _MANTISSA_DIGITS - 1:
                mantissa = mantissa * 10 + (byte - _ZERO)
                kept += mantissa > 0
                exponent -= after_point
            else:
                exponent += not after_point
        else:
            break
        place += 1
    if digits and place < end and data[place] | _LOWER == ord("e"):
        place += 1
        lowered = place < end and data[place] == _MINUS
        if place < end and (lowered or data[place] == _PLUS):
            place += 1
        shift = 0
        first = place
        while place < end and _ZERO <= data[place] <= _NINE:
            shift = min(shift * 10 + (data[place] - _ZERO), 100_000)
            place += 1
        digits *= place > first
        exponent += -shift if lowered else shift
    if digits == 0 or place < end:
        place = begin + (negative or data[begin] == _PLUS)
        if _is_word(data, place, end, _NAN):
            return _NUMBER, np.nan
        if _is_word(data, place, end, _INF) or _is_word(data, place, end, _INFINITY):
            return _NUMBER, -np.inf if negative else np.inf
        if _is_word(data, begin, end, _TRUE):
            return _NUMBER, 1.0
        if _is_word(data, begin, end, _FALSE):
            return _NUMBER, 0.0
        return _OTHER, 0.0
    value = float(mantissa)
    if mantissa == 0:
        value = 0.0
    elif 0 <= exponent <= 22:
        value *= _EXACT_POWERS[exponent]
    elif -22 <= exponent < 0:
        value /= _EXACT_POWERS[-exponent]
    elif exponent < -300:
        value = value * 1e-280 * 10.0 ** (exponent + 280)
    else:
        value *= 10.0**exponent
    return _NUMBER, -value if negative else value


@kernel
def _integer(data: npt.NDArray[np.uint8], begin: int, end: int) -> tuple[bool, np.int64]:
    """Whether a field is an integer from -2**63 to 2**64 - 1 in its shortest form, and its 64 bits."""
    negative = begin < end and data[begin] == _MINUS
    place = begin + negative
    digits = end - place
    if digits < 1 or digits > 20 or (data[place] == _ZERO and (digits > 1 or negative)):
        return False, np.int64(0)
    value = np.uint64(0)
    for number in range(digits):
        byte = data[place + number]
        if byte < _ZERO or byte > _NINE:
            return False, np.int64(0)
        digit = np.uint64(byte - _ZERO)
        if number == _MANTISSA_DIGITS and (value > _UINT64_TENTH or (value == _UINT64_TENTH and digit > _UINT64_LAST)):
            return False, np.int64(0)
        value = value * _TEN + digit
    if not negative:
        return True, np.int64(value)
    return bool(value <= _INT64_SIGN), -np.int64(value)


@kernel
def _id(data: npt.NDArray[np.uint8], begin: int, end: int, doubled: int) -> tuple[np.int64, bool]:
    """Returns the id of a field: an integer itself, the hash of any other text, MISSING_ID if it is empty.

    Also returns whether the field has an id: text that is not UTF-8 has none.
    """
    if begin == end:
        return np.int64(MISSING_ID), True
    is_integer, value = _integer(data, begin, end)
    if is_integer:
        return value, True
    valid = is_utf8(data, begin, end)
    if not doubled:
        return xxh64(data, begin, end), valid
    text = np.empty(end - begin, dtype=np.uint8)
    length = 0
    place = begin
    while place < end:
        text[length] = data[place]
        length += 1
        place += 2 if data[place] == QUOTE else 1
    return xxh64(text, 0, length), valid


@kernel
def _count_items(data: npt.NDArray[np.uint8], begin: int, end: int, separator: int) -> int:
    """Counts the items of a list that are not empty."""
    items = 0
    filled = False
    for place in range(begin, end):
        if data[place] == separator:
            items += filled
            filled = False
        else:
            filled = True
    return items + filled


@kernel
def parse_items(
    data: npt.NDArray[np.uint8],
    marks: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    separator: int,
    values: npt.NDArray[np.int64],
) -> None:
    """Writes the first `lengths[i]` items of the list at marks[i] (see `_split`) end to end, without empty ones."""
    filled = 0
    for row in range(lengths.size):
        place, end, doubled = marks[row, 0], marks[row, 1], marks[row, 2]
        stop = filled + lengths[row]
        while filled < stop:
            first = place
            while place < end and data[place] != separator:
                place += 1
            if place > first:
                values[filled], _ = _id(data, first, place, doubled)
                filled += 1
            place += 1


@kernel
def parse_records(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    records: npt.NDArray[np.int64],
    delimiter: int,
    separator: int,
    fields: int,
    numbers_at: npt.NDArray[np.int64],
    ids_at: npt.NDArray[np.int64],
    lists_at: npt.NDArray[np.int64],
    longest: npt.NDArray[np.int64],
    missing: float,
    log1p: npt.NDArray[np.bool_],
    labels: npt.NDArray[np.float32],
    dense: npt.NDArray[np.floating],
    ids: npt.NDArray[np.int64],
    list_marks: npt.NDArray[np.int64],
    list_lengths: npt.NDArray[np.int64],
    problems: npt.NDArray[np.int32],
) -> int:
    """Parses records to rows without gaps; returns their number. `problems` says what is wrong with each record.

    `numbers_at` are the places of the label and the dense columns among the `fields`, `ids_at` and `lists_at` those of
    the categorical and the list columns; `log1p[i]`: whether dense column i becomes its logarithm. A list of more than
    `longest[i]` ids is malformed. Lists are marked in `list_marks` [lists, rows, 3], for `parse_items`, and their ids
    counted in `list_lengths` [lists, rows].
    """
    row = 0
    marks = np.empty((fields, 3), dtype=np.int64)
    for number in range(records.size):
        begin = starts[records[number]]
        end = starts[records[number] + 1] - 1
        if end > begin and data[end - 1] == _RETURN:
            end -= 1
        problem = GOOD
        if begin == end:
            problem = BLANK
        else:
            found = _split(data, begin, end, delimiter, marks)
            if found != fields:
                problem = BAD_QUOTES if found == BAD_QUOTES else WRONG_FIELDS
        role = 0
        while problem == GOOD and role < numbers_at.size:
            place = numbers_at[role]
            kind, value = _number(data, marks[place, 0], marks[place, 1])
            if kind == _OTHER:
                problem = 1 + KINDS * role + NOT_A_NUMBER
            elif role == 0:
                if kind == _EMPTY or (value != 0 and value != 1):
                    problem = 1 + NOT_A_LABEL
                labels[row] = value
            elif kind == _EMPTY:
                dense[row, role - 1] = missing
            else:
                if not log1p[role - 1]:
                    dense[row, role - 1] = value
                elif value <= 0:
                    dense[row, role - 1] = 0.0
                elif value < LOG1P_TABLE.size and value == np.floor(value):
                    dense[row, role - 1] = LOG1P_TABLE[int(value)]
                else:
                    dense[row, role - 1] = np.log1p(value)
                if not np.isfinite(np.float32(value)):
                    problem = 1 + KINDS * role + NOT_FINITE
            role += 1
        if problem == GOOD:
            for column in range(ids_at.size):
                place = ids_at[column]
                ids[row, column], valid = _id(data, marks[place, 0], marks[place, 1], marks[place, 2])
                if problem == GOOD and not valid:
                    problem = 1 + KINDS * (numbers_at.size + column) + NOT_UTF8
            for column in range(lists_at.size):
                place = lists_at[column]
                length = _count_items(data, marks[place, 0], marks[place, 1], separator)
                if problem == GOOD:
                    role = numbers_at.size + ids_at.size + column
                    if length > longest[column]:
                        problem = 1 + KINDS * role + TOO_LONG
                    elif not is_utf8(data, marks[place, 0], marks[place, 1]):
                        problem = 1 + KINDS * role + NOT_UTF8
                for number_of_mark in range(3):
                    list_marks[column, row, number_of_mark] = marks[place, number_of_mark]
                list_lengths[column, row] = length
        problems[number] = problem
        row += problem == GOOD
    return row
