"""The dense parameters as rows of one more table: row p is piece p of the flat vector."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.table import optimizers

DENSE_TABLE = "(dense)"
"""What errors and files call the table."""


@dataclass(frozen=True, eq=False)
class DensePieces:
    """What a store needs to know of the dense parameters.

    * `initial`: float32 [DENSE_PIECES, piece length], what each piece begins with; zeros behind the last parameter.
    * `optimizer`: stepped as in torch.optim.
    * `parameters`: floats of the flat vector.
    """

    initial: NDArray[np.float32]
    optimizer: OptimizerSpec
    parameters: int

    @classmethod
    def of(cls, parameters: NDArray[np.float32], optimizer: OptimizerSpec) -> "DensePieces":
        """Cuts the flat vector of initial parameters. Raises ValueError for a rule that does not step dense ones."""
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
