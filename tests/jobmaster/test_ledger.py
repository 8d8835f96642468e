from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.jobmaster.small_job import job

from emberscale_api.job.roles import MemberId, Role
from emberscale_jobmaster import ranges, takeover
from emberscale_jobmaster.events import TakenOver
from emberscale_jobmaster.ledger import Lease, Ledger, LedgerError, Remainder, _differing
from emberscale_jobmaster.machine import MasterState, step
from eventually import unwrap
from examples import examples


def worker(index: int) -> MemberId:
    return MemberId(Role.WORKER, index, f"incarnation-{index}")


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of grants, commits, ends, expiries and roll-backs, against a plain count of commits per batch."""

    @initialize(batches=st.integers(1, 60))
    def open_books(self, batches: int) -> None:
        self.ledger = Ledger.fresh(batches)
        self.next_token = 1
        self.committed = [0] * batches
        self.shards: dict[int, tuple[int, int]] = {}

    def _count(self, start: int, stop: int) -> None:
        for batch in range(start, stop):
            self.committed[batch] += 1

    def _pick(self, data: Any) -> int:
        return int(data.draw(st.sampled_from(sorted(self.ledger.leases))))

    @rule(index=st.integers(0, 3), batches=st.integers(1, 9))
    def grant(self, index: int, batches: int) -> None:
        granted = self.ledger.grant(worker(index), self.next_token, batches)
        if granted is None:
            assert self.ledger.available == 0
            return
        before, (self.ledger, lease) = self.ledger, granted
        assert lease.token == self.next_token
        assert lease.token not in before.leases
        assert 0 < lease.stop - lease.start <= batches
        assert lease.shard <= lease.start
        self.next_token += 1

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data(), progress=st.integers(-3, 12))
    def commit(self, data: Any, progress: int) -> None:
        token = self._pick(data)
        before = self.ledger.leases[token]
        self.ledger = self.ledger.commit(token, before.committed + progress)
        after = self.ledger.leases[token]
        assert before.committed <= after.committed <= before.stop
        self._count(before.committed, after.committed)

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        token = self._pick(data)
        lease = self.ledger.leases[token]
        self.ledger = self.ledger.finish(token)
        assert token not in self.ledger.leases
        self._count(lease.committed, lease.stop)

    @precondition(lambda self: self.ledger.leases)
    @rule(data=st.data())
    def expire(self, data: Any) -> None:
        token = self._pick(data)
        lease = self.ledger.leases[token]
        self.ledger = self.ledger.revoke({token})
        rests = [rest for rest in self.ledger.returned if (rest.shard, rest.start) == (lease.shard, lease.committed)]
        assert bool(rests) == (lease.committed < lease.stop)
        assert all((rest.shard, rest.stop) == (lease.shard, lease.stop) for rest in rests)

    @rule()
    def revoke_all(self) -> None:
        self.ledger = self.ledger.revoke_all()
        assert not self.ledger.leases

    @rule(keep=st.data())
    def roll_back(self, keep: Any) -> None:
        kept = keep.draw(st.sets(st.integers(0, len(self.committed) + 3)))
        applied = ranges.normalised((batch, batch + 1) for batch in kept)
        self.ledger = Ledger.fresh(len(self.committed), applied)
        self.committed = [int(batch in kept) for batch in range(len(self.committed))]

    @invariant()
    def no_batch_is_committed_twice(self) -> None:
        assert max(self.committed) <= 1
        done = {batch for start, stop in self.ledger.done for batch in range(start, stop)}
        assert done == {batch for batch, times in enumerate(self.committed) if times}

    @invariant()
    def every_batch_is_in_exactly_one_place(self) -> None:
        places = [
            *self.ledger.done,
            *self.ledger.uncut,
            *((rest.start, rest.stop) for rest in self.ledger.returned),
            *((lease.committed, lease.stop) for lease in self.ledger.leases.values()),
        ]
        batches = sorted(batch for start, stop in places for batch in range(start, stop))
        assert batches == list(range(len(self.committed)))

    @invariant()
    def the_books_pass_their_own_check(self) -> None:
        self.ledger.check()
        self.ledger.check_since(getattr(self, "checked", Ledger.fresh(len(self.committed))))
        self.checked = self.ledger

    def teardown(self) -> None:
        """Whatever happened, the rest can be trained to the end, each batch once."""
        if not hasattr(self, "ledger"):
            return
        self.ledger = self.ledger.revoke_all()
        while granted := self.ledger.grant(worker(0), self.next_token, 7):
            self.ledger, lease = granted
            self._count(lease.start, lease.stop)
            self.ledger = self.ledger.finish(lease.token)
            self.next_token += 1
        assert self.ledger.complete
        assert self.committed == [1] * len(self.committed)


TestLedger = LedgerMachine.TestCase


def test_a_remainder_is_leased_before_anything_new_and_keeps_its_shards_name() -> None:
    ledger, first = Ledger.fresh(20).grant(worker(0), 1, 6) or (None, None)
    assert ledger is not None
    assert first is not None
    ledger = ledger.commit(1, 4).revoke({1})

    ledger, rest = ledger.grant(worker(1), 2, 6) or (None, None)

    assert rest is not None
    assert (rest.shard, rest.start, rest.stop, rest.token) == (0, 4, 6, 2)


def test_the_end_of_a_long_remainder_becomes_a_shard_of_its_own() -> None:
    granted = Ledger.fresh(8).grant(worker(0), 1, 8)
    assert granted is not None
    ledger = granted[0].commit(1, 1).revoke_all()
    shards = []
    token = 2
    while granted := ledger.grant(worker(1), token, 3):
        ledger, lease = granted
        shards.append((lease.shard, lease.start, lease.stop))
        token += 1

    assert shards == [(0, 1, 4), (4, 4, 7), (7, 7, 8)]


def test_what_a_checkpoint_lacks_is_leased_and_the_rest_is_not() -> None:
    ledger = Ledger.fresh(10, done=((0, 2), (5, 7)))
    leased: list[tuple[int, int]] = []
    while granted := ledger.grant(worker(0), len(leased) + 1, 2):
        ledger, lease = granted
        leased.append((lease.start, lease.stop))

    assert leased == [(2, 4), (4, 5), (7, 9), (9, 10)]


@pytest.mark.parametrize(
    ("ledger", "complaint"),
    [
        (Ledger(batches=4, uncut=((2, 4),), done=((0, 1),)), "batch 1 is in no place"),
        (Ledger(batches=4, uncut=((1, 4),), done=((0, 2),)), "batch 1 is in two places"),
        (Ledger(batches=4, uncut=((0, 3),)), "ends at batch 3 of 4"),
        (Ledger(batches=2, uncut=(), leases={1: Lease(1, worker(0), 0, 0, 2, 0)}, done=((0, 2),)), "two places"),
    ],
)
def test_a_batch_in_no_place_or_in_two_is_a_defect(ledger: Ledger, complaint: str) -> None:
    with pytest.raises(LedgerError, match=complaint):
        ledger.check()


def worked_on(workers: int) -> Ledger:
    """A ledger of which each worker holds two leases, with a part of the first done."""
    ledger = Ledger.fresh(100 * workers)
    for token in range(2 * workers):
        ledger = unwrap(ledger.grant(worker(token // 2), token, 10))[0]
    for token in range(0, 2 * workers, 2):
        ledger = ledger.commit(token, 10 * token + 5)
    return ledger


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_a_check_of_the_difference_finds_what_a_whole_check_finds(data: st.DataObject) -> None:
    """Any place of a sound ledger may become another one, get lost or appear twice."""
    before = worked_on(3).revoke({1, 2})
    pairs = st.tuples(st.integers(0, 300), st.integers(0, 300)).map(lambda pair: (min(pair), max(pair)))
    after = before
    match data.draw(st.sampled_from(["done", "uncut", "returned", "leases", "step"])):
        case "done":
            after = replace(before, done=_changed(data, before.done, data.draw(pairs)))
        case "uncut":
            after = replace(before, uncut=_changed(data, before.uncut, data.draw(pairs)))
        case "returned":
            start, stop = data.draw(pairs)
            after = replace(before, returned=_changed(data, before.returned, Remainder(start, start, stop)))
        case "leases":
            token = data.draw(st.sampled_from(sorted(before.leases)))
            start, stop = data.draw(pairs)
            after = replace(before, leases={**before.leases, token: Lease(token, worker(0), start, start, stop, start)})
        case "step":
            token = data.draw(st.sampled_from(sorted(before.leases)))
            after = data.draw(st.sampled_from([before.finish(token), before.revoke({token}), before.revoke_all()]))
    assert _complaint(lambda: after.check_since(before)) == _complaint(after.check)


def _changed(data: st.DataObject, places: tuple[Any, ...], place: Any) -> tuple[Any, ...]:
    """Returns the places with one removed, added, or in the place of another."""
    at = data.draw(st.integers(0, len(places)))
    return (*places[:at], *data.draw(st.sampled_from([(), (place,)])), *places[at + data.draw(st.integers(0, 1)) :])


def _complaint(check: Callable[[], None]) -> str:
    try:
        check()
    except LedgerError as error:
        return str(error)
    return ""


def test_the_check_of_a_commit_looks_at_no_other_lease() -> None:
    before = worked_on(200)
    was, now = _differing(tuple(before.leases.values()), tuple(before.commit(100, 1008).leases.values()))
    assert [lease.token for lease in (*was, *now)] == [100, 100]
    was_done, now_done = _differing(before.done, before.commit(100, 1008).done)
    assert (was_done, now_done) == (((1000, 1005),), ((1000, 1008),))


def test_a_new_master_checks_the_whole_ledger_that_it_finds() -> None:
    found = MasterState(replace(takeover.initial(wall=0.0), ledger=Ledger(batches=4, uncut=((0, 3),))))
    with pytest.raises(LedgerError, match="ends at batch 3 of 4"):
        step(found, TakenOver(now=0.0, wall=1000.0, has_flash_store=False), job().spec)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))), st.integers(0, 40), st.integers(1, 9))
def test_ranges_that_include_another_are_its_union(pairs: list[tuple[int, int]], start: int, length: int) -> None:
    one = ranges.normalised(pairs)
    assert ranges.including(one, start, start + length) == ranges.union(one, ((start, start + length),))
