"""Each built-in model, against its formula written out in plain torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emberscale_api.job import resolve_model
from emberscale_trainer.models.architectures import DLRM, CrossLayer, DCNv2, WideAndDeep, XDeepFM, build_model
from emberscale_trainer.models.cin import compress
from emberscale_trainer.models.interaction import interact
from training_jobs import training_job

B, DENSE, TABLES, D = 6, 3, 5, 4


def pairwise_products(first: Tensor, others: Tensor, dimension: int) -> Tensor:
    vectors = torch.cat([first, others], dim=1).view(len(first), -1, dimension)
    pairs = [(i, j) for i in range(vectors.shape[1]) for j in range(i)]
    return torch.cat([first, *((vectors[:, i] * vectors[:, j]).sum(1, keepdim=True) for i, j in pairs)], dim=1)


@pytest.mark.parametrize(("vectors", "dimension"), [(1, 16), (2, 1), (3, 5), (8, 8), (27, 16), (41, 20)])
@pytest.mark.parametrize("repeated", [0, 1])
@pytest.mark.parametrize("batch", [1, 8, 19])
def test_interactions_and_their_gradients_are_those_of_the_formula(
    vectors: int, dimension: int, repeated: int, batch: int
) -> None:
    generator = torch.Generator().manual_seed(vectors)
    first = torch.randn(batch, repeated * dimension, generator=generator, requires_grad=True)
    others = torch.randn(batch, vectors * dimension, generator=generator, requires_grad=True)
    expected, got = pairwise_products(first, others, dimension), interact(first, others, dimension)
    torch.testing.assert_close(got, expected)
    gradient = torch.randn(expected.shape, generator=generator)
    if expected.requires_grad and expected.shape[1]:
        torch.testing.assert_close(
            torch.autograd.grad(got, (first, others), gradient, allow_unused=True),
            torch.autograd.grad(expected, (first, others), gradient, materialize_grads=True),
        )


def test_interactions_refuse_what_are_no_vectors() -> None:
    with pytest.raises(ValueError, match="no vectors of 4"):
        interact(torch.zeros(2, 4), torch.zeros(2, 6), 4)
    with pytest.raises(TypeError, match="float64"):
        interact(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.float64), 4)


def test_dlrm_is_its_formula() -> None:
    model = DLRM(DENSE, TABLES, D, bottom=[7], top=[8])
    dense, embeddings = torch.randn(B, DENSE), torch.randn(B, TABLES * D)
    assert model.bottom is not None
    expected = model.top(pairwise_products(model.bottom(dense), embeddings, D))[:, 0]
    torch.testing.assert_close(model(dense, embeddings), expected)
    bare = DLRM(0, TABLES, D, bottom=[7], top=[8])
    expected = bare.top(pairwise_products(dense[:, :0], embeddings, D))[:, 0]
    torch.testing.assert_close(bare(dense[:, :0], embeddings), expected)


def test_wide_and_deep_is_its_formula() -> None:
    model = WideAndDeep(DENSE, TABLES * D, layers=[8, 8])
    dense, deep, wide = torch.randn(B, DENSE), torch.randn(B, TABLES * D), torch.randn(B, TABLES)
    assert model.wide is not None
    expected = model.deep(torch.cat([dense, deep], 1))[:, 0] + dense @ model.wide.weight[0] + wide.sum(1)
    torch.testing.assert_close(model(dense, torch.cat([deep, wide], 1)), expected)


@pytest.mark.parametrize("rank", [None, 3, 1000])
def test_dcn_is_its_formula(rank: int | None) -> None:
    model = DCNv2(DENSE, TABLES * D, cross_layers=2, cross_rank=rank, layers=[8])
    x0 = x = torch.randn(B, DENSE + TABLES * D)
    for layer in model.cross:
        assert isinstance(layer, CrossLayer)
        weight = layer.expand.weight
        if rank == 3:
            assert isinstance(layer.reduce, nn.Linear)
            assert layer.reduce.weight.shape == (3, DENSE + TABLES * D)
            weight = weight @ layer.reduce.weight
        x = x0 * (x @ weight.t() + layer.expand.bias) + x
    expected = model.deep(x)[:, 0]
    torch.testing.assert_close(model(x0[:, :DENSE], x0[:, DENSE:]), expected)


def test_xdeepfm_is_its_formula() -> None:
    maps = [3, 2]
    model = XDeepFM(DENSE, TABLES, D, cin_layers=maps, layers=[8])
    dense, fields, wide = torch.randn(B, DENSE), torch.randn(B, TABLES, D), torch.randn(B, TABLES)
    x, sums = fields, []
    for weights in model.interactions.filters:
        # equation 6: every map is a weighted sum of the elementwise products of all pairs
        filters = weights.view(len(weights), x.shape[1], TABLES)
        x = torch.einsum("hij,bid,bjd->bhd", filters, x, fields)
        sums.append(x.sum(2))
    interactions = torch.cat(sums, 1) @ model.interactions.output.weight[0]
    assert model.linear is not None
    linear = dense @ model.linear.weight[0] + wide.sum(1)
    deep = model.deep(torch.cat([dense, fields.reshape(B, -1)], 1))[:, 0]
    got = model(dense, torch.cat([fields.reshape(B, -1), wide], 1))
    torch.testing.assert_close(got, interactions + linear + deep)


@pytest.mark.parametrize("itself", [False, True], ids=["of others", "of a tensor with itself"])
def test_the_compressed_interactions_have_the_gradients_of_the_formula(itself: bool) -> None:
    x = torch.randn(4, 130, 5, requires_grad=True)
    first = x if itself else torch.randn(3, 130, 5, requires_grad=True)
    weights = torch.randn(2, len(x) * len(first), requires_grad=True)
    expected = torch.einsum("hij,ibd,jbd->hbd", weights.view(2, len(x), len(first)), x, first)
    gradient = torch.randn_like(expected)
    got = compress(x, first, weights)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (x, first, weights), gradient),
        torch.autograd.grad(expected, (x, first, weights), gradient),
        rtol=1e-4,  # the gradients of weights are sums of 650 products
        atol=1e-4,
    )


def built(**model: Any) -> torch.nn.Module:
    columns = {"label": "y", "dense": ["a", "b"], "categorical": ["c"], "lists": [{"name": "d"}, {"name": "e"}]}
    job = training_job(model=model, data={"train": ["x"], "format": "CSV", "columns": columns})
    resolved = resolve_model(job.spec)
    module = build_model(job.spec.model, resolved, seed=3)
    width = sum(table.dimension for table in resolved.tables)
    assert module(torch.randn(B, 2), torch.randn(B, width)).shape == (B,)
    return module


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"architecture": "WideAndDeep", "embeddings": {"tables": {"d": {"dimension": 3}}}},
        {"architecture": "XDeepFM", "cinLayers": [4]},
        {"architecture": "DCNv2", "crossRank": 2, "crossLayers": 1, "embeddings": {"tables": {"c": {"dimension": 2}}}},
    ],
)
def test_a_manifest_names_the_model_and_the_seed_its_first_parameters(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    one = built(**model)
    torch.manual_seed(1)
    other = built(**model)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)
