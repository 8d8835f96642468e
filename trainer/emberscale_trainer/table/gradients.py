"""Gradients that must not reach a row: one NaN spreads to whatever it meets, and into every checkpoint that is kept."""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.compiled import entry
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.table.memory import address_of, float32, load_float32
from emberscale_trainer.table.vector import VECTOR_BYTES, load8, splat8, sum8


class NonFiniteGradientError(ValueError):
    """A gradient is NaN or infinite; stepping by it would only spread it."""


def require_finite(gradients: NDArray[np.float32], of: str) -> None:
    """Raises NonFiniteGradientError if any of `gradients`, a contiguous float32 vector, is NaN or infinite."""
    if not _all_finite(address_of(gradients), len(gradients)):
        where = int(np.argmin(np.isfinite(gradients)))
        raise NonFiniteGradientError(f"gradient {where} of {len(gradients)} of the {of} is {gradients[where]}")


@entry
def _all_finite(values: int, count: int) -> int:
    """1 if none of `count` float32 is NaN or infinite, else 0."""
    none = float32(0)
    first = second = third = fourth = splat8(none)  # four sums, so that one does not wait for the other
    step = 4 * VECTOR_BYTES
    whole = FLOAT_BYTES * count // step * step
    for at in range(values, values + whole, step):
        first = first + load8(at) * none  # NaN times 0 is NaN, and so is infinity times 0
        second = second + load8(at + VECTOR_BYTES) * none
        third = third + load8(at + 2 * VECTOR_BYTES) * none
        fourth = fourth + load8(at + 3 * VECTOR_BYTES) * none
    total = sum8((first + second) + (third + fourth))
    for at in range(values + whole, values + FLOAT_BYTES * count, FLOAT_BYTES):
        total += load_float32(at) * none
    return 1 if total == 0 else 0
