"""Where parity is, for groups of any size."""

from collections import Counter, defaultdict
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from emberscale_trainer.parity import ParityLayout

TABLES, SEGMENTS = st.integers(0, 30), 40
LAYOUTS = st.integers(1, 2).flatmap(
    lambda parity: st.integers(parity + 1, 9).map(lambda members: ParityLayout(members, parity))
)


@given(LAYOUTS, TABLES)
def test_a_stripe_has_one_segment_of_each_member_but_its_holders(layout: ParityLayout, table: int) -> None:
    stripes: dict[int, list[int]] = defaultdict(list)
    for member in range(layout.members):
        for segment in range(SEGMENTS * (layout.members - layout.parity)):
            stripes[layout.stripe(member, table, segment)].append(member)
    for stripe, found in stripes.items():
        roles = {member: layout.role(member, table, stripe) for member in range(layout.members)}
        assert sorted(found) == [member for member, role in roles.items() if role is None]
        assert sorted(role for role in roles.values() if role is not None) == list(range(layout.parity))
        assert sorted(layout.position(member, table, stripe) for member in found) == list(range(len(found)))
    assert sorted(stripes) == list(range(SEGMENTS * layout.members))


@given(LAYOUTS, TABLES)
def test_a_member_finds_its_segment_in_each_stripe(layout: ParityLayout, table: int) -> None:
    for member in range(layout.members):
        found = [layout.segment(member, table, stripe) for stripe in range(SEGMENTS * layout.members)]
        mine = [segment for segment in found if segment is not None]
        assert mine == list(range(len(mine)))
        assert [layout.stripe(member, table, segment) for segment in mine] == [
            stripe for stripe, segment in enumerate(found) if segment is not None
        ]


@given(LAYOUTS, TABLES)
def test_all_members_hold_as_many_blocks_of_each_kind(layout: ParityLayout, table: int) -> None:
    held = Counter(
        (member, layout.role(member, table, stripe))
        for stripe in range(SEGMENTS * layout.members)
        for member in range(layout.members)
    )
    assert {held[member, role] for member in range(layout.members) for role in range(layout.parity)} == {SEGMENTS}


@given(LAYOUTS, TABLES, st.integers(0, 1000), st.data())
def test_what_a_member_logs_goes_to_the_holders_of_its_segments(
    layout: ParityLayout, table: int, segment: int, data: st.DataObject
) -> None:
    member = data.draw(st.integers(0, layout.members - 1))
    stripe, lane = layout.stripe(member, table, segment), layout.lane(member, table, segment)
    for other in range(layout.members):
        role = layout.role(other, table, stripe)
        assert (lane in layout.lanes_to(other)) is (role is not None)
        if role is not None:
            assert layout.lanes_to(other)[role] == lane
            assert other != member


@given(LAYOUTS, TABLES, st.integers(0, 40))
def test_one_member_that_is_left_decodes_what_is_lost_of_a_stripe(
    layout: ParityLayout, table: int, stripe: int
) -> None:
    members = range(layout.members)
    for count in range(1, layout.parity + 1):
        for lost in map(frozenset, combinations(members, count)):
            rows = layout.lost_rows(lost, table, stripe)
            if not rows:
                continue
            decoder = layout.decoder(lost, table, stripe)
            (holder,) = [member for member in members if layout.role(member, table, stripe) == decoder]
            assert holder not in lost


def test_tables_of_one_segment_are_spread() -> None:
    assert {ParityLayout(5).lane(0, table, 0) for table in range(5)} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("members", "parity", "message"),
    [
        (1, 1, "parity 1 takes 2 servers or more, not 1"),
        (2, 2, "parity 2 takes 3 servers or more, not 2"),
        (258, 2, "parity 2 takes 257 servers at most, not 258"),
        (5, 3, "parity is 1 or 2, not 3"),
    ],
)
def test_a_group_of_another_size_is_refused(members: int, parity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParityLayout(members, parity)
