"""The decisions of a member of a parity group, without rows, threads and streams."""

import pytest

from emberscale_api.job import MOST_STRIPE_WIDTH
from emberscale_trainer.parity import Holding, ParityLayout, SourceOverError
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.group import GroupCore, is_parity_stream, parity_stream, source_of
from emberscale_trainer.stream import StreamLostError
from eventually import unwrap


class Sums:
    """Parity of numbers."""

    def __init__(self) -> None:
        self.value = 0

    def apply(self, source: int, deltas: int) -> None:
        self.value ^= deltas


def member(
    me: int, members: int, *, whole: bool = True, parity: int = 1, most_width: int = MOST_STRIPE_WIDTH
) -> tuple[GroupCore[int], Sums]:
    sums = Sums()
    core = GroupCore(me, ParityLayout(members, parity, most_width), Holding(sums, me, members))
    if whole:
        core.meet()
        core.filled()
    return core, sums


def test_a_push_waits_for_all_holders_but_a_lost_one() -> None:
    core, _ = member(0, 3)
    assert core.put() == 1
    assert core.waits_for(1, {1: 1, 2: 0}.__getitem__) == (2,)
    assert core.stored({1: 1, 2: 0}.__getitem__) == 0
    core.lose(frozenset({2}))
    assert core.holders == (1,)
    assert core.waits_for(1, {1: 1, 2: 0}.__getitem__) == ()
    core.end()
    assert core.waits_for(5, {1: 1, 2: 0}.__getitem__) == ()


def test_a_push_waits_for_holders_alone_and_what_all_must_know_for_all() -> None:
    core, _ = member(0, 6, most_width=2)
    assert core.holders == (1, 2)
    assert (core.put(to_all=True), core.put(), core.put(to_all=True), core.put()) == (1, 2, 3, 4)
    assert [core.sent_to(1, number) for number in range(5)] == [0, 1, 2, 3, 4]
    assert [core.sent_to(4, number) for number in range(5)] == [0, 1, 1, 2, 2]
    assert [core.reached(1, count) for count in range(5)] == [0, 1, 2, 3, 4]
    assert [core.reached(4, count) for count in range(3)] == [0, 2, 4]
    reached = {1: 4, 2: 4, 3: 4, 4: 2, 5: 4}.__getitem__
    assert core.waits_for(4, reached) == ()
    assert core.waits_for(4, reached, all_others=True) == (4,)
    assert core.stored(reached) == 4
    core.lose(frozenset({4}))
    assert core.waits_for(4, reached, all_others=True) == ()


def test_members_far_from_a_lost_one_wait_for_its_holders_and_say_nothing_of_its_rows() -> None:
    far, _ = member(5, 6, most_width=2)
    holder, _ = member(1, 6, most_width=2)
    for core in (far, holder):
        for source in {*range(6)} - {1, 5}:
            core.begin(source, AppliedBatches())
    holder.begin(5, AppliedBatches())
    far.begin(1, AppliedBatches())
    holder.take(0, 0, ((0, 7),), 0b1)
    assert far.lose(frozenset({0})) == {0: 1}
    assert holder.lose(frozenset({0})) == {0: 2}
    for source in (3, 4):
        for core in (far, holder):
            core.withdrawn(source, {0: 1})
    far.withdrawn(1, {0: 2})
    holder.withdrawn(5, {0: 1})
    assert far.agreed() is None
    assert holder.agreed() is None, "the other holder has yet to say what it has"
    for core in (far, holder):
        core.withdrawn(2, {0: 2})
    assert far.agreed() == {}
    agreed = holder.agreed()
    assert unwrap(agreed)[0].ranges(0) == [(7, 8)], "members that hold none of its parity lack no push"


def test_pushes_wait_for_nobody_until_all_have_answered_once() -> None:
    core, _ = member(0, 3, whole=False)
    assert core.put() == 1
    assert (core.yet_to_meet({1: 1, 2: 0}.__getitem__), core.has_met) == ((2,), False)
    assert core.waits_for(1, {1: 1, 2: 0}.__getitem__) == ()
    assert core.yet_to_meet({1: 1, 2: 1}.__getitem__) == ()
    core.meet()
    assert core.waits_for(core.put(), {1: 2, 2: 1}.__getitem__) == (2,)
    assert not core.is_whole


def test_the_batches_of_a_source_are_those_as_all_have_answered() -> None:
    core, _ = member(0, 3)
    core.begin(1, AppliedBatches())
    core.begin(2, AppliedBatches())
    before = AppliedBatches()
    before.record(0, 0)
    core.begin(1, before)
    core.take(1, 0, ((0, 1),), 0b1)
    core.lose(frozenset({1}))
    core.withdrawn(2, {1: 3})
    assert unwrap(core.agreed())[1].ranges(0) == [(0, 2)]


