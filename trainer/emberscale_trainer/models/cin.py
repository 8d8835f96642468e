"""One layer of a compressed interaction network, without ever holding all its products in memory.

The products x_i * y_j of all pairs of maps would take before * fields floats a sample and dimension: 100 MB for a batch
of 2048. They are made for a few hundred columns at a time, which stay in the cache, and made again for the gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_COLUMNS = 512


def compress(x: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """sum over i, j of weights[h, i * fields + j] * x[i] * first[j], elementwise: float32 [maps, B, dimension].

    `x` is float32 [before, B, dimension], `first` float32 [fields, B, dimension], `weights` float32
    [maps, before * fields].
    """
    if torch.compiler.is_compiling():
        products = _products(_flat(x), _flat(first))  # a graph cannot take pieces whose number hangs on the batch
        return (weights @ products).view(-1, *x.shape[1:])
    return _Compress.apply(x, first, weights)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped


class _Compress(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, first: Tensor, weights: Tensor) -> Tensor:
        context.save_for_backward(x, first, weights)
        left, right = _flat(x), _flat(first)
        out = torch.empty(len(weights), left.shape[1], dtype=x.dtype)
        for part in _parts(left.shape[1]):
            out[:, part] = weights @ _products(left[:, part], right[:, part])
        return out.view(-1, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, first, weights = context.saved_tensors
        left, right, of_out = _flat(x), _flat(first), _flat(gradient)
        of_left, of_right = torch.empty_like(left), torch.empty_like(right)
        of_weights = torch.zeros_like(weights)
        for part in _parts(left.shape[1]):
            one, other, of_maps = left[:, part], right[:, part], of_out[:, part]
            of_weights.addmm_(of_maps, _products(one, other).t())
            of_products = (weights.t() @ of_maps).view(len(one), len(other), -1)
            of_left[:, part] = (of_products * other).sum(dim=1)
            of_right[:, part] = (of_products * one[:, None]).sum(dim=0)
        return of_left.view_as(x), of_right.view_as(first), of_weights


def _flat(maps: Tensor) -> Tensor:
    return maps.flatten(1)


def _parts(columns: int) -> list[slice]:
    return [slice(start, start + _COLUMNS) for start in range(0, columns, _COLUMNS)]


def _products(x: Tensor, first: Tensor) -> Tensor:
    """float [before * fields, columns]"""
    return (x[:, None] * first[None]).flatten(0, 1)
