"""The update rules, fused: one pass over a row's weights and state for one gradient.

Each rule is a function of elements, `rule(weight, state..., gradient, parameters) -> (weight, state...)`, which serves
eight elements at once and one alone (see `vector`). The semantics are those of torch.optim, applied to a row when a
gradient for it arrives; a row that gets none does not change:

* SGD, Momentum, Adagrad: as torch.optim.SGD (no dampening) and torch.optim.Adagrad.
* Adam: as torch.optim.SparseAdam, but the bias correction counts the steps of the row, not of the table. In the dense
  table: as torch.optim.Adam, which adds epsilon after the correction.
* RowWiseAdagrad: one accumulator per row, which takes the mean of the squared gradient.
* FTRL: FTRL-Proximal with per-coordinate rates (McMahan et al., 2013, algorithm 1). A new row starts from the state
  that the algorithm would have at the initial weights, so that the first gradient does not discard them.
"""

import math
from collections.abc import Callable
from typing import Any

from emberscale_api.job import OptimizerSpec, OptimizerType
from emberscale_trainer.jit import part, routine
from emberscale_trainer.jit.memory import float32, load_float32, load_float64, store_float32
from emberscale_trainer.jit.vector import (
    VECTOR_BYTES,
    WHOLE,
    greatest,
    least,
    load8,
    root,
    splat8,
    store8,
    sum8,
)
from emberscale_trainer.table.layout import FLOAT_BYTES

SGD, MOMENTUM, ADAGRAD, ROW_WISE_ADAGRAD, ADAM, FTRL, DENSE_ADAM = range(7)

CODES = {
    OptimizerType.SGD: SGD,
    OptimizerType.MOMENTUM: MOMENTUM,
    OptimizerType.ADAGRAD: ADAGRAD,
    OptimizerType.ROW_WISE_ADAGRAD: ROW_WISE_ADAGRAD,
    OptimizerType.ADAM: ADAM,
    OptimizerType.FTRL: FTRL,
}

DENSE_CODES = {
    OptimizerType.SGD: SGD,
    OptimizerType.MOMENTUM: MOMENTUM,
    OptimizerType.ADAGRAD: ADAGRAD,
    OptimizerType.ADAM: DENSE_ADAM,
}
"""The rules that step dense parameters, each as in torch.optim."""


def parameters_of(spec: OptimizerSpec) -> tuple[float, ...]:
    """Returns the numbers of a specification in the order in which the kernels read them, at most PARAMETERS."""
    rate = spec.learning_rate
    return {
        OptimizerType.SGD: (rate,),
        OptimizerType.MOMENTUM: (rate, spec.momentum),
        OptimizerType.ADAGRAD: (rate, spec.epsilon, spec.initial_accumulator),
        OptimizerType.ROW_WISE_ADAGRAD: (rate, spec.epsilon, spec.initial_accumulator),
        OptimizerType.ADAM: (rate, spec.epsilon, spec.beta1, spec.beta2),
        OptimizerType.FTRL: (1 / rate, spec.l1, spec.ftrl_beta / rate + spec.l2),
    }[spec.type]


@part
def _parameter(parameters: int, number: int) -> float:
    return float32(load_float64(parameters + 8 * number))


@part
def sgd(weight: float, gradient: float, rate: float) -> float:
    """w - rate*g"""
    return weight - rate * gradient


@part
def momentum(weight: float, velocity: float, gradient: float, parameters: tuple[float, float]) -> tuple[float, float]:
    """v = m*v + g; w - rate*v"""
    rate, decay = parameters
    velocity = decay * velocity + gradient
    return weight - rate * velocity, velocity


@part
def adagrad(weight: float, squares: float, gradient: float, parameters: tuple[float, float]) -> tuple[float, float]:
    """s = s + g^2; w - rate*g / (sqrt(s) + epsilon)"""
    rate, epsilon = parameters
    squares = squares + gradient * gradient
    return weight - rate * gradient / (root(squares) + epsilon), squares


@part
def adam(
    weight: float, mean: float, square: float, gradient: float, parameters: tuple[float, float, float, float]
) -> tuple[float, float, float]:
    """Exponential means of g and g^2; w - rate*mean / (sqrt(square) + epsilon), with a bias-corrected rate."""
    rate, epsilon, fresh_1, fresh_2 = parameters
    mean = mean + (gradient - mean) * fresh_1
    square = square + (gradient * gradient - square) * fresh_2
    return weight - rate * mean / (root(square) + epsilon), mean, square


@part
def ftrl(
    weight: float, z: float, n: float, gradient: float, parameters: tuple[float, float, float]
) -> tuple[float, float, float]:
    """z = z + g - w*(sqrt(n + g^2) - sqrt(n))/alpha; n = n + g^2; w = -shrink(z, l1) / ((beta + sqrt(n))/alpha + l2)"""
    inverse_alpha, l1, base = parameters
    grown = n + gradient * gradient
    grown_root = root(grown)
    z = z + gradient - (grown_root - root(n)) * inverse_alpha * weight
    return (greatest(least(z, l1), -l1) - z) / (grown_root * inverse_alpha + base), z, grown


@part
def apply_sgd(weights: int, gradient: int, dimension: int, rate: float) -> None:
    """Steps one row by SGD."""
    whole = FLOAT_BYTES * (dimension & WHOLE)
    for at in range(0, whole, VECTOR_BYTES):
        store8(weights + at, sgd(load8(weights + at), load8(gradient + at), rate))
    for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
        store_float32(weights + at, sgd(load_float32(weights + at), load_float32(gradient + at), rate))


