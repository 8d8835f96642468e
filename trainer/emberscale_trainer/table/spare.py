"""Memory for the old rows that snapshots save, kept from one snapshot to the next.

A push that saves rows in memory that nobody has touched before waits for the system to provide every page of it. That
takes longer than the copying, and much longer on a virtual machine that returns free memory to its host.
"""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.slab import SEGMENT_BYTES, zeroed

_SHARE = 16
"""All spare memory together is at most this part of the rows' memory."""


class SpareMemory:
    """Pieces of SEGMENT_BYTES. Callers hold the lock of the table store."""

    def __init__(self) -> None:
        self._pieces: list[NDArray[np.uint8]] = []
        self._most = 0

    def bound(self, rows_bytes: int) -> None:
        """Frees what is too much beside rows that take `rows_bytes` of memory, and keeps no more from now on."""
        self._most = rows_bytes // _SHARE // SEGMENT_BYTES
        del self._pieces[self._most :]

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns memory of at least `size` bytes, with anything in it. Raises MemoryError."""
        if size <= SEGMENT_BYTES and self._pieces:
            return self._pieces.pop()
        return zeroed(max(size, SEGMENT_BYTES))

    def give_back(self, piece: NDArray[np.uint8]) -> None:
        """Keeps a piece for later. Nobody uses it any more."""
        if len(piece) == SEGMENT_BYTES and len(self._pieces) < self._most:
            self._pieces.append(piece)
