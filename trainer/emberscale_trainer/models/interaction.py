"""Dot products between all pairs of a sample's vectors: the feature interaction of DLRM.

torch.bmm over 27 vectors of 16 spends most of its time in the bookkeeping of thousands of tiny products, computes every
product twice, and index_select and its backward copy the half that is wanted. Here one pass over a sample's vectors,
which stay in the first-level cache, makes the rows of the next layer's input, and one pass back makes both gradients.

The backward of p_ij = v_i . v_j is dv_i = sum over j != i of g_ij v_j, with g symmetric.
"""

from typing import Any

import numba
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emberscale_trainer.table.compiled import part
from emberscale_trainer.table.memory import copy, float32, load_float32, store_float32
from emberscale_trainer.table.vector import LANES, VECTOR_BYTES, add_product, load8, splat8, store8

_TILE = 4
"""Vectors whose products are summed at once: enough independent sums to hide the latency of an addition."""


def interact(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """`first` beside the dot products of all pairs of vectors; float32 [batch, dimension + pairs].

    The vectors are those of `first`, float32 [batch, k * dimension], followed by those of `others`, float32
    [batch, n * dimension]; pairs (1, 0), (2, 0), (2, 1), (3, 0) and so on. All of `first` is repeated before them.
    """
    if torch.compiler.is_compiling():
        return _interact_in_a_graph(first, others, dimension)
    return _Interaction.apply(first, others, dimension)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


def _interact_in_a_graph(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """The same of torch's own operations: a graph that is compiled or exported cannot hold kernels of ours."""
    vectors = torch.cat([first, others], dim=1).view(first.shape[0], -1, dimension)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([first, products[:, rows, columns]], dim=1)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, first: Tensor, others: Tensor, dimension: int) -> Tensor:
        first, others = first.contiguous(), others.contiguous()
        context.save_for_backward(first, others)
        context.dimension = dimension
        shape = _Shape(first, others, dimension)
        out = torch.empty(len(first), first.shape[1] + shape.vectors * (shape.vectors - 1) // 2)
        scratch = shape.scratch()
        _forward(first.data_ptr(), others.data_ptr(), *shape.numbers, scratch.data_ptr(), shape.room, out.data_ptr())
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, others = context.saved_tensors
        gradient = gradient.contiguous()
        of_first, of_others = torch.empty_like(first), torch.empty_like(others)
        shape = _Shape(first, others, context.dimension)
        scratch = shape.scratch()
        _backward(
            gradient.data_ptr(),
            first.data_ptr(),
            others.data_ptr(),
            *shape.numbers,
            scratch.data_ptr(),
            shape.room,
            of_first.data_ptr(),
            of_others.data_ptr(),
        )
        return of_first, of_others, None


class _Shape:
    """What the kernels need to know of two float32 tensors: `numbers` are batch, both widths and the dimension."""

    def __init__(self, first: Tensor, others: Tensor, dimension: int) -> None:
        if first.dtype != torch.float32 or others.dtype != torch.float32:
            raise TypeError(f"vectors are float32, not {first.dtype} and {others.dtype}")
        width = first.shape[1] + others.shape[1]
        if len(first) != len(others) or first.shape[1] % dimension or others.shape[1] % dimension:
            raise ValueError(f"{tuple(first.shape)} and {tuple(others.shape)} are no vectors of {dimension}")
        self.numbers = (len(first), first.shape[1], others.shape[1], dimension)
        self.vectors = width // dimension
        self.room = -(-self.vectors // LANES) * LANES

    def scratch(self) -> Tensor:
        """Zeros for two copies of a sample's vectors and a square of products, each padded to whole registers."""
        _, _, _, dimension = self.numbers
        return torch.zeros(self.room * (2 * dimension + self.room) + LANES)


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True, error_model="numpy")
def _forward(first, others, batch, first_width, others_width, dimension, scratch, room, out):  # type: ignore[no-untyped-def]
    # Numba types this from the signature above. All but the numbers batch to dimension, and room, are addresses.
    width = first_width + others_width
    count = width // dimension
    by_vectors = count - 1 if count > LANES else 0  # rows with at least a vector's length of floats after them
    row_bytes = 4 * dimension
    vectors = scratch
    turned = scratch + room * row_bytes
    products = turned + room * row_bytes
    out_at = out
    for sample in range(batch):
        copy(vectors, first + 4 * first_width * sample, 4 * first_width)
        copy(vectors + 4 * first_width, others + 4 * others_width * sample, 4 * others_width)
        for vector in range(count):
            source = vectors + vector * row_bytes
            target = turned + 4 * vector
            for element in range(dimension):
                store_float32(target + 4 * room * element, load_float32(source + 4 * element))
        copy(out_at, vectors, 4 * first_width)
        out_at += 4 * first_width
        for tile in range(0, count, _TILE):
            row0 = vectors + tile * row_bytes
            for chunk in range(0, tile + _TILE, LANES):
                sum0 = sum1 = sum2 = sum3 = splat8(float32(0))
                column = turned + 4 * chunk
                for element in range(0, row_bytes, 4):
                    at = row0 + element
                    values = load8(column)
                    sum0 = add_product(sum0, load_float32(at), values)
                    sum1 = add_product(sum1, load_float32(at + row_bytes), values)
                    sum2 = add_product(sum2, load_float32(at + 2 * row_bytes), values)
                    sum3 = add_product(sum3, load_float32(at + 3 * row_bytes), values)
                    column += 4 * room
                at = products + 4 * chunk
                store8(at, sum0)
                store8(at + 4 * room, sum1)
                store8(at + 8 * room, sum2)
                store8(at + 12 * room, sum3)
            for row in range(tile, min(tile + _TILE, count)):
                source = products + 4 * room * (row - tile)
                if row < by_vectors:  # what is copied beyond the row's end is written over by the rows that follow
                    for at in range(0, 4 * row, VECTOR_BYTES):
                        store8(out_at + at, load8(source + at))
                else:
                    copy(out_at, source, 4 * row)
                out_at += 4 * row


@part
def _pair(gradient: int, sum_row: float, sum_column: float, row: float, column: float) -> tuple[float, float]:
    """Adds one pair's gradient times the other vector to the sums of both vectors."""
    weight = load_float32(gradient)
    return add_product(sum_row, weight, column), add_product(sum_column, weight, row)


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True, error_model="numpy")
def _backward(  # type: ignore[no-untyped-def]
    gradient, first, others, batch, first_width, others_width, dimension, scratch, room, of_first, of_others
):
    # Numba types this from the signature above. All but the numbers batch to dimension, and room, are addresses.
    #
    # Four rows of the triangle of gradients at a time: each of their pairs adds to the row's sum, which stays in a
    # register, and to that of its column, which an earlier tile has begun. Rows that fill the last tile are zero.
    width = first_width + others_width
    count = width // dimension
    row_bytes = 4 * dimension
    whole = row_bytes // VECTOR_BYTES * VECTOR_BYTES
    vectors = scratch
    result = scratch + room * row_bytes
    nothing = result + room * row_bytes
    gradient_at = gradient
    for sample in range(batch):
        copy(vectors, first + 4 * first_width * sample, 4 * first_width)
        copy(vectors + 4 * first_width, others + 4 * others_width * sample, 4 * others_width)
        passed = gradient_at
        triangle = gradient_at + 4 * first_width
        gradient_at = triangle + 2 * count * (count - 1)
        for tile in range(0, count, _TILE):
            row0 = triangle + 2 * tile * (tile - 1)
            row1 = row0 + 4 * tile if tile + 1 < count else nothing
            row2 = row1 + 4 * (tile + 1) if tile + 2 < count else nothing
            row3 = row2 + 4 * (tile + 2) if tile + 3 < count else nothing
            own = vectors + tile * row_bytes
            target = result + tile * row_bytes
            for element in range(0, whole, VECTOR_BYTES):
                at = own + element
                vector0, vector1 = load8(at), load8(at + row_bytes)
                vector2, vector3 = load8(at + 2 * row_bytes), load8(at + 3 * row_bytes)
                sum0 = sum1 = sum2 = sum3 = splat8(float32(0))
                source = vectors + element
                column = result + element
                for offset in range(0, 4 * tile, 4):
                    values, total = load8(source), load8(column)
                    sum0, total = _pair(row0 + offset, sum0, total, vector0, values)
                    sum1, total = _pair(row1 + offset, sum1, total, vector1, values)
                    sum2, total = _pair(row2 + offset, sum2, total, vector2, values)
                    sum3, total = _pair(row3 + offset, sum3, total, vector3, values)
                    store8(column, total)
                    source += row_bytes
                    column += row_bytes
                inside = 4 * tile
                sum1, sum0 = _pair(row1 + inside, sum1, sum0, vector1, vector0)
                sum2, sum0 = _pair(row2 + inside, sum2, sum0, vector2, vector0)
                sum3, sum0 = _pair(row3 + inside, sum3, sum0, vector3, vector0)
                sum2, sum1 = _pair(row2 + inside + 4, sum2, sum1, vector2, vector1)
                sum3, sum1 = _pair(row3 + inside + 4, sum3, sum1, vector3, vector1)
                sum3, sum2 = _pair(row3 + inside + 8, sum3, sum2, vector3, vector2)
                at = target + element
                store8(at, sum0)
                store8(at + row_bytes, sum1)
                store8(at + 2 * row_bytes, sum2)
                store8(at + 3 * row_bytes, sum3)
        for element in range(whole, row_bytes, 4):
            for row in range(count):
                total = float32(0)
                for other in range(count):
                    if other != row:
                        high, low = max(row, other), min(row, other)
                        weight = load_float32(triangle + 2 * high * (high - 1) + 4 * low)
                        total += weight * load_float32(vectors + other * row_bytes + element)
                store_float32(result + row * row_bytes + element, total)
        for element in range(0, 4 * first_width, 4):
            value = load_float32(result + element) + load_float32(passed + element)
            store_float32(of_first + 4 * first_width * sample + element, value)
        copy(of_others + 4 * others_width * sample, result + 4 * first_width, 4 * others_width)
