"""A worker's statistics of its time."""

import time

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from sklearn.metrics import roc_auc_score

from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.status import EVALUATION_BINS, PROGRESS_BINS
from emberscale_api.rpc import master_pb2
from emberscale_api.rpc.codec import same_fields
from emberscale_trainer.worker.messages import report_work
from emberscale_trainer.worker.rounds import RoundFigures
from emberscale_trainer.worker.statistics import WorkerMetrics, WorkerStatistics, add_to_histogram


def test_training_waited_for_what_was_under_way_then() -> None:
    statistics = WorkerStatistics()
    now = time.perf_counter()
    # waiting for 10 s; the batch was being read until 6 s ago and pulled from 5 to 3 s ago
    statistics.waited(now - 10, (now - 12, now - 6), (now - 5, now - 3))
    stages = statistics.total_stages
    assert stages["wait_read"] == pytest.approx(4)
    assert stages["wait_pull"] == pytest.approx(2)
    assert stages["wait"] == pytest.approx(4, abs=0.5)


def test_a_batch_that_was_there_already_cost_no_wait() -> None:
    statistics = WorkerStatistics()
    now = time.perf_counter()
    statistics.waited(now, (now - 3, now - 2), (now - 2, now - 1))
    stages = statistics.total_stages
    assert (stages["wait_read"], stages["wait_pull"]) == (0, 0)


def test_predictions_are_counted_by_label_and_none_falls_outside() -> None:
    counts = np.zeros((2, 4), dtype=np.int64)
    probabilities = np.array([0, 0.51, 0.99, 1, np.nan], dtype=np.float32)
    add_to_histogram(probabilities, np.array([0, 1, 1, 0, 0], dtype=np.float32), counts)
    assert counts.tolist() == [[2, 0, 0, 1], [0, 0, 2, 0]]


@pytest.mark.parametrize(("centre", "spread"), [(-7, 1), (-1, 1), (-3, 7)], ids=["rare clicks", "usual", "overfitted"])
@pytest.mark.parametrize(("bins", "error"), [(PROGRESS_BINS, 5e-4), (EVALUATION_BINS, 2e-5)])
def test_the_bins_tell_rare_and_overconfident_predictions_apart(
    bins: int, error: float, centre: float, spread: float
) -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(centre, spread, 300_000)
    labels = generator.random(len(logits)) < 1 / (1 + np.exp(-(centre + (logits - centre) / spread)))
    probabilities = (1 / (1 + np.exp(-logits))).astype(np.float32)
    counts = np.zeros((2, bins), dtype=np.int64)
    add_to_histogram(probabilities, labels.astype(np.float32), counts)
    negatives, positives = counts
    below = np.cumsum(negatives) - negatives
    found = (positives * (below + negatives / 2)).sum() / (positives.sum() * negatives.sum())
    assert found == pytest.approx(roc_auc_score(labels, probabilities), abs=error)


def test_rounds_are_told_to_the_master_and_served_as_metrics() -> None:
    statistics, registry = WorkerStatistics(), CollectorRegistry()
    registry.register(WorkerMetrics(statistics))
    statistics.moved(100, 50)
    for batches in (2, 4):
        statistics.round_trained(RoundFigures(batches, 40, 70, 3, 5, single_rows=9, seconds=1.0, of_lease=8))
    decision = RoundsDecision(True, "EstimatePays", "it saves", 4, 40, 70, 3, 120)
    told = [master_pb2.HeartbeatRequest() for _ in range(2)]
    for request in told:
        report_work(request, statistics, decision)
    expected = master_pb2.WorkerTraffic(
        bytes=150, rounds=2, round_batches=6, round_bytes=80, single_bytes=140, round_rows=6, single_rows=18
    )
    assert [request.worker.traffic for request in told] == [expected] * 2
    assert [same_fields(RoundsDecision, request.worker.rounds) for request in told] == [decision] * 2
    served = {
        "emberscale_rounds_total": 2,
        "emberscale_round_batches_total": 6,
        "emberscale_round_bytes_total": 80,
        "emberscale_round_single_bytes_total": 140,
        "emberscale_round_rows_total": 6,
        "emberscale_round_single_rows_total": 18,
    }
    assert {name: registry.get_sample_value(name) for name in served} == served
