from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_trainer.data.order import EpochOrder

sizes = st.lists(st.integers(0, 50), max_size=20)
seeds = st.integers(0, (1 << 63) - 1)
epochs = st.integers(0, 1000)


def line_of(order: EpochOrder, start: int, stop: int) -> list[tuple[int, int]]:
    return [
        (span.block, record)
        for span in order.spans(start, stop)
        for record in order.permutation(span.block)[span.start : span.stop].tolist()
    ]


@given(sizes, seeds, epochs, st.booleans())
def test_every_record_stands_at_exactly_one_position(sizes: list[int], seed: int, epoch: int, enabled: bool) -> None:
    order = EpochOrder(sizes, seed, epoch, enabled)
    assert order.records == sum(sizes)
    expected = [(block, record) for block, size in enumerate(sizes) for record in range(size)]
    assert sorted(line_of(order, 0, order.records)) == expected


@given(sizes, seeds, epochs, st.booleans(), st.lists(st.integers(0, 1000), max_size=8))
def test_any_cut_of_the_positions_gives_the_same_line(
    sizes: list[int], seed: int, epoch: int, enabled: bool, cuts: list[int]
) -> None:
    whole = EpochOrder(sizes, seed, epoch, enabled)
    bounds = sorted({0, whole.records, *(cut for cut in cuts if cut <= whole.records)})
    parts = []
    for start, stop in pairwise(bounds):
        parts += line_of(EpochOrder(sizes, seed, epoch, enabled), start, stop)
    assert parts == line_of(whole, 0, whole.records)


@given(sizes, seeds, epochs)
def test_without_shuffling_positions_follow_the_files(sizes: list[int], seed: int, epoch: int) -> None:
    order = EpochOrder(sizes, seed, epoch, enabled=False)
    line = line_of(order, 0, order.records)
    assert line == sorted(line)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), seeds)
def test_a_block_is_left_only_when_it_is_used_up(sizes: list[int], seed: int) -> None:
    spans = list(EpochOrder(sizes, seed, 0, enabled=True).spans(0, sum(sizes)))
    assert sorted(span.block for span in spans) == list(range(len(sizes)))
    assert all((span.start, span.stop) == (0, sizes[span.block]) for span in spans)


def test_epochs_seeds_and_blocks_are_shuffled_differently() -> None:
    sizes = [1000] * 50
    orders = [EpochOrder(sizes, seed, epoch, True) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    block_orders = {tuple(span.block for span in order.spans(0, 50_000)) for order in orders}
    within = {tuple(order.permutation(block).tolist()) for order in orders for block in range(50)}
    assert len(block_orders) == len(orders)
    assert len(within) == 50 * len(orders)


def test_places_are_spread_evenly() -> None:
    """The mean displacement of a uniform permutation of n is (n^2 - 1) / (3 n)."""
    n = 20_000
    permutation = EpochOrder([n], 7, 3, True).permutation(0)
    assert np.abs(permutation - np.arange(n)).mean() == pytest.approx(n / 3, rel=0.03)
    assert abs(np.corrcoef(permutation[:-1], permutation[1:])[0, 1]) < 0.03


def test_the_order_never_changes_between_releases() -> None:
    """A job that resumes under a newer version must not repeat or skip records."""
    order = EpochOrder([5, 4, 6, 3], 42, 1, True)
    assert line_of(order, 0, 18) == [
        *((3, record) for record in (2, 1, 0)),
        *((2, record) for record in (5, 0, 3, 4, 1, 2)),
        *((1, record) for record in (3, 2, 0, 1)),
        *((0, record) for record in (0, 4, 1, 3, 2)),
    ]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 10)])
def test_positions_outside_of_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="within the epoch's 9"):
        list(EpochOrder([4, 5], 0, 0, True).spans(start, stop))


def test_the_blocks_of_a_chain_follow_each_other_as_they_lie() -> None:
    chains = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    orders = []
    for seed in range(5):
        order = EpochOrder([4] * 10, seed, 0, True, chains)
        blocks = [span.block for span in order.spans(0, 40)]
        assert sorted(blocks) == list(range(10))
        orders.append([chains[block] for block in blocks])
        for chain in range(4):
            found = [block for block in blocks if chains[block] == chain]
            place = blocks.index(found[0])
            assert blocks[place : place + len(found)] == sorted(found)
    assert len({tuple(order) for order in orders}) > 1


def test_blocks_that_are_chains_of_their_own_are_ordered_as_without_chains() -> None:
    sizes = [5, 0, 7, 3, 4]
    assert list(EpochOrder(sizes, 3, 1, True, range(5)).spans(0, 19)) == list(
        EpochOrder(sizes, 3, 1, True).spans(0, 19)
    )
