"""How many batches a worker trains in a round, and in which order rounds are pulled and pushed."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, cast

import numpy as np
import pytest

from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.wire import MAX_ROUND
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.channel import ChannelClosedError
from emberscale_trainer.worker.keys import KeyPlan
from emberscale_trainer.worker.local_rows import LocalChanges
from emberscale_trainer.worker.pace import Stretch
from emberscale_trainer.worker.rounds import Round, RoundFigures, RoundLengths, RoundSize, rounds_ruled_out
from emberscale_trainer.worker.turns import RoundTurns
from training_jobs import training_job

ENABLED = HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED)
AUTO = HotEmbeddingsSpec(mode=HotEmbeddingsMode.AUTO)


def figures(
    batches: int, saves: bool = True, values: int = 1000, seconds: float = 0.01, of_lease: int = MAX_ROUND
) -> RoundFigures:
    return RoundFigures(batches, 40 if saves else 95, 100, 10, values, 25, seconds, of_lease)


def estimate(bytes_: int, batches: int = 64, values: int = 1000) -> RoundSize:
    return RoundSize(batches, bytes_, 100, 10, values)


def measure(lengths: RoundLengths, speed: float, in_rounds: bool = False, token: int = 0) -> None:
    """Measures as many stretches at this speed as a comparison takes."""
    for _ in range(6):
        lengths.measured(Stretch(in_rounds, token, 16, int(speed), 1.0, (1, 1)))


def measured_auto() -> RoundLengths:
    """Returns lengths in the mode `Auto`; the speed of single batches is known."""
    lengths = RoundLengths(AUTO, 15)
    measure(lengths, 1000)
    return lengths


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
        lengths.limit(13)
        assert grown(lengths) == [2, 4, 8, 8, 8, 8]
        lengths.limit(1)
        assert lengths.length == 1
        assert not lengths.begin_lease(2)

    def test_a_round_fits_into_the_budget(self) -> None:
        lengths = RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED, budget="1536Ki"), 15)
        lengths.trained(figures(2, values=2 * 8192))  # 32 KiB per batch, six times
        assert lengths.length == 4
        for _ in range(3):
            lengths.trained(figures(lengths.length, values=lengths.length * 8192))
        assert lengths.length == 8

    def test_a_lease_progresses_several_times_within_its_timeout(self) -> None:
        lengths = RoundLengths(ENABLED, 16)
        for _ in range(8):
            lengths.trained(figures(lengths.length, seconds=0.5 * lengths.length))
        assert lengths.length == 8  # a round takes four seconds

    def test_a_lease_of_which_a_round_is_split_is_trained_batch_by_batch(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.split(1)
        assert not lengths.begin_lease(1)
        assert lengths.begin_lease(2)

    def test_auto_rests_where_rounds_save_little_and_tries_again_later(self) -> None:
        lengths = measured_auto()
        lengths.limit(4)
        assert lengths.estimated(estimate(40))
        assert lengths.begin_lease(0)
        grown(lengths, saves=False)
        wanted = []
        for token in range(1, 100):
            wanted.append(lengths.wants_estimate)
            assert not lengths.begin_lease(token)
        assert not any(wanted[:64])
        assert all(wanted[64:])
        measure(lengths, 1000)
        assert lengths.estimated(estimate(40))
        assert lengths.begin_lease(100)

    def test_auto_begins_no_round_before_an_estimate(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert lengths.wants_estimate
        assert not lengths.begin_lease(0)
        assert not lengths.estimated(estimate(80))
        assert not lengths.wants_estimate
        assert not any(lengths.begin_lease(token) for token in range(100))
        assert lengths.wants_estimate

    def test_an_estimate_decides_in_the_hundredths_that_people_read(self) -> None:
        just_above = RoundSize(64, 6004, 10_000, 10, 1000)
        lengths = measured_auto()
        assert lengths.estimated(just_above)
        assert lengths.decision is not None
        assert (lengths.decision.reason, just_above.ratio) == ("EstimatePays", 0.6)
        assert not measured_auto().estimated(RoundSize(64, 6060, 10_000, 10, 1000))

    def test_auto_looks_again_soon_at_what_few_batches_said(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert not lengths.estimated(estimate(80, 2))
        assert [lengths.begin_lease(0), lengths.wants_estimate] == [False, False]
        assert [lengths.begin_lease(1), lengths.wants_estimate] == [False, True]

    def test_an_estimate_is_of_rounds_that_would_be_admitted(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert lengths.longest(50) == 32
        lengths.limit(9)
        assert lengths.longest(50) == 8
        lengths.limit(1)
        assert lengths.longest(50) == 1

    def test_a_job_that_fixes_the_mode_needs_no_estimate(self) -> None:
        assert not RoundLengths(ENABLED, 15).wants_estimate

    def test_auto_rests_where_rounds_as_long_as_leases_save_little(self) -> None:
        lengths = measured_auto()
        lengths.estimated(estimate(40))
        lengths.begin_lease(0)
        sizes = [2, 4, 8, 16, 32, 32, 32]
        resting = []
        for size in sizes:
            lengths.trained(figures(size, saves=False, of_lease=32))
            resting.append(not lengths.begin_lease(1))
        assert resting == [False] * 5 + [True] * 2

    def test_a_short_lease_is_no_reason_to_rest(self) -> None:
        lengths = measured_auto()
        lengths.estimated(estimate(40))
        for size in (2, 4, 8):
            lengths.trained(figures(size, of_lease=64))
        lengths.trained(figures(3, saves=False, of_lease=3))
        assert lengths.begin_lease(1)

    @pytest.mark.parametrize("figure", [{"seconds": 60.0}, {"values": 1 << 28}])
    def test_a_round_that_did_not_fit_is_tried_again_later(self, figure: dict[str, Any]) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.trained(figures(2, **figure))
        assert lengths.length == 1  # in the current lease
        begun = [lengths.begin_lease(token) for token in range(100)]
        assert not any(begun[:64])
        assert all(begun[64:])

    def test_auto_goes_on_where_rounds_save_much(self) -> None:
        lengths = measured_auto()
        lengths.estimated(estimate(40))
        grown(lengths)
        assert all(lengths.begin_lease(token) for token in range(100))

    def test_auto_begins_no_round_before_the_speed_of_single_batches_is_known(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        assert lengths.estimated(estimate(40))
        assert not lengths.begin_lease(0)
        measure(lengths, 1000)
        assert lengths.begin_lease(1)

    def test_auto_gives_up_rounds_that_are_slower_and_tries_them_again_later(self) -> None:
        lengths = measured_auto()
        lengths.limit(64)
        lengths.estimated(estimate(40))
        assert lengths.begin_lease(1)
        grown(lengths)
        measure(lengths, 990, in_rounds=True, token=5)
        begun, token = [], 6
        while not lengths.wants_estimate and token < 1000:
            begun.append(lengths.begin_lease(token))
            token += 1
        assert not any(begun)
        assert len(begun) == 128 - 6 + 1
        measure(lengths, 900)
        assert lengths.estimated(estimate(40))
        assert lengths.length == 2
        assert lengths.begin_lease(token)

    def test_auto_measures_rounds_that_have_grown(self) -> None:
        lengths = measured_auto()
        lengths.estimated(estimate(40))
        lengths.begin_lease(1)
        lengths.trained(figures(2))
        measure(lengths, 10, in_rounds=True)
        assert lengths.begin_lease(2)

    def test_rounds_that_the_manifest_wants_are_trained_at_any_speed(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        before = lengths.decision
        for token in range(1000):
            assert lengths.begin_lease(token)
            grown(lengths)
            measure(lengths, 1000)
            measure(lengths, 10, in_rounds=True, token=token)
        assert lengths.decision == before


class TestDecision:
    def told(self, lengths: RoundLengths) -> tuple[bool, str]:
        decision = lengths.decision
        assert decision is not None
        return decision.active, decision.reason

    def test_a_job_that_disables_rounds_has_none(self) -> None:
        assert RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.DISABLED), 15).decision is None

    def test_speeds_that_are_forgotten_meanwhile_do_not_keep_a_worker_from_telling(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lengths = measured_auto()
        lengths.estimated(estimate(40))
        moved = Stretch(False, 0, 16, 1000, 1.0, (1, 2))
        committing = threading.Thread(target=lengths.measured, args=(moved,))

        def median_meanwhile(speeds: Iterable[float]) -> float:
            committing.start()
            committing.join(0.2)
            return median(speeds)

        monkeypatch.setattr("emberscale_trainer.worker.pace.median", median_meanwhile)
        assert lengths.decision is not None
        committing.join()

    def test_auto_tells_its_estimate_with_the_numbers(self) -> None:
        lengths = measured_auto()
        assert self.told(lengths) == (False, "EstimatePending")
        lengths.estimated(estimate(80))
        assert self.told(lengths) == (False, "EstimateDoesNotPay")
        lengths.estimated(estimate(40))
        message = (
            "a round of 64 batches would take 0.40x the bytes of its batches one by one; 0.6x or less begins rounds"
        )
        assert lengths.decision == RoundsDecision(True, "EstimatePays", message, 64, 40, 100, 10, 24_000)

    def test_auto_tells_that_rounds_saved_less_than_it_had_estimated(self) -> None:
        lengths = measured_auto()
        lengths.limit(4)
        lengths.estimated(estimate(40))
        grown(lengths, saves=False)
        assert self.told(lengths) == (False, "SavesTooLittle")
        assert lengths.decision is not None
        assert "a round of 4 batches took 0.95x" in lengths.decision.message
        lengths.trained(figures(1, saves=False))  # from the current lease
        assert self.told(lengths) == (False, "SavesTooLittle")

    def test_auto_tells_both_speeds_with_the_estimate(self) -> None:
        lengths = RoundLengths(AUTO, 15)
        lengths.estimated(estimate(40))
        lengths.limit(64)
        assert self.told(lengths) == (False, "SpeedPending")
        measure(lengths, 10_234)
        lengths.begin_lease(1)
        assert self.told(lengths) == (True, "EstimatePays")
        grown(lengths)
        measure(lengths, 5_020, in_rounds=True)
        message = "rounds train 5,020 samples/s, and single batches 10,234 samples/s (0.49x; 1x or more would pay)"
        assert lengths.decision == RoundsDecision(False, "SpeedDoesNotPay", message, 64, 40, 100, 10, 24_000)

    def test_a_bound_without_room_is_told_while_it_lasts(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.limit(1)
        assert self.told(lengths) == (False, "NotAdmitted")
        lengths.limit(2)
        assert self.told(lengths) == (True, "Enabled")

    @pytest.mark.parametrize(
        ("figure", "reason", "said"),
        [
            ({"seconds": 60.0}, "TooSlow", "two batches take 1m to train, and a lease must progress every 3.75s"),
            ({"values": 1 << 28}, "BudgetTooSmall", "the rows of two batches take 6 GiB of memory, and hotEmbeddings."),
        ],
    )
    def test_what_does_not_fit_is_told_until_it_does(self, figure: dict[str, Any], reason: str, said: str) -> None:
        lengths = RoundLengths(ENABLED, 15)
        lengths.trained(figures(2, **figure))
        assert self.told(lengths) == (False, reason)
        assert lengths.decision is not None
        assert lengths.decision.message.startswith(said)
        for token in range(65):
            lengths.begin_lease(token)
        assert self.told(lengths) == (False, reason)
        lengths.trained(figures(2))
        assert self.told(lengths) == (True, "Enabled")

    def test_a_budget_that_is_too_small_is_told_in_the_same_words_each_time(self) -> None:
        lengths = RoundLengths(ENABLED, 15)
        told = set()
        for values in (1 << 28, 1 << 29):
            lengths.trained(figures(2, values=values))
            told.add(lengths.decision)
        assert len(told) == 1

    def test_a_budget_above_the_memory_of_a_worker_rules_rounds_out(self) -> None:
        spec = training_job(hotEmbeddings={"mode": "Enabled", "budget": "4Gi"}).spec
        assert rounds_ruled_out(spec, None) is None
        assert rounds_ruled_out(spec, 4 << 30) is None
        decision = rounds_ruled_out(spec, 3 << 30)
        assert decision is not None
        assert decision.reason == "BudgetAboveMemory"
        assert decision.message == "hotEmbeddings.budget is 4 GiB, and a worker has 3 GiB of memory"
        lengths = RoundLengths(spec.hot_embeddings, 15, decision)
        assert lengths.decision == decision
        assert not lengths.begin_lease(1)
        assert not lengths.wants_estimate

    def test_what_rounds_do_not_work_with_is_told_of_auto(self) -> None:
        optimizers = {"sparse": {"type": "Adam"}}
        spec = training_job(hotEmbeddings={"mode": "Auto"}, optimizers=optimizers).spec
        decision = rounds_ruled_out(spec, None)
        assert decision is not None
        assert (decision.reason, decision.message) == (
            "Obstacle",
            "hotEmbeddings does not work with optimizers.sparse.type (Adam)",
        )
        assert rounds_ruled_out(training_job(optimizers=optimizers).spec, None) is None


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
