"""Parity that servers hold for each other, with a loss after any item of any push."""

import threading
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.parity import Holding, ParityBlocks, ParityLayout, SourceOverError, blocks
from emberscale_trainer.parity.code import PRODUCTS, coefficient
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import Reader, TableStore, keys_of
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.slab import Segment
from examples import examples
from snapshots import records_of

# rows of some 40 kB, so that a few keys fill segments
TABLES = [
    TableSpec(number, f"C{number}", number, 10_000, OptimizerSpec(type=OptimizerType.SGD), InitializerSpec(), seed=3)
    for number in range(2)
]
LAYOUTS = [RowLayout.of(spec) for spec in TABLES]
Sent = tuple[int, tuple[tuple[int, int], ...], NDArray[np.uint8]]


class Member:
    """A server: its rows, the items on their way to each holder of its parity, and how many of them have arrived."""

    def __init__(self, me: int, layout: ParityLayout, *, merges: bool = False) -> None:
        self.layout = layout
        self.me = me
        self.store = TableStore(TABLES)
        self.log = self.store.log_deltas(
            layout.width, lambda table, segment: layout.lane(me, table, segment), merges=merges
        )
        self.blocks = ParityBlocks(layout, me, LAYOUTS)
        self.holding = Holding(self.blocks, me, layout.members)
        self.links: dict[int, deque[Sent]] = {peer: deque() for peer in layout.holders(me)}
        self.sent = 0
        self.arrived = dict.fromkeys(self.links, 0)
        self.at: dict[int, tuple[list[dict[int, bytes]], set[int]]] = {}
        self.batches: set[int] = set()
        self.gathered: list[int] = []
        self.whole_at = 0

    def send(self) -> None:
        """Sends one item to each holder, with all that has gathered."""
        stored = min(self.arrived.values())
        self.sent += 1
        if self.log.is_whole and not self.whole_at:
            self.whole_at = self.sent
        taken = self.log.take([self.layout.lanes_to(self.me, peer) for peer in self.links])
        for link, deltas in zip(self.links.values(), taken, strict=True):
            link.append((stored, tuple((0, batch) for batch in self.gathered), deltas))
        self.gathered.clear()
        self.at[self.sent] = (rows_of(self.store), set(self.batches))


def rows_of(store: TableStore) -> list[dict[int, bytes]]:
    return [
        records_of(store.readers.snapshot(Reader.FLASH, threading.RLock()), number) for number in range(len(TABLES))
    ]


