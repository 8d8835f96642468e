from hypothesis import given, settings
from hypothesis import strategies as st

from emberscale_api import routing
from emberscale_trainer.table import hashing


@given(key=st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None)  # the first call compiles
def test_the_compiled_hash_is_the_one_that_routing_uses(key: int) -> None:
    assert hashing.mix64(key) == hashing.as_signed(routing.mix64(key))
    assert hashing.mix64(key) & hashing.BUCKET_MASK == routing.bucket_of(key)
