"""The log loss of logits: its value, the predictions and the gradient in one pass.

PyTorch's loss needs a graph of its own, and computes the sigmoid once more for the predictions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit import typed_kernel


class LogLoss(NamedTuple):
    """`total` is summed over the batch; `probabilities` and `gradient` are float32 [batch].

    `gradient` is that of the mean loss with respect to the logits.
    """

    total: float
    probabilities: NDArray[np.float32]
    gradient: NDArray[np.float32]


def log_loss(logits: NDArray[np.float32], labels: NDArray[np.float32]) -> LogLoss:
    """The loss of `logits` float32 [batch] against `labels` float32 [batch], 0 or 1. Raises ValueError for others."""
    if logits.shape != labels.shape or logits.ndim != 1:
        raise ValueError(f"logits of shape {logits.shape} do not fit labels of shape {labels.shape}")
    probabilities, gradient = np.empty_like(labels), np.empty_like(labels)
    total = _log_loss(np.ascontiguousarray(logits), np.ascontiguousarray(labels), probabilities, gradient)
    return LogLoss(total, probabilities, gradient)


@typed_kernel("f8(f4[::1], f4[::1], f4[::1], f4[::1])")
def _log_loss(logits, labels, probabilities, gradient):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. exp never gets a positive number, so nothing overflows.
    total = 0.0
    for sample in range(len(logits)):
        logit, label = logits[sample], labels[sample]
        small = np.exp(-abs(logit))
        probability = (np.float32(1) if logit >= 0 else small) / (np.float32(1) + small)
        total += max(logit, np.float32(0)) - logit * label + np.log1p(small)
        probabilities[sample] = probability
        gradient[sample] = (probability - label) / len(logits)
    return total
