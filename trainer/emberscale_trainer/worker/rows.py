"""Between the rows of unique keys and the embeddings of a batch: gather forward, scatter-add backward."""

import numba
import numpy as np
from numpy.typing import NDArray


def gather(rows: NDArray[np.float32], offsets: NDArray[np.int32], dimensions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Embeddings float32 [batch, sum of dimensions] from `rows` float32 [values], by where each id's row begins."""
    embeddings = np.empty((offsets.shape[0], int(dimensions.sum())), dtype=np.float32)
    _gather(rows, offsets, dimensions, embeddings)
    return embeddings


def scatter(
    gradients: NDArray[np.float32], offsets: NDArray[np.int32], dimensions: NDArray[np.int64], values: int
) -> NDArray[np.float32]:
    """Gradients of `values` floats of rows from those of the embeddings: ids of one row add up."""
    rows = np.zeros(values, dtype=np.float32)
    _scatter(gradients, offsets, dimensions, rows)
    return rows


@numba.njit("void(f4[::1], i4[:, ::1], i8[::1], f4[:, ::1])", nogil=True, cache=True)
def _gather(rows, offsets, dimensions, embeddings):  # type: ignore[no-untyped-def]
    # Numba types this from the signature above.
    batch, tables = offsets.shape
    for row in range(batch):
        column = 0
        for table in range(tables):
            start = offsets[row, table]
            dimension = dimensions[table]
            for element in range(dimension):
                embeddings[row, column + element] = rows[start + element]
            column += dimension


@numba.njit("void(f4[:, ::1], i4[:, ::1], i8[::1], f4[::1])", nogil=True, cache=True)
def _scatter(gradients, offsets, dimensions, rows):  # type: ignore[no-untyped-def]
    # Numba types this from the signature above.
    batch, tables = offsets.shape
    for row in range(batch):
        column = 0
        for table in range(tables):
            start = offsets[row, table]
            dimension = dimensions[table]
            for element in range(dimension):
                rows[start + element] += gradients[row, column + element]
            column += dimension
