"""The statistics of a worker: of its last heartbeat, of an evaluation shard, and in total, as Prometheus metrics."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from emberscale_api import metrics
from emberscale_api.job.data import BadRecord
from emberscale_api.job.running import Traffic
from emberscale_api.job.status import BINNED_LOGITS, EVALUATION_BINS, PROGRESS_BINS
from emberscale_api.metrics import WORKER_STAGES
from emberscale_api.telemetry import labelled
from emberscale_trainer.jit import typed_kernel
from emberscale_trainer.worker.rounds import RoundFigures

Span = tuple[float, float]
"""Begin and end of a span, by time.perf_counter."""


@typed_kernel("void(f4[::1], f4[::1], i8[:, ::1])")
def add_to_histogram(probabilities, labels, counts):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Adds predictions float32 in [0, 1] to `counts` int64 [2, bins] by label float32; row 1 holds the positives.

    The bins are equal in logits, as rare clicks, and a model that overfits, leave few bins of [0, 1] in use.
    """
    # Numba types this from the signature above.
    bins = counts.shape[1]
    for sample in range(len(labels)):
        probability = np.float64(probabilities[sample])
        position = (0.5 + (np.log(probability) - np.log(1.0 - probability)) / BINNED_LOGITS) * bins
        cell = np.int64(min(position, bins - 1.0) if position > 0 else 0.0)  # NaN is 0
        counts[1 if labels[sample] > 0 else 0, cell] += 1


@dataclass
class WorkDelta:
    """The work of a worker since its last heartbeat; `histogram` int64 [2, bins] as in `add_to_histogram`."""

    sequence: int
    samples: int = 0
    batches: int = 0
    loss_sum: float = 0.0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, PROGRESS_BINS), np.int64))
    truncated_records: int = 0
    bad_records: list[BadRecord] = field(default_factory=list)


class WorkerStatistics:
    """Totals since the start and deltas since the last heartbeat; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delta = WorkDelta(1)
        self.total_samples = 0
        self.total_batches = 0
        self.total_stages = dict.fromkeys(WORKER_STAGES, 0.0)
        self.total_traffic = Traffic()
        self.total_received = 0
        self.total_ids = 0
        self.total_keys = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            with self._lock:
                self.total_stages[name] += seconds

    def waited(self, since: float, reading: Span, pulling: Span) -> None:
        """Attributes the wait for a batch `since` then to the spans in which it was read and pulled."""
        until = time.perf_counter()
        waits = [max(0.0, min(until, stop) - max(since, start)) for start, stop in (reading, pulling)]
        with self._lock:
            self.total_stages["wait_read"] += waits[0]
            self.total_stages["wait_pull"] += waits[1]
            self.total_stages["wait"] += max(0.0, until - since - sum(waits))

    def trained(
        self,
        probabilities: NDArray[np.float32],
        labels: NDArray[np.float32],
        loss_sum: float,
        truncated_records: int = 0,
    ) -> None:
        """Counts a computed batch; `loss_sum` is over its samples; lists of `truncated_records` of them were cut."""
        with self._lock:
            self._delta.samples += len(labels)
            self._delta.batches += 1
            self._delta.loss_sum += loss_sum
            add_to_histogram(probabilities, labels, self._delta.histogram)
            self._delta.truncated_records += truncated_records
            self.total_samples += len(labels)
            self.total_batches += 1

    def planned(self, ids: int, keys: int) -> None:
        """Counts the rows that a batch looks up, and its distinct keys."""
        with self._lock:
            self.total_ids += ids
            self.total_keys += keys

    def moved(self, received: int, sent: int) -> None:
        """Counts bytes received and sent, with headers."""
        with self._lock:
            self.total_received += received
            self.total_traffic = self.total_traffic.plus(Traffic(received + sent))

    def round_trained(self, figures: RoundFigures) -> None:
        """Counts a round and what it takes on the wire."""
        with self._lock:
            trained = Traffic(
                rounds=1,
                round_batches=figures.batches,
                round_bytes=figures.bytes,
                single_bytes=figures.single_bytes,
                round_rows=figures.rows,
                single_rows=figures.single_rows,
            )
            self.total_traffic = self.total_traffic.plus(trained)

    def skipped(self, records: list[BadRecord]) -> None:
        """Counts malformed records, which were left out."""
        with self._lock:
            self._delta.bad_records += records

    def take(self) -> WorkDelta:
        """Returns the work since the previous call; the sequence counts calls."""
        with self._lock:
            taken, self._delta = self._delta, WorkDelta(self._delta.sequence + 1)
            return taken


@dataclass
class EvaluationTotals:
    """Sums over the batches of one shard; they can be merged with those of other shards without loss.

    `histogram` int64 [2, bins] as in `add_to_histogram`.
    """

    samples: int = 0
    loss_sum: float = 0.0
    prediction_sum: float = 0.0
    label_sum: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, EVALUATION_BINS), np.int64))

    def add(self, probabilities: NDArray[np.float32], labels: NDArray[np.float32], loss_sum: float) -> None:
        """Adds a batch: predictions and labels float32 [batch], and the log loss summed over it."""
        self.samples += len(labels)
        self.loss_sum += loss_sum
        self.prediction_sum += float(probabilities.sum(dtype=np.float64))
        self.label_sum += int(labels.sum(dtype=np.float64))
        add_to_histogram(probabilities, labels, self.histogram)


class WorkerMetrics(Collector):
    """Exports the statistics' totals, read when scraped."""

    def __init__(self, statistics: WorkerStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yields the totals at this moment."""
        statistics, traffic = self._statistics, self._statistics.total_traffic
        for name, text, value in (
            (metrics.SAMPLES_TOTAL, "Samples trained on", statistics.total_samples),
            (metrics.BATCHES_TOTAL, "Batches trained on", statistics.total_batches),
            (metrics.IDS_TOTAL, "Rows that batches look up", statistics.total_ids),
            (metrics.KEYS_TOTAL, "Distinct keys among those of a batch", statistics.total_keys),
            (metrics.ROUNDS_TOTAL, "Rounds trained", traffic.rounds),
            (metrics.ROUND_BATCHES_TOTAL, "Batches trained in rounds", traffic.round_batches),
            (metrics.ROUND_BYTES_TOTAL, "Bytes of keys and rows of rounds", traffic.round_bytes),
            (
                metrics.ROUND_SINGLE_BYTES_TOTAL,
                "Bytes that the batches of rounds would have taken one by one",
                traffic.single_bytes,
            ),
            (metrics.ROUND_ROWS_TOTAL, "Distinct rows of rounds", traffic.round_rows),
            (
                metrics.ROUND_SINGLE_ROWS_TOTAL,
                "Rows that the batches of rounds would have pulled one by one",
                traffic.single_rows,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        stages = statistics.total_stages
        yield labelled(CounterMetricFamily, metrics.STAGE_SECONDS_TOTAL, "Seconds spent by stage", ["stage"], stages)
        moved = {"received": statistics.total_received, "sent": traffic.bytes - statistics.total_received}
        text = "Bytes exchanged with parameter servers"
        yield labelled(CounterMetricFamily, metrics.WIRE_BYTES_TOTAL, text, ["direction"], moved)
