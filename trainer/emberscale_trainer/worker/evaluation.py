"""The totals of an evaluation shard."""

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job.status import EVALUATION_BINS
from emberscale_api.rpc import master_pb2
from emberscale_trainer.worker.statistics import histogram


class EvaluationTotals:
    """Sums over the batches of one shard; they can be merged with those of other shards without loss."""

    def __init__(self) -> None:
        self._samples = 0
        self._loss_sum = 0.0
        self._prediction_sum = 0.0
        self._label_sum = 0
        self._histogram = np.zeros((2, EVALUATION_BINS), dtype=np.int64)

    def add(self, probabilities: NDArray[np.float32], labels: NDArray[np.float32], loss_sum: float) -> None:
        """Adds a batch: predictions and labels float32 [batch], and the log loss summed over it."""
        self._samples += len(labels)
        self._loss_sum += loss_sum
        self._prediction_sum += float(probabilities.sum(dtype=np.float64))
        self._label_sum += int(labels.sum(dtype=np.float64))
        self._histogram += histogram(probabilities, labels, EVALUATION_BINS)

    def to_proto(self) -> master_pb2.Evaluation:
        """The totals as they travel to the master."""
        negatives, positives = self._histogram.astype("<u4")
        return master_pb2.Evaluation(
            samples=self._samples,
            loss_sum=self._loss_sum,
            prediction_sum=self._prediction_sum,
            label_sum=self._label_sum,
            positives=positives.tobytes(),
            negatives=negatives.tobytes(),
        )
