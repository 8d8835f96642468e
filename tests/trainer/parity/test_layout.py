"""Where parity is, for groups of any size."""

from collections import Counter, defaultdict
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from emberscale_trainer.parity import ParityLayout

TABLES, SEGMENTS = st.integers(0, 30), 40


@st.composite
def layouts(draw: st.DrawFn) -> ParityLayout:
    parity = draw(st.integers(1, 2))
    return ParityLayout(draw(st.integers(parity + 1, 9)), parity, draw(st.integers(1, 5)))


LAYOUTS = layouts()


@given(LAYOUTS, TABLES)
def test_a_stripe_has_segments_of_as_many_members_and_none_of_its_holders(layout: ParityLayout, table: int) -> None:
    stripes: dict[int, list[int]] = defaultdict(list)
    for member in range(layout.members):
        for segment in range(SEGMENTS * layout.width):
            stripes[layout.stripe(member, table, segment)].append(member)
    for stripe, found in stripes.items():
        roles = {member: layout.role(member, table, stripe) for member in range(layout.members)}
        assert len(found) == len({*found}) == layout.width
        assert {roles[member] for member in found} == {None}
        assert found == [one for one in range(layout.members) if layout.has_segment(one, table, stripe)]
        assert sorted(role for role in roles.values() if role is not None) == list(range(layout.parity))
        assert sorted(layout.position(member, table, stripe) for member in found) == list(range(len(found)))
    assert sorted(stripes) == list(range(SEGMENTS * layout.members))


@given(LAYOUTS, TABLES)
def test_a_member_finds_its_segment_in_each_stripe(layout: ParityLayout, table: int) -> None:
    for member in range(layout.members):
        found = [layout.segment(member, table, stripe) for stripe in range(SEGMENTS * layout.members)]
        mine = {segment: stripe for stripe, segment in enumerate(found) if segment is not None}
        assert sorted(mine) == list(range(SEGMENTS * layout.width))
        assert all(layout.stripe(member, table, segment) == stripe for segment, stripe in mine.items())


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
    assert 0 <= lane < layout.width
    for other in range(layout.members):
        role = layout.role(other, table, stripe)
        assert other == member or (lane in layout.lanes_to(member, other)) is (role is not None)
        if role is not None:
            assert other in layout.holders(member)
            assert member in layout.sources(other)


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


@given(LAYOUTS)
def test_a_member_sends_changes_to_few_others(layout: ParityLayout) -> None:
    for member in range(layout.members):
        holders = layout.holders(member)
        assert len(holders) == layout.width + layout.parity - 1
        assert member not in holders
        lanes = [layout.lanes_to(member, other) for other in range(layout.members) if other != member]
        assert sorted(lane for found in lanes for lane in found) == sorted([*range(layout.width)] * layout.parity)
        assert {other for other in range(layout.members) if other != member and layout.lanes_to(member, other)} == {
            *holders
        }


@pytest.mark.parametrize("members", [2, 3, 5, 6, 7, 11, 40])
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5, 9])
def test_segments_that_do_not_fill_a_round_share_few_blocks(members: int, segments: int) -> None:
    layout = ParityLayout(members)
    blocks = {layout.stripe(member, 0, segment) for member in range(members) for segment in range(segments)}
    assert len(blocks) <= members * segments / layout.width + layout.width / 2


def test_tables_of_one_segment_are_spread() -> None:
    assert {ParityLayout(5).lane(0, table, 0) for table in range(5)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("members", "parity", "message"),
    [
        (1, 1, "parity 1 takes 2 servers or more, not 1"),
        (2, 2, "parity 2 takes 3 servers or more, not 2"),
        (5, 3, "parity is 1 or 2, not 3"),
    ],
)
def test_a_group_of_another_size_is_refused(members: int, parity: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParityLayout(members, parity)
