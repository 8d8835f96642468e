"""Wide & Deep: a linear model that memorises, and an MLP that generalises, trained together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emberscale_trainer.models.layers import mlp


class WideAndDeep(nn.Module):
    """The model of Cheng et al. (2016), section 3.3: the sum of both parts' log odds.

    The wide part has one weight a dense feature and one an id; cross products of features (their equation 2) are
    columns of the data. `forward` takes dense features float32 [B, dense] and float32 [B, deep + wide], the embeddings
    of a sample followed by the weights of its ids, and returns logits float32 [B].
    """

    def __init__(self, dense: int, deep: int, layers: Sequence[int]) -> None:
        super().__init__()
        self._deep_width = deep
        self.wide = nn.Linear(dense, 1, bias=False) if dense else None
        self.deep = mlp([dense + deep, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        deep: Tensor = self.deep(torch.cat([dense, embeddings[:, : self._deep_width]], dim=1)).squeeze(1)
        return deep + wide_logits(self.wide, dense, embeddings[:, self._deep_width :])


def wide_logits(of_dense: nn.Linear | None, dense: Tensor, weights: Tensor) -> Tensor:
    """The linear part: float32 [B] from dense features and the weights of a sample's ids, float32 [B, columns]."""
    of_ids = weights.sum(dim=1)
    return of_ids if of_dense is None else of_ids + of_dense(dense).squeeze(1)
