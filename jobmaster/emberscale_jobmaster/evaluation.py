"""Merging what evaluation shards measured into one result an epoch."""

import math
from dataclasses import dataclass

import numpy as np

from emberscale_api.checkpoint import EvaluationResult
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
        """The metrics. Normalised entropy is the log loss relative to that of always predicting the mean label."""
        logloss = self.loss_sum / self.samples if self.samples else math.nan
        base = self.label_sum / self.samples if self.samples else math.nan
        entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base)) if 0 < base < 1 else math.nan
        return EvaluationResult(
            epoch=epoch,
            samples=self.samples,
            auc=auc(self.positives, self.negatives),
            logloss=logloss,
            normalized_entropy=logloss / entropy,
            calibration=self.prediction_sum / self.label_sum if self.label_sum else math.nan,
        )
