"""The interactions of DLRM, dot products between all pairs of a sample's vectors, and their gradients.

The backward of p_ij = v_i . v_j is dv_i = sum over j != i of g_ij v_j, with g symmetric. torch.bmm over 27 vectors of
16 spends most of its time on the bookkeeping of thousands of tiny products and computes every product twice;
index_select and its backward then copy the needed half. Here one pass over the vectors, which stay in the first-level
cache, makes the rows of the next layer's input, and one pass back makes both gradients (`dot_products`).

Embeddings of a whole batch side by side, and their gradients, would not fit into the second-level cache, but the rows
that they come from do, since most ids of a batch occur more than once. So vectors may be given as places in rows, and
their gradients are then added up in rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emberscale_trainer.jit.vector import LANES
from emberscale_trainer.models.dot_products import TILE, backward, forward


class Lookup(NamedTuple):
    """The vectors of a batch as places in rows.

    `rows` is float32 [values], and `offsets` int32 [batch, n] is where in `rows` each vector of a sample begins.
    """

    rows: Tensor
    offsets: Tensor


def interact(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """Returns `first` beside the dot products of all pairs of vectors; float32 [batch, dimension + pairs].

    The vectors are those of `first`, float32 [batch, k * dimension], followed by those of `others`, float32
    [batch, n * dimension]; pairs (1, 0), (2, 0), (2, 1), (3, 0) and so on. All of `first` is repeated before them.
    """
    if torch.compiler.is_compiling():
        return _interact_in_a_graph(first, others, dimension)
    if not torch.is_grad_enabled():
        return interactions(first, others, dimension)
    return _Interaction.apply(first, others, dimension)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


def _interact_in_a_graph(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    """The same with torch's own operations, since a compiled or exported graph cannot hold our kernels."""
    vectors = torch.cat([first, others], dim=1)
    vectors = vectors.view(-1, vectors.shape[1] // dimension, dimension)
    rows, columns = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    return torch.cat([first, products[:, rows, columns]], dim=1)


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, first: Tensor, others: Tensor, dimension: int) -> Tensor:
        context.save_for_backward(first, others)
        context.dimension = dimension
        return interactions(first, others, dimension)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        first, others = context.saved_tensors
        return *interaction_gradients(gradient, first, others, context.dimension), None


def interactions(first: Tensor, others: Tensor | Lookup, dimension: int) -> Tensor:
    """Computes the result of `interact` without a graph, also from a lookup.

    The rows of the result are further apart than they are wide, so that their pairs fill whole registers.
    """
    shape = _Shape(first, others, dimension)
    out = torch.empty(shape.batch, shape.first_width + shape.whole_pairs)
    scratch = shape.forward_scratch()
    forward(*shape.numbers, scratch.data_ptr(), out.data_ptr())
    return out[:, : shape.first_width + shape.pairs]


def interaction_gradients(
    gradient: Tensor, first: Tensor, others: Tensor | Lookup, dimension: int
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of `first` and `others` from the gradient of the result of `interact`.

    For a lookup it is the gradient of the rows, float32 [values], summed over the vectors of each row.
    """
    shape = _Shape(first, others, dimension)
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    of_first = torch.empty(shape.batch, shape.first_width)
    of_others = torch.zeros_like(others.rows) if isinstance(others, Lookup) else torch.empty_like(shape.others)
    scratch = shape.backward_scratch()
    backward(
        gradient.data_ptr(),
        gradient.stride(0),
        *shape.numbers,
        scratch.data_ptr(),
        shape.tiled,
        of_first.data_ptr(),
        of_others.data_ptr(),
    )
    return of_first, of_others


class _Shape:
    """The kernels' description of two float32 tensors, or of one and a lookup.

    `numbers` are the addresses of both and of the offsets, the batch, both widths and the dimension. Without a lookup,
    the address of the offsets is 0.
    """

    def __init__(self, first: Tensor, others: Tensor | Lookup, dimension: int) -> None:
        if isinstance(others, Lookup):
            values, places, others_width = others.rows, others.offsets, dimension * others.offsets.shape[1]
            if places.dtype != torch.int32 or not places.is_contiguous():
                raise TypeError(f"offsets are contiguous int32, not {places.dtype} with strides {places.stride()}")
            offsets = places.data_ptr()
        else:
            values, places, others_width = others, others, others.shape[1]
            offsets = 0
        if first.dtype != torch.float32 or values.dtype != torch.float32:
            raise TypeError(f"vectors are float32, not {first.dtype} and {values.dtype}")
        self.first, self.others = first.contiguous(), values.contiguous()
        self.batch, self.first_width = first.shape
        if self.batch != places.shape[0] or self.first_width % dimension or others_width % dimension:
            shapes = f"{tuple(first.shape)} and {(places.shape[0], others_width)}"
            raise ValueError(f"{shapes} are no vectors of {dimension}")
        addresses = self.first.data_ptr(), self.others.data_ptr(), offsets
        self.numbers = (*addresses, self.batch, self.first_width, others_width, dimension)
        self._others_width, self._dimension = others_width, dimension
        vectors = (self.first_width + others_width) // dimension
        self.pairs = vectors * (vectors - 1) // 2
        self.whole_pairs = -(-self.pairs // LANES) * LANES
        self.tiled = -(-vectors // TILE) * TILE

    def forward_scratch(self) -> Tensor:
        """Zeros for LANES samples: their vectors, all pairs, and the rows in and out of a block that is not whole."""
        turned = self.tiled * self._dimension + self.tiled * (self.tiled - 1) // 2
        rows = 2 * self.first_width + self._others_width + self.whole_pairs
        beyond = LANES  # pairs beyond the last that fill a register
        return torch.zeros(LANES * (turned + beyond + rows))

    def backward_scratch(self) -> Tensor:
        """Zeros for the vectors and the gradients of a sample, and a row of the triangle."""
        return torch.zeros(self.tiled * (2 * self._dimension + 1))
