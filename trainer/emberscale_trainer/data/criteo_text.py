"""Records as Criteo TSV."""

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.compiled import kernel
from emberscale_trainer.data.records import MISSING_ID

MISSING_INTEGER = np.iinfo(np.int64).min

_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_TAB, _NEWLINE, _MINUS, _ZERO = 9, 10, 45, 48
_INTEGER_BYTES = 21
_CATEGORY_BYTES = 9


def criteo_lines(
    labels: npt.NDArray[np.uint8], integers: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Records as text, uint8[bytes], each with its newline.

    labels uint8[n]; integers int64[n, d], or MISSING_INTEGER; ids int64[n, c] of 32 bits, or MISSING_ID.
    """
    count = labels.size
    room = np.empty(count * (2 + integers.shape[1] * _INTEGER_BYTES + ids.shape[1] * _CATEGORY_BYTES + 1), np.uint8)
    length = _format(labels, integers, ids, room)
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
