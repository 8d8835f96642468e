"""The weights that an id begins with, of torch's own operations: what evaluation answers for ids never trained on.

The same numbers as `emberscale_trainer.table.initializers`, which says how they are made.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emberscale_api.job import TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import MIX_1, MIX_2
from emberscale_trainer.table.hashing import as_signed
from emberscale_trainer.table.initializers import GAMMA, table_seed

_HALF = 0xFFFFFFFF
_UNIT = 2.0**-32


class InitialWeights(nn.Module):
    """Of tables with one dimension and one initializer.

    `forward` takes ids int64 [n, tables] and returns float32 [n, tables, dimension].
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        super().__init__()
        self._initializer = specs[0].initializer
        self._dimension = specs[0].dimension
        steps = [as_signed(step * GAMMA & 2**64 - 1) for step in range(1, (self._dimension + 1) // 2 + 1)]
        self.register_buffer("_seeds", torch.tensor([table_seed(spec) for spec in specs]), persistent=False)
        self.register_buffer("_steps", torch.tensor(steps), persistent=False)
        self._seeds: Tensor
        self._steps: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        """Each id's first weights."""
        kind, scale = self._initializer.type, self._initializer.scale
        if kind is InitializerType.ZEROS:
            return torch.zeros(*ids.shape, self._dimension)
        streams = _mix64(_mix64(ids) ^ self._seeds)
        bits = _mix64(streams[:, :, None] + self._steps)
        low, high = (bits & _HALF).double(), _shift_right(bits, 32).double()
        if kind is InitializerType.UNIFORM:
            first = ((low + 0.5) * (2 * _UNIT) - 1.0) * scale
            second = ((high + 0.5) * (2 * _UNIT) - 1.0) * scale
        else:  # Box-Muller
            radius = torch.sqrt(-2.0 * torch.log((low + 1.0) * _UNIT)) * scale
            angle = high * (2.0 * math.pi * _UNIT)
            first, second = radius * torch.cos(angle), radius * torch.sin(angle)
        return torch.stack([first, second], dim=3).flatten(2)[:, :, : self._dimension].float()


def _mix64(value: Tensor) -> Tensor:
    """`routing.mix64` on the 64 bits of each int64; products wrap."""
    value = (value ^ _shift_right(value, 30)) * as_signed(MIX_1)
    value = (value ^ _shift_right(value, 27)) * as_signed(MIX_2)
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shifts in zeros, as for unsigned numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
