"""The costs and the results of estimates of rounds."""

import numpy as np
import pytest

from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec, OptimizerType, resolve_model
from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner, RequestTooLargeError
from emberscale_trainer.worker.rounds import Round, RoundLengths
from emberscale_trainer.worker.trial import RoundTrial
from master_stand_in import even_table
from training_jobs import training_job

TABLES = resolve_model(training_job().spec).tables
COLUMNS = 1 + max(table.column for table in TABLES)
RECORDS = 50


def batch(number: int, ids: int) -> Batch:
    """Makes a batch with ids below `ids`."""
    drawn = np.random.default_rng(number).integers(0, ids, (RECORDS, COLUMNS))
    dense = np.zeros((RECORDS, 13), np.float32)
    positions = (number * RECORDS, (number + 1) * RECORDS)
    return Batch(number, *positions, np.zeros(RECORDS, np.float32), dense, drawn, (), (), 0)


class Estimate:
    """An estimate over 64 batches; `planned` are the lengths of the planned rounds, and `most` batches fit a frame."""

    def __init__(self, ids: int, budget: int, most: int = 64) -> None:
        self.lengths = RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.AUTO, budget=str(budget)), 60)
        self.planned: list[int] = []
        self._most = most
        self._rounds = KeyPlanner(even_table(1), TABLES, 100, OptimizerType.ADAGRAD)
        singles, trial = KeyPlanner(even_table(1), TABLES, 100), RoundTrial(self.lengths)
        for number in range(64):
            one = Round.of([batch(number, ids)])
            trial.add(one, singles.plan(one.ids, one.lists))
        trial.end(self._plan)

    def _plan(self, one: Round) -> KeyPlan:
        self.planned.append(len(one.batches))
        if len(one.batches) > self._most:
            raise RequestTooLargeError("beyond a frame")
        return self._rounds.plan(one.ids, one.lists)

    @property
    def batches(self) -> int:
        """The batches of the round behind the decision."""
        assert self.lengths.decision is not None
        return self.lengths.decision.batches


def test_where_all_fits_the_longest_round_is_planned_at_once() -> None:
    assert Estimate(ids=100, budget=1 << 30).planned == [2, 64]


def test_where_batches_share_no_rows_the_round_that_fits_is_planned_and_none_beyond() -> None:
    needed = Estimate(ids=1 << 40, budget=1 << 30).lengths.decision
    assert needed is not None
    estimate = Estimate(ids=1 << 40, budget=9 * needed.memory_bytes // 64)
    assert (estimate.planned, estimate.batches) == ([2, 8], 8)


def test_where_batches_share_rows_longer_ones_are_tried_while_they_fit() -> None:
    estimate = Estimate(ids=10, budget=1 << 22)
    assert estimate.lengths.decision is not None
    assert estimate.batches == 64
    assert estimate.planned == sorted(set(estimate.planned))


@pytest.mark.parametrize(("most", "planned", "found"), [(16, [2, 64, 32, 16], 16), (2, [2, 64, 32, 16, 8, 4], 2)])
def test_rounds_beyond_a_frame_are_cut(most: int, planned: list[int], found: int) -> None:
    estimate = Estimate(ids=100, budget=1 << 30, most=most)
    assert (estimate.planned, estimate.batches) == (planned, found)


def test_no_round_fits_into_a_frame() -> None:
    estimate = Estimate(ids=100, budget=1 << 30, most=1)
    assert estimate.planned == [2]
    assert estimate.lengths.decision is not None
    assert estimate.lengths.decision.reason == "NotAdmitted"


def test_batches_that_an_estimate_keeps_fit_into_the_budget() -> None:
    kept = 10 * 2 * batch(0, 1).memory_bytes
    estimate = Estimate(ids=1, budget=kept)
    assert estimate.batches == 8
    none = Estimate(ids=1, budget=kept // 10)
    assert none.planned == []
    assert none.lengths.decision is not None
    assert (none.lengths.decision.reason, none.batches) == ("BudgetTooSmall", 0)