class Group(RuleBasedStateMachine):
    """Members push, and their items arrive at any time, until as many as the parity covers are lost at once.

    An item has the changes of one push, or also those that gathered before it, in any grouping. The logs may merge
    them.
    The loss ends an example, so most examples allow it only after some pushes.
    """

    @initialize(
        parity=st.integers(1, 2),
        data_members=st.integers(1, 4),
        most_width=st.integers(1, 4),
        pushes_before_loss=st.integers(0, 10),
        merges=st.booleans(),
    )
    def begin(self, parity: int, data_members: int, most_width: int, pushes_before_loss: int, merges: bool) -> None:
        self.layout = ParityLayout(parity + data_members, parity, most_width)
        self.members = [Member(me, self.layout, merges=merges) for me in range(self.layout.members)]
        self.parity = parity
        self.pushes_before_loss = pushes_before_loss
        self.batch = 0
        self.lost: list[Member] = []
        for one in self.members:
            one.sent += 1
            one.at[1] = (rows_of(one.store), set())
            for peer in one.links:
                self.members[peer].holding.begin(one.me, AppliedBatches())
                one.arrived[peer] = 1

    @precondition(lambda self: not self.lost)
    @rule(data=st.data(), keys=st.lists(st.integers(0, 400), min_size=1, max_size=6), gathers=st.booleans())
    def push(self, data: st.DataObject, keys: list[int], gathers: bool) -> None:
        one = data.draw(st.sampled_from(self.members))
        counts = np.array([len(keys), 1], np.uint32)
        named = np.array([*keys, keys[0]], np.int64)  # keys may repeat
        one.store.push(counts, named, np.full(len(named) * 10_000, self.batch + 1, np.float32))
        one.batches.add(self.batch)
        one.gathered.append(self.batch)
        if not gathers:
            one.send()
        self.batch += 1

    @precondition(lambda self: not self.lost)
    @rule(data=st.data(), keys=st.lists(st.integers(0, 400), min_size=1, max_size=6), gathers=st.booleans())
    def retire(self, data: st.DataObject, keys: list[int], gathers: bool) -> None:
        one = data.draw(st.sampled_from(self.members))
        one.store.retire(0, np.array(keys, np.int64))
        if not gathers:
            one.send()

    @precondition(lambda self: not self.lost)
    @rule(data=st.data(), gathers=st.booleans())
    def fill(self, data: st.DataObject, gathers: bool) -> None:
        one = data.draw(st.sampled_from(self.members))
        one.log.fill(100_000)
        if not gathers:
            one.send()

    @precondition(lambda self: not self.lost)
    @rule(data=st.data(), items=st.integers(1, 8))
    def arrive(self, data: st.DataObject, items: int) -> None:
        one = data.draw(st.sampled_from(self.members))
        peer = data.draw(st.sampled_from(sorted(one.links)))
        self._deliver(one, peer, items)

    def _deliver(self, one: Member, peer: int, items: int) -> None:
        for _ in range(min(items, len(one.links[peer]))):
            self.members[peer].holding.take(one.me, *one.links[peer].popleft())
            one.arrived[peer] += 1

    @precondition(lambda self: not self.lost and self.batch >= self.pushes_before_loss)
    @precondition(lambda self: any(one.log.is_whole for one in self.members))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        whole = [one for one in self.members if one.log.is_whole]
        self.lost = data.draw(st.lists(st.sampled_from(whole), min_size=1, max_size=self.parity, unique=True))
        lost = frozenset(one.me for one in self.lost)
        rest = [one for one in self.members if one.me not in lost]
        agreed = {index: min(one.holding.lose(index) for one in self._holders_of(index, rest)) for index in lost}
        for one in rest:
            while not one.log.is_empty:
                one.log.withdraw(150_000)
                one.send()
            for peer in one.links.keys() - lost:
                self._deliver(one, peer, len(one.links[peer]))
                self.members[peer].holding.withdraw(one.me)
        for one in rest:
            for index in lost.intersection(self.layout.sources(one.me)):
                one.holding.agree(index, agreed[index])
        for one in rest:
            for table in range(len(TABLES)):
                decoder = self.members[(one.me + 1) % len(self.members)]
                for stripe, first, half in one.blocks.halves(lost, table):
                    decoder.blocks.take_half(table, stripe, first, half)
        for source in self.lost:
            expected, batches = source.at[agreed[source.me]]
            for one in self._holders_of(source.me, rest):
                assert {*_numbers(one.holding.applied(source.me))} == batches
            if all(one.whole_at and agreed[one.me] >= one.whole_at for one in self.lost):  # else not protected yet
                assert self._decoded(rest, lost, source.me) == expected

    def _holders_of(self, source: int, rest: list[Member]) -> list[Member]:
        return [one for one in rest if one.me in self.layout.holders(source)]

    def _decoded(self, rest: list[Member], lost: frozenset[int], source: int) -> list[dict[int, bytes]]:
        rows: list[dict[int, bytes]] = [{} for _ in TABLES]
        for one in rest:
            for table, layout in enumerate(LAYOUTS):
                for slots in one.blocks.decoded(lost, source, table):
                    live = slots[layout.fields(slots)["pushes"] != 0]
                    keys = keys_of(live).tolist()
                    assert not rows[table].keys() & set(keys)
                    rows[table].update(zip(keys, (row.tobytes() for row in live), strict=True))
        return rows

    @precondition(lambda self: bool(self.lost))
    @rule()
    def hear_of_the_lost(self) -> None:
        for lost in self.lost:
            for one in self._holders_of(lost.me, [one for one in self.members if one not in self.lost]):
                with pytest.raises(SourceOverError):
                    one.holding.take(lost.me, 0, (), np.zeros(0, np.uint8))

    @invariant()
    def nothing_is_applied_that_some_holder_lacks(self) -> None:
        if not getattr(self, "members", []) or self.lost:  # from a loss on, holders apply what they agree on
            return
        for one in self.members:
            everywhere = one.at[min(one.arrived.values())][1]
            for peer in one.links:
                holding = self.members[peer].holding
                assert holding.received(one.me) == one.arrived[peer]
                assert {*_numbers(holding.applied(one.me))} <= everywhere


def _numbers(applied: AppliedBatches) -> list[int]:
    return [number for first, stop in applied.ranges(0) for number in range(first, stop)]


TestLosses = Group.TestCase
TestLosses.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def test_what_makes_no_sense_is_refused() -> None:
    layout, table = ParityLayout(3), 1
    elsewhere = next(one for one in range(2) if layout.role(0, table, layout.stripe(1, table, one)) is None)
    segments, bits = (elsewhere, blocks._MOST_SEGMENTS), LAYOUTS[table].slot_bits
    for deltas in (
        np.zeros(5, np.uint8),
        np.full(200, 255, np.uint8),
        *(_delta(segment << bits, table) for segment in segments),
    ):
        holding = Holding(ParityBlocks(ParityLayout(3), 0, LAYOUTS), 0, 3)
        holding.begin(1, AppliedBatches())
        holding.take(1, 0, (), deltas)
        with pytest.raises(ValueError, match="server 1 sends"):
            holding.take(1, 2, (), np.zeros(0, np.uint8))


