"""Rows as Criteo TSV."""

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.compiled import kernel
from emberscale_trainer.data.records import MISSING_ID
from emberscale_trainer.data.synthetic.population import MISSING_INTEGER, Rows

_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_TAB, _NEWLINE, _MINUS, _ZERO = 9, 10, 45, 48
_INTEGER_BYTES = 21
_CATEGORY_BYTES = 9


def format_rows(rows: Rows) -> npt.NDArray[np.uint8]:
    """The rows as text, uint8[bytes], each with its newline."""
    count, integers = rows.integers.shape
    room = np.empty(count * (2 + integers * _INTEGER_BYTES + rows.ids.shape[1] * _CATEGORY_BYTES + 1), dtype=np.uint8)
    length = _format(rows.labels, rows.integers, rows.ids, room)
    return room[:length]


@kernel
def _format(
    labels: npt.NDArray[np.uint8],
    integers: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    text: npt.NDArray[np.uint8],
) -> int:
    end = 0
    for row in range(labels.size):
        text[end] = _ZERO + labels[row]
        end += 1
        for column in range(integers.shape[1]):
            text[end] = _TAB
            end += 1
            value = integers[row, column]
            if value == MISSING_INTEGER:
                continue
            if value < 0:
                text[end] = _MINUS
                end += 1
                value = -value
            digits = 1
            bound = 10
            while value >= bound:
                digits += 1
                bound *= 10
            for place in range(end + digits - 1, end - 1, -1):
                text[place] = _ZERO + value % 10
                value //= 10
            end += digits
        for column in range(ids.shape[1]):
            text[end] = _TAB
            end += 1
            key = ids[row, column]
            if key == MISSING_ID:
                continue
            for place in range(8):
                text[end + place] = _DIGITS[(key >> (28 - 4 * place)) & 15]
            end += 8
        text[end] = _NEWLINE
        end += 1
    return end
