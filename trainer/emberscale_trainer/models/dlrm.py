"""DLRM: a bottom MLP over dense features, dot products between all pairs of vectors, and a top MLP."""

from collections.abc import Sequence

from torch import Tensor, nn

from emberscale_trainer.models.interaction import interact
from emberscale_trainer.models.layers import mlp


class DLRM(nn.Module):
    """The model of Naumov et al. (2019), whose embeddings are given rather than held.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, tables * dimension], and returns logits
    float32 [B]. Without dense features there is no bottom MLP, and the vectors are the embeddings alone.
    """

    def __init__(self, dense: int, tables: int, dimension: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self._dimension = dimension
        vectors = tables + 1 if dense else tables
        self.bottom = mlp([dense, *bottom, dimension], activate_last=True) if dense else None
        repeated = dimension if dense else 0
        self.top = mlp([repeated + vectors * (vectors - 1) // 2, *top, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        bottom = embeddings[:, :0] if self.bottom is None else self.bottom(dense)
        logits: Tensor = self.top(interact(bottom, embeddings, self._dimension))
        return logits.squeeze(1)
