"""Placements are complete, balanced and need few moves, whatever the placement before."""

from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from emberscale_api.routing import BUCKETS
from emberscale_jobmaster.placement import NOBODY, placed
from emberscale_trainer.partition import buckets_of

servers_and_owners = st.integers(1, 9).flatmap(
    lambda servers: st.tuples(st.just(servers), st.lists(st.integers(NOBODY, 11), max_size=80))
)


def counts(owners: tuple[int, ...], servers: int) -> list[int]:
    return [owners.count(server) for server in range(servers)]


def moves(before: list[int] | tuple[int, ...], after: tuple[int, ...]) -> int:
    return sum(one != other for one, other in zip(before, after, strict=True))


@given(servers_and_owners)
def test_equal_things_are_spread_evenly_with_as_few_moves_as_there_can_be(case: tuple[int, list[int]]) -> None:
    servers, before = case
    after = placed(before, servers)
    held = counts(after, servers)
    assert len(after) == len(before)
    assert sum(held) == len(before), "everything is owned once"
    assert max(held) - min(held) <= 1
    kept = sorted((before.count(server) for server in range(servers)), reverse=True)
    low, more = divmod(len(before), servers)
    most_kept = sum(min(own, low + (place < more)) for place, own in enumerate(kept))
    assert moves(before, after) == len(before) - most_kept


@given(servers_and_owners, st.data())
def test_limits_are_kept_within_one_thing(case: tuple[int, list[int]], data: st.DataObject) -> None:
    servers, before = case
    limits = data.draw(st.lists(st.integers(1, 16), min_size=servers, max_size=servers))
    after = placed(before, servers, limits)
    assert all(0 <= owner < servers for owner in after)
    above = [
        held - len(before) * limit / sum(limits) for held, limit in zip(counts(after, servers), limits, strict=True)
    ]
    assert max(above) - min(above) <= 1 + 1e-6
    assert placed(after, servers, limits) == after, "what is placed stays"


def test_a_first_placement_keeps_neighbours_together() -> None:
    after = placed([NOBODY] * 64, 3)
    assert sum(one != other for one, other in pairwise(after)) <= 3


def test_one_more_server_takes_only_its_share() -> None:
    before = placed([NOBODY] * 1024, 2)
    after = placed(before, 3)
    assert counts(after, 3) in ([342, 341, 341], [341, 342, 341], [341, 341, 342])
    assert moves(before, after) == counts(after, 3)[2]
    assert all(owner in (2, was) for was, owner in zip(before, after, strict=True))


def test_a_server_that_goes_gives_what_it_has_and_nobody_else_gives() -> None:
    before = placed([NOBODY] * 1024, 3)
    after = placed(before, 2)
    assert moves(before, after) == counts(before, 3)[2]


def test_a_server_with_the_limit_zero_owns_nothing() -> None:
    before = placed([NOBODY] * 1024, 3)
    after = placed(before, 3, limits=[1, 0, 1])
    assert counts(after, 3) == [512, 0, 512]
    assert moves(before, after) == counts(before, 3)[1]
    back = placed(after, 3)
    assert moves(after, back) == counts(back, 3)[1]


@pytest.mark.parametrize("arguments", [([0], 0), ([0], 1, [1, 1]), ([0], 2, [0, 0]), ([0], 2, [2, -1])])
def test_what_makes_no_sense_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match="expected a"):
        placed(*arguments)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("servers", [2, 3, 4, 8])
def test_hot_rows_load_no_server_above_the_others(servers: int) -> None:
    """A worker asks once a batch for a row, however many of the batch's 512 records name it."""
    owners = np.array(placed([NOBODY] * BUCKETS, servers))
    generator = np.random.default_rng(0)
    requests = np.zeros(servers)
    for _ in range(200):
        ids = np.minimum(generator.zipf(1.1, size=(512, 26)), 1 << 20) + np.arange(26) * (1 << 24)
        requests += np.bincount(owners[buckets_of(np.unique(ids).astype(np.int64))], minlength=servers)
    assert requests.max() < 1.05 * requests.mean()
