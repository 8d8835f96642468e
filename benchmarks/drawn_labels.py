"""Quality on held-out records of the synthetic generator, expected over the labels that it draws.

Each record counts as positive with the probability by which the generator drew its label. The labels themselves would
only add chance to small differences between models.
"""

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from emberscale_trainer.data.population import Population
from whole_run import SYNTHETIC_SEED


class DrawnLabels:
    """The labels of held-out records, and the probabilities by which they are 1."""

    def __init__(self, labels: NDArray[np.float32], before: int) -> None:
        """`labels` [n] are those of the rows of `synthesise` after the first `before`; raises RuntimeError if not."""
        rows = Population(SYNTHETIC_SEED).rows(before, before + len(labels))
        if not np.array_equal(labels, rows.labels):
            raise RuntimeError("the held-out records are not those of the generator")
        self._labels = np.repeat([True, False], len(labels))
        self._weights = np.concatenate([rows.probabilities, 1 - rows.probabilities])

    def auc(self, predicted: NDArray[np.float32]) -> float:
        """Returns the expected AUC of predictions [n]."""
        return float(roc_auc_score(self._labels, np.tile(predicted.astype(np.float64), 2), sample_weight=self._weights))
