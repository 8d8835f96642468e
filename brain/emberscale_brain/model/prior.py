"""The prior of a job's coefficients, until its own measurements determine them: a normal distribution.

A job that has not varied its shape leaves the model under-determined. Similar past jobs then tell how its time divides
among the terms. If there are none, the processor time of its workers and PS tells how much of it is theirs, and whether
they work at the same time; the time that its workers spend in each stage tells about the rest, or about all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_brain.planner.types import ThroughputFit

# Shares of the paper's terms in an iteration if nothing is measured: its figure 1 gives the look-ups 30 to 48%.
_DEFAULT_SHARES = (0.40, 0.15, 0.10, 0.25, 0.10)
_LEAST_SHARE = 0.03
_WEAK_RELATIVE_SD = 2.0
_LEAST_SD_SHARE = 0.1
_REQUEST_SD_SHARE = 0.1
_CPU_RELATIVE_SD = 0.15  # of the processor time of a batch from shape to shape
_ALSO_CPU = 0.02  # of an iteration: by so much, processor times together may exceed it without an overlap
OVERLAPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""The overlaps that a fit chooses among."""


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
    spread = _WEAK_RELATIVE_SD * np.append(shares, _REQUEST_SD_SHARE) * iteration_seconds / at
    return Prior(mean, np.diag(spread**2))


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The use of processors at some shapes: features float64[n, 6], seconds of an iteration float64[n].

    `workers` and `ps` float64[n] are shares of their cores, and so shares of an iteration that they compute.
    """

    x: NDArray[np.float64]
    seconds: NDArray[np.float64]
    workers: NDArray[np.float64]
    ps: NDArray[np.float64]


def cpu_prior(use: CpuUse, stages: Mapping[str, float] | None = None) -> Prior:
    """A prior from processor times, which say what each role computes for a batch; all of `use` is above 0.

    Where workers and PS together compute for longer than an iteration takes, they do so at the same time, and the terms
    overlap: as much as that takes. What is left of an iteration is divided among the network's terms and the constant
    by the workers' stages: more PS do not help a job that waits for its data.
    """
    of_worker, of_ps = use.workers * use.seconds, use.ps * use.seconds
    gradient = float(np.mean(of_worker / use.x[:, 0]))
    update, request = _ps_work(use.x, of_ps)
    mean = np.array([gradient, update, 0.0, 0.0, 0.0, request])
    computing = np.stack([use.x[:, 0] * gradient, use.x[:, 1] * update + use.x[:, 5] * request])
    overlap = next((one for one in OVERLAPS if _excess(computing, use.seconds, one) <= _ALSO_CPU), OVERLAPS[-1])
    at, seconds = use.x[0], float(use.seconds[0])
    left = max(0.0, 1 - float(computing[:, 0].sum()) / seconds)
    others = _stage_shares(stages or {})[2:]
    mean[2:5] = left * others / others.sum() * seconds / at[2:5]
    least = _LEAST_SHARE * seconds / at
    spread = np.maximum(_CPU_RELATIVE_SD * mean, least)
    spread[2:5] = _WEAK_RELATIVE_SD * np.maximum(mean, least)[2:5]
    spread[5] += _REQUEST_SD_SHARE * float(of_ps[0]) / at[5]
    return Prior(mean, np.diag(spread**2), overlap)


def _ps_work(x: NDArray[np.float64], of_ps: NDArray[np.float64]) -> tuple[float, float]:
    """The coefficients of the update and of requests: all is the update unless other numbers of PS say otherwise."""
    rows = x[:, [1, 5]] / of_ps[:, None]
    doubt = np.array([[0.0, _REQUEST_SD_SHARE * float(rows[:, 1].mean())]])
    update, request = nnls(np.vstack([rows, doubt]), np.append(np.ones(len(rows)), 0.0))[0]
    return float(update), float(request)


def _excess(terms: NDArray[np.float64], seconds: NDArray[np.float64], overlap: float) -> float:
    """By how much the terms [2, n] together exceed the iteration, as the mean logarithm over shapes."""
    together = (terms**overlap).sum(axis=0) ** (1 / overlap)
    return float(np.mean(np.log(together / seconds)))


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
