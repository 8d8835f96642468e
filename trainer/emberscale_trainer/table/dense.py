"""The dense parameters as rows of one more table, where row p is piece p of the flat vector; the check of gradients.

A NaN spreads to every value that it meets, and into every checkpoint, so no gradient with a NaN may reach a row.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.errors import InvalidError
from emberscale_api.job import InitializerSpec, OptimizerSpec, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.jit import entry
from emberscale_trainer.jit.memory import address_of, float32, load_float32
from emberscale_trainer.jit.vector import VECTOR_BYTES, load8, splat8, sum8
from emberscale_trainer.table import optimizers
from emberscale_trainer.table.layout import FLOAT_BYTES

DENSE_TABLE = "(dense)"
"""The table's name in errors and files."""


@dataclass(frozen=True, eq=False)
class DensePieces:
    """A store's description of the dense parameters.

    * `initial`: float32 [DENSE_PIECES, piece length], the initial parameters; zeros behind the last one.
    * `optimizer`: stepped as in torch.optim.
    * `parameters`: floats of the flat vector.
    """

    initial: NDArray[np.float32]
    optimizer: OptimizerSpec
    parameters: int

    @classmethod
    def of(cls, parameters: NDArray[np.float32], optimizer: OptimizerSpec) -> "DensePieces":
        """Cuts the flat vector of initial parameters. Raises ValueError for a rule that cannot step dense ones."""
        if optimizer.type not in optimizers.DENSE_CODES:
            raise ValueError(f"{optimizer.type} does not step dense parameters")
        initial = np.zeros((DENSE_PIECES, piece_length(len(parameters))), np.float32)
        initial.reshape(-1)[: len(parameters)] = parameters
        return cls(initial, optimizer, len(parameters))

    def table(self, number: int) -> TableSpec:
        """The specification of the table, as number `number` of a store."""
        return TableSpec(
            number=number,
            name=DENSE_TABLE,
            column=-1,
            dimension=self.initial.shape[1],
            optimizer=self.optimizer,
            initializer=InitializerSpec(),
            seed=0,
        )


class NonFiniteGradientError(InvalidError):
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