def _over_one_state(rule: Callable[..., tuple[float, float]]) -> Callable[[int, int, int, Any], None]:
    """Makes a kernel part that applies a rule to weights at an address and one state float per weight behind them."""

    @part
    def apply(weights: int, gradient: int, dimension: int, parameters: Any) -> None:
        state = weights + FLOAT_BYTES * dimension
        whole = FLOAT_BYTES * (dimension & WHOLE)
        for at in range(0, whole, VECTOR_BYTES):
            weight8, state8 = rule(load8(weights + at), load8(state + at), load8(gradient + at), parameters)
            store8(weights + at, weight8)
            store8(state + at, state8)
        for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
            weight1, state1 = rule(
                load_float32(weights + at), load_float32(state + at), load_float32(gradient + at), parameters
            )
            store_float32(weights + at, weight1)
            store_float32(state + at, state1)

    return apply


def _over_two_states(rule: Callable[..., tuple[float, float, float]]) -> Callable[[int, int, int, Any], None]:
    """The same for rules with two state floats per weight."""

    @part
    def apply(weights: int, gradient: int, dimension: int, parameters: Any) -> None:
        first = weights + FLOAT_BYTES * dimension
        second = first + FLOAT_BYTES * dimension
        whole = FLOAT_BYTES * (dimension & WHOLE)
        for at in range(0, whole, VECTOR_BYTES):
            weight8, first8, second8 = rule(
                load8(weights + at), load8(first + at), load8(second + at), load8(gradient + at), parameters
            )
            store8(weights + at, weight8)
            store8(first + at, first8)
            store8(second + at, second8)
        for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
            weight1, first1, second1 = rule(
                load_float32(weights + at),
                load_float32(first + at),
                load_float32(second + at),
                load_float32(gradient + at),
                parameters,
            )
            store_float32(weights + at, weight1)
            store_float32(first + at, first1)
            store_float32(second + at, second1)

    return apply


apply_momentum = _over_one_state(momentum)
apply_adagrad = _over_one_state(adagrad)
_apply_adam = _over_two_states(adam)
apply_ftrl = _over_two_states(ftrl)


@part
def _mean_square(gradient: int, dimension: int) -> float:
    whole = FLOAT_BYTES * (dimension & WHOLE)
    lanes = splat8(float32(0))
    for at in range(0, whole, VECTOR_BYTES):
        values = load8(gradient + at)
        lanes = lanes + values * values
    total = sum8(lanes)
    for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
        value = load_float32(gradient + at)
        total += value * value
    return total / float32(dimension)


@part
def apply_row_wise_adagrad(weights: int, gradient: int, dimension: int, parameters: tuple[float, float]) -> None:
    """Steps one row: s = s + mean(g^2); w - rate*g / (sqrt(s) + epsilon)."""
    rate, epsilon = parameters
    squares_at = weights + FLOAT_BYTES * dimension
    squares = load_float32(squares_at) + _mean_square(gradient, dimension)
    store_float32(squares_at, squares)
    apply_sgd(weights, gradient, dimension, rate / (root(squares) + epsilon))


def _adam_stepper(*, corrects_epsilon: bool) -> Callable[[int, int, int, tuple[float, float, float, float]], None]:
    @part
    def apply(weights: int, gradient: int, dimension: int, parameters: tuple[float, float, float, float]) -> None:
        rate, epsilon, beta_1, beta_2 = parameters
        steps_at = weights + 3 * FLOAT_BYTES * dimension
        steps = load_float32(steps_at) + float32(1)
        store_float32(steps_at, steps)
        correction = math.sqrt(1.0 - beta_2**steps)
        corrected = rate * correction / (1.0 - beta_1**steps)
        if corrects_epsilon:
            epsilon *= correction
        step = (float32(corrected), float32(epsilon), float32(1.0 - beta_1), float32(1.0 - beta_2))
        _apply_adam(weights, gradient, dimension, step)

    return apply


apply_adam = _adam_stepper(corrects_epsilon=False)
"""Steps one row by Adam, counting its steps in the last float of the state."""

apply_dense_adam = _adam_stepper(corrects_epsilon=True)
"""The same, but the mean square is corrected for bias before epsilon is added to its root."""


@part
def rate_of(parameters: int) -> float:
    """Reads the parameter of SGD."""
    return _parameter(parameters, 0)


@part
def two_parameters(parameters: int) -> tuple[float, float]:
    """Reads the parameters of Momentum, Adagrad and RowWiseAdagrad."""
    return _parameter(parameters, 0), _parameter(parameters, 1)


@part
def three_parameters(parameters: int) -> tuple[float, float, float]:
    """Reads the parameters of FTRL."""
    return _parameter(parameters, 0), _parameter(parameters, 1), _parameter(parameters, 2)


@part
def adam_parameters(parameters: int) -> tuple[float, float, float, float]:
    """Reads the parameters of Adam, in float64 because powers of the betas need it."""
    return (
        load_float64(parameters),
        load_float64(parameters + 8),
        load_float64(parameters + 16),
        load_float64(parameters + 24),
    )


@routine
def initial_state(optimizer: int, weights: int, dimension: int, parameters: int) -> None:
    """Writes the state of a new row behind its weights; the row's other bytes are zero already."""
    state = weights + FLOAT_BYTES * dimension
    if optimizer == ROW_WISE_ADAGRAD:
        store_float32(state, _parameter(parameters, 2))
    elif optimizer == ADAGRAD:
        for element in range(dimension):
            store_float32(state + FLOAT_BYTES * element, _parameter(parameters, 2))
    elif optimizer == FTRL:
        l1, base = _parameter(parameters, 1), _parameter(parameters, 2)
        for element in range(dimension):
            weight = load_float32(weights + FLOAT_BYTES * element)
            shrunk = weight * base
            if weight > 0:
                shrunk += l1
            elif weight < 0:
                shrunk -= l1
            store_float32(state + FLOAT_BYTES * element, -shrunk)
