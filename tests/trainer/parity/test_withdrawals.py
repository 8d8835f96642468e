"""A row of a lost member can be decoded once all live members have withdrawn theirs at its place, and not before."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given
from numpy.typing import NDArray

from emberscale_trainer.parity import ParityLayout
from emberscale_trainer.parity.withdrawals import SlotNumbers, Withdrawals

PLACES, BITS, TABLES = 5, 3, 2
ROW_BYTES = 10
NUMBERS = [SlotNumbers(BITS, PLACES, ROW_BYTES)] * TABLES
HOLDER, LOST = 0, 1


def slot(number: int) -> int:
    """Returns the slot of which so many are below, as the end of what is withdrawn."""
    return number // PLACES << BITS | number % PLACES


class Rows:
    """What each live member has left in the parity, as a model: the places of stripes."""

    def __init__(self, layout: ParityLayout, counts: dict[int, list[int]]) -> None:
        self.layout = layout
        self.left = {
            (source, table, *self.place(source, table, number))
            for source, them in counts.items()
            for table, count in enumerate(them)
            for number in range(count)
        }

    def place(self, source: int, table: int, number: int) -> tuple[int, int]:
        return self.layout.stripe(source, table, number // PLACES), number % PLACES

    def are_alone(self, table: int, stripe: int, place: int) -> bool:
        return not any(one[1:] == (table, stripe, place) for one in self.left)


def decodes(layout: ParityLayout, stripes: int) -> list[tuple[int, int]]:
    lost = frozenset({LOST})
    return [
        (table, stripe)
        for table in range(TABLES)
        for stripe in range(stripes)
        if layout.lost_rows(lost, table, stripe) and layout.decoding_member(lost, table, stripe) == HOLDER
    ]


def array(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


@given(st.data(), st.integers(1, 2), st.integers(2, 6), st.integers(1, 5))
def test_places_are_found_once_and_as_soon_as_they_are_alone(
    data: st.DataObject, parity: int, members: int, most_width: int
) -> None:
    assume(members > parity)
    layout = ParityLayout(members, parity, most_width)
    sources = [member for member in range(members) if member not in (HOLDER, LOST)]
    counts = {one: [data.draw(st.integers(0, 30)) for _ in range(TABLES)] for one in sources}
    rows, withdrawals = Rows(layout, counts), Withdrawals(layout, NUMBERS)
    for source, them in counts.items():
        withdrawals.tell_ends(source, [slot(count) for count in them])
    stripes = decodes(layout, 10)
    withdrawals.begin(stripes)
    expected = {(table, stripe, place) for table, stripe in stripes for place in range(PLACES)}
    found: set[tuple[int, int, int]] = set()

    def check() -> None:
        while withdrawals.decodable.has_more:
            taken = withdrawals.decodable.take(most_bytes=3 * ROW_BYTES)
            assert sum(len(one.places) for one in taken) <= 3
            for one in taken:
                for place in one.places.tolist():
                    assert (one.table, one.stripe, place) not in found
                    found.add((one.table, one.stripe, place))
        assert found == {one for one in expected if rows.are_alone(*one)}

    check()
    for _ in range(data.draw(st.integers(0, 12)) if sources else 0):
        source, table = data.draw(st.sampled_from(sources)), data.draw(st.integers(0, TABLES - 1))
        if data.draw(st.booleans()):
            counts[source][table] = data.draw(st.integers(0, counts[source][table]))
            for number in range(counts[source][table], 31):
                rows.left.discard((source, table, *rows.place(source, table, number)))
            withdrawals.withdrew_to(source, [slot(count) for count in counts[source]])
        else:
            stripe = data.draw(st.integers(0, 9))
            places = sorted(data.draw(st.sets(st.integers(0, PLACES - 1))))
            if layout.segment(source, table, stripe) is not None:
                for place in places:
                    rows.left.discard((source, table, stripe, place))
            withdrawals.withdrew(source, table, stripe, array(*places))
        check()
    for source in sources:
        withdrawals.withdrew_to(source, [0] * TABLES)
    rows.left.clear()
    check()


def test_wanted_rows_come_first_and_once() -> None:
    """In a group of two, all rows can be decoded at once."""
    layout = ParityLayout(2)
    withdrawals = Withdrawals(layout, NUMBERS)
    [(table, first), (_, second), *_] = stripes = [one for one in decodes(layout, 8) if one[0] == 0]
    withdrawals.begin(stripes)
    for _ in range(2):
        withdrawals.decodable.want(table, second, array(4, 1))
    assert withdrawals.decodable.has_wanted
    [one] = withdrawals.decodable.take(most_bytes=ROW_BYTES)
    [other, next_one] = withdrawals.decodable.take(most_bytes=2 * ROW_BYTES)
    assert (one.stripe, one.places.tolist()) == (second, [4])
    assert (other.stripe, other.places.tolist()) == (second, [1])
    assert (next_one.stripe, next_one.places.tolist()) == (first, [0])
    withdrawals.decodable.want(table, second, array(4))
    assert not withdrawals.decodable.has_wanted
    left = withdrawals.decodable.take(most_bytes=1000)
    assert [one.places.tolist() for one in left][:2] == [[1, 2, 3, 4], [0, 2, 3]]
    assert not withdrawals.decodable.has_more


def test_rows_that_are_wanted_before_they_can_be_decoded_come_first() -> None:
    layout = ParityLayout(3)
    withdrawals = Withdrawals(layout, NUMBERS)
    withdrawals.tell_ends(2, [slot(30)] * TABLES)
    [(table, first), (_, second), *_] = stripes = [
        one for one in decodes(layout, 9) if one[0] == 0 and layout.segment(2, *one) is not None
    ]
    withdrawals.begin(stripes)
    while withdrawals.decodable.has_more:
        withdrawals.decodable.take(most_bytes=1000)
    withdrawals.decodable.want(table, second, array(3))
    for stripe in (first, second):
        withdrawals.withdrew(2, table, stripe, array(2, 3))
    taken = [(one.stripe, one.places.tolist()) for one in withdrawals.decodable.take(most_bytes=1000)]
    assert taken == [(second, [3]), (first, [2, 3]), (second, [2])]


def test_key_columns_add_up() -> None:
    withdrawals = Withdrawals(ParityLayout(3), NUMBERS)
    withdrawals.tell_keys(0, 2, np.array([[1, 2], [4, 8]], np.uint8))
    withdrawals.tell_keys(0, 2, np.array([[1, 1]], np.uint8))
    assert withdrawals.columns[0, 2].tolist() == [[0, 3], [4, 8], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize(("table", "rows"), [(TABLES, 1), (-1, 1), (0, PLACES + 1)])
def test_keys_of_what_is_no_segment_are_refused(table: int, rows: int) -> None:
    with pytest.raises(ValueError, match="has no"):
        Withdrawals(ParityLayout(3), NUMBERS).tell_keys(table, 0, np.zeros((rows, 12), np.uint8))


def test_ends_of_another_number_of_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="1 tables are withdrawn, and there are 2"):
        Withdrawals(ParityLayout(3), NUMBERS).tell_ends(2, [0])


def test_places_that_do_not_exist_are_refused() -> None:
    layout = ParityLayout(3)
    withdrawals = Withdrawals(layout, NUMBERS)
    withdrawals.tell_ends(2, [slot(30)] * TABLES)
    ((table, stripe), *_) = stripes = decodes(layout, 3)
    withdrawals.begin(stripes)
    with pytest.raises(ValueError, match="has no places 5 to 5"):
        withdrawals.withdrew(2, table, stripe, array(PLACES))
    with pytest.raises(ValueError, match="has no places 5 to 5"):
        withdrawals.decodable.want(table, stripe, array(PLACES))
