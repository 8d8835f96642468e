"""Fitting the throughput model: robust non-negative least squares on relative error, with a prior.

Minimised is the sum of squared differences of log iteration time, RMSLE's own measure: non-negative least squares on
the relative error gives the start, and Gauss-Newton steps (each again such a problem) the rest. Every shape counts
once, with the variance `noise^2 / profiles + misfit^2`: a thousand profiles of one do not drown three of another.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_brain.model.features import FEATURES, ModelConstants, features
from emberscale_brain.model.prior import Prior, weak_prior
from emberscale_brain.model.window import ProfileWindow
from emberscale_brain.planner.types import JobProfile, ThroughputFit

_NOISE = 0.05  # relative standard deviation of a profile before any was compared with another
_NOISE_WEIGHT = 2.0  # profiles' worth of trust in that
_MISFIT = 0.01  # relative error of the model itself at a shape, before it is measured
_MISFIT_WEIGHT = 2.0
_MISFITS = np.logspace(-8, 0, 65)  # variances among which the misfit's is found
_DRIFT = 0.01  # relative standard deviation that an hour of age adds (M and B are constant only "for a short time")
_TUKEY = 4.685
_ROUGH_STEPS = 4  # with weights for the least absolute deviation, which an outlier moves little
_STEPS = 16
_TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True)
class _Data:
    """Shapes of a window: features [n, 5], log seconds [n], profiles behind each [n], variance that age adds [n]."""

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    counts: NDArray[np.float64]
    drift: NDArray[np.float64]
    within_scatter: float
    within_freedom: float


def _data(window: ProfileWindow, constants: ModelConstants) -> _Data:
    shapes = list(window.shapes.values())
    keys = np.array([shape.key for shape in shapes], dtype=np.float64)
    inliers = np.array([shape.inliers for shape in shapes])
    latest = np.array([shape.latest for shape in shapes])
    age_hours = (latest.max() - latest) / 3600
    return _Data(
        x=features(constants, keys[:, 0], keys[:, 1], keys[:, 2], keys[:, 3]),
        y=np.array([shape.location for shape in shapes]),
        counts=inliers,
        drift=_DRIFT**2 * age_hours,
        within_scatter=sum(shape.scatter for shape in shapes),
        within_freedom=float((inliers - 1).sum()),
    )


def _noise_variance(data: _Data, residuals: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Variance of one profile: scatter within shapes, and about the model for shapes measured once."""
    once = data.counts < 1.5
    freedom = max(0.0, float(weights[once].sum()) - FEATURES)
    about_model = float((weights * residuals**2)[once].sum()) if freedom > 0 else 0.0
    total = _NOISE_WEIGHT * _NOISE**2 + data.within_scatter + about_model
    return total / (_NOISE_WEIGHT + data.within_freedom + freedom)


def _misfit_variance(
    residuals: NDArray[np.float64], weights: NDArray[np.float64], variance: NDArray[np.float64], noise: float
) -> float:
    """Variance of the model's own error, so that residuals are as large as their variances say."""
    repeated = variance < 0.75 * noise
    freedom = float(weights[repeated].sum())
    squares = (weights * residuals**2)[repeated]
    own = variance[repeated]
    excess = (squares[:, None] / (own[:, None] + _MISFITS)).sum(axis=0) + _MISFIT_WEIGHT * _MISFIT**2 / _MISFITS
    # excess falls as the misfit grows
    return float(np.exp(np.interp(-np.log(freedom + _MISFIT_WEIGHT), -np.log(excess), np.log(_MISFITS))))


def _solve(
    x: NDArray[np.float64],
    target: NDArray[np.float64],
    precision: NDArray[np.float64],
    prior_root: NDArray[np.float64],
    prior_mean: NDArray[np.float64],
) -> NDArray[np.float64]:
    """argmin over c >= 0 of sum precision (x c - target)^2 + |prior_root (c - prior_mean)|^2."""
    root = np.sqrt(precision)[:, None]
    matrix = np.vstack([root * x, prior_root])
    right = np.concatenate([root[:, 0] * target, prior_root @ prior_mean])
    scale = np.linalg.norm(matrix, axis=0)
    solution: NDArray[np.float64] = nnls(matrix / scale, right)[0] / scale
    return solution


