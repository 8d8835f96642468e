"""The hash of keys, as in `emberscale_api.routing`, and the parts that it is cut into.

Bits 0-9 are the bucket. Bits 32-63 are the fingerprint: a sub-index of 2^b entries is probed from its highest b bits.
"""

from emberscale_api.routing import BUCKETS, MIX_1, MIX_2
from emberscale_trainer.table.compiled import part
from emberscale_trainer.table.memory import shift_right

BUCKET_MASK = BUCKETS - 1


def as_signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_MIX_1 = as_signed(MIX_1)
_MIX_2 = as_signed(MIX_2)


@part
def mix64(key: int) -> int:
    """The finaliser of splitmix64, a bijection of 64-bit numbers; equals `routing.mix64` bit by bit."""
    value = (key ^ shift_right(key, 30)) * _MIX_1
    value = (value ^ shift_right(value, 27)) * _MIX_2
    return value ^ shift_right(value, 31)
