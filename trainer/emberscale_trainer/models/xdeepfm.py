"""xDeepFM: a linear model, an MLP, and a compressed interaction network (CIN) over whole embedding vectors."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from emberscale_trainer.models.cin import compress
from emberscale_trainer.models.layers import mlp
from emberscale_trainer.models.wide_and_deep import wide_logits


class CompressedInteractions(nn.Module):
    """The CIN of Lian et al. (2018), section 3.2, with the identity for an activation, which they found best.

    Layer k makes maps x^k_h = sum over i, j of W^k_hij (x^(k-1)_i * x^0_j), their equation 6; each map is summed over
    the embedding dimension, their equation 7, and the sums of all layers are weighed, their equation 8.
    `forward` takes the fields' embeddings float32 [B, fields, dimension], and returns float32 [B].
    """

    def __init__(self, fields: int, layers: Sequence[int]) -> None:
        super().__init__()
        self.filters = nn.ParameterList()
        for before, maps in pairwise([fields, *layers]):
            self.filters.append(nn.Parameter(nn.init.xavier_uniform_(torch.empty(maps, before * fields))))
        self.output = nn.Linear(sum(layers), 1, bias=False)

    def forward(self, fields: Tensor) -> Tensor:
        """The log odds of the interactions."""
        # maps before samples: a layer is then one product of matrices over all samples and dimensions
        first = x = fields.permute(1, 0, 2).contiguous()
        sums = []
        for weights in self.filters:
            x = compress(x, first, weights)
            sums.append(x.sum(dim=2))
        weighed: Tensor = self.output(torch.cat(sums).t())
        return weighed.squeeze(1)


class XDeepFM(nn.Module):
    """The model of Lian et al. (2018), equation 9; dense features enter the linear part and the MLP.

    `forward` takes dense features float32 [B, dense] and float32 [B, tables * dimension + tables], the embeddings of a
    sample followed by the weights of its ids, and returns logits float32 [B].
    """

    def __init__(
        self, dense: int, tables: int, dimension: int, cin_layers: Sequence[int], layers: Sequence[int]
    ) -> None:
        super().__init__()
        self._tables, self._dimension = tables, dimension
        self.linear = nn.Linear(dense, 1, bias=False) if dense else None
        self.interactions = CompressedInteractions(tables, cin_layers)
        self.deep = mlp([dense + tables * dimension, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        width = self._tables * self._dimension
        fields, weights = embeddings[:, :width], embeddings[:, width:]
        deep: Tensor = self.deep(torch.cat([dense, fields], dim=1)).squeeze(1)
        interactions: Tensor = self.interactions(fields.reshape(-1, self._tables, self._dimension))
        return wide_logits(self.linear, dense, weights) + interactions + deep
