"""The layout of a row's bytes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import OptimizerType, TableSpec
from emberscale_trainer.table.slab import rows_per_segment

KEY_BYTES = 8
FLOAT_BYTES = 4
COUNTER_BYTES = 4


def state_floats(optimizer: OptimizerType, dimension: int) -> int:
    """Floats of optimizer state in a row of `dimension` weights."""
    return {
        OptimizerType.SGD: 0,
        OptimizerType.MOMENTUM: dimension,
        OptimizerType.ADAGRAD: dimension,
        OptimizerType.ROW_WISE_ADAGRAD: 1,
        OptimizerType.ADAM: 2 * dimension + 1,
        OptimizerType.FTRL: 2 * dimension,
    }[optimizer]


@dataclass(frozen=True)
class RowLayout:
    """A row is one record: `key: int64 | weights: float32[dimension] | state: float32[state] | pushes: uint32`.

    In a table with eviction, `touched: uint32` follows: the number of batches that the server had applied, including
    the one that last pushed the row.

    `pushes` counts the gradients that the row has taken, up to 2^32 - 1. It is never 0 in a row, and a slot without a
    row is all zero, so it also tells which slots are live. It is part of the row because it costs no extra cache miss
    there, and mostly fills bytes that padding to a multiple of 8 would waste.
    """

    dimension: int
    state: int
    evicted: bool = False

    @classmethod
    def of(cls, spec: TableSpec) -> "RowLayout":
        """The layout of a table's rows."""
        state = state_floats(spec.optimizer.type, spec.dimension)
        return cls(spec.dimension, state, spec.eviction.removes_rows)

    @property
    def floats(self) -> int:
        """Floats of weights and state."""
        return self.dimension + self.state

    @property
    def pushes_offset(self) -> int:
        """The offset of the counter, in bytes."""
        return KEY_BYTES + FLOAT_BYTES * self.floats

    @property
    def touched_offset(self) -> int:
        """The offset of `touched`, in bytes; 0 in a layout without it."""
        return self.pushes_offset + COUNTER_BYTES if self.evicted else 0

    @property
    def stride(self) -> int:
        """Bytes of a record; a multiple of 8."""
        counters = 2 if self.evicted else 1
        return -(-(self.pushes_offset + counters * COUNTER_BYTES) // 8) * 8

    @property
    def segment_rows(self) -> int:
        """Rows of a segment of the table."""
        return rows_per_segment(self.stride)

    @property
    def slot_bits(self) -> int:
        """The number of bits of a slot that give the row within its segment."""
        return (self.segment_rows - 1).bit_length()

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """A record with the fields key, weights, state, pushes and, if the layout has it, touched."""
        fields = {
            "key": ("<i8", 0),
            "weights": (("<f4", (self.dimension,)), KEY_BYTES),
            "state": (("<f4", (self.state,)), KEY_BYTES + FLOAT_BYTES * self.dimension),
            "pushes": ("<u4", self.pushes_offset),
        }
        if self.evicted:
            fields["touched"] = ("<u4", self.touched_offset)
        return np.dtype(
            {
                "names": list(fields),
                "formats": [form for form, _ in fields.values()],
                "offsets": [offset for _, offset in fields.values()],
                "itemsize": self.stride,
            }
        )

    def fields(self, records: NDArray[np.uint8]) -> NDArray[np.void]:
        """A view of `u8[n, stride]`, contiguous, as n records of `dtype`."""
        return records.view(self.dtype)[:, 0]

    def empty(self, rows: int) -> NDArray[np.uint8]:
        """`u8[rows, stride]`, all zero."""
        return np.zeros((rows, self.stride), np.uint8)


def keys_of(records: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The keys of records `u8[n, stride]`, as int64 [n]."""
    return np.ascontiguousarray(records[:, :KEY_BYTES]).view(np.int64).reshape(-1)
