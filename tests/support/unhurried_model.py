"""A model that rests before each batch, so that jobs that only have to last leave the cores to others."""

import time

import torch
from torch import Tensor, nn

REST_SECONDS = 0.2


class UnhurriedModel(nn.Module):
    """Adds up the embeddings and a linear layer, for at most 5 batches a second."""

    def __init__(self, dense: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dense, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """Returns logits float32 [B]; `dense` is float32 [B, dense], an embedding float32 [B, dimension] per column."""
        time.sleep(REST_SECONDS)
        summed = torch.cat(list(embeddings.values()), dim=1).sum(dim=1)
        return self.linear(dense).squeeze(1) + summed  # type: ignore[no-any-return]  # torch does not type calls


def build(features) -> nn.Module:  # type: ignore[no-untyped-def]  # it runs in pods, which have no tests to import
    """Builds the model; `features.dense` names the dense features."""
    return UnhurriedModel(len(features.dense))
