"""Speeds, loss and AUC: over the last seconds of training, and over an evaluation.

Time is an argument, in seconds. Training samples are aggregated in slices of time, so that a window costs a few slices,
however many workers report. The measurements of evaluation shards merge into one result per epoch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import numpy as np
import numpy.typing as npt

from emberscale_api.frozen import replace
from emberscale_api.job.status import EVALUATION_BINS, EvaluationResult


def auc(positives: npt.ArrayLike, negatives: npt.ArrayLike) -> float:
    """AUC from counts per bin of predictions, ascending, with label 1 and with label 0; shape [bins] both.

    Applies the trapezoid rule over bins: predictions in the same bin are ties and count half. NaN if a label is absent.
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
    """Sums over evaluated samples; the histograms count predictions in ascending bins, by label."""

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
            positives=tuple(map(add, self.positives, other.positives)),
            negatives=tuple(map(add, self.negatives, other.negatives)),
        )

    def result(self, epoch: int) -> EvaluationResult:
        """Returns the metrics of an epoch, which counts from 1."""
        logloss = self.loss_sum / self.samples if self.samples else None
        base = self.label_sum / self.samples if self.samples else 0.0
        entropy = -(base * math.log(base) + (1 - base) * math.log(1 - base)) if 0 < base < 1 else None
        area = math.nan if entropy is None else auc(self.positives, self.negatives)
        return EvaluationResult(
            epoch=epoch,
            samples=self.samples,
            auc=area if math.isfinite(area) else None,
            logloss=logloss,
            normalized_entropy=logloss / entropy if logloss is not None and entropy is not None else None,
            calibration=self.prediction_sum / self.label_sum if self.label_sum else None,
        )


@dataclass(frozen=True)
class RateMeter:
    """Samples per second over the last `window` seconds."""

    window: float = 15.0
    slices: tuple[tuple[float, int], ...] = ()
    """(when the slice began, samples), ascending."""
    began: float | None = None

    def add(self, samples: int, now: float) -> "RateMeter":
        """The meter after `samples` more; the first report only starts the clock."""
        if self.began is None:
            return RateMeter(self.window, (), now)
        kept = [entry for entry in self.slices if entry[0] > now - self.window]
        if kept and now - kept[-1][0] < 1.0:
            kept[-1] = (kept[-1][0], kept[-1][1] + samples)
        else:
            kept.append((now, samples))
        return RateMeter(self.window, tuple(kept), self.began)

    def rate(self, now: float) -> float | None:
        """Samples per second; None before the first measurement."""
        if self.began is None or now <= self.began or not self.slices:
            return None
        recent = sum(samples for when, samples in self.slices if when > now - self.window)
        return recent / max(1.0, min(self.window, now - self.began))


@dataclass(frozen=True)
class Slice:
    """The statistics of one slice of time; histograms of predictions by label, shape [bins]."""

    began: float
    samples: int
    loss_sum: float
    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProgressiveWindow:
    """Progressive validation: loss and AUC of predictions made before the update.

    Covers the last `window` seconds, or fewer if these hold `enough` samples, as older samples describe an older model.
    """

    window: float = 60.0
    slice_seconds: float = 1.0
    enough: int = 100_000
    slices: tuple[Slice, ...] = ()

    def add(
        self, samples: int, loss_sum: float, positives: Sequence[int], negatives: Sequence[int], now: float
    ) -> "ProgressiveWindow":
        """Returns the window after a report. Histograms of another length reset the window."""
        ones, zeros = np.asarray(positives, dtype=np.int64), np.asarray(negatives, dtype=np.int64)
        kept = [part for part in self.slices if part.began > now - self.window and len(part.positives) == len(ones)]
        if kept and now - kept[-1].began < self.slice_seconds:
            last = kept.pop()
            samples, loss_sum = last.samples + samples, last.loss_sum + loss_sum
            part = Slice(last.began, samples, loss_sum, last.positives + ones, last.negatives + zeros)
        else:
            part = Slice(now, samples, loss_sum, ones, zeros)
        recent = [part]
        for older in reversed(kept):
            if sum(one.samples for one in recent) >= self.enough:
                break
            recent.append(older)
        return replace(self, slices=tuple(reversed(recent)))

    def loss(self) -> float:
        """Mean log loss; NaN before the first report."""
        samples = sum(part.samples for part in self.slices)
        return sum(part.loss_sum for part in self.slices) / samples if samples else math.nan

    def auc(self) -> float:
        """AUC; NaN until both labels were seen."""
        return auc(*self.histograms())

    def histograms(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The counts of predictions by bin, with label 1 and with label 0, shape [bins]; [] before the first report."""
        ones = np.sum([part.positives for part in self.slices], axis=0, dtype=np.int64)
        zeros = np.sum([part.negatives for part in self.slices], axis=0, dtype=np.int64)
        return np.asarray(ones), np.asarray(zeros)


def eta_seconds(remaining: int, samples_per_second: float | None) -> float:
    """Seconds until `remaining` samples are trained; negative if unknown."""
    if remaining == 0:
        return 0.0
    return remaining / samples_per_second if samples_per_second else -1.0
