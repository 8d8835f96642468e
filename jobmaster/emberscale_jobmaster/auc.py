"""The area under the ROC curve, from histograms of predictions."""

import math

import numpy as np
import numpy.typing as npt


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
