"""Counts a model's parameters besides its embeddings, an estimate of a job's size before it starts."""

from collections.abc import Sequence
from itertools import pairwise

from emberscale_api.job import Architecture, TrainingJobSpec, resolve_model


def dense_parameters(spec: TrainingJobSpec) -> int:
    """Returns the exact number for a built-in model; for a custom model, that of an MLP with the built-in widths."""
    model, columns = spec.model, resolve_model(spec)
    dense, dimensions = len(columns.columns.dense), [table.dimension for table in columns.embeddings]
    width = dense + sum(dimensions)
    deep = _mlp([width, *model.deep_mlp, 1])
    match model.architecture:
        case Architecture.DLRM:
            vectors, dimension = len(dimensions) + 1, model.embeddings.dimension
            pairs = vectors * (vectors - 1) // 2
            return _mlp([dense, *model.bottom_mlp, dimension]) + _mlp([dimension + pairs, *model.top_mlp, 1])
        case Architecture.WIDE_AND_DEEP:
            return dense + deep
        case Architecture.XDEEPFM:
            fields, layers = len(dimensions), model.cin_layers
            filters = sum(before * fields * maps for before, maps in pairwise([fields, *layers]))
            return dense + filters + sum(layers) + deep
        case Architecture.DCN_V2:
            rank = model.cross_rank
            matrix = width * width if rank is None or 2 * rank >= width else 2 * width * rank
            return model.cross_layers * (matrix + width) + deep
        case None:
            return deep


def _mlp(widths: Sequence[int]) -> int:
    """Weights and biases of linear layers, one between each two widths."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))
