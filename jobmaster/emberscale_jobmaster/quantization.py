"""Chooses the bits in which a checkpoint stores weights, so that restores cost no significant accuracy.

Only checkpoints quantise weights, so only a restore costs accuracy, and the costs of restores add up. Check-N-Run
(section 5.2.1) measured how many restores stay below a loss of 0.01% over the life of a job: RESTORES. It takes the
fewest bits that allow the restores it expects, and 8 bits after more than that. This module uses one budget instead: a
restore spends 1 / RESTORES[bits] of it, and the next checkpoint gets the fewest bits with which the expected restores
do not exceed the rest.
"""

from collections.abc import Mapping
from types import MappingProxyType

from emberscale_api.job import Quantization

RESTORES: Mapping[int, int] = MappingProxyType({2: 1, 3: 3, 4: 20, 8: 100})
"""By bits, how many restores of a job lose at most 0.01% of accuracy together."""

_MOST_BITS = max(RESTORES)
_ROUNDING = 1e-9

BELIEVED_BETWEEN_FAILURES = 86_400 / 0.015
"""Seconds between failures of one parameter server until the brain says more (DLRover-RM section 2.2)."""


def weight_bits(wanted: Quantization, restores: Mapping[int, int], expected: float) -> int:
    """Returns the bits of a weight in the next checkpoint; 0 stands for float32.

    * `restores`: the number of restores so far, by the bits of the restored weights.
    * `expected`: the number of restores still to come. At least one is assumed, as the checkpoint is useless otherwise.
    """
    match wanted:
        case Quantization.NONE:
            return 0
        case Quantization.AUTO:
            left = 1 - sum(count / RESTORES.get(bits, 1) for bits, count in restores.items())
            affordable = (
                bits for bits, allowed in RESTORES.items() if max(1.0, expected) / allowed <= left + _ROUNDING
            )
            return min(affordable, default=_MOST_BITS)
        case _:
            return int(wanted)


def expected_restores(seconds_left: float, servers: int, between_failures: float | None) -> float:
    """Returns the restores expected in `seconds_left` of training; `between_failures` is the brain's estimate."""
    return seconds_left / (between_failures or BELIEVED_BETWEEN_FAILURES / max(1, servers))
