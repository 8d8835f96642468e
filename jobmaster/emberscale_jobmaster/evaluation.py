"""Merges the measurements of evaluation shards into one result per epoch, with AUC from histograms."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_api.job.status import EVALUATION_BINS, EvaluationResult


def auc(positives: npt.ArrayLike, negatives: npt.ArrayLike) -> float:
    """AUC from counts per bin of predictions, ascending, with label 1 and with label 0; shape [bins] both.

    The trapezoid rule over bins: predictions in the same bin are ties and count half. NaN where a label is absent.
    """
    ones = np.asarray(positives, dtype=np.float64)
    zeros = np.asarray(negatives, dtype=np.float64)
    pairs = ones.sum() * zeros.sum()
    if pairs == 0:
        return math.nan
    below = np.cumsum(zeros) - zeros
    return float((ones * (below + zeros / 2)).sum() / pairs)


@dataclass(frozen=True)
class Tally:
    """Sums over evaluated samples; the histograms count predictions in equal bins of [0, 1], by label."""

    samples: int = 0
    loss_sum: float = 0.0
    prediction_sum: float = 0.0
    label_sum: int = 0
    positives: tuple[int, ...] = (0,) * EVALUATION_BINS
    negatives: tuple[int, ...] = (0,) * EVALUATION_BINS

    def merge(self, other: "Tally") -> "Tally":
        """The sums over the samples of both."""
        if not self.samples:
            return other
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
