"""The items of a row stream, and their bytes.

An item's payload is `kind: uint32 | table: uint32 | epoch: uint32 | keys: uint32 | batch: uint64 | stride: uint64`,
then `keys: int64[keys]`, then `records: uint8[n, stride]` until its end; little-endian.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.transport import Buffer

_FIXED = struct.Struct("<IIIIQQ")

NO_RECORDS: NDArray[np.uint8] = np.zeros((0, 8), np.uint8)
"""The records of an item that has none."""


class ItemKind(IntEnum):
    """The meaning of an item to the receiver."""

    ROWS = 1
    """Rows as they are: `records` of the table's layout."""
    CHANGES = 2
    """Rows that changed since they were sent: the rows of `keys` are retired first, then `records` are put."""
    DELTA = 3
    """The changes of one batch, for parity: `records` are deltas (`table.deltas`) of any tables, `keys` one number: the
    last item that all holders have."""
    FILL = 4
    """As DELTA, of no batch."""
    BASE = 5
    """The first item for parity: `keys` are the batches in the rows, as `epoch, first, stop, times` each."""
    WITHDRAWN = 6
    """Nothing of the sender is left in the parity. `keys` are each lost member, and how many items came of it."""
    WITHDRAWAL = 7
    """As FILL, of rows that the sender takes out of the parity. `keys` go on with the slot, by table, from which on it
    has taken out all, if the rows of a lost member follow on demand."""
    HALF = 8
    """What the sender has of a stripe of `table`, for the holder that decodes it: `keys` are the stripe and the first
    slot of `records`. Without keys, it is the last one of the sender."""
    COALESCED = 9
    """As DELTA, of several batches: `keys` are the last item that all holders have, and epoch and number of each batch.
    """
    COLUMNS = 10
    """The key columns (`parity.blocks`) of the sender's segments: `keys` are table, stripe and rows of each."""
    COLUMNS_TOLD = 11
    """The last of them: `keys` are the lost member, how many items came of it, and, by table, the slot from which on
    the sender has no rows in the parity."""
    WITHDRAWN_PLACES = 12
    """As WITHDRAWAL, of the sender's rows at places of stripes: `keys` go on with these, as `parity.places` has them.
    """
    KEYS = 13
    """Rows of a lost member that will follow: `keys` are key and place of each."""
    WANTED = 14
    """Rows that the sender wants before others of that lost member: `keys` are their places."""


def _no_keys() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Item:
    """One item of a stream.

    * `table`: number of the table.
    * `records`: uint8 [n, stride], contiguous.
    * `keys`: int64 [k]; of CHANGES the keys that were retired, else as the kind says.
    * `epoch`, `batch`: of DELTA, the batch.
    """

    kind: ItemKind
    table: int
    records: NDArray[np.uint8]
    keys: NDArray[np.int64] = field(default_factory=_no_keys)
    epoch: int = 0
    batch: int = 0

    def buffers(self) -> list[Buffer]:
        """The payload, in parts that are not copied."""
        fixed = _FIXED.pack(self.kind, self.table, self.epoch, len(self.keys), self.batch, self.records.shape[1])
        return [fixed, self.keys, self.records]

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return _FIXED.size + self.keys.nbytes + self.records.nbytes

    @classmethod
    def parse(cls, payload: NDArray[np.uint8]) -> "Item":
        """The inverse of `buffers`; keys and records are views. Raises ValueError for bytes that are no item."""
        if len(payload) < _FIXED.size:
            raise ValueError("the payload ends within an item's fixed part")
        kind, table, epoch, count, batch, stride = _FIXED.unpack(payload[: _FIXED.size].tobytes())
        start = _FIXED.size + 8 * count
        if len(payload) < start or not stride or (len(payload) - start) % stride:
            raise ValueError("the payload does not add up to an item's keys and records")
        keys = payload[_FIXED.size : start].view(np.int64)
        return cls(ItemKind(kind), table, payload[start:].reshape(-1, stride), keys, epoch, batch)
