"""Keys that the index cannot tell apart by what it keeps of their hashes."""

from typing import Any

import numpy as np
import pytest

from emberscale_api.routing import MIX_1, MIX_2, bucket_of, mix64
from emberscale_trainer.table import TableStore
from emberscale_trainer.table.hashing import as_signed

MASK = (1 << 64) - 1


def unshift(value: int, bits: int) -> int:
    """The x with `x ^ (x >> bits) == value`."""
    result = value
    for _ in range(64 // bits):
        result = value ^ (result >> bits)
    return result


def key_with_hash(value: int) -> int:
    value = unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & MASK
    return as_signed(unshift(value, 30))


# the last probes from the end of the index into its beginning
@pytest.mark.parametrize("fingerprint", [0, 0x1234_5678, 0xFFFF_FFFF])
def test_keys_with_one_fingerprint_in_one_bucket_are_told_apart(
    make_spec: Any, pull: Any, push: Any, initial_weights: Any, fingerprint: int
) -> None:
    keys = [key_with_hash(fingerprint << 32 | middle << 10 | 77) for middle in range(300)]
    assert {mix64(key) >> 32 for key in keys} == {fingerprint}
    assert {bucket_of(key) for key in keys} == {77}
    spec = make_spec(dimension=3, learning_rate=1.0)
    store = TableStore([spec])
    known, unknown = keys[:250], keys[250:]
    expected = np.array([initial_weights(spec, key) for key in keys])
    push(store, (known, np.repeat(np.arange(250), 3)))
    stepped = expected[:250] - np.arange(250, dtype=np.float32)[:, None]
    assert np.array_equal(pull(store, known[::-1]).reshape(-1, 3), stepped[::-1])
    assert np.array_equal(pull(store, unknown).reshape(-1, 3), expected[250:])
    assert store.rows() == {"C1": 250}
