"""One layer of xDeepFM's compressed interaction network (CIN), and its gradients.

A layer multiplies all pairs of maps, x_i * y_j, which would take before * fields floats per sample and dimension:
100 MB for a batch of 2048. The products are computed for a few columns at a time, which stay in the cache, and computed
again for the gradients. In the first layer, where x and y are the same, x_i * x_j and x_j * x_i share one weight, the
sum of theirs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emberscale_trainer.jit import typed_kernel

_COLUMNS = 512


def compress(x: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """sum over i, j of weights[h, i * fields + j] * x[i] * first[j], elementwise: float32 [maps, B, dimension].

    `x` is float32 [before, B, dimension], `first` float32 [fields, B, dimension], `weights` float32
    [maps, before * fields].
    """
    if torch.compiler.is_compiling():  # a graph cannot hold pieces whose number depends on the batch
        products = (x.flatten(1)[:, None] * first.flatten(1)[None]).flatten(0, 1)
        return (weights @ products).view(len(weights), *x.shape[1:])
    if x is not first:
        pairs = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(first))).t().contiguous()
        return _Compress.apply(x, first, weights, pairs)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped
    pairs = torch.tril_indices(len(x), len(x))
    square = weights.view(-1, len(x), len(x))
    both = square.tril() + square.transpose(1, 2).tril(-1)
    return _Compress.apply(x, first, both[:, pairs[0], pairs[1]], pairs)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


class _Compress(torch.autograd.Function):
    """The products of map pairs[0, k] and field pairs[1, k], by weights float32 [maps, k]."""

    @staticmethod
    def forward(context: Any, x: Tensor, first: Tensor, weights: Tensor, pairs: Tensor) -> Tensor:
        x, first = x.contiguous(), first.contiguous()
        context.save_for_backward(x, first, weights, pairs)
        left, right = x.flatten(1), first.flatten(1)
        out = torch.empty(len(weights), left.shape[1])
        products = torch.empty(pairs.shape[1], _COLUMNS)
        for start, stop in _parts(left.shape[1]):
            _multiply(left.numpy(), right.numpy(), pairs.numpy(), start, stop, products.numpy())
            torch.mm(weights, products[:, : stop - start], out=out[:, start:stop])
        return out.view(-1, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, first, weights, pairs = context.saved_tensors
        left, right, of_out = x.flatten(1), first.flatten(1), gradient.flatten(1)
        of_left, of_right, of_weights = torch.zeros_like(left), torch.zeros_like(right), torch.zeros_like(weights)
        products = torch.empty(pairs.shape[1], _COLUMNS)
        for start, stop in _parts(left.shape[1]):
            part, of_maps = products[:, : stop - start], of_out[:, start:stop]
            _multiply(left.numpy(), right.numpy(), pairs.numpy(), start, stop, products.numpy())
            of_weights.addmm_(of_maps, part.t())
            torch.mm(weights.t(), of_maps, out=part)
            _unmultiply(
                products.numpy(),
                left.numpy(),
                right.numpy(),
                pairs.numpy(),
                start,
                stop,
                of_left.numpy(),
                of_right.numpy(),
            )
        return of_left.view_as(x), of_right.view_as(first), of_weights, None


def _parts(columns: int) -> list[tuple[int, int]]:
    return [(start, min(start + _COLUMNS, columns)) for start in range(0, columns, _COLUMNS)]


@typed_kernel("void(f4[:, ::1], f4[:, ::1], i8[:, ::1], i8, i8, f4[:, ::1])")
def _multiply(left, right, pairs, start, stop, products):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above.
    for pair in range(pairs.shape[1]):
        one, other, product = left[pairs[0, pair], start:stop], right[pairs[1, pair], start:stop], products[pair]
        for column in range(stop - start):
            product[column] = one[column] * other[column]


@typed_kernel("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], i8[:, ::1], i8, i8, f4[:, ::1], f4[:, ::1])")
def _unmultiply(of_products, left, right, pairs, start, stop, of_left, of_right):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above.
    for pair in range(pairs.shape[1]):
        one, other, of_product = left[pairs[0, pair], start:stop], right[pairs[1, pair], start:stop], of_products[pair]
        of_one, of_other = of_left[pairs[0, pair], start:stop], of_right[pairs[1, pair], start:stop]
        for column in range(stop - start):
            of_one[column] += of_product[column] * other[column]
        for column in range(stop - start):
            of_other[column] += of_product[column] * one[column]