def _delta(slot: int, table: int, row: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Returns a delta of one row, of zeros if none is given."""
    head = np.array([slot, 1 | table << 16], "<u4").view(np.uint8)
    return np.concatenate([head, np.zeros(LAYOUTS[table].stride, np.uint8) if row is None else row])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 13))
def test_a_holder_multiplies_the_rows_of_each_member_by_its_factor(seed: int, stripe: int) -> None:
    random, layout, row_layout = np.random.default_rng(seed), ParityLayout(14, 2, most_width=12), LAYOUTS[0]
    for role in range(2):
        held = ParityBlocks(layout, (stripe + role) % layout.members, LAYOUTS)
        expected = np.zeros(row_layout.stride, np.uint8)
        for member in range(layout.members):
            if (segment := layout.segment(member, 0, stripe)) is not None:
                row = random.integers(0, 256, row_layout.stride, np.uint8)
                held.apply(member, _delta(segment << row_layout.slot_bits, 0, row))
                expected ^= PRODUCTS[coefficient(role, layout.position(member, 0, stripe))][row]
        assert np.array_equal(held._blocks[0, stripe].rows[0], expected)


def test_a_lost_source_is_heard_no_more() -> None:
    holding = Holding(ParityBlocks(ParityLayout(3), 0, LAYOUTS), 0, 3)
    holding.begin(1, AppliedBatches())
    assert holding.lose(1) == 1
    with pytest.raises(SourceOverError, match="nothing more of server 1"):
        holding.take(1, 0, (), np.zeros(0, np.uint8))
    with pytest.raises(ValueError, match="2 items of server 1 were agreed on"):
        holding.agree(1, 2)


def test_an_item_is_applied_only_when_its_source_says_that_all_holders_have_it() -> None:
    class Applied(list[tuple[int, str]]):
        def apply(self, source: int, deltas: str) -> None:
            self.append((source, deltas))

    applied = Applied()
    holding = Holding[str](applied, 0, 3)
    holding.begin(1, AppliedBatches())
    holding.take(1, 0, ((0, 7),), "first")
    holding.take(1, 1, ((0, 8),), "second")
    assert (applied, _numbers(holding.applied(1))) == ([], [])
    holding.take(1, 2, ((0, 9),), "third")
    assert (applied, _numbers(holding.applied(1))) == ([(1, "first")], [7])


def test_an_item_of_several_batches_counts_as_a_whole_or_not_at_all() -> None:
    class Applied(list[str]):
        def apply(self, source: int, deltas: str) -> None:
            self.append(deltas)

    applied = Applied()
    holding = Holding[str](applied, 0, 3)
    holding.begin(1, AppliedBatches())
    holding.take(1, 1, ((0, 7), (0, 9)), "first")
    holding.take(1, 1, ((0, 8), (0, 10)), "second")
    assert holding.lose(1) == 3
    assert _numbers(holding.applied(1)) == []
    holding.agree(1, 2)
    assert (applied, _numbers(holding.applied(1))) == (["first"], [7, 9])


def test_an_item_for_which_there_was_no_memory_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, holder = Member(0, ParityLayout(2)), Member(1, ParityLayout(2))
    holding = holder.holding
    while not source.log.is_whole:
        source.log.fill(1 << 20)
    keys = np.arange(2, dtype=np.int64)
    source.store.push(np.ones(2, np.uint32), keys, np.ones(20_000, np.float32))
    deltas = source.log.take([(0,)])[0].copy()
    holding.begin(0, AppliedBatches())
    holding.take(0, 0, ((0, 7),), deltas)
    room = [True]

    def segment(rows: int, stride: int, *, huge: bool) -> Segment:
        if not room:
            raise MemoryError
        room.pop()
        return Segment(rows, stride, huge=huge)

    monkeypatch.setattr(blocks, "Segment", segment)
    with pytest.raises(MemoryError):
        holding.take(0, 2, ((0, 8),), deltas)
    assert holding.received(0) == 2
    room += [True] * 2
    holding.take(0, 2, ((0, 8),), deltas)
    assert holding.received(0) == 3
    for table, layout in enumerate(LAYOUTS):
        found = [
            row
            for slots in holder.blocks.decoded(frozenset({0}), 0, table)
            for row in slots
            if layout.fields(row[None])["pushes"][0]
        ]
        assert keys_of(np.array(found)).tolist() == [table]
