"""A table as a safetensors file, written piece by piece: the library wants whole tensors in memory.

The format: the length of a JSON header as a little-endian uint64, the header, which says where the bytes of each tensor
begin and end after it, and those bytes.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from emberscale._serving.sorted_rows import Rows

_ALIGNMENT = 8


class TableFile:
    """Writes `keys` int64 [rows] and `weights` float32 [rows, dimension]. Raises OSError."""

    def __init__(self, path: Path, rows: int, dimension: int) -> None:
        keys_bytes, weights_bytes = 8 * rows, 4 * rows * dimension
        header = json.dumps(
            {
                "keys": {"dtype": "I64", "shape": [rows], "data_offsets": [0, keys_bytes]},
                "weights": {
                    "dtype": "F32",
                    "shape": [rows, dimension],
                    "data_offsets": [keys_bytes, keys_bytes + weights_bytes],
                },
            }
        ).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._keys_at = self._file.tell()
        self._weights_at = self._keys_at + keys_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, rows: Rows) -> None:
        """Writes the next rows."""
        keys, weights = rows
        self._keys_at = self._write(self._keys_at, keys.astype("<i8", copy=False))
        self._weights_at = self._write(self._weights_at, weights.astype("<f4", copy=False))

    def _write(self, place: int, values: NDArray[np.generic]) -> int:
        self._file.seek(place)
        self._file.write(np.ascontiguousarray(values).data.cast("B") if values.size else b"")
        return self._file.tell()
