"""Gradients without a graph, against PyTorch's autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from emberscale_trainer.models.architectures import DLRM, DCNv2
from emberscale_trainer.models.flat import FlatParameters
from emberscale_trainer.models.interaction import Lookup, interact, interaction_gradients, interactions
from emberscale_trainer.models.mlp import MLP, MLPPasses
from emberscale_trainer.models.vjp import DLRMVJP, vjp_of

widths = st.integers(1, 40)
batches = st.sampled_from([1, 2, 7, 8, 9, 64, 65, 131])


def by_autograd(model: nn.Module, *inputs: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the model's output, and the gradients of the inputs; those of the parameters go to their `grad`."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    output: Tensor = model(*leaves)
    output.backward(gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output.detach(), [leaf.grad for leaf in leaves]


def lookup(batch: int, tables: int, dimension: int, rows: int, seed: int) -> tuple[Lookup, Tensor]:
    """Returns vectors as places in few rows, with gaps before, between and after them, and the same side by side."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3 + rows * (dimension + 1), generator=generator)
    numbers = torch.randint(rows, (batch, tables), generator=generator)
    offsets = (3 + (dimension + 1) * numbers).to(torch.int32)
    places = offsets.long()[:, :, None] + torch.arange(dimension)
    return Lookup(values, offsets), values[places].flatten(1)


@given(
    layers=st.lists(widths, min_size=2, max_size=4),
    activate_last=st.booleans(),
    batch=batches,
    dead=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_passes_of_an_mlp_have_the_gradients_of_autograd(
    layers: list[int], activate_last: bool, batch: int, dead: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    mlp = MLP(layers, activate_last)
    inputs, gradient = torch.randn(batch, layers[0]), torch.randn(batch, layers[-1])
    if dead:
        with torch.no_grad():
            inputs[::2] = 0
            for parameter in mlp.parameters():
                parameter[::3] = 0  # outputs that are exactly 0, where the ReLU has no slope
    flat = FlatParameters(mlp)
    expected, (of_inputs,) = by_autograd(mlp, inputs, gradient=gradient)
    of_parameters = flat.gradients.clone()
    flat.gradients.fill_(7)
    with torch.no_grad():
        passes = MLPPasses(mlp)
        outputs = passes.forward(inputs)
        got = torch.empty_like(inputs)
        passes.backward_to_inputs(passes.backward(outputs, gradient.clone()), got)
    torch.testing.assert_close(outputs[-1], expected)
    torch.testing.assert_close(got, of_inputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat.gradients, of_parameters, rtol=1e-4, atol=1e-4)


def test_an_mlp_without_memory_for_gradients_has_no_passes() -> None:
    with pytest.raises(ValueError, match="no gradients"):
        MLPPasses(MLP([2, 1], False))


@given(
    tables=st.integers(1, 12),
    dimension=st.sampled_from([1, 3, 8, 16, 20]),
    repeated=st.integers(0, 2),
    batch=batches,
    rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_interactions_of_places_in_rows_are_those_of_the_vectors_to_the_bit(
    tables: int, dimension: int, repeated: int, batch: int, rows: int, seed: int
) -> None:
    places, vectors = lookup(batch, tables, dimension, rows, seed)
    first = torch.randn(batch, repeated * dimension)
    got = interactions(first, places, dimension)
    assert torch.equal(got, interactions(first, vectors, dimension))
    gradient = torch.randn(got.shape)
    of_first, of_rows = interaction_gradients(gradient, first, places, dimension)
    expected_of_first, of_vectors = interaction_gradients(gradient, first, vectors, dimension)
    assert torch.equal(of_first, expected_of_first)
    summed = torch.zeros_like(places.rows)
    indices = places.offsets.long()[:, :, None] + torch.arange(dimension)
    for sample, of_sample in zip(indices, of_vectors.view(indices.shape), strict=True):
        for index, of_vector in zip(sample, of_sample, strict=True):  # the order in which the kernel adds
            summed[index] += of_vector
    assert torch.equal(of_rows, summed)


def test_gradients_of_interactions_may_lie_apart_or_be_one_number() -> None:
    first, others = torch.randn(5, 4), torch.randn(5, 12)
    out = interactions(first, others, 4)
    for gradient in (torch.randn(5, 2 * out.shape[1])[:, : out.shape[1]], torch.ones(()).expand(out.shape)):
        assert not gradient.is_contiguous()
        expected = interaction_gradients(gradient.contiguous(), first, others, 4)
        for got, one in zip(interaction_gradients(gradient, first, others, 4), expected, strict=True):
            assert torch.equal(got, one)


def test_a_lookup_has_offsets_of_32_bits_side_by_side() -> None:
    places, _ = lookup(4, 2, 4, 3, seed=0)
    for offsets in (places.offsets.long(), places.offsets.t().contiguous().t()):
        with pytest.raises(TypeError, match="contiguous int32"):
            interactions(torch.zeros(4, 4), Lookup(places.rows, offsets), 4)
    with pytest.raises(ValueError, match="no vectors of 4"):
        interactions(torch.zeros(3, 4), places, 4)


@pytest.mark.parametrize("batch", [1, 6, 131])
@pytest.mark.parametrize(
    ("build", "dense"),
    [
        (lambda: DLRM(3, 5, 4, bottom=[7, 6], top=[8, 5]), 3),
        (lambda: DLRM(3, 5, 4, bottom=[], top=[]), 3),
        (lambda: DLRM(0, 5, 4, bottom=[7], top=[8]), 0),
        (lambda: DCNv2(3, 20, cross_layers=2, cross_rank=None, layers=[8]), 3),
    ],
)
def test_the_vjp_of_a_model_is_that_of_autograd(build: Any, dense: int, batch: int) -> None:
    torch.manual_seed(batch)
    model: nn.Module = build()
    places, embeddings = lookup(batch, 5, 4, rows=9, seed=batch)
    of_dense, gradient = torch.randn(batch, dense), torch.randn(batch)
    flat = FlatParameters(model)
    vjp = vjp_of(model, flat)
    for step in range(2):  # the second shows that nothing is left of the first, and that parameters may change
        flat.values.mul_(1 - step / 4)
        flat.clear_gradients()
        expected, (_, of_embeddings) = by_autograd(model, of_dense, embeddings, gradient=gradient)
        assert of_embeddings is not None
        of_parameters = flat.gradients.clone()
        assert of_parameters.count_nonzero()
        logits, pull_back = vjp(of_dense, embeddings.clone())
        assert not logits.requires_grad
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(pull_back(gradient.clone()), of_embeddings)
        torch.testing.assert_close(flat.gradients, of_parameters, rtol=1e-5, atol=1e-4)
        if isinstance(vjp, DLRMVJP):
            flat.clear_gradients()
            logits, pull_back = vjp(of_dense, places)
            torch.testing.assert_close(logits, expected)
            of_rows = np.zeros(len(places.rows), np.float32)
            indices = places.offsets.long()[:, :, None] + torch.arange(4)
            np.add.at(of_rows, indices.flatten().numpy(), of_embeddings.flatten().numpy())
            torch.testing.assert_close(pull_back(gradient.clone()), torch.from_numpy(of_rows), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(flat.gradients, of_parameters, rtol=1e-5, atol=1e-4)


def test_interact_is_the_same_with_and_without_a_graph() -> None:
    first, others = torch.randn(9, 4), torch.randn(9, 12)
    with torch.no_grad():
        expected = interact(first, others, 4)
    assert torch.equal(interact(first.requires_grad_(), others, 4).detach(), expected)
