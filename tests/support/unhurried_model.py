"""A model that rests before each batch: jobs that only have to outlast something leave the cores to others."""

import time

import torch
from torch import Tensor, nn

REST_SECONDS = 0.2


class UnhurriedModel(nn.Module):
    """The sum of the embeddings and a linear layer, at most 5 batches a second."""

    def __init__(self, dense: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dense, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """Logits float32 [B], from dense float32 [B, dense] and an embedding float32 [B, dimension] for each column."""
        time.sleep(REST_SECONDS)
        summed = torch.cat(list(embeddings.values()), dim=1).sum(dim=1)
        return self.linear(dense).squeeze(1) + summed  # type: ignore[no-any-return]  # torch does not type calls


def build(features) -> nn.Module:  # type: ignore[no-untyped-def]  # it runs in pods, which have no tests to import
    """`features.dense` names the dense features."""
    return UnhurriedModel(len(features.dense))
