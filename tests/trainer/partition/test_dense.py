"""Slices of the dense vector, stepped apart, against torch stepping the whole."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from emberscale_api.job import OptimizerSpec, OptimizerType
from emberscale_api.routing import dense_slice
from emberscale_trainer.partition import DenseSlice

RULES = [OptimizerType.SGD, OptimizerType.MOMENTUM, OptimizerType.ADAGRAD, OptimizerType.ADAM]
REFERENCE: dict[OptimizerType, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
    OptimizerType.SGD: lambda p: torch.optim.SGD([p], lr=0.1),
    OptimizerType.MOMENTUM: lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    OptimizerType.ADAGRAD: lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-8),
    OptimizerType.ADAM: lambda p: torch.optim.Adam([p], lr=0.1),
}


@pytest.mark.parametrize("rule", RULES)
def test_slices_step_as_the_whole(rule: OptimizerType) -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=103).astype(np.float32)
    spec = OptimizerSpec(type=rule, learning_rate=0.1)
    edges = [dense_slice(server, 3, 103) for server in range(3)]
    slices = [DenseSlice(values[start:stop], spec) for start, stop in edges]
    whole = DenseSlice(values, spec)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = REFERENCE[rule](parameter)
    for _ in range(5):
        gradients = generator.normal(size=103).astype(np.float32)
        whole.step(gradients)
        parameter.grad = torch.from_numpy(gradients)
        optimizer.step()
        for part, (start, stop) in zip(slices, edges, strict=True):
            part.step(gradients[start:stop])
    np.testing.assert_array_equal(np.concatenate([part.values for part in slices]), whole.values)
    # torch rounds a product and its sum at once where the machine can
    np.testing.assert_allclose(whole.values, parameter.detach().numpy(), rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("rule", RULES)
def test_a_restored_slice_goes_on_as_if_nothing_had_happened(rule: OptimizerType) -> None:
    generator = np.random.default_rng(2)
    values = generator.normal(size=17).astype(np.float32)
    gradients = generator.normal(size=(6, 17)).astype(np.float32)
    spec = OptimizerSpec(type=rule, learning_rate=0.1)
    steady, interrupted = DenseSlice(values, spec), DenseSlice(values, spec)
    for gradient in gradients[:3]:
        steady.step(gradient.copy())
        interrupted.step(gradient.copy())
    restored = DenseSlice(np.zeros(17, dtype=np.float32), spec)
    restored.restore(interrupted.state())
    for gradient in gradients[3:]:
        steady.step(gradient.copy())
        restored.step(gradient.copy())
    np.testing.assert_array_equal(restored.values, steady.values)


def test_gradients_of_another_length_are_refused() -> None:
    part = DenseSlice(np.zeros(8, dtype=np.float32), OptimizerSpec(type=OptimizerType.SGD, learning_rate=0.1))
    with pytest.raises(ValueError, match=r"gradients are float32\[8\], not float32\(7,\)"):
        part.step(np.zeros(7, dtype=np.float32))


def test_a_rule_for_rows_alone_steps_no_dense_parameters() -> None:
    with pytest.raises(ValueError, match="FTRL does not step dense parameters"):
        DenseSlice(np.zeros(8, dtype=np.float32), OptimizerSpec(type=OptimizerType.FTRL, learning_rate=0.1))
