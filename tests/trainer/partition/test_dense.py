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
    whole = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = REFERENCE[rule](whole)
    for _ in range(5):
        gradients = generator.normal(size=103).astype(np.float32)
        whole.grad = torch.from_numpy(gradients)
        optimizer.step()
        for part, (start, stop) in zip(slices, edges, strict=True):
            part.step(gradients[start:stop].copy())
    np.testing.assert_array_equal(np.concatenate([part.values for part in slices]), whole.detach().numpy())


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
