"""The initial weights of a new row.

They depend only on the seed, the number of the table, the key and the element: neither the order of insertion nor the
number of parameter servers matters. The generator is splitmix64 used by counter: element pair i of a row takes the two
halves of `mix64(stream + (i + 1) * GAMMA)`, where `stream = mix64(mix64(key) ^ table_seed)`.

The rows of the dense table begin with given weights: their pieces of the model's initial parameters.
"""

import math

from emberscale_api.job import TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import DENSE_PIECES
from emberscale_api.routing import mix64 as reference_mix64
from emberscale_trainer.jit import routine
from emberscale_trainer.jit.memory import copy, float32, shift_right, store_float32, zero
from emberscale_trainer.table.index import as_signed, mix64
from emberscale_trainer.table.layout import FLOAT_BYTES

ZEROS, UNIFORM, NORMAL, GIVEN = range(4)

CODES = {InitializerType.ZEROS: ZEROS, InitializerType.UNIFORM: UNIFORM, InitializerType.NORMAL: NORMAL}

GAMMA = 0x9E3779B97F4A7C15
"""The increment of splitmix64."""

_GAMMA = as_signed(GAMMA)
_HALF = 0xFFFFFFFF
_UNIT = 2.0**-32


def table_seed(spec: TableSpec) -> int:
    """Returns the signed 64-bit number that distinguishes the tables of a job, and jobs with different seeds."""
    return as_signed(reference_mix64(reference_mix64(spec.seed * GAMMA) + spec.number * GAMMA))


@routine
def initial_weights(
    target: int, dimension: int, initializer: int, scale: float, seed: int, key: int, key_hash: int
) -> None:
    """Writes `dimension` float32 to an address: uniform in [-scale, scale], normal(0, scale), zeros, or given ones.

    For GIVEN, `seed` is the address of float32[DENSE_PIECES, dimension]; keys that are no piece get zeros.
    """
    size = FLOAT_BYTES * dimension
    if initializer == ZEROS:
        zero(target, size)
        return
    if initializer == GIVEN:
        if 0 <= key < DENSE_PIECES:
            copy(target, seed + key * size, size)
        else:
            zero(target, size)
        return
    stream = mix64(key_hash ^ seed)
    for element in range(0, dimension, 2):
        stream += _GAMMA
        bits = mix64(stream)
        low, high = bits & _HALF, shift_right(bits, 32)
        if initializer == UNIFORM:
            first = ((low + 0.5) * (2 * _UNIT) - 1.0) * scale
            second = ((high + 0.5) * (2 * _UNIT) - 1.0) * scale
        else:  # Box-Muller
            radius = math.sqrt(-2.0 * math.log((low + 1.0) * _UNIT)) * scale
            angle = high * (2.0 * math.pi * _UNIT)
            first, second = radius * math.cos(angle), radius * math.sin(angle)
        store_float32(target + FLOAT_BYTES * element, float32(first))
        if element + 1 < dimension:
            store_float32(target + FLOAT_BYTES * (element + 1), float32(second))
