"""Which rows of a store have changed, and which keys were retired, since one reader asked last."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.memory import address_of


class Changes:
    """Table by table, a bitmap with a bit a slot, which the kernels write, and the keys that were retired.

    `entries` are the reader's entries in the tables' descriptors. A bit may stay set for a slot whose row was retired.
    """

    def __init__(self, entries: Sequence[np.void], slots: Sequence[int]) -> None:
        """Begins to record: `slots` is one more than the highest slot of each table."""
        self._entries = entries
        self._bitmaps = [np.zeros(max(count // 8, 1), np.uint8) for count in slots]
        self._retired: list[list[NDArray[np.int64]]] = [[] for _ in entries]
        for entry, bitmap in zip(entries, self._bitmaps, strict=True):
            entry["changed"] = address_of(bitmap)

    def make_room(self, table: int, slots: int) -> None:
        """Sees that the bitmap of a table has a bit for so many slots. Raises MemoryError."""
        old = self._bitmaps[table]
        if slots > 8 * len(old):
            grown = np.zeros(max(slots // 8, 2 * len(old)), np.uint8)
            grown[: len(old)] = old
            self._bitmaps[table] = grown
            self._entries[table]["changed"] = address_of(grown)

    def retire(self, table: int, keys: NDArray[np.int64]) -> None:
        """Notes that the rows of keys were retired."""
        if len(keys):
            self._retired[table].append(keys)

    def bitmap(self, table: int) -> NDArray[np.uint8]:
        """The slots of a table that changed, one bit each, the lowest first."""
        return self._bitmaps[table]

    def retired_keys(self) -> list[NDArray[np.int64]]:
        """By table, the distinct keys that were retired; some may have a row again."""
        return [np.unique(np.concatenate([*keys, np.zeros(0, np.int64)])) for keys in self._retired]

    def merge(self, earlier: "Changes") -> None:
        """Adds the changes that were recorded before these."""
        for table, bits in enumerate(earlier._bitmaps):
            self.make_room(table, 8 * len(bits))
            self._bitmaps[table][: len(bits)] |= bits
            self._retired[table] = earlier._retired[table] + self._retired[table]

    def stop(self) -> None:
        """Records no more."""
        for entry in self._entries:
            entry["changed"] = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the bitmaps and of the retired keys."""
        return sum(bits.nbytes for bits in self._bitmaps) + sum(key.nbytes for keys in self._retired for key in keys)
