"""The decisions of one parameter server, driven by lists of events and by random interleavings of them."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from emberscale_api.routing import bucket_of
from emberscale_api.shape import GIB
from emberscale_api.wire import Flag, Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError, Outcome
from emberscale_trainer.server.core import (
    SWITCH_SECONDS,
    Assigning,
    Assignment,
    LaterError,
    ServerCore,
    Wait,
)
from emberscale_trainer.server.pressure import LONGEST_DELAY_SECONDS
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound, Ticket
from examples import examples
from moves import EVERYTHING, table_of

NO_KEYS = np.empty(0, dtype=np.int64)
NO_COUNTS = np.zeros(2, dtype=np.uint32)


def serving(generation: int = 1, version: int = 1, bound: StalenessBound | None = None) -> ServerCore:
    core = ServerCore()
    assign(core, generation, version, bound)
    return core


def assign(core: ServerCore, generation: int, version: int, bound: StalenessBound | None = None) -> None:
    wanted = Assignment(generation, version, "")
    assert core.assign(wanted) is Assigning.LOAD
    assert core.adopt(wanted, EVERYTHING, AppliedBatches(), bound)


def switched(core: ServerCore, barrier: int, version: int, generation: int = 1, now: float = 0.0) -> Outcome:
    """Switches to a move that changes only the version, and whose number is the version."""
    core.prepare(version, core.known[1], table_of(version, generation=generation), 0, now)
    return core.switch(generation, barrier, version, AppliedBatches(), None, now)[0]


def header(batch: int, token: int = 1, shard: int = 0, generation: int = 1, version: int = 1) -> Header:
    return Header(Kind.PUSH, generation=generation, version=version, batch=batch, shard=shard, token=token)


def push(core: ServerCore, request: Header, session: int = 0, now: float = 0.0) -> Status | Wait:
    decision = core.push(session, request, now, now)
    if decision is Status.OK:
        core.record(session, request, now)
    return decision


class TestReplacedServers:
    """The table of a partial recovery names another process in the place of a lost one."""

    def replaced(
        self, core: ServerCore, bound: StalenessBound | None = None, record: AppliedBatches | None = None
    ) -> None:
        core.prepare(7, core.known[1], table_of(2), 0, 0.0, replaces=True)
        if core.serving:
            core.hold(1, 1, 5, 10, 0)
            core.settle(1, 5, [], 10, 0)
        core.switch(1, 5, 7, record or AppliedBatches(), bound, 0.0)

    def test_a_survivor_keeps_its_own_record(self) -> None:
        core = serving()
        push(core, header(0))
        self.replaced(core, record=AppliedBatches())
        assert push(core, header(0, version=2)) is Status.REPEATED
        assert push(core, header(1, version=2)) is Status.OK

    def test_a_survivor_serves_nobody_that_may_still_ask_the_lost_server(self) -> None:
        core = serving()
        self.replaced(core)
        for flags in (Flag.NONE, Flag.READ_ONLY):
            old = header(3)._replace(flags=flags)
            assert core.pull(0, old, NO_COUNTS, NO_KEYS, 0.0, 0.0) is Status.MOVED
            assert core.pull(0, old._replace(version=2), NO_COUNTS, NO_KEYS, 0.0, 0.0) is Status.OK

    def test_a_successor_takes_for_applied_what_the_survivors_have(self) -> None:
        core = ServerCore()
        self.replaced(core, record=AppliedBatches.from_runs([(0, [(0, 4, 1)])]))
        assert push(core, header(3, version=2)) is Status.REPEATED
        assert push(core, header(4, version=2)) is Status.OK

    def test_a_successor_that_orders_staleness_refuses_gradients_whose_pulls_were_lost(self) -> None:
        core = ServerCore()
        self.replaced(core, StalenessBound(2))
        assert push(core, header(0, version=2), session=1) is Status.REFRESH
        assert core.admit(2, header(0, version=2), 0.0) is Status.OK
        assert push(core, header(0, version=2), session=2) is Status.OK
        assert push(core, header(0, version=2), session=2) is Status.REPEATED

    def test_the_next_server_that_orders_staleness_refuses_them_too(self) -> None:
        """A move after the recovery hands over only the pulls that are known."""
        successor, following = ServerCore(), ServerCore()
        self.replaced(successor, StalenessBound(2))
        assert successor.admit(2, header(1, version=2), 0.0) is Status.OK
        bound = StalenessBound(2)
        bound.take_over([OutstandingPull(Ticket(2, 0, 1), token=1, unseen=0)])
        following.prepare(8, 0, table_of(3), 0, 0.0)
        following.switch(1, 6, 8, AppliedBatches(), bound, 0.0)
        assert push(following, header(0, version=3), session=1) is Status.REFRESH
        assert push(following, header(1, version=3), session=2) is Status.OK


class TestVersionsAndGenerations:
    def test_a_request_of_another_generation_is_told_to_refresh_whatever_else_it_says(self) -> None:
        core = serving(generation=2, version=5)
        for version in (1, 5, 9):
            old = header(0, generation=1, version=version)
            assert core.push(0, old, 0, 0) is Status.REFRESH
            assert core.pull(0, old, NO_COUNTS, NO_KEYS, 0, 0) is Status.REFRESH
            assert core.admit(0, old, 0.0) is Status.REFRESH

    def test_nothing_is_served_before_the_first_assignment_and_while_one_loads(self) -> None:
        core = ServerCore()
        assert core.push(0, header(0), 0, 0) is Status.REFRESH
        assign(core, 1, 1)
        core.assign(Assignment(2, 2, ""))
        assert core.push(0, header(0), 0, 0) is Status.REFRESH
        with pytest.raises(NotHeldError):
            core.hold(1, 1, 1, 10, 0)

    def test_another_table_of_the_same_version_is_loaded_anew(self) -> None:
        """Two masters that began from the same ledger gave both tables this version."""
        core = ServerCore()
        one, other = (Assignment(1, 1, "", ("ps-0-1", replaced)) for replaced in ("ps-1-1", "ps-1-2"))
        assert core.assign(one) is Assigning.LOAD
        assert core.adopt(one, EVERYTHING, AppliedBatches(), None)
        assert core.assign(other) is Assigning.LOAD
        assert core.adopt(other, EVERYTHING, AppliedBatches(), None)
        assert push(core, header(0)) is Status.OK
        with pytest.raises(LaterError, match="have trained on"):
            core.assign(one)

    def test_a_barrier_over_another_table_is_refused(self) -> None:
        """A master whose ledger lost a switch would take a snapshot of some servers for one of all."""
        core = serving(version=2)
        with pytest.raises(LaterError, match="version 2 is served, and 1 is asked for"):
            core.hold(1, 1, 1, 10, 0)
        with pytest.raises(NotHeldError, match="version 3 is not served here"):
            core.hold(1, 3, 1, 10, 0)
        core.hold(1, 2, 1, 10, 0)

    def test_a_push_of_an_older_version_has_moved(self) -> None:
        assert push(serving(version=2), header(0, version=1)) is Status.MOVED

    def test_a_push_of_a_newer_version_waits_for_the_switch_and_not_for_ever(self) -> None:
        core = serving(version=1)
        newer = header(0, version=2)
        assert core.push(0, newer, arrived=5, now=6) == Wait(5 + SWITCH_SECONDS)
        assert core.push(0, newer, arrived=5, now=5 + SWITCH_SECONDS) is Status.MOVED
        core.hold(1, 1, 1, 10, 6)
        core.settle(1, 1, [], 10, 6)
        switched(core, 1, 2, now=6)
        assert core.push(0, newer, arrived=5, now=7) is Status.OK

    def test_a_pull_of_another_version_is_served_where_everything_asked_for_is_owned(self) -> None:
        core, key = ServerCore(), 17
        buckets = np.zeros(1024, dtype=np.bool_)
        buckets[bucket_of(key)] = True
        pieces = np.zeros(64, dtype=np.bool_)
        pieces[3] = True
        wanted = Assignment(1, 2, "")
        core.assign(wanted)
        core.adopt(wanted, Ownership(buckets, pieces), AppliedBatches(), None)
        for keys, expected in (
            ([key, 3], Status.OK),
            ([key, 4], Status.MOVED),
            ([key + 1, 3], Status.MOVED),
            ([key, 64], Status.MOVED),
            ([key, -1], Status.MOVED),
        ):
            counts = np.array([1, 1], dtype=np.uint32)
            decision = core.pull(0, header(0, version=1), counts, np.array(keys, dtype=np.int64), 0, 0)
            assert decision is expected, keys


class TestAssignments:
    def test_the_same_assignment_attaches_and_an_older_one_is_refused(self) -> None:
        core = ServerCore()
        first, second = Assignment(1, 1, ""), Assignment(2, 2, "checkpoint")
        assert core.assign(first) is Assigning.LOAD
        assert core.assign(first) is Assigning.LOADING
        assert core.assign(second) is Assigning.LOAD
        with pytest.raises(LaterError):
            core.assign(first)
        assert not core.adopt(first, EVERYTHING, AppliedBatches(), None)
        assert core.adopt(second, EVERYTHING, AppliedBatches(), None)
        assert core.assign(second) is Assigning.DONE
        assert core.known == (2, 2)

    @pytest.mark.parametrize("checkpoint", ["a", "b"])
    def test_an_assignment_whose_rows_have_trained_on_is_not_done_again(self, checkpoint: str) -> None:
        """The master lost the end of its ledger, and would take the trained rows for those of the checkpoint."""
        core = ServerCore()
        first = Assignment(2, 2, "a")
        core.assign(first)
        core.adopt(first, EVERYTHING, AppliedBatches(), None)
        assert core.assign(first) is Assigning.DONE
        header = Header(Kind.PUSH, generation=2, version=2, batch=7)
        assert core.push(1, header, 0.0, 0.0) is Status.OK
        core.record(1, header, 0.0)
        with pytest.raises(LaterError, match="trained on"):
            core.assign(Assignment(2, 2, checkpoint))
        assert core.serving
        assert core.assign(Assignment(3, 3, "a")) is Assigning.LOAD

    def test_an_assignment_that_failed_may_be_asked_for_again(self) -> None:
        core, wanted = ServerCore(), Assignment(1, 1, "checkpoint")
        core.assign(wanted)
        core.give_up(wanted)
        assert core.assign(wanted) is Assigning.LOAD

    def test_a_server_that_dropped_its_rows_for_an_assignment_says_so_though_it_fails(self) -> None:
        """Otherwise a master whose ledger ends before the assignment would believe that the rows are served."""
        core, wanted = serving(), Assignment(5, 7, "checkpoint")
        before = core.known
        core.assign(wanted)
        assert core.known == (5, 7) != before
        core.give_up(wanted)
        assert core.known == (5, 7)
        assert core.assign(wanted) is Assigning.LOAD

    def test_an_assignment_of_before_a_switch_is_refused(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0)
        core.settle(1, 1, [], 10, 0)
        switched(core, 1, 2)
        with pytest.raises(LaterError):
            core.assign(Assignment(1, 1, ""))


class TestBarriers:
    def test_batches_that_others_have_applied_are_let_through_and_nothing_else(self) -> None:
        core = serving()
        push(core, header(0))
        assert core.hold(1, 1, 1, 10, now=0).ranges(0) == [(0, 1)]
        assert push(core, header(1)) == Wait(10)
        core.settle(1, 1, [(0, 0, 2)], 10, now=1)
        assert core.settled(1, 1, now=1) is None
        assert push(core, header(2), now=1) == Wait(11)
        assert push(core, header(1), now=1) is Status.OK
        settled = core.settled(1, 1, now=2)
        assert settled is not None
        assert settled.ranges(0) == [(0, 2)]
        assert push(core, header(2), now=2) == Wait(11)
        outcome = core.snapshot(1, 1, now=4)
        assert outcome.applied.ranges(0) == [(0, 2)]
        assert (outcome.held_seconds, outcome.settled_seconds) == (4, 3)
        assert push(core, header(2), now=4) is Status.OK

    def test_a_snapshot_before_everything_is_settled_is_refused(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0)
        with pytest.raises(NotHeldError, match="not settled"):
            core.snapshot(1, 1, 0)
        core.settle(1, 1, [(0, 0, 1)], 10, 0)
        with pytest.raises(NotHeldError, match="not settled"):
            core.snapshot(1, 1, 0)

    def test_a_barrier_that_lapsed_never_succeeds(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, now=0)
        core.settle(1, 1, [], 10, now=5)
        for call in (
            lambda: core.snapshot(1, 1, now=15),
            lambda: core.settle(1, 1, [], 10, now=15),
            lambda: core.settled(1, 1, now=15),
            lambda: core.hold(1, 1, 1, 10, now=15),
        ):
            with pytest.raises(NotHeldError):
                call()
        assert push(core, header(0), now=15) is Status.OK

    def test_a_barrier_is_not_held_after_its_resume_even_if_the_hold_comes_late(self) -> None:
        core = serving()
        core.resume(1, 3)
        with pytest.raises(NotHeldError, match="over"):
            core.hold(1, 1, 3, 10, 0)
        core.hold(1, 1, 4, 10, 0)
        core.resume(1, 3)
        assert push(core, header(0)) == Wait(10)
        core.resume(1, 4)
        assert push(core, header(0)) is Status.OK

    def test_a_later_barrier_replaces_one_whose_master_is_gone(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0)
        core.hold(1, 1, 2, 10, 0)
        with pytest.raises(NotHeldError):
            core.settle(1, 1, [], 10, 0)
        with pytest.raises(NotHeldError):
            core.hold(1, 1, 1, 10, 0)
        core.settle(1, 2, [], 10, 0)

    def test_a_snapshot_or_switch_whose_answer_was_lost_is_answered_again(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0)
        core.settle(1, 1, [], 10, 0)
        assert not core.snapshot(1, 1, 1).repeated
        push(core, header(0), now=2)
        again = core.snapshot(1, 1, 3)
        assert again.repeated
        assert again.applied.ranges(0) == []
        core.hold(1, 1, 2, 10, 4)
        core.settle(1, 2, [], 10, 4)
        assert not switched(core, 2, 2, now=5).repeated
        assert core.switch(1, 2, 2, AppliedBatches(), None, 6)[0].repeated
        with pytest.raises(LaterError):
            switched(core, 2, 1, now=6)
        with pytest.raises(NotHeldError):
            switched(core, 2, 3, now=6)
        assert core.known == (1, 2)

    def test_a_barrier_of_another_generation_is_refused(self) -> None:
        core = serving(generation=2, version=2)
        with pytest.raises(LaterError):
            core.hold(1, 1, 1, 10, 0)
        with pytest.raises(NotHeldError):
            core.hold(3, 1, 1, 10, 0)

    def test_a_new_assignment_lets_go(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 1000, 0)
        assign(core, 2, 2)
        assert push(core, header(0, generation=2, version=2)) is Status.OK


class TestLeases:
    def test_a_push_under_an_older_lease_of_the_shard_is_fenced(self) -> None:
        core = serving()
        assert push(core, header(0, token=7)) is Status.OK
        assert push(core, header(1, token=6)) is Status.FENCED
        assert push(core, header(9, token=6, shard=9)) is Status.OK

    def test_a_dead_lease_is_fenced_and_its_tickets_are_forgotten(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.admit(1, header(0, token=1), 0.0) is Status.OK
        assert core.admit(2, header(1, token=2, shard=1), 0.0) == Wait(None)
        core.leases(1, live=[2], next_token=3)
        assert core.admit(2, header(1, token=2, shard=1), 0.0) is Status.OK
        assert core.admit(1, header(5, token=1), 0.0) is Status.FENCED
        assert push(core, header(0, token=1), session=1) is Status.FENCED
        assert push(core, header(1, token=2, shard=1), session=2) is Status.OK

    def test_a_push_under_way_of_a_dead_lease_no_longer_counts(self) -> None:
        core = serving(bound=StalenessBound(0))
        core.admit(1, header(0, token=1), 0.0)
        assert push(core, header(0, token=1), session=1) is Status.OK
        assert core.admit(2, header(1, token=2, shard=1), 0.0) == Wait(None)
        core.leases(1, live=[2], next_token=3)
        assert core.admit(2, header(1, token=2, shard=1), 0.0) is Status.OK

    def test_no_push_is_applied_once_the_master_has_begun_another_generation(self) -> None:
        core = serving(generation=2, version=2)
        core.hear_generation(3)
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.REFRESH
        core.hear_generation(2)  # from a master that lost its last writes
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.OK

    def test_leases_of_another_generation_or_told_late_change_nothing(self) -> None:
        core = serving(generation=2, version=2)
        core.leases(1, live=[], next_token=100)
        core.leases(2, live=[5], next_token=6)
        core.leases(2, live=[1], next_token=2)
        assert push(core, header(0, token=1, generation=2, version=2)) is Status.FENCED
        assert push(core, header(0, token=5, generation=2, version=2)) is Status.OK
        assert push(core, header(1, token=6, generation=2, version=2)) is Status.OK


class TestSessions:
    def test_the_late_end_of_an_old_session_does_not_forget_its_successors_pulls(self) -> None:
        core = serving(bound=StalenessBound(0))
        old, new = 1, 2
        assert core.admit(new, header(0), 0.0) is Status.OK
        core.disconnected(old)
        assert core.admit(3, header(1, token=2, shard=1), 0.0) == Wait(None)

    def test_a_session_ends_with_its_first_connection(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert push(core, header(0), session=1) is Status.OK
        assert core.admit(1, header(1), 0.0) == Wait(None)  # waits on the other connection for the push under way
        core.disconnected(1)
        assert core.admit(2, header(1), 0.0) is Status.OK

    def test_a_pull_for_training_waits_for_the_bound_and_one_for_evaluation_does_not(self) -> None:
        core = serving(bound=StalenessBound(0))
        assert core.pull(1, header(0), NO_COUNTS, NO_KEYS, 0, 0) is Status.OK
        second = header(1, token=2, shard=1)
        assert core.pull(2, second, NO_COUNTS, NO_KEYS, 0, 0) == Wait(None)
        assert core.pull(2, second._replace(flags=Flag.READ_ONLY), NO_COUNTS, NO_KEYS, 0, 0) is Status.OK
        core.disconnected(1)
        assert core.pull(2, second, NO_COUNTS, NO_KEYS, 0, 0) is Status.OK

    def test_a_pull_asked_for_anew_is_admitted_and_counts_once(self) -> None:
        core = serving(bound=StalenessBound(1))
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert core.admit(1, header(0), 0.0) is Status.OK
        assert core.admit(1, header(1), 0.0) is Status.OK
        assert core.admit(1, header(2), 0.0) == Wait(None)


class Interleavings(RuleBasedStateMachine):
    """One server under pushes, barriers, lapses, dead leases, lost sessions and roll-backs, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.generation = 0
        self.version = 0
        self.core = ServerCore()
        self.applied: dict[int, int] = {}
        self.barrier = 0
        self.until: float | None = None
        self.allowed: set[int] = set()
        self.reported: set[int] | None = None
        self.live: set[int] = set()
        self.next_token = 1

    @initialize(bound=st.none() | st.integers(0, 3))
    def start(self, bound: int | None) -> None:
        self.roll_back(bound)

    @rule(bound=st.none() | st.integers(0, 3))
    def roll_back(self, bound: int | None) -> None:
        self.generation += 1
        self.version += 1
        assign(self.core, self.generation, self.version, None if bound is None else StalenessBound(bound))
        self.applied, self.live, self.next_token = {}, set(), 1
        self.let_go()

    def let_go(self) -> None:
        self.until, self.allowed, self.reported = None, set(), None

    @property
    def held(self) -> bool:
        return self.until is not None and self.now < self.until

    def header(self, batch: int, token: int, generations: int = 0, versions: int = 0) -> Header:
        return header(batch, token, batch // 4, self.generation - generations, self.version - versions)

    @rule(
        batch=st.integers(0, 11),
        token=st.integers(1, 8),
        session=st.integers(0, 2),
        generations=st.sampled_from([0, 0, 0, 1]),
        versions=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def push(self, batch: int, token: int, session: int, generations: int, versions: int) -> None:
        request = self.header(batch, token, generations, versions)
        decision = self.core.push(session, request, self.now, self.now)
        assert isinstance(decision, (Status, Wait))
        if decision is not Status.OK:
            return
        assert (generations, versions) == (0, 0)
        assert token in self.live or token >= self.next_token
        assert not self.held or batch in self.allowed
        self.core.record(session, request, self.now)
        self.applied[batch] = self.applied.get(batch, 0) + 1
        self.core.complete(session, request)

    @rule(batch=st.integers(0, 11), token=st.integers(1, 8), session=st.integers(0, 2))
    def admit(self, batch: int, token: int, session: int) -> None:
        if self.core.admit(session, self.header(batch, token), 0.0) is Status.OK:
            assert token in self.live or token >= self.next_token

    @rule(session=st.integers(0, 2))
    def lose_a_session(self, session: int) -> None:
        self.core.disconnected(session)

    @rule(seconds=st.sampled_from([1.0, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def leases_end(self, data: st.DataObject) -> None:
        self.next_token = min(8, self.next_token + data.draw(st.integers(0, 2)))
        self.live = {token for token in range(1, self.next_token) if data.draw(st.booleans())}
        self.core.leases(self.generation, self.live, self.next_token)

    @rule()
    def hold(self) -> None:
        self.barrier += 1
        applied = self.core.hold(self.generation, self.version, self.barrier, 10, self.now)
        assert numbers(applied) == set(self.applied)
        self.until, self.allowed, self.reported = self.now + 10, set(), None

    @precondition(lambda self: self.barrier)
    @rule(batches=st.sets(st.integers(0, 11)))
    def settle(self, batches: set[int]) -> None:
        ranges = [(0, batch, batch + 1) for batch in batches]
        if not self.held:
            with pytest.raises(NotHeldError):
                self.core.settle(self.generation, self.barrier, ranges, 10, self.now)
            return
        self.core.settle(self.generation, self.barrier, ranges, 10, self.now)
        self.until, self.allowed, self.reported = self.now + 10, batches - set(self.applied), None

    @precondition(lambda self: self.held)
    @rule()
    def report(self) -> None:
        try:
            applied = self.core.settled(self.generation, self.barrier, self.now)
        except NotHeldError:
            return
        if applied is not None:
            assert self.allowed <= numbers(applied)
            self.reported = numbers(applied)

    @precondition(lambda self: self.barrier)
    @rule(switch=st.booleans())
    def finish(self, switch: bool) -> None:
        try:
            if switch:
                outcome = switched(self.core, self.barrier, self.version + 1, self.generation, self.now)
            else:
                outcome = self.core.snapshot(self.generation, self.barrier, self.now)
        except NotHeldError:
            return
        if outcome.repeated:
            return
        self.version += switch
        assert self.held
        assert numbers(outcome.applied) == set(self.applied)
        if self.reported is not None:
            assert numbers(outcome.applied) == self.reported
        self.let_go()

    @rule(older=st.integers(0, 1))
    def resume(self, older: int) -> None:
        self.core.resume(self.generation, self.barrier - older)
        if not older:
            self.let_go()

    @invariant()
    def each_batch_is_applied_at_most_once(self) -> None:
        assert all(times == 1 for times in self.applied.values())
        if self.generation:
            assert numbers(self.core.applied) == set(self.applied)


def numbers(applied: AppliedBatches) -> set[int]:
    return {number for first, stop in applied.ranges(0) for number in range(first, stop)}


Interleavings.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
TestInterleavings = Interleavings.TestCase


def test_a_repeated_push_is_under_way_until_it_is_complete() -> None:
    core = serving(bound=StalenessBound(0))
    assert core.admit(1, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=1) is Status.OK
    core.disconnected(1)  # before the other servers got the push
    assert core.admit(2, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=2) is Status.REPEATED
    assert core.admit(3, header(1, shard=1), 0.0) == Wait(None)  # its pull could miss the push on the other servers
    core.complete(2, header(0))
    assert core.admit(3, header(1, shard=1), 0.0) is Status.OK


def test_the_number_of_a_move_is_not_given_again() -> None:
    """Otherwise a master that lost its ledger would reuse numbers, and its moves would be refused as over."""
    core = serving()
    core.prepare(90, 1, table_of(2), 0, 0.0)
    assert core.next_numbers == (0, 91)
    core.abandon(90)
    assert core.next_numbers == (0, 91)


def test_a_checkpoint_is_begun_in_one_barrier_only() -> None:
    """Two masters from one ledger use the same number: the second could overwrite files of a complete checkpoint."""
    core = serving()
    core.hold(1, 1, 5, 10.0, 0.0, 7)
    assert core.next_checkpoint == 8
    core.hold(1, 1, 5, 10.0, 1.0, 7)  # the same call again
    core.resume(1, 5)
    for checkpoint in (7, 6):
        with pytest.raises(LaterError, match=f"checkpoint 7 was begun here, and {checkpoint} is not later"):
            core.hold(1, 1, 6, 10.0, 2.0, checkpoint)
    core.hold(1, 1, 6, 10.0, 2.0)  # a move's barrier begins no checkpoint
    core.resume(1, 6)
    core.hold(1, 1, 7, 10.0, 3.0, 8)
    assert core.next_checkpoint == 9


def test_what_still_comes_of_a_session_that_has_ended_keeps_nobody_waiting() -> None:
    """A push without room in memory ends one connection; a pull may be on its way on the other."""
    core = serving(bound=StalenessBound(0, 0))
    assert core.admit(1, header(0), 0.0) is Status.OK
    core.disconnected(1)
    assert core.admit(1, header(1), 0.0) is Status.REFRESH
    assert push(core, header(1), session=1) is Status.REFRESH
    assert core.admit(2, header(0), 0.0) is Status.OK
    assert push(core, header(0), session=2) is Status.OK


def run_short(core: ServerCore) -> None:
    core.pressure.look(GIB - 1, GIB, 0.0)
    core.pressure.look(GIB, GIB, 0.1)


class TestMemoryPressure:
    def test_a_push_waits_for_memory_and_not_for_ever(self) -> None:
        core = serving()
        run_short(core)
        assert core.push(0, header(0), 1.0, 2.0) == Wait(1.0 + LONGEST_DELAY_SECONDS)
        assert core.push(0, header(0), 1.0, 1.0 + LONGEST_DELAY_SECONDS) is Status.OK

    def test_a_push_that_waits_goes_on_once_there_is_memory(self) -> None:
        core = serving()
        run_short(core)
        assert isinstance(core.push(0, header(0), 1.0, 1.0), Wait)
        core.pressure.look(0, GIB, 2.0)
        assert core.push(0, header(0), 1.0, 2.0) is Status.OK

    def test_neither_repeats_nor_batches_that_a_barrier_settles_wait(self) -> None:
        core = serving()
        assert push(core, header(0)) is Status.OK
        run_short(core)
        assert core.push(0, header(0), 1.0, 1.0) is Status.REPEATED
        core.hold(1, 1, 1, 10, 1.0)
        core.settle(1, 1, [(0, 0, 2)], 10, 1.0)
        assert core.push(0, header(1), 1.0, 1.0) is Status.OK
