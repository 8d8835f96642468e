"""DLRM: a bottom MLP over dense features, dot products between all pairs of vectors, and a top MLP."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from emberscale_api.job import ModelSpec, ResolvedModel


class DLRM(nn.Module):
    """The model of Naumov et al. (2019), whose embeddings are given rather than held.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, tables * dimension], and returns logits
    float32 [B].
    """

    def __init__(self, dense: int, tables: int, dimension: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self._dimension = dimension
        vectors = tables + 1
        self.bottom = _mlp([dense, *bottom, dimension], activate_last=True)
        self.top = _mlp([dimension + vectors * (vectors - 1) // 2, *top, 1], activate_last=False)
        rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("_pairs", rows * vectors + columns, persistent=False)
        self._pairs: Tensor

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        batch = dense.shape[0]
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom, embeddings], dim=1).view(batch, -1, self._dimension)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(batch, -1)
        interactions = products.index_select(1, self._pairs)
        logits: Tensor = self.top(torch.cat([bottom, interactions], dim=1))
        return logits.squeeze(1)


def _mlp(widths: Sequence[int], activate_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if activate_last or number < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def build_model(spec: ModelSpec, resolved: ResolvedModel, seed: int) -> nn.Module:
    """The manifest's model with initial dense parameters that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DLRM(
            dense=len(resolved.columns.dense),
            tables=len(resolved.tables),
            dimension=resolved.tables[0].dimension,
            bottom=spec.bottom_mlp,
            top=spec.top_mlp,
        )
