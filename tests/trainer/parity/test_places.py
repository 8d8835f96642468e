"""The places of rows, as numbers that name table, stripe and place."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from emberscale_trainer.parity.places import place_numbers, split_places
from emberscale_trainer.table.layout import RowLayout

LAYOUTS = [RowLayout(4, 0), RowLayout(16, 16), RowLayout(300, 300)]
PLACES = st.integers(0, len(LAYOUTS) - 1).flatmap(
    lambda table: st.tuples(st.just(table), st.integers(0, 3), st.integers(0, LAYOUTS[table].segment_rows - 1))
)


@given(st.sets(PLACES))
def test_numbers_are_split_into_what_they_were_made_of(places: set[tuple[int, int, int]]) -> None:
    numbers = [place_numbers(table, stripe, np.array([place]), LAYOUTS[table]) for table, stripe, place in places]
    parts = [*split_places(np.concatenate([*numbers, *numbers, np.zeros(0, np.int64)]), LAYOUTS)]
    assert [(table, stripe, place) for table, stripe, found in parts for place in found.tolist()] == sorted(places)
    assert len({(table, stripe) for table, stripe, _ in parts}) == len(parts)


@pytest.mark.parametrize("number", [len(LAYOUTS) << 48, -1])
def test_a_table_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="there is no table"):
        [*split_places(np.array([number]), LAYOUTS)]


def test_a_place_that_does_not_exist_is_refused() -> None:
    layout = next(one for one in LAYOUTS if one.segment_rows < 1 << one.slot_bits)
    number = place_numbers(LAYOUTS.index(layout), 0, np.array([layout.segment_rows]), layout)
    with pytest.raises(ValueError, match=f"has {layout.segment_rows} places"):
        [*split_places(number, LAYOUTS)]
