"""The interactions of DLRM, dot products between all pairs of a sample's vectors, and their gradients.

The backward of p_ij = v_i . v_j is dv_i = sum over j != i of g_ij v_j, with g symmetric. torch.bmm over 27 vectors of
16 spends most of its time on the bookkeeping of thousands of tiny products and computes every product twice;
index_select and its backward then copy the needed half.
Here one pass over the vectors, which stay in the first-level cache, makes the rows of the next layer's input, and one
pass back makes both gradients. Forward, a register holds one element of eight samples, so no sum crosses lanes and no
lane is idle. Backward, it holds eight elements of one vector: transposing vectors, gradients and triangle would cost
more than it saves.
"""

from typing import Any

import numba
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emberscale_trainer.table.compiled import part
from emberscale_trainer.table.memory import copy, float32, load_float32, store_float32
from emberscale_trainer.table.vector import LANES, VECTOR_BYTES, WHOLE, add_product, load8, splat8, store8, turn8

_TILE = 4
"""Rows of the triangle of pairs that are summed at once: enough independent sums to hide the latency of an addition."""

_FLOAT = 4
_LINE = VECTOR_BYTES
"""Bytes of one element of LANES samples."""


def interact(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """Returns `first` beside the dot products of all pairs of vectors; float32 [batch, dimension + pairs].

    The vectors are those of `first`, float32 [batch, k * dimension], followed by those of `others`, float32
    [batch, n * dimension]; pairs (1, 0), (2, 0), (2, 1), (3, 0) and so on. All of `first` is repeated before them.
    """
    if torch.compiler.is_compiling():
        return _interact_in_a_graph(first, others, dimension)
    if not torch.is_grad_enabled():
        return _rows(first, others, dimension)
    return _Interaction.apply(first, others, dimension)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


def _interact_in_a_graph(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """The same with torch's own operations, since a compiled or exported graph cannot hold our kernels."""
    vectors = torch.cat([first, others], dim=1).view(first.shape[0], -1, dimension)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([first, products[:, rows, columns]], dim=1)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, first: Tensor, others: Tensor, dimension: int) -> Tensor:
        context.save_for_backward(first, others)
        context.dimension = dimension
        return _rows(first, others, dimension)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, others = context.saved_tensors
        return *interaction_gradients(gradient, first, others, context.dimension), None


def _rows(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """Computes the result of `interact`."""
    first, others = first.contiguous(), others.contiguous()
    shape = _Shape(first, others, dimension)
    out = torch.empty(len(first), first.shape[1] + shape.pairs)
    scratch = shape.forward_scratch()
    _forward(first.data_ptr(), others.data_ptr(), *shape.numbers, scratch.data_ptr(), out.data_ptr())
    return out


def interaction_gradients(gradient: Tensor, first: Tensor, others: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `first` and `others` from the gradient of the result of `interact`."""
    gradient, first, others = gradient.contiguous(), first.contiguous(), others.contiguous()
    of_first, of_others = torch.empty_like(first), torch.empty_like(others)
    shape = _Shape(first, others, dimension)
    scratch = shape.backward_scratch()
    _backward(
        gradient.data_ptr(),
        first.data_ptr(),
        others.data_ptr(),
        *shape.numbers,
        scratch.data_ptr(),
        shape.tiled,
        of_first.data_ptr(),
        of_others.data_ptr(),
    )
    return of_first, of_others


class _Shape:
    """The kernels' description of two float32 tensors: `numbers` are batch, both widths and the dimension."""

    def __init__(self, first: Tensor, others: Tensor, dimension: int) -> None:
        if first.dtype != torch.float32 or others.dtype != torch.float32:
            raise TypeError(f"vectors are float32, not {first.dtype} and {others.dtype}")
        width = first.shape[1] + others.shape[1]
        if len(first) != len(others) or first.shape[1] % dimension or others.shape[1] % dimension:
            raise ValueError(f"{tuple(first.shape)} and {tuple(others.shape)} are no vectors of {dimension}")
        self.numbers = (len(first), first.shape[1], others.shape[1], dimension)
        vectors = width // dimension
        self.pairs = vectors * (vectors - 1) // 2
        self.tiled = -(-vectors // _TILE) * _TILE

    def forward_scratch(self) -> Tensor:
        """Zeros for LANES samples: their vectors, all pairs, and the rows in and out of a block that is not whole."""
        _, first_width, others_width, dimension = self.numbers
        turned = self.tiled * dimension + self.tiled * (self.tiled - 1) // 2
        rows = 2 * first_width + others_width + self.pairs
        return torch.zeros(LANES * (turned + rows))

    def backward_scratch(self) -> Tensor:
        """Zeros for the vectors and the gradients of a sample, and a row of the triangle."""
        _, _, _, dimension = self.numbers
        return torch.zeros(self.tiled * (2 * dimension + 1))


@part
def _turn(source: int, stride: int, width: int, target: int) -> None:
    """Transposes `width` floats of LANES samples, `stride` bytes apart, to lines of one element of all samples."""
    whole = width & WHOLE
    for column in range(0, whole, LANES):
        turn8(source + _FLOAT * column, stride, target + _LINE * column, _LINE)
    for column in range(whole, width):
        for sample in range(LANES):
            value = load_float32(source + stride * sample + _FLOAT * column)
            store_float32(target + _LINE * column + _FLOAT * sample, value)


@part
def _turn_back(source: int, width: int, target: int, stride: int) -> None:
    """The inverse of `_turn`."""
    whole = width & WHOLE
    for column in range(0, whole, LANES):
        turn8(source + _LINE * column, _LINE, target + _FLOAT * column, stride)
    for column in range(whole, width):
        for sample in range(LANES):
            value = load_float32(source + _LINE * column + _FLOAT * sample)
            store_float32(target + stride * sample + _FLOAT * column, value)


@part
def _row(triangle: int, row: int) -> int:
    """Returns the address of a row's pairs in a triangle of lines."""
    return triangle + _LINE * (row * (row - 1) // 2)


@part
def _forward_block(
    first: int, others: int, first_width: int, others_width: int, dimension: int, scratch: int, out: int
) -> None:
    """Computes the rows of LANES samples; triangle rows beyond the last vector come from zeros, and are dropped."""
    count = (first_width + others_width) // dimension
    tiles = (count + _TILE - 1) // _TILE * _TILE
    vector_bytes = _LINE * dimension
    vectors, products = scratch, scratch + tiles * vector_bytes
    _turn(first, _FLOAT * first_width, first_width, vectors)
    _turn(others, _FLOAT * others_width, others_width, vectors + _LINE * first_width)
    for tile in range(0, tiles, _TILE):
        own = vectors + tile * vector_bytes
        row0, row1 = _row(products, tile), _row(products, tile + 1)
        row2, row3 = _row(products, tile + 2), _row(products, tile + 3)
        for column in range(0, tile, 2):
            sum00 = sum01 = sum10 = sum11 = splat8(float32(0))
            sum20 = sum21 = sum30 = sum31 = splat8(float32(0))
            other = vectors + column * vector_bytes
            for element in range(0, vector_bytes, _LINE):
                value0, value1 = load8(other + element), load8(other + vector_bytes + element)
                at = own + element
                value = load8(at)
                sum00, sum01 = add_product(sum00, value, value0), add_product(sum01, value, value1)
                value = load8(at + vector_bytes)
                sum10, sum11 = add_product(sum10, value, value0), add_product(sum11, value, value1)
                value = load8(at + 2 * vector_bytes)
                sum20, sum21 = add_product(sum20, value, value0), add_product(sum21, value, value1)
                value = load8(at + 3 * vector_bytes)
                sum30, sum31 = add_product(sum30, value, value0), add_product(sum31, value, value1)
            at = _LINE * column
            store8(row0 + at, sum00)
            store8(row0 + at + _LINE, sum01)
            store8(row1 + at, sum10)
            store8(row1 + at + _LINE, sum11)
            store8(row2 + at, sum20)
            store8(row2 + at + _LINE, sum21)
            store8(row3 + at, sum30)
            store8(row3 + at + _LINE, sum31)
        sum10 = sum20 = sum21 = sum30 = sum31 = sum32 = splat8(float32(0))
        for element in range(0, vector_bytes, _LINE):
            at = own + element
            value0, value1 = load8(at), load8(at + vector_bytes)
            value2, value3 = load8(at + 2 * vector_bytes), load8(at + 3 * vector_bytes)
            sum10 = add_product(sum10, value1, value0)
            sum20, sum21 = add_product(sum20, value2, value0), add_product(sum21, value2, value1)
            sum30, sum31 = add_product(sum30, value3, value0), add_product(sum31, value3, value1)
            sum32 = add_product(sum32, value3, value2)
        at = _LINE * tile
        store8(row1 + at, sum10)
        store8(row2 + at, sum20)
        store8(row2 + at + _LINE, sum21)
        store8(row3 + at, sum30)
        store8(row3 + at + _LINE, sum31)
        store8(row3 + at + 2 * _LINE, sum32)
    pairs = count * (count - 1) // 2
    stride = _FLOAT * (first_width + pairs)
    for sample in range(LANES):
        copy(out + stride * sample, first + _FLOAT * first_width * sample, _FLOAT * first_width)
    _turn_back(products, pairs, out + _FLOAT * first_width, stride)


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True, error_model="numpy")
def _forward(first, others, batch, first_width, others_width, dimension, scratch, out):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. All but the numbers batch to dimension are addresses.
    count = (first_width + others_width) // dimension
    out_bytes = _FLOAT * (first_width + count * (count - 1) // 2)
    first_bytes, others_bytes = _FLOAT * first_width, _FLOAT * others_width
    some_first = scratch
    some_others = some_first + LANES * first_bytes
    some_out = some_others + LANES * others_bytes
    room = some_out + LANES * out_bytes
    for sample in range(0, batch, LANES):
        samples = min(LANES, batch - sample)
        of_first, of_others = first + first_bytes * sample, others + others_bytes * sample
        target = out + out_bytes * sample
        if samples < LANES:
            copy(some_first, of_first, first_bytes * samples)
            copy(some_others, of_others, others_bytes * samples)
            of_first, of_others, target = some_first, some_others, some_out
        _forward_block(of_first, of_others, first_width, others_width, dimension, room, target)
        if samples < LANES:
            copy(out + out_bytes * sample, some_out, out_bytes * samples)


@part
def _pair(gradient: int, sum_row: float, sum_column: float, row: float, column: float) -> tuple[float, float]:
    """Adds one pair's gradient times the other vector to the sums of both vectors."""
    weight = load_float32(gradient)
    return add_product(sum_row, weight, column), add_product(sum_column, weight, row)


@numba.njit("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", nogil=True, cache=True, error_model="numpy")
def _backward(  # type: ignore[no-untyped-def]  # Numba infers the types
    gradient, first, others, batch, first_width, others_width, dimension, scratch, tiled, of_first, of_others
):
    # Numba types this from the signature above. All but the numbers batch to dimension, and tiled, are addresses.
    #
    # Four rows of the triangle of gradients at a time: each of their pairs adds to the row's sum, which stays in a
    # register, and to that of its column, which an earlier tile has begun. Rows that fill the last tile are zero.
    width = first_width + others_width
    count = width // dimension
    row_bytes = 4 * dimension
    whole = row_bytes // VECTOR_BYTES * VECTOR_BYTES
    vectors = scratch
    result = scratch + tiled * row_bytes
    nothing = result + tiled * row_bytes
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
