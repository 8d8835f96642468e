"""Rounds on a parameter server: their batches are applied together, and count one by one for the staleness bound."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import DENSE_PIECES
from emberscale_api.wire import MAX_ROUND, Flag, Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.core import Assigning, Assignment, ServerCore, Wait
from emberscale_trainer.server.staleness import StalenessBound, Ticket
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import DensePieces, TableStore
from moves import EVERYTHING

NO_KEYS = np.empty(0, dtype=np.int64)
NO_COUNTS = np.zeros(2, dtype=np.uint32)
WANTED = Assignment(1, 1, "")


def serving(bound: StalenessBound | None = None) -> ServerCore:
    core = ServerCore()
    assert core.assign(WANTED) is Assigning.LOAD
    assert core.adopt(WANTED, EVERYTHING, AppliedBatches(), bound)
    return core


def of_round(first: int, batches: int, token: int = 1, shard: int = 0) -> Header:
    return Header(
        Kind.PUSH,
        flags=Flag.ROUND,
        generation=1,
        version=1,
        batch=first,
        batches=batches,
        shard=shard,
        token=token,
    )


def single(batch: int, token: int = 1, shard: int = 0) -> Header:
    return Header(Kind.PUSH, generation=1, version=1, batch=batch, shard=shard, token=token)


def push(core: ServerCore, request: Header, session: int = 1, now: float = 0.0) -> Status | Wait:
    decision = core.push(session, request, now, now)
    if decision is Status.OK:
        core.record(session, request, now)
    return decision


class TestAtomicity:
    def test_all_batches_of_a_round_are_applied_at_once(self) -> None:
        core = serving()
        assert push(core, of_round(4, 4)) is Status.OK
        assert core.applied.ranges(0) == [(4, 8)]

    def test_a_round_pushed_again_changes_nothing(self) -> None:
        core = serving()
        push(core, of_round(4, 4))
        assert push(core, of_round(4, 4)) is Status.REPEATED
        assert push(core, of_round(4, 2)) is Status.REPEATED
        assert push(core, single(5)) is Status.REPEATED

    def test_a_round_of_which_a_part_is_applied_is_not(self) -> None:
        core = serving()
        push(core, single(5))
        assert push(core, of_round(4, 4)) is Status.PARTIAL
        assert core.applied.ranges(0) == [(5, 6)]

    def test_a_barrier_admits_a_round_that_others_have_applied_as_a_whole(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0.0)
        assert push(core, of_round(0, 4)) == Wait(10.0)
        core.settle(1, 1, [(0, 0, 4)], 10, 0.0)
        assert push(core, of_round(0, 4)) is Status.OK
        assert core.settled(1, 1, 0.0) is not None

    def test_a_barrier_that_waits_for_a_part_of_a_round_has_it_pushed_batch_by_batch(self) -> None:
        core = serving()
        core.hold(1, 1, 1, 10, 0.0)
        core.settle(1, 1, [(0, 0, 2)], 10, 0.0)
        assert push(core, of_round(0, 4)) is Status.PARTIAL
        assert [push(core, single(batch)) for batch in (0, 1)] == [Status.OK, Status.OK]
        assert push(core, single(2)) == Wait(10.0)


class TestStaleness:
    def test_the_bound_counts_the_batches_of_a_round(self) -> None:
        core = serving(StalenessBound(4))
        assert core.admit(1, of_round(0, 4), 0.0) is Status.OK
        assert core.admit(2, single(4, 2, 1), 0.0) is Status.OK  # its pull may miss four batches
        assert core.admit(3, single(5, 3, 2), 0.0) == Wait(None)

    def test_the_own_rounds_of_a_session_do_not_make_each_other_stale(self) -> None:
        core = serving(StalenessBound(0))
        assert core.admit(1, of_round(0, 4), 0.0) is Status.OK
        assert core.admit(1, of_round(4, 4), 0.0) is Status.OK
        assert push(core, of_round(0, 4)) is Status.OK
        assert push(core, of_round(4, 4)) is Status.OK

    def test_a_session_whose_round_is_outstanding_does_not_wait_for_another_one(self) -> None:
        core = serving(StalenessBound(4))
        assert core.admit(1, of_round(0, 4), 0.0) is Status.OK
        assert core.admit(2, of_round(8, 4, 2, 1), 0.0) is Status.OK
        assert core.admit(3, of_round(16, 4, 3, 2), 0.0) == Wait(None)
        assert core.admit(1, of_round(4, 4), 0.0) is Status.LATER

    def test_a_session_pulls_no_round_ahead_while_others_train(self) -> None:
        core = serving(StalenessBound(64))
        assert core.admit(1, of_round(0, 4), 0.0) is Status.OK
        assert core.admit(2, of_round(8, 4, 2, 1), 0.0) is Status.OK
        assert core.admit(1, of_round(4, 4), 0.0) is Status.LATER
        assert push(core, of_round(0, 4)) is Status.OK
        assert core.admit(1, of_round(4, 4), 0.0) is Status.OK
        core.disconnected(2)
        core.complete(1, of_round(0, 4))
        assert core.admit(1, of_round(16, 4), 0.0) is Status.OK

    def test_no_session_pulls_ahead_of_one_that_waits(self) -> None:
        core = serving(StalenessBound(0))
        assert core.admit(1, of_round(0, 4), 0.0) is Status.OK
        assert core.admit(2, of_round(8, 4, 2, 1), 0.0) == Wait(None)
        assert core.admit(1, of_round(4, 4), 0.0) is Status.LATER
        assert push(core, of_round(0, 4)) is Status.OK
        core.complete(1, of_round(0, 4))
        assert core.admit(2, of_round(8, 4, 2, 1), 0.0) is Status.OK

    def test_a_session_that_ends_while_it_waits_holds_nobody_back(self) -> None:
        core = serving(StalenessBound(0))
        core.admit(1, of_round(0, 4), 0.0)
        core.admit(2, of_round(8, 4, 2, 1), 0.0)
        core.disconnected(2)
        assert core.admit(1, of_round(4, 4), 0.0) is Status.OK

    def test_a_session_alone_may_have_any_round_and_others_share_the_bound(self) -> None:
        core = serving(StalenessBound(64))
        assert core.round_limit(1) == MAX_ROUND
        core.admit(2, of_round(0, 4, 2, 1), 0.0)
        assert core.round_limit(1) == 64
        core.admit(3, of_round(8, 4, 3, 2), 0.0)
        assert core.round_limit(1) == 32

    def test_a_frame_says_how_much_room_there_is_however_large_the_bound(self) -> None:
        core = serving(StalenessBound(1 << 20))
        core.admit(2, of_round(0, 4, 2, 1), 0.0)
        assert Header.unpack(Header(Status.OK, batches=core.round_limit(1)).pack()).batches == MAX_ROUND

    @given(
        bound=st.integers(0, 8),
        events=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.booleans()), max_size=60),
    )
    def test_no_round_misses_more_batches_of_others_than_the_bound(
        self, bound: int, events: list[tuple[int, int, bool]]
    ) -> None:
        subject = StalenessBound(bound)
        outstanding: dict[Ticket, int] = {}
        others_applied, number = dict.fromkeys(range(3), 0), 0
        for session, batches, pulls in events:
            mine = [ticket for ticket in outstanding if ticket.session == session]
            if pulls and len(mine) < 2:
                ticket = Ticket(session, 0, number, batches, is_round=True)
                if subject.may_pull(ticket):
                    subject.pulled(ticket, 0)
                    outstanding[ticket], number = others_applied[session], number + batches
            elif mine and subject.may_push(mine[0]):
                missed = others_applied[session] - outstanding.pop(mine[0])
                assert subject.pushed(mine[0], 0) == missed <= bound
                subject.completed(mine[0])
                for other in others_applied.keys() - {session}:
                    others_applied[other] += mine[0].batches
        while outstanding:  # the oldest can always go on
            oldest = next(iter(outstanding))
            assert subject.may_push(oldest)
            subject.pushed(oldest, 0)
            subject.completed(oldest)
            del outstanding[oldest]


RULE = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=1.0)
SGD = OptimizerSpec(type=OptimizerType.SGD, learning_rate=1.0)
TABLE = TableSpec(0, "C0", 0, 4, RULE, InitializerSpec(), seed=0)
COUNTS, KEYS = np.array([2, 0], np.uint32), np.array([7, 9], np.int64)


@pytest.fixture
def state() -> ServerState:
    state = ServerState()
    tables = TableStore([TABLE], DensePieces.of(np.zeros(DENSE_PIECES, np.float32), SGD))
    state.assign(WANTED)
    state.adopt(WANTED, tables, EVERYTHING, AppliedBatches(), None)
    return state


def pulled(state: ServerState, flags: Flag = Flag.ROUND) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    request = of_round(0, 2)._replace(kind=Kind.PULL, flags=flags)
    status, rows, _ = state.pull(1, request, COUNTS, KEYS, lambda floats: np.empty(floats, np.float32))
    assert status is Status.OK
    assert rows is not None
    return rows


def test_a_round_is_answered_with_weights_and_state_and_pushes_by_how_much_both_changed(state: ServerState) -> None:
    before = pulled(state)
    assert before.shape == (2 * 5,)  # four weights and an accumulator each
    changes = np.arange(10, dtype=np.float32)
    assert state.push(1, of_round(0, 2), COUNTS, KEYS, changes) is Status.OK
    np.testing.assert_allclose(pulled(state), before + changes)
    np.testing.assert_allclose(pulled(state, Flag.READ_ONLY), (before + changes).reshape(2, 5)[:, :4].reshape(-1))
    assert state.core.applied.ranges(0) == [(0, 2)]


def test_gradients_are_of_one_batch(state: ServerState) -> None:
    with pytest.raises(ValueError, match="only the changes of a round"):
        state.push(1, of_round(0, 2)._replace(flags=Flag.NONE), COUNTS, KEYS, np.ones(8, np.float32))
    assert state.core.applied.total == 0
