"""Where parity is, for groups of any size."""

from collections import Counter, defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from emberscale_trainer.parity import ParityLayout

MEMBERS, TABLES, SEGMENTS = st.integers(2, 9), st.integers(0, 30), 40


@given(MEMBERS, TABLES)
def test_a_stripe_has_one_segment_of_each_member_but_its_holder(members: int, table: int) -> None:
    layout = ParityLayout(members)
    stripes: dict[int, list[int]] = defaultdict(list)
    for member in range(members):
        for segment in range(SEGMENTS * (members - 1)):
            stripes[layout.stripe(member, table, segment)].append(member)
    for stripe, found in stripes.items():
        assert sorted([*found, layout.holder(table, stripe)]) == list(range(members))
    assert sorted(stripes) == list(range(SEGMENTS * members))


@given(MEMBERS, TABLES)
def test_all_members_hold_as_many_stripes(members: int, table: int) -> None:
    held = Counter(ParityLayout(members).holder(table, stripe) for stripe in range(SEGMENTS * members))
    assert set(held.values()) == {SEGMENTS}


@given(MEMBERS, TABLES, st.integers(0, 1000), st.data())
def test_nobody_holds_parity_of_its_own_rows(members: int, table: int, segment: int, data: st.DataObject) -> None:
    member = data.draw(st.integers(0, members - 1))
    assert ParityLayout(members).lane(member, table, segment) != member


def test_tables_of_one_segment_are_spread() -> None:
    assert {ParityLayout(5).lane(0, table, 0) for table in range(5)} == {1, 2, 3, 4}


def test_one_server_alone_has_no_parity() -> None:
    with pytest.raises(ValueError, match="two servers or more, not 1"):
        ParityLayout(1)
