"""How many batches a worker trains in a round, and whose turn it is to pull and to push."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec
from emberscale_api.wire import MAX_ROUND
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.channel import ChannelClosedError
from emberscale_trainer.worker.keys import KeyPlan
from emberscale_trainer.worker.local_rows import LocalChanges
from emberscale_trainer.worker.rounds import Round, RoundFigures, RoundLengths
from emberscale_trainer.worker.turns import RoundTurns

ENABLED = HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED)
AUTO = HotEmbeddingsSpec(mode=HotEmbeddingsMode.AUTO)


def figures(
    batches: int, saves: bool = True, values: int = 1000, seconds: float = 0.01, of_lease: int = MAX_ROUND
) -> RoundFigures:
    return RoundFigures(batches, 40 if saves else 95, 100, values, seconds, of_lease)


def grown(lengths: RoundLengths, saves: bool = True) -> list[int]:
    seen = []
    for _ in range(6):
        seen.append(lengths.length)
        lengths.trained(figures(lengths.length, saves))
    return seen


class TestLengths:
    def test_a_job_without_rounds_never_begins_one(self) -> None:
        assert not RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.DISABLED), 15).begin_lease(1)

    def test_rounds_grow_from_two_batches(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        assert lengths.begin_lease(1)
        assert grown(lengths) == [2, 4, 8, 16, 32, 64]

    def test_a_round_has_no_more_batches_than_the_bound_has_room_for(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.room(13)
        assert grown(lengths) == [2, 4, 8, 8, 8, 8]
        lengths.room(1)
        assert lengths.length == 1
        assert not lengths.begin_lease(2)

    def test_a_round_fits_into_the_budget(self) -> None:
        lengths = RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED, budget="1536Ki"), 15)
        lengths.trained(figures(2, values=2 * 8192))  # 32 KiB a batch, six times
        assert lengths.length == 4
        for _ in range(3):
            lengths.trained(figures(lengths.length, values=lengths.length * 8192))
        assert lengths.length == 8

    def test_a_lease_progresses_several_times_within_its_timeout(self) -> None:
        lengths = RoundLengths(ENABLED, 16)
        for _ in range(8):
            lengths.trained(figures(lengths.length, seconds=0.5 * lengths.length))
        assert lengths.length == 8  # of four seconds

    def test_a_lease_of_which_a_round_is_split_is_trained_batch_by_batch(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.split(1)
        assert not lengths.begin_lease(1)
        assert lengths.begin_lease(2)

    def test_auto_rests_where_rounds_save_little_and_tries_again_later(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        lengths.room(4)
        assert lengths.estimated(40, 100)
        assert lengths.begin_lease(0)
        grown(lengths, saves=False)
        wanted = []
        for token in range(1, 100):
            wanted.append(lengths.wants_estimate)
            assert not lengths.begin_lease(token)
        assert not any(wanted[:64])
        assert all(wanted[64:])
        assert lengths.estimated(40, 100)
        assert lengths.begin_lease(100)

    def test_auto_begins_no_round_before_an_estimate(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert lengths.wants_estimate
        assert not lengths.begin_lease(0)
        assert not lengths.estimated(80, 100)
        assert not lengths.wants_estimate
        assert not any(lengths.begin_lease(token) for token in range(100))
        assert lengths.wants_estimate

    def test_auto_looks_again_soon_at_what_few_batches_said(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert not lengths.estimated(80, 100, 2)
        assert [lengths.begin_lease(0), lengths.wants_estimate] == [False, False]
        assert [lengths.begin_lease(1), lengths.wants_estimate] == [False, True]

    def test_an_estimate_is_of_rounds_that_would_be_admitted(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert lengths.longest(50) == 32
        lengths.room(9)
        assert lengths.longest(50) == 8
        lengths.room(1)
        assert lengths.longest(50) == 1

    def test_a_job_that_fixes_the_mode_needs_no_estimate(self) -> None:
        assert not RoundLengths(ENABLED, 15).wants_estimate

    def test_auto_rests_where_rounds_as_long_as_leases_save_little(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        lengths.estimated(40, 100)
        lengths.begin_lease(0)
        sizes = [2, 4, 8, 16, 32, 32, 32]
        resting = []
        for size in sizes:
            lengths.trained(figures(size, saves=False, of_lease=32))
            resting.append(not lengths.begin_lease(1))
        assert resting == [False] * 5 + [True] * 2

    def test_a_short_lease_is_no_reason_to_rest(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        lengths.estimated(40, 100)
        for size in (2, 4, 8):
            lengths.trained(figures(size, of_lease=64))
        lengths.trained(figures(3, saves=False, of_lease=3))
        assert lengths.begin_lease(1)

    @pytest.mark.parametrize("figure", [{"seconds": 60.0}, {"values": 1 << 28}])
    def test_a_round_that_did_not_fit_is_tried_again_later(self, figure: dict[str, Any]) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.trained(figures(2, **figure))
        assert lengths.length == 1  # in the lease that is under way
        begun = [lengths.begin_lease(token) for token in range(100)]
        assert not any(begun[:64])
        assert all(begun[64:])

    def test_auto_goes_on_where_rounds_save_much(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        lengths.estimated(40, 100)
        grown(lengths)
        assert all(lengths.begin_lease(token) for token in range(100))


def batch(number: int, ids: list[int], lists: list[list[int]]) -> Batch:
    values = np.array([one for of_record in lists for one in of_record], np.int64)
    offsets = np.cumsum([0, *(len(of_record) for of_record in lists)]).astype(np.int64)
    records = len(ids)
    return Batch(
        number,
        records * number,
        records * (number + 1),
        np.zeros(records, np.float32),
        np.zeros((records, 0), np.float32),
        np.array(ids, np.int64)[:, None],
        (IdLists(values, offsets),),
        (),
        0,
    )


def test_a_round_has_the_ids_and_lists_of_its_batches_one_after_another() -> None:
    one = Round.of([batch(0, [1, 2], [[5], [6, 7]]), batch(1, [2, 3], [[], [8]])])
    assert one.ids.tolist() == [[1], [2], [2], [3]]
    assert one.lists[0].values.tolist() == [5, 6, 7, 8]
    assert one.lists[0].offsets.tolist() == [0, 1, 3, 3, 4]
    assert one.edges == (0, 2, 4)
    assert one.stop == 4


CHANGES = LocalChanges(cast(KeyPlan, None), np.zeros(0, np.float32), np.zeros(0, np.float32))


class TestTurns:
    def test_a_pull_before_the_push_of_the_round_before_has_not_seen_it(self) -> None:
        turns = RoundTurns()
        with turns.pull() as first:
            pass
        with turns.pull() as second:
            pass
        turns.trained(CHANGES)
        with turns.push():
            pass
        assert (first, second) == (0, 0)
        assert turns.unseen(second) is CHANGES

    def test_a_pull_after_it_has(self) -> None:
        turns = RoundTurns()
        with turns.pull():
            pass
        turns.trained(CHANGES)
        with turns.push():
            pass
        with turns.pull() as second:
            pass
        assert second == 1
        assert turns.unseen(second) is None

    def test_a_push_waits_for_the_end_of_a_pull(self) -> None:
        turns, order = RoundTurns(), list[str]()

        def push() -> None:
            with turns.push():
                order.append("push")

        with ThreadPoolExecutor(1) as threads, turns.pull():
            pushing = threads.submit(push)
            order.append("pull")
        pushing.result(20)
        assert order == ["pull", "push"]

    def test_at_most_one_round_is_pulled_ahead(self) -> None:
        turns, third = RoundTurns(), threading.Event()

        def pull() -> None:
            with turns.pull():
                third.set()

        for _ in range(2):
            with turns.pull():
                pass
        threading.Thread(target=pull, daemon=True).start()
        assert not third.is_set()
        with turns.push():
            pass
        assert third.wait(20)

    def test_a_pull_that_fails_does_not_count(self) -> None:
        turns = RoundTurns()
        for _ in range(3):
            with pytest.raises(RuntimeError), turns.pull():
                raise RuntimeError
        with turns.pull() as pushed:
            assert pushed == 0

    def test_whoever_waits_is_told_of_the_end(self) -> None:
        turns = RoundTurns()
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(turns.await_push, 0)
            turns.abort()
            with pytest.raises(ChannelClosedError):
                waiting.result(20)
