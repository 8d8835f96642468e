"""The architectures that a manifest can name, and the model that it specifies.

* DLRM: a bottom MLP over dense features, dot products between all pairs of vectors, and a top MLP.
* Wide & Deep: a linear model that memorises, and an MLP that generalises, trained together.
* DCN-v2: cross layers, which multiply features explicitly, and an MLP on top of them.
* xDeepFM: a linear model, an MLP, and a compressed interaction network (CIN) over whole embedding vectors.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from emberscale_api.job import Architecture, ModelSpec, ResolvedModel
from emberscale_api.job.dense import narrow_rank
from emberscale_trainer.models.cin import compress
from emberscale_trainer.models.entrypoint import features_of, own_model
from emberscale_trainer.models.flat import load_flat
from emberscale_trainer.models.initial import initial_parameters
from emberscale_trainer.models.interaction import interact
from emberscale_trainer.models.mlp import MLP


class DLRM(nn.Module):
    """The model of Naumov et al. (2019), which takes embeddings as inputs instead of holding them.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, tables * dimension], and returns logits
    float32 [B]. Without dense features there is no bottom MLP, and the vectors are the embeddings alone.
    """

    def __init__(self, dense: int, tables: int, dimension: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.dimension = dimension
        vectors = tables + 1 if dense else tables
        self.bottom = MLP([dense, *bottom, dimension], activate_last=True) if dense else None
        repeated = dimension if dense else 0
        self.top = MLP([repeated + vectors * (vectors - 1) // 2, *top, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        bottom = embeddings[:, :0] if self.bottom is None else self.bottom(dense)
        logits: Tensor = self.top(interact(bottom, embeddings, self.dimension))
        return logits.squeeze(1)


class WideAndDeep(nn.Module):
    """The model of Cheng et al. (2016), section 3.3: the sum of both parts' log odds.

    The wide part has one weight per dense feature and one per id; cross products of features (their equation 2) are
    columns of the data. `forward` takes dense features float32 [B, dense] and float32 [B, deep + wide], the embeddings
    of a sample followed by the weights of its ids, and returns logits float32 [B].
    """

    def __init__(self, dense: int, deep: int, layers: Sequence[int]) -> None:
        super().__init__()
        self._deep_width = deep
        self.wide = nn.Linear(dense, 1, bias=False) if dense else None
        self.deep = MLP([dense + deep, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        deep: Tensor = self.deep(torch.cat([dense, embeddings[:, : self._deep_width]], dim=1)).squeeze(1)
        return deep + wide_logits(self.wide, dense, embeddings[:, self._deep_width :])


def wide_logits(of_dense: nn.Linear | None, dense: Tensor, weights: Tensor) -> Tensor:
    """The linear part: float32 [B] from dense features and the weights of a sample's ids, float32 [B, columns]."""
    of_ids = weights.sum(dim=1)
    return of_ids if of_dense is None else of_ids + of_dense(dense).squeeze(1)


class CrossLayer(nn.Module):
    """x0 * (W x + b) + x, Wang et al. (2021), equation 1; with a rank W = U V^T, equation 2.

    Takes and returns float32 [B, width].
    """

    def __init__(self, width: int, rank: int | None) -> None:
        super().__init__()
        narrow = narrow_rank(width, rank)
        self.reduce = nn.Identity() if narrow is None else nn.Linear(width, narrow, bias=False)
        self.expand = nn.Linear(width if narrow is None else narrow, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """The next layer's features."""
        return torch.addcmul(x, x0, self.expand(self.reduce(x)))


class DCNv2(nn.Module):
    """The stacked model of Wang et al. (2021), section 3.3: the MLP takes the output of the cross layers.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, embeddings], of any dimensions, and
    returns logits float32 [B].
    """

    def __init__(
        self, dense: int, embeddings: int, cross_layers: int, cross_rank: int | None, layers: Sequence[int]
    ) -> None:
        super().__init__()
        width = dense + embeddings
        self.cross = nn.ModuleList(CrossLayer(width, cross_rank) for _ in range(cross_layers))
        self.deep = MLP([width, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        x0 = x = torch.cat([dense, embeddings], dim=1)
        for layer in self.cross:
            x = layer(x0, x)
        logits: Tensor = self.deep(x)
        return logits.squeeze(1)


class CompressedInteractions(nn.Module):
    """The CIN of Lian et al. (2018), section 3.2, with the identity for an activation, which they found best.

    Layer k makes maps x^k_h = sum over i, j of W^k_hij (x^(k-1)_i * x^0_j), their equation 6; each map is summed over
    the embedding dimension, their equation 7, and the sums of all layers are weighted, their equation 8.
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
        # maps before samples, so that a layer is one product of matrices over all samples and dimensions
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
        self.deep = MLP([dense + tables * dimension, *layers, 1], activate_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        width = self._tables * self._dimension
        fields, weights = embeddings[:, :width], embeddings[:, width:]
        deep: Tensor = self.deep(torch.cat([dense, fields], dim=1)).squeeze(1)
        interactions: Tensor = self.interactions(fields.reshape(-1, self._tables, self._dimension))
        return wide_logits(self.linear, dense, weights) + interactions + deep


def build_model(spec: ModelSpec, resolved: ResolvedModel, seed: int) -> nn.Module:
    """Builds the manifest's model with initial dense parameters that depend on the seed alone.

    It takes dense features float32 [B, dense] and float32 [B, sum of the tables' dimensions], the vectors of all tables
    side by side in their order, and returns logits float32 [B]. Raises EntrypointError.
    """
    if spec.entrypoint:
        return own_model(spec.entrypoint, features_of(resolved), seed)
    model = _built_in(spec, resolved)
    load_flat(model, torch.from_numpy(initial_parameters(spec, resolved, seed)))
    return model


def _built_in(spec: ModelSpec, resolved: ResolvedModel) -> nn.Module:
    dense = len(resolved.columns.dense)
    tables = len(resolved.embeddings)
    width = sum(table.dimension for table in resolved.embeddings)
    dimension = resolved.embeddings[0].dimension
    match spec.architecture:
        case Architecture.WIDE_AND_DEEP:
            return WideAndDeep(dense, width, spec.deep_mlp)
        case Architecture.XDEEPFM:
            return XDeepFM(dense, tables, dimension, spec.cin_layers, spec.deep_mlp)
        case Architecture.DCN_V2:
            return DCNv2(dense, width, spec.cross_layers, spec.cross_rank, spec.deep_mlp)
        case _:
            return DLRM(dense, tables, dimension, spec.bottom_mlp, spec.top_mlp)