def _inverse(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of a positive definite matrix whose rows may differ in scale by many orders of magnitude."""
    scale = 1 / np.sqrt(np.diag(matrix))
    inverse: NDArray[np.float64] = np.linalg.inv(matrix * np.outer(scale, scale)) * np.outer(scale, scale)
    symmetric: NDArray[np.float64] = (inverse + inverse.T) / 2
    return symmetric


def _robust_fit(data: _Data, prior: Prior) -> tuple[NDArray[np.float64], ...]:
    """Coefficients, weights of the shapes (0: outlier), variance of each, and [noise variance]."""
    prior_root = np.linalg.cholesky(_inverse(prior.covariance)).T.astype(np.float64)
    noise = (_NOISE_WEIGHT * _NOISE**2 + data.within_scatter) / (_NOISE_WEIGHT + data.within_freedom)
    weights = np.ones(len(data.y))
    variance = noise / data.counts + data.drift + _MISFIT**2
    seconds = np.exp(data.y)
    c = _solve(data.x / seconds[:, None], np.ones(len(seconds)), 1 / variance, prior_root, prior.mean)
    for step in range(_STEPS):
        predicted = np.maximum(data.x @ c, 1e-12 * seconds)
        residuals = data.y - np.log(predicted)
        if step < _ROUGH_STEPS:
            weights = 1 / np.maximum(1.0, np.abs(residuals) / np.sqrt(variance))
        else:
            distance = residuals / (_TUKEY * np.sqrt(variance))
            weights = np.where(np.abs(distance) < 1, (1 - distance**2) ** 2, 0.0)
            noise = _noise_variance(data, residuals, weights)
            sampling = noise / data.counts + data.drift
            variance = sampling + _misfit_variance(residuals, weights, sampling, noise)
        target = 1 + np.clip(residuals, -0.7, 0.7)
        updated = _solve(data.x / predicted[:, None], target, weights / variance, prior_root, prior.mean)
        moved = float(np.abs(data.x @ (updated - c) / predicted).max())
        c = updated
        if step > _ROUGH_STEPS + 2 and moved < _TOLERANCE:
            break
    return c, weights, variance, np.array([noise])


def fit_window(window: ProfileWindow, constants: ModelConstants, prior: Prior, fitted_at: float = 0.0) -> ThroughputFit:
    """Fits the profiles of a window; with none of them, the prior is the fit.

    The covariance is that of the posterior without the bound at 0, so a coefficient that is 0 keeps its doubt.
    """
    if not window.shapes:
        return prior_fit(prior, fitted_at)
    data = _data(window, constants)
    c, weights, variance, (noise,) = _robust_fit(data, prior)
    predicted = data.x @ c
    slopes = data.x / predicted[:, None]
    prior_precision = _inverse(prior.covariance)
    covariance = _inverse(slopes.T @ (slopes * (weights / variance)[:, None]) + prior_precision)
    residuals = data.y - np.log(predicted)
    kept = weights > 0
    set_aside = sum(shape.outliers for shape in window.shapes.values())
    dropped = [len(shape.log_seconds) for shape, keep in zip(window.shapes.values(), kept, strict=True) if not keep]
    between = float((data.counts * residuals**2)[kept].sum())
    rmsle = ((between + data.within_scatter) / max(1.0, float(data.counts[kept].sum()))) ** 0.5
    return ThroughputFit(
        coefficients=tuple(float(value) for value in c),  # type: ignore[arg-type]  # five, as the features are
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
        noise=float(noise) ** 0.5,
        rmsle=rmsle,
        profiles=window.profiles,
        distinct_shapes=len(window.shapes),
        outliers=set_aside + sum(dropped),
        prior_share=float(np.clip(np.trace(covariance @ prior_precision) / FEATURES, 0, 1)),
        fitted_at=fitted_at,
    )


def prior_fit(prior: Prior, fitted_at: float = 0.0) -> ThroughputFit:
    """The fit of a job that has not been measured yet."""
    return ThroughputFit(
        coefficients=tuple(float(value) for value in prior.mean),  # type: ignore[arg-type]  # five, as the features are
        covariance=tuple(tuple(float(value) for value in row) for row in prior.covariance),
        noise=_NOISE,
        rmsle=0.0,
        profiles=0,
        distinct_shapes=0,
        prior_share=1.0,
        fitted_at=fitted_at,
    )


def first_prior(profiles: tuple[JobProfile, ...], window: ProfileWindow, constants: ModelConstants) -> Prior | None:
    """The weak prior at the first shape of a window, split by the stages that a profile of it reports."""
    if not window.shapes:
        return None
    first = next(iter(window.shapes.values()))
    stages = next((dict(p.stage_fractions) for p in reversed(profiles) if p.stage_fractions and not p.restarted), {})
    return weak_prior(features(constants, *first.key), float(np.exp(first.location)), stages)


def fit_profiles(
    profiles: tuple[JobProfile, ...], constants: ModelConstants, now: float, prior: Prior | None = None
) -> ThroughputFit | None:
    """Fits profiles from scratch; None where neither a usable profile nor a prior is there."""
    window = ProfileWindow().add(profiles, now)
    prior = prior or first_prior(profiles, window, constants)
    return None if prior is None else fit_window(window, constants, prior, now)
