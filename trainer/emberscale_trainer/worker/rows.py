"""Between the rows of unique keys and the embeddings of a batch: gather or pool forward, scatter-add backward."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import Pooling, TableSpec
from emberscale_trainer.jit import typed_kernel
from emberscale_trainer.jit.memory import address_of, load_float32, store_float32
from emberscale_trainer.jit.vector import VECTOR_BYTES, WHOLE, load8, store8
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.worker.keys import KeyPlan


class EmbeddingLayout:
    """The place of each table's vector in a batch's embeddings, float32 [batch, width]: side by side, in order.

    A list's vector is the sum or the mean of its ids' rows, as in torch.nn.EmbeddingBag; that of an empty list is zero.
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        dimensions = np.array([table.dimension for table in tables], dtype=np.int64)
        self.width = int(dimensions.sum())
        starts = np.cumsum(dimensions) - dimensions
        single = self._single = np.array([table.pooling is None for table in tables], dtype=np.bool_)
        self._dimensions, self._starts = dimensions[single], starts[single]
        self._pooled = [
            (int(starts[table.number]), table.dimension, table.pooling is Pooling.MEAN)
            for table in tables
            if table.pooling is not None
        ]

    def gather(self, rows: NDArray[np.float32], plan: KeyPlan) -> NDArray[np.float32]:
        """Returns embeddings float32 [batch, width] from `rows` float32 [plan.values]."""
        embeddings = np.empty((len(plan.offsets), self.width), dtype=np.float32)
        places = (plan.offsets, self._dimensions, self._starts)
        _gather(_address(rows), *places, _address(embeddings), FLOAT_BYTES * self.width)
        for (start, dimension, mean), lists in zip(self._pooled, plan.lists, strict=True):
            _pool(rows, lists.rows, lists.edges, start, dimension, mean, embeddings)
        return embeddings

    def scatter(self, gradients: NDArray[np.float32], plan: KeyPlan) -> NDArray[np.float32]:
        """Returns the gradients of the rows, float32 [plan.values], summed over the ids of each row."""
        rows = np.zeros(plan.values, dtype=np.float32)
        places = (plan.offsets, self._dimensions, self._starts)
        _scatter(_address(gradients), *places, _address(rows), FLOAT_BYTES * self.width)
        for (start, dimension, mean), lists in zip(self._pooled, plan.lists, strict=True):
            _unpool(gradients, lists.rows, lists.edges, start, dimension, mean, rows)
        return rows

    def relaid(self, values: NDArray[np.float32], old: KeyPlan, new: KeyPlan) -> NDArray[np.float32]:
        """Converts rows from the layout of `old` to that of `new`, a plan of the same batch: float32 [new.values]."""
        moved = np.empty(new.values, dtype=np.float32)
        _relay(values, old.offsets, new.offsets, new.floats[self._single], moved)
        for floats, before, after in zip(new.floats[~self._single], old.lists, new.lists, strict=True):
            _relay(values, before.rows[:, None], after.rows[:, None], np.array([floats]), moved)
        return moved


@typed_kernel("void(f4[::1], i4[:, ::1], i4[:, ::1], i8[::1], f4[::1])")
def _relay(values, old, new, dimensions, moved):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above.
    batch, tables = old.shape
    for row in range(batch):
        for table in range(tables):
            for element in range(dimensions[table]):
                moved[new[row, table] + element] = values[old[row, table] + element]


def _address(array: NDArray[np.float32]) -> int:
    """Returns the address of an array's floats, for kernels. Raises ValueError for another type or layout."""
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise ValueError(f"rows and embeddings are contiguous float32, not {array.dtype} with strides {array.strides}")
    return address_of(array)


@typed_kernel("void(i8, i4[:, ::1], i8[::1], i8[::1], i8, i8)")
def _gather(rows, offsets, dimensions, starts, embeddings, width):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. `rows` and `embeddings` are addresses, `width` is in bytes.
    batch, tables = offsets.shape
    for row in range(batch):
        for table in range(tables):
            source = rows + FLOAT_BYTES * offsets[row, table]
            target = embeddings + width * row + FLOAT_BYTES * starts[table]
            whole = FLOAT_BYTES * (dimensions[table] & WHOLE)
            for at in range(0, whole, VECTOR_BYTES):
                store8(target + at, load8(source + at))
            for at in range(whole, FLOAT_BYTES * dimensions[table], FLOAT_BYTES):
                store_float32(target + at, load_float32(source + at))


@typed_kernel("void(i8, i4[:, ::1], i8[::1], i8[::1], i8, i8)")
def _scatter(gradients, offsets, dimensions, starts, rows, width):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. `gradients` and `rows` are addresses, `width` is in bytes.
    batch, tables = offsets.shape
    for row in range(batch):
        for table in range(tables):
            source = gradients + width * row + FLOAT_BYTES * starts[table]
            target = rows + FLOAT_BYTES * offsets[row, table]
            whole = FLOAT_BYTES * (dimensions[table] & WHOLE)
            for at in range(0, whole, VECTOR_BYTES):
                store8(target + at, load8(target + at) + load8(source + at))
            for at in range(whole, FLOAT_BYTES * dimensions[table], FLOAT_BYTES):
                store_float32(target + at, load_float32(target + at) + load_float32(source + at))


@typed_kernel("void(f4[::1], i4[::1], i8[::1], i8, i8, b1, f4[:, ::1])")
def _pool(rows, begins, edges, column, dimension, mean, embeddings):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above.
    for row in range(len(embeddings)):
        first, stop = edges[row], edges[row + 1]
        for element in range(dimension):
            embeddings[row, column + element] = 0
        for item in range(first, stop):
            for element in range(dimension):
                embeddings[row, column + element] += rows[begins[item] + element]
        if mean and stop > first:
            for element in range(dimension):
                embeddings[row, column + element] /= np.float32(stop - first)


@typed_kernel("void(f4[:, ::1], i4[::1], i8[::1], i8, i8, b1, f4[::1])")
def _unpool(gradients, begins, edges, column, dimension, mean, rows):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above.
    for row in range(len(gradients)):
        first, stop = edges[row], edges[row + 1]
        share = np.float32(1) / np.float32(stop - first) if mean and stop > first else np.float32(1)
        for item in range(first, stop):
            for element in range(dimension):
                rows[begins[item] + element] += gradients[row, column + element] * share
