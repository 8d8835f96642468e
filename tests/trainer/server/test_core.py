"""The decisions of one parameter server: which assignments it takes, and which versions of the table it serves."""

import numpy as np
import pytest
from tests.trainer.server.cores import NO_COUNTS, NO_KEYS, assign, header, push, serving, switched

from buckets import bucket_of
from emberscale_api.wire import Flag, Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assigning, Assignment, LaterError, ServerCore, Wait
from emberscale_trainer.server.staleness import OutstandingPull, StalenessBound, Ticket
from moves import EVERYTHING, table_of


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


def test_a_push_that_only_the_lost_first_server_had_is_pulled_again_before_others_apply_it() -> None:
    """The rebuilt record has its batch, but nobody knows how many pushes its pull has missed since."""
    successor, torn = ServerCore(), header(0, version=2)
    successor.prepare(7, 0, table_of(2), 0, 0.0, lost=(0,))
    successor.switch(1, 5, 7, AppliedBatches.from_runs([(0, [(0, 1, 1)])]), StalenessBound(0), 0.0)
    assert push(successor, torn, session=1) is Status.REFRESH
    assert successor.admit(2, torn, 0.0) is Status.OK
    assert push(successor, torn, session=2) is Status.REPEATED
    assert push(successor, torn, session=2) is Status.REPEATED, "it asks again under a newer table"
    assert successor.admit(3, header(1, shard=1, version=2), 0.0) == Wait(None), "others may still lack it"
    successor.complete(2, torn)
    assert successor.admit(3, header(1, shard=1, version=2), 0.0) is Status.OK


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


def test_the_number_of_a_move_is_not_given_again() -> None:
    """Otherwise a master that lost its ledger would reuse numbers, and its moves would be refused as over."""
    core = serving()
    core.prepare(90, 1, table_of(2), 0, 0.0)
    assert core.next_numbers == (0, 91)
    core.abandon(90)
    assert core.next_numbers == (0, 91)
