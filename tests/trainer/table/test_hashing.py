from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from buckets import bucket_of
from emberscale_api import routing
from emberscale_trainer.table import index

compiled_hash = cast(Callable[[int], int], njit(lambda key: index.mix64(key)))


@given(key=st.integers(-(2**63), 2**63 - 1))
def test_the_compiled_hash_is_the_one_that_routing_uses(key: int) -> None:
    assert compiled_hash(key) == index.as_signed(routing.mix64(key))
    assert compiled_hash(key) & index.BUCKET_MASK == bucket_of(key)
