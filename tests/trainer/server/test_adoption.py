"""Batches that only a part of a server's rows has, and the memory that adopted rows take."""

from collections.abc import Set

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.server.cores import header, push, serving

from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_api.wire import Flag, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.adoption import bytes_to_adopt, combined
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assignment, ServerCore
from moves import table_of


def share(number: int, shares: int) -> Ownership:
    """One of several equal shares of everything."""
    return Ownership(np.arange(BUCKETS) % shares == number, np.arange(DENSE_PIECES) % shares == number)


def record(batches: Set[int]) -> AppliedBatches:
    applied = AppliedBatches()
    for batch in batches:
        applied.record(0, batch)
    return applied


@given(st.lists(st.sets(st.integers(0, 20)), min_size=1, max_size=3))
def test_each_batch_is_known_for_the_rows_that_have_it(have: list[set[int]]) -> None:
    on_all, on_any = set(range(21)).intersection(*have), set[int]().union(*have)
    owned = [share(number, len(have)) for number in range(len(have))]
    common, partly = combined([(part, record(batches)) for part, batches in zip(owned, have, strict=True)])
    everything = share(0, 1)
    assert common.lacking([(0, 0, 21)]) == [(0, batch) for batch in range(21) if batch not in on_all]
    assert len(partly) == len(on_any) - len(on_all)
    for batch in on_any - on_all:
        lacking = partly.lacking((0, batch), everything)
        for part, batches in zip(owned, have, strict=True):
            assert bool(lacking.within(part)) == (batch not in batches)


def adopting(own: set[int], rebuilt: set[int]) -> ServerCore:
    """A core that has applied batches to its own half, and adopts the other half with the batches in that."""
    core = serving()
    for batch in own:
        push(core, header(batch))
    core.prepare(7, 1, table_of(2), 0, 0.0, lost=(1,))
    core.switch(1, 7, 7, AppliedBatches(), None, 0.0, [(share(1, 2), record(rebuilt))])
    return core


def test_what_all_rows_have_is_repeated_and_what_only_some_have_is_completed() -> None:
    core = adopting({0, 1}, {0, 2})
    assert push(core, header(0, version=2)) is Status.REPEATED
    for batch in (1, 2):
        assert core.lacking(header(batch, version=2)) is not None
        assert push(core, header(batch, version=2)) is Status.OK
        assert core.lacking(header(batch, version=2)) is None
        assert push(core, header(batch, version=2)) is Status.REPEATED
    assert core.is_uniform
    assert core.applied.ranges(0) == [(0, 3)]


def test_a_round_with_such_a_batch_is_split() -> None:
    core = adopting({0, 1}, {0})
    request = header(1, version=2)._replace(flags=Flag.ROUND, batches=2)
    assert push(core, request) is Status.PARTIAL


def test_no_barrier_is_held_until_all_rows_have_the_same_batches() -> None:
    core = adopting({0, 1}, {0})
    with pytest.raises(NotHeldError, match="some rows lack 1 batch that others have"):
        core.hold(1, 2, 9, 10.0, 0.0)
    push(core, header(1, version=2))
    assert core.hold(1, 2, 9, 10.0, 0.0).ranges(0) == [(0, 2)]


def test_rows_are_not_adopted_without_the_batches_in_them() -> None:
    core, wanted = ServerCore(), Assignment(1, 1, "")
    core.assign(wanted)
    core.adopt(wanted, share(0, 2), AppliedBatches(), None)
    core.prepare(7, 1, table_of(2), 0, 0.0, lost=(1,))
    with pytest.raises(NotHeldError, match="does not say which batches the adopted rows have"):
        core.switch(1, 7, 7, AppliedBatches(), None, 0.0)
    assert core.known == (1, 1)


def test_adopted_rows_take_memory_in_proportion_to_buckets_and_parity_with_fewer_servers_takes_more() -> None:
    own, gained = share(0, 4), share(1, 4)
    assert bytes_to_adopt(1000, own, gained, servers=2, parity=0, blocks=0) == 1000
    assert bytes_to_adopt(1000, own, gained, servers=3, parity=1, blocks=333) == 1000 + 2000 // 2 - 333
    assert bytes_to_adopt(1000, own, gained, servers=1, parity=1, blocks=500) == 1000
