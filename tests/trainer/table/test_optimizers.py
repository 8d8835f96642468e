from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from emberscale_api.job import OptimizerType
from emberscale_trainer.table import TableStore

STEPS = 12
KEYS = [4, -9, 2**62, 17, 0]
# with and without a tail that does not fill a register
DIMENSIONS = [1, 5, 8, 16, 27]

Pull = Callable[..., NDArray[np.float32]]
Push = Callable[..., None]
Rows = Callable[..., dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]]]


def gradients(dimension: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(5)
    return [random.standard_normal((len(KEYS), dimension)).astype(np.float32) for _ in range(STEPS)]


@pytest.mark.parametrize("dimension", DIMENSIONS)
@pytest.mark.parametrize(
    ("optimizer", "parameters", "reference"),
    [
        (OptimizerType.SGD, {"learning_rate": 0.3}, lambda weight: torch.optim.SGD([weight], lr=0.3)),
        (
            OptimizerType.MOMENTUM,
            {"learning_rate": 0.1, "momentum": 0.8},
            lambda weight: torch.optim.SGD([weight], lr=0.1, momentum=0.8),
        ),
        (
            OptimizerType.ADAGRAD,
            {"learning_rate": 0.1, "epsilon": 1e-6, "initial_accumulator": 0.5},
            lambda weight: torch.optim.Adagrad([weight], lr=0.1, eps=1e-6, initial_accumulator_value=0.5),
        ),
        (
            OptimizerType.ADAM,
            {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
            lambda weight: torch.optim.SparseAdam([weight], lr=0.05, betas=(0.8, 0.99), eps=1e-7),
        ),
    ],
    ids=["SGD", "Momentum", "Adagrad", "Adam"],
)
def test_rows_that_are_all_touched_step_as_in_torch(
    make_spec: Any,
    pull: Pull,
    push: Push,
    optimizer: OptimizerType,
    parameters: dict[str, float],
    reference: Callable[[torch.Tensor], torch.optim.Optimizer],
    dimension: int,
) -> None:
    store = TableStore([make_spec(dimension=dimension, optimizer=optimizer, **parameters)])
    weight = torch.nn.Parameter(torch.from_numpy(pull(store, KEYS).reshape(len(KEYS), dimension)))
    torch_optimizer = reference(weight)
    every_row = torch.arange(len(KEYS)).unsqueeze(0)
    for gradient in gradients(dimension):
        dense = torch.from_numpy(gradient)
        sparse = torch.sparse_coo_tensor(every_row, dense, dense.shape, is_coalesced=True, check_invariants=False)
        weight.grad = sparse if optimizer is OptimizerType.ADAM else dense
        torch_optimizer.step()
        push(store, (KEYS, gradient))
    np.testing.assert_allclose(pull(store, KEYS).reshape(len(KEYS), dimension), weight.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_row_wise_adagrad_adds_the_mean_square_to_one_accumulator(
    make_spec: Any, pull: Pull, push: Push, rows_of: Rows, dimension: int
) -> None:
    spec = make_spec(
        dimension=dimension,
        optimizer=OptimizerType.ROW_WISE_ADAGRAD,
        learning_rate=0.1,
        epsilon=1e-5,
        initial_accumulator=0.25,
    )
    store = TableStore([spec])
    weights = pull(store, KEYS).reshape(len(KEYS), dimension).astype(np.float64)
    accumulators = np.full(len(KEYS), 0.25)
    for gradient in gradients(dimension):
        push(store, (KEYS, gradient))
        accumulators += np.square(gradient, dtype=np.float64).mean(axis=1)
        weights -= 0.1 * gradient / (np.sqrt(accumulators) + 1e-5)[:, None]
    rows = rows_of(store)
    np.testing.assert_allclose([rows[key][0] for key in KEYS], weights, atol=2e-6)
    np.testing.assert_allclose([rows[key][1][0] for key in KEYS], accumulators, rtol=1e-6)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_ftrl_follows_the_algorithm_from_the_initial_weights(
    make_spec: Any, pull: Pull, push: Push, dimension: int
) -> None:
    alpha, beta, l1, l2 = 0.2, 0.7, 1.0, 0.05
    spec = make_spec(
        dimension=dimension, optimizer=OptimizerType.FTRL, learning_rate=alpha, ftrl_beta=beta, l1=l1, l2=l2, scale=0.5
    )
    store = TableStore([spec])
    weights = pull(store, KEYS).reshape(len(KEYS), dimension).astype(np.float64)
    n = np.zeros_like(weights)
    zeros = 0
    z = -weights * (beta / alpha + l2) - np.sign(weights) * l1
    for gradient in gradients(dimension):
        push(store, (KEYS, gradient))
        sigma = (np.sqrt(n + np.square(gradient)) - np.sqrt(n)) / alpha
        z += gradient - sigma * weights
        n += np.square(gradient, dtype=np.float64)
        shrunk = np.where(np.abs(z) <= l1, 0.0, z - np.sign(z) * l1)
        weights = -shrunk / ((beta + np.sqrt(n)) / alpha + l2)
        zeros += int(np.count_nonzero(weights == 0))
    assert zeros  # l1 has an effect
    np.testing.assert_allclose(pull(store, KEYS).reshape(len(KEYS), dimension), weights, atol=3e-6)


def test_a_zero_gradient_leaves_a_fresh_ftrl_row_where_it_is(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(dimension=9, optimizer=OptimizerType.FTRL, l1=0.01, l2=0.1)])
    before = pull(store, KEYS)
    push(store, (KEYS, np.zeros((len(KEYS), 9))))
    np.testing.assert_allclose(pull(store, KEYS), before, rtol=1e-5)


def test_adam_corrects_the_bias_by_the_steps_of_the_row(make_spec: Any, pull: Pull, push: Push) -> None:
    """The first step of a row is the same, early or late in the training."""
    store = TableStore([make_spec(dimension=8, optimizer=OptimizerType.ADAM, learning_rate=0.01)])
    gradient = np.linspace(-1, 1, 8, dtype=np.float32)
    early, late = pull(store, [1]), pull(store, [2])
    for _ in range(STEPS):
        push(store, ([1], gradient))
    push(store, ([2], gradient))
    np.testing.assert_allclose(pull(store, [2]) - late, -0.01 * np.sign(gradient), atol=1e-6)
    assert np.abs(pull(store, [1]) - early).min() > 0.05


@pytest.mark.parametrize("optimizer", list(OptimizerType))
def test_a_row_that_gets_no_gradient_does_not_change(
    make_spec: Any, pull: Pull, push: Push, rows_of: Rows, optimizer: OptimizerType
) -> None:
    store = TableStore([make_spec(dimension=11, optimizer=optimizer, initial_accumulator=0.1)])
    push(store, ([1, 2], np.ones(22)))
    before = rows_of(store)[2]
    for gradient in gradients(11):
        push(store, ([1], gradient[0]))
    weights, state, pushes = rows_of(store)[2]
    assert np.array_equal(weights, before[0])
    assert np.array_equal(state, before[1])
    assert pushes == before[2] == 1
