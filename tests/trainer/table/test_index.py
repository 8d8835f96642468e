"""Keys that share the part of their hashes that the index keeps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buckets import bucket_of
from emberscale_api.job import EvictionSpec, TableSpec
from emberscale_api.routing import MIX_1, MIX_2, mix64
from emberscale_trainer.table import TableStore
from emberscale_trainer.table.index import as_signed

MASK = (1 << 64) - 1


def unshift(value: int, bits: int) -> int:
    """Returns the x with `x ^ (x >> bits) == value`."""
    result = value
    for _ in range(64 // bits):
        result = value ^ (result >> bits)
    return result


def evicted_spec(make_spec: Any) -> TableSpec:
    """Returns a table with eviction, whose rows can be looked up by buckets."""
    spec: TableSpec = make_spec(dimension=1)
    return replace(spec, eviction=EvictionSpec(ttl_batches=1))


def pushes_by_key(store: TableStore, bucket: int) -> dict[int, int]:
    marks = store.marks_of_buckets(0, np.array([bucket]))
    return dict(marks[:, :2].tolist())


def key_with_hash(value: int) -> int:
    value = unshift(value, 31) * pow(MIX_2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(MIX_1, -1, 1 << 64) & MASK
    return as_signed(unshift(value, 30))


# the last fingerprint probes past the end of the index to its beginning
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


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_keys_that_leave_one_by_one_hide_no_other(make_spec: Any, data: st.DataObject) -> None:
    """The keys of the bucket probe past each other, some of them past the end of the index to its beginning."""
    fingerprints = [0, 1, 0x1000_0000, 0x7FFF_FFFF, 0xE000_0000, 0xF000_0000, 0xFFFF_FFFE, 0xFFFF_FFFF]
    keys = [key_with_hash(fingerprint << 32 | middle << 10 | 3) for fingerprint in fingerprints for middle in range(4)]
    store, held = TableStore([evicted_spec(make_spec)]), dict[int, int]()
    one, step = np.array([1], np.uint32), np.ones(1, np.float32)
    for key, push in data.draw(st.lists(st.tuples(st.sampled_from(keys), st.booleans()), max_size=120)):
        if push:
            store.push(one, np.array([key]), step)
            held[key] = held.get(key, 0) + 1
        else:
            assert store.retire(0, np.array([key])) == (held.pop(key, None) is not None)
        assert pushes_by_key(store, 3) == held
    for key in keys:  # each key is found, and has no second row
        store.push(one, np.array([key]), step)
        held[key] = held.get(key, 0) + 1
    assert pushes_by_key(store, 3) == held
