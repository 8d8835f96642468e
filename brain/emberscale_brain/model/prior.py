"""The prior of a job's coefficients, until its own measurements determine them: a normal distribution.

A job that has not varied its shape leaves the model under-determined. Similar past jobs then tell how its time divides
among the terms; if there are none, the time that its workers spend in each stage tells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_brain.planner.types import ThroughputFit

# Shares of the paper's terms in an iteration if nothing is measured: its figure 1 gives the look-ups 30 to 48%.
_DEFAULT_SHARES = (0.40, 0.15, 0.10, 0.25, 0.10)
_LEAST_SHARE = 0.03
_WEAK_RELATIVE_SD = 2.0
_LEAST_SD_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Prior:
    """Mean float64[6] and covariance float64[6, 6] of the coefficients.

    `overlap` is the assumed overlap of the terms until measurements say otherwise.
    """

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    overlap: float = 1.0


def _stage_shares(stages: Mapping[str, float]) -> NDArray[np.float64]:
    """Shares of the paper's terms from a worker's stages: compute is the gradient; pull and push wait for the PS."""
    total = sum(stages.values())
    if total <= 0:
        return np.array(_DEFAULT_SHARES)
    compute, pull, push = (stages.get(name, 0.0) / total for name in ("compute", "pull", "push"))
    rest = max(0.0, 1 - compute - pull - push)
    shares = np.array([compute, 0.6 * push, 0.4 * push, pull, rest])
    shares = np.maximum(shares, _LEAST_SHARE)
    normalized: NDArray[np.float64] = shares / shares.sum()
    return normalized


def weak_prior(at: NDArray[np.float64], iteration_seconds: float, stages: Mapping[str, float] | None = None) -> Prior:
    """A prior that little data outweighs: the time measured at features `at` (float64[6]), split by the stages."""
    shares = _stage_shares(stages or {})
    # the cost of requests, which the paper leaves out, is assumed to be 0 for now, but may well be a tenth
    mean = np.append(shares, 0.0) * iteration_seconds / at
    spread = _WEAK_RELATIVE_SD * np.append(shares, 0.1) * iteration_seconds / at
    return Prior(mean, np.diag(spread**2))


def similar_prior(fits: Sequence[ThroughputFit], similarities: Sequence[float], at: NDArray[np.float64]) -> Prior:
    """Derives a prior from past jobs' fits, weighted by similarity (0 to 1, above 0).

    Its variance adds the spread among the fits, their own uncertainty, and more the less similar they are. `at`
    (float64[6]) are the features of a typical shape, at which no term is assumed to be exactly 0. The total speed is
    trusted less than its division among the terms, since hardware or a feature pipeline can be slower in all terms.
    """
    weights = np.asarray(similarities, dtype=np.float64)
    if len(fits) == 0 or len(fits) != len(weights) or not (weights > 0).all():
        raise ValueError("a prior needs at least one past fit, each with a similarity above 0")
    overlap = max({fit.overlap for fit in fits}, key=lambda one: sum(weights[[fit.overlap == one for fit in fits]]))
    alike = [fit.overlap == overlap for fit in fits]  # coefficients under another overlap mean something else
    fits, weights = [fit for fit, same in zip(fits, alike, strict=True) if same], weights[alike]
    likeness = float((weights**2).sum() / weights.sum())
    weights = weights / weights.sum()
    coefficients = np.array([fit.coefficients for fit in fits])
    mean = weights @ coefficients
    deviations = coefficients - mean
    between = np.einsum("i,ij,ik->jk", weights, deviations, deviations)
    own = np.einsum("i,ijk->jk", weights, np.array([fit.covariance for fit in fits]))
    doubt = 0.15 + 0.85 * (1 - likeness)
    least = _LEAST_SD_SHARE * float(at @ mean) / at
    covariance = between + own + np.diag((doubt * mean) ** 2 + least**2) + doubt**2 * np.outer(mean, mean)
    return Prior(mean, covariance, overlap)
