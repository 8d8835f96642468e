"""Merging what evaluation shards measured into one result an epoch."""

import math
from dataclasses import dataclass

import numpy as np

from emberscale_api.job.status import EvaluationResult
from emberscale_jobmaster.auc import auc

BINS = 16384


@dataclass(frozen=True)
class Tally:
    """Sums over evaluated samples; the histograms count predictions in equal bins of [0, 1], by label."""

    samples: int = 0
    loss_sum: float = 0.0
    prediction_sum: float = 0.0
    label_sum: int = 0
    positives: tuple[int, ...] = (0,) * BINS
    negatives: tuple[int, ...] = (0,) * BINS

    def merge(self, other: "Tally") -> "Tally":
        """The sums over the samples of both."""
        return Tally(
            samples=self.samples + other.samples,
            loss_sum=self.loss_sum + other.loss_sum,
            prediction_sum=self.prediction_sum + other.prediction_sum,
            label_sum=self.label_sum + other.label_sum,
            positives=tuple((np.asarray(self.positives) + np.asarray(other.positives)).tolist()),
            negatives=tuple((np.asarray(self.negatives) + np.asarray(other.negatives)).tolist()),
        )

    def result(self, epoch: int) -> EvaluationResult:
        """Returns the metrics of an epoch, which counts from 1."""
        logloss = self.loss_sum / self.samples if self.samples else None
        base = self.label_sum / self.samples if self.samples else 0.0
        entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base)) if 0 < base < 1 else None
        area = auc(self.positives, self.negatives)
        return EvaluationResult(
            epoch=epoch,
            samples=self.samples,
            auc=area if math.isfinite(area) else None,
            logloss=logloss,
            normalized_entropy=logloss / entropy if logloss is not None and entropy is not None else None,
            calibration=self.prediction_sum / self.label_sum if self.label_sum else None,
        )
