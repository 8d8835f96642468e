"""Writes a table as a safetensors file with ascending keys, in pieces: the library needs whole tensors in memory.

The format: the length of a JSON header as a little-endian uint64, the header, which says where the bytes of each tensor
begin and end after it, and those bytes. Rows are sorted by key in bounded memory: sorted runs on disk, merged range by
range.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8

Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Keys int64 [n] and weights float32 [n, dimension]."""


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

    def __exit__(self, *error: object) -> None:
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


class RowSorter:
    """Takes rows in any order, with distinct keys, and gives them back in the order of their keys.

    At most about twice `rows_in_memory` rows are in memory at once; the others wait in files of `folder`.
    """

    def __init__(self, folder: Path, rows_in_memory: int) -> None:
        self._folder = folder
        self._limit = rows_in_memory
        self._held: list[Rows] = []
        self._held_rows = 0
        self._runs: list[Rows] = []

    def add(self, keys: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        """Takes rows over; the arrays must not change afterwards."""
        if not len(keys):
            return
        self._held.append((keys, weights))
        self._held_rows += len(keys)
        if self._held_rows >= self._limit:
            self._spill()

    def sorted(self) -> Iterator[Rows]:
        """Yields all rows, in pieces."""
        if not self._runs:
            if self._held:
                yield _sorted(self._held)
            return
        if self._held:
            self._spill()
        edges = self._edges()
        begins = [0] * len(self._runs)
        for edge in [*edges, None]:
            pieces = []
            for number, (keys, weights) in enumerate(self._runs):
                stop = len(keys) if edge is None else int(np.searchsorted(keys, edge))
                pieces.append((keys[begins[number] : stop], weights[begins[number] : stop]))
                begins[number] = stop
            yield _sorted(pieces)

    def _spill(self) -> None:
        keys, weights = _sorted(self._held)
        number = len(self._runs)
        self._runs.append((self._kept(f"keys-{number}", keys), self._kept(f"weights-{number}", weights)))
        self._held, self._held_rows = [], 0

    def _kept(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        path = self._folder / f"{name}.npy"
        np.save(path, values)
        kept: NDArray[Any] = np.load(path, mmap_mode="r")
        return kept

    def _edges(self) -> NDArray[np.int64]:
        """Returns keys between which there are at most `rows_in_memory` rows.

        It takes every s-th key of each of r runs. Between the first and the last of r consecutive keys of these are
        fewer than 2 * r * s rows.
        """
        runs = len(self._runs)
        step = max(1, self._limit // (2 * runs))
        taken = np.sort(np.concatenate([keys[::step] for keys, _ in self._runs]))
        return taken[runs::runs]


def _sorted(pieces: list[Rows]) -> Rows:
    keys = np.concatenate([keys for keys, _ in pieces])
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate([weights for _, weights in pieces])[order]