def test_what_some_holder_lacks_of_a_lost_member_is_dropped() -> None:
    core, sums = member(0, 3)
    core.begin(1, AppliedBatches())
    core.begin(2, AppliedBatches())
    for number, deltas in enumerate((0b001, 0b010, 0b100)):
        core.take(1, 0, ((0, number),), deltas)
    assert core.lose(frozenset({1})) == {1: 4}
    assert core.agreed() is None
    core.withdrawn(2, {1: 3})  # the other holder has the first item and two pushes
    assert unwrap(core.agreed())[1].ranges(0) == [(0, 2)]
    assert sums.value == 0b011
    with pytest.raises(SourceOverError):
        core.take(1, 0, ((0, 3),), 0b1000)


def test_servers_that_take_different_ones_for_lost_rebuild_neither() -> None:
    core, _ = member(0, 4)
    for source in (1, 2, 3):
        core.begin(source, AppliedBatches())
    core.lose(frozenset({1}))
    core.withdrawn(2, {1: 1})
    core.withdrawn(3, {2: 1})
    with pytest.raises(NotHeldError, match="do not agree on which ones are lost"):
        core.agreed()


def lost_at_once() -> tuple[GroupCore[int], Sums]:
    """Returns a member of four that holds 2 and 3 items of the last two members, which are lost."""
    core, sums = member(0, 4, parity=2)
    for source in (1, 2, 3):
        core.begin(source, AppliedBatches())
    core.take(2, 0, ((0, 0),), 0b0001)
    core.take(3, 0, ((0, 0),), 0b0010)
    core.take(3, 0, ((0, 1),), 0b0100)
    assert core.lose(frozenset({2, 3})) == {2: 2, 3: 3}
    assert core.holders == (1,)
    return core, sums


def test_of_each_of_two_lost_members_what_some_holder_lacks_is_dropped() -> None:
    core, sums = lost_at_once()
    core.withdrawn(1, {2: 1, 3: 3})
    agreed = unwrap(core.agreed())
    assert (agreed[2].ranges(0), agreed[3].ranges(0)) == ([], [(0, 2)])
    assert sums.value == 0b0110


def test_two_lost_rows_are_decoded_once_the_others_have_sent_what_they_have() -> None:
    core, _ = lost_at_once()
    core.withdrawn(1, {2: 2, 3: 3})
    assert not core.has_halves()
    core.sent_halves(1)
    assert core.has_halves()


def test_holders_that_know_of_one_lost_member_and_of_two_rebuild_none() -> None:
    core, _ = lost_at_once()
    core.withdrawn(1, {2: 2})
    with pytest.raises(NotHeldError, match="do not agree on which ones are lost"):
        core.agreed()


def test_more_members_than_parity_covers_are_not_rebuilt() -> None:
    core, _ = member(0, 4)
    with pytest.raises(NotHeldError, match="2 servers are lost, and parity covers 1"):
        core.lose(frozenset({1, 2}))


def test_a_member_that_has_begun_to_withdraw_is_not_rebuilt() -> None:
    core, _ = member(0, 4, parity=2)
    core.begin(1, AppliedBatches())
    core.take_withdrawal(1, 0b1)
    with pytest.raises(NotHeldError, match="1 of the lost servers had begun to take their rows out"):
        core.lose(frozenset({1, 2}))


def test_no_rows_are_rebuilt_where_those_of_a_survivor_are_not_protected() -> None:
    core, _ = member(0, 2, whole=False)
    with pytest.raises(NotHeldError, match="not protected"):
        core.lose(frozenset({1}))
    core.filled()
    core.lose(frozenset({1}))
    assert not core.is_whole
    core.end()
    with pytest.raises(SourceOverError, match="over"):
        core.take(1, 0, (), 1)
    with pytest.raises(NotHeldError, match="over"):
        core.agreed()


def test_one_group_rebuilds_once() -> None:
    core, _ = member(0, 3)
    core.lose(frozenset({1}))
    core.lose(frozenset({1}))
    with pytest.raises(NotHeldError):
        core.lose(frozenset({2}))


def test_a_stream_is_taken_by_the_group_of_its_table_alone() -> None:
    stream = parity_stream(7, 3)
    assert is_parity_stream(stream)
    assert source_of(stream & ~(1 << 62), 1, (1, 7), (1, 3)) is None, "its sender places parity otherwise"
    assert not is_parity_stream(7 << 10)
    assert source_of(stream, 1, (1, 6), (1, 3)) is None
    assert source_of(stream, 1, (1, 7), (1, 3)) == 1
    for newest, members in (((1, 8), (1, 3)), ((2, 7), (1, 3)), ((1, 7), (1, 2))):
        with pytest.raises(StreamLostError):
            source_of(stream, 1, newest, members)
