"""The dense parameters of the built-in models: their shapes, in the order of the flat vector, and their initial range.

Parameter servers hold this vector, and need no deep-learning library to make it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from emberscale_api.job.model import Architecture, ModelSpec
from emberscale_api.job.resolved import ResolvedModel


@dataclass(frozen=True)
class DenseParameter:
    """One parameter of a model.

    * `shape`: as in PyTorch; the weights of a linear layer are [outputs, inputs].
    * `bound`: initial values are uniform in [-bound, bound).
    """

    shape: tuple[int, ...]
    bound: float

    @property
    def length(self) -> int:
        """The number of floats."""
        return math.prod(self.shape)


def dense_parameters(model: ModelSpec, resolved: ResolvedModel) -> list[DenseParameter]:
    """Returns the parameters of a built-in model.

    Initial values are those of PyTorch's layers: uniform within 1 / sqrt(inputs) in linear layers (`torch.nn.Linear`),
    and Xavier's in the filters of xDeepFM. A model of the user's own gets those of an MLP with the default widths, an
    estimate of its size.
    """
    dense, tables = len(resolved.columns.dense), len(resolved.embeddings)
    width = dense + sum(table.dimension for table in resolved.embeddings)
    deep = [width, *model.deep_mlp, 1]
    match model.architecture:
        case Architecture.DLRM:
            dimension = resolved.embeddings[0].dimension
            vectors, repeated = (tables + 1, dimension) if dense else (tables, 0)
            bottom = _mlp([dense, *model.bottom_mlp, dimension]) if dense else ()
            return [*bottom, *_mlp([repeated + vectors * (vectors - 1) // 2, *model.top_mlp, 1])]
        case Architecture.WIDE_AND_DEEP:
            return [*_wide(dense), *_mlp(deep)]
        case Architecture.XDEEPFM:
            filters = [_filter(before * tables, maps) for before, maps in pairwise([tables, *model.cin_layers])]
            return [*_wide(dense), *filters, _weights(sum(model.cin_layers), 1), *_mlp(deep)]
        case Architecture.DCN_V2:
            crossed = [part for _ in range(model.cross_layers) for part in _cross_layer(width, model.cross_rank)]
            return [*crossed, *_mlp(deep)]
        case None:
            return list(_mlp(deep))


def _weights(inputs: int, outputs: int) -> DenseParameter:
    return DenseParameter((outputs, inputs), 1 / math.sqrt(inputs))


def _linear(inputs: int, outputs: int) -> tuple[DenseParameter, DenseParameter]:
    """The weights and the bias of a linear layer."""
    return _weights(inputs, outputs), DenseParameter((outputs,), 1 / math.sqrt(inputs))


def _mlp(widths: Sequence[int]) -> Iterator[DenseParameter]:
    for inputs, outputs in pairwise(widths):
        yield from _linear(inputs, outputs)


def _wide(dense: int) -> list[DenseParameter]:
    """The linear part: one weight per dense feature."""
    return [_weights(dense, 1)] if dense else []


def _filter(inputs: int, maps: int) -> DenseParameter:
    return DenseParameter((maps, inputs), math.sqrt(6 / (inputs + maps)))


def _cross_layer(width: int, rank: int | None) -> list[DenseParameter]:
    narrow = narrow_rank(width, rank)
    return list(_linear(width, width)) if narrow is None else [_weights(width, narrow), *_linear(narrow, width)]


def narrow_rank(width: int, rank: int | None) -> int | None:
    """Returns the rank of a cross layer's matrices; None if one full matrix has no more parameters."""
    return rank if rank is not None and 2 * rank < width else None
