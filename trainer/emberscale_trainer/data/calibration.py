"""Computes the quality of known probabilities as predictions, and scales scores to a given quality."""

import numpy as np
import numpy.typing as npt

_STEPS = 25
_MAX_OFFSET, _MAX_SLOPE = 30.0, 10.0


def expected_auc(probabilities: npt.NDArray[np.float64]) -> float:
    """Returns the expected AUC of probabilities as predictions of labels that are drawn from them."""
    ascending = np.sort(probabilities)  # cheap if they are in order already
    below = np.cumsum(1.0 - ascending) - (1.0 - ascending)
    positives = ascending.sum()
    negatives = ascending.size - positives
    ordered = float((ascending * below).sum())
    tied = float((ascending * (1.0 - ascending)).sum()) / 2
    return (ordered + tied) / float(positives * negatives)


def calibrate(scores: npt.NDArray[np.float64], positive_rate: float, auc: float) -> tuple[float, float]:
    """Finds offset and slope so that sigmoid(offset + slope * score) has about the given mean and expected AUC."""
    centre, spread = float(scores.mean()), float(scores.std())
    standard = np.sort((scores - centre) / spread)

    def offset_for(slope: float) -> float:
        low, high = -_MAX_OFFSET, _MAX_OFFSET
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if _sigmoid(middle + slope * standard).mean() < positive_rate:
                low = middle
            else:
                high = middle
        return low

    low, high = 0.0, _MAX_SLOPE
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if expected_auc(_sigmoid(offset_for(middle) + middle * standard)) < auc:
            low = middle
        else:
            high = middle
    return offset_for(low) - low * centre / spread, low / spread


def _sigmoid(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(-logits))
    return result


class RankStatistics:
    """AUC and log loss of probabilities, accumulated with the same result for any chunks of rows.

    The AUC comes from histograms of 2**20 bins, ties within a bin counting half: its error is below 1e-6.
    """

    BINS = 1 << 20
    _FIXED_POINT = 1 << 40

    def __init__(self) -> None:
        self._positives = np.zeros(self.BINS, dtype=np.int64)
        self._negatives = np.zeros(self.BINS, dtype=np.int64)
        self._loss = 0

    def add(self, probabilities: npt.NDArray[np.float64], labels: npt.NDArray[np.uint8]) -> None:
        """Takes rows: probabilities float64[n] in (0, 1), labels uint8[n]."""
        bins = (probabilities * self.BINS).astype(np.int64)
        positive = labels == 1
        np.add.at(self._positives, bins[positive], 1)
        np.add.at(self._negatives, bins[~positive], 1)
        losses = -np.log(np.where(positive, probabilities, 1.0 - probabilities))
        self._loss += int((losses * self._FIXED_POINT).astype(np.int64).sum())

    @property
    def rows(self) -> int:
        """Rows taken."""
        return int(self._positives.sum() + self._negatives.sum())

    @property
    def positives(self) -> int:
        """Rows with label 1."""
        return int(self._positives.sum())

    @property
    def auc(self) -> float | None:
        """The area under the ROC curve; None while a class is missing."""
        positives, negatives = int(self._positives.sum()), int(self._negatives.sum())
        if not positives or not negatives:
            return None
        below = np.cumsum(self._negatives) - self._negatives
        twice = int((self._positives * (2 * below + self._negatives)).sum())
        return twice / (2 * positives * negatives)

    @property
    def log_loss(self) -> float | None:
        """The mean log loss in nats; None without rows."""
        return self._loss / self._FIXED_POINT / self.rows if self.rows else None
