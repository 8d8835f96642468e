"""DCN-v2: cross layers, which multiply features explicitly, and an MLP on top of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emberscale_trainer.models.layers import mlp


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, Wang et al. (2021), equation 1; with a rank W = U V^T, equation 2.

    Takes and returns float32 [B, width].
    """

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        narrow = rank is not None and 2 * rank < width
        self.reduce = nn.Linear(width, rank, bias=False) if narrow and rank is not None else nn.Identity()
        self.expand = nn.Linear(rank if narrow and rank is not None else width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """The next layer's features."""
        return torch.addcmul(x, x0, self.expand(self.reduce(x)))


class DCNv2(nn.Module):
    """The stacked model of Wang et al. (2021), section 3.3: the MLP takes what the cross layers give.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, embeddings], of any dimensions, and
    returns logits float32 [B].
    """

    def __init__(
        self, dense: int, embeddings: int, cross_layers: int, cross_rank: int | None, layers: Sequence[int]
    ) -> None:
        super().__init__()
        width = dense + embeddings
        self.cross = nn.ModuleList(CrossLayer(width, cross_rank) for _ in range(cross_layers))
        self.deep = mlp([width, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        x0 = x = torch.cat([dense, embeddings], dim=1)
        for layer in self.cross:
            x = layer(x0, x)
        logits: Tensor = self.deep(x)
        return logits.squeeze(1)
