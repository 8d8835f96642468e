"""Gradients without a graph, against PyTorch's autograd."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from emberscale_trainer.models.architectures import DLRM, DCNv2
from emberscale_trainer.models.flat import FlatParameters
from emberscale_trainer.models.mlp import MLP, MLPPasses
from emberscale_trainer.models.vjp import vjp_of

widths = st.integers(1, 40)
batches = st.sampled_from([1, 2, 7, 8, 9, 64, 65, 131])


def by_autograd(model: nn.Module, *inputs: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the model's output, and the gradients of the inputs; those of the parameters go to their `grad`."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    output: Tensor = model(*leaves)
    output.backward(gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return output.detach(), [leaf.grad for leaf in leaves]


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
    of_dense, embeddings, gradient = torch.randn(batch, dense), torch.randn(batch, 20), torch.randn(batch)
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
