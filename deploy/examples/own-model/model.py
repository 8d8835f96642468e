"""DeepFM (Guo et al. 2017) as a model of one's own: plain PyTorch, and nothing of Emberscale in it.

Emberscale calls the factory that `spec.model.entrypoint` names with the features of the job, and trains the dense
parameters of the module that it returns together with the embeddings, which it looks up and pools itself.
"""

import torch
from torch import Tensor, nn


class DeepFM(nn.Module):
    """The products of all pairs of embeddings, summed, and an MLP over everything."""

    def __init__(self, dense: int, tables: int, dimension: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dense, 1)
        self.deep = nn.Sequential(
            nn.Linear(dense + tables * dimension, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """Logits float32 [B], from dense float32 [B, dense] and an embedding float32 [B, dimension] for each column."""
        vectors = torch.stack(list(embeddings.values()), dim=1)
        # (sum of v)^2 - sum of v^2 is twice the sum over all pairs
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        deep: Tensor = self.deep(torch.cat([dense, vectors.flatten(start_dim=1)], dim=1)).squeeze(1)
        linear: Tensor = self.linear(dense).squeeze(1)
        return linear + pairs + deep


def build(features) -> nn.Module:  # type: ignore[no-untyped-def]  # an emberscale.Features; nothing need be imported
    """`features.dense` names the dense features; `features.embeddings` maps columns of ids to dimensions."""
    dimensions = list(features.embeddings.values())
    return DeepFM(len(features.dense), len(dimensions), dimensions[0])
