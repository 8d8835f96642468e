"""Fits the throughput model: robust non-negative least squares on relative error, with a prior.

The fit minimises the sum of squared differences of log iteration time, as RMSLE does. It starts from non-negative least
squares on the relative error, and continues with Gauss-Newton steps, each again such a problem. Every shape counts
once, with the variance `noise^2 / profiles + misfit^2`, so that a thousand profiles of one do not drown three of
another.

Once there are more shapes than coefficients, the fit also chooses the overlap of the terms among a few values.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_api.shape import JobProfile
from emberscale_brain.model.predict import FEATURES, Coefficients, ModelConstants, features
from emberscale_brain.model.prior import OVERLAPS, CpuUse, Prior, cpu_prior, weak_prior
from emberscale_brain.model.window import TUKEY, ProfileWindow, ShapeKey, shape_key
from emberscale_brain.planner.types import ThroughputFit

_NOISE = 0.05  # relative standard deviation of a profile before profiles are compared
_NOISE_WEIGHT = 2.0  # the weight of that assumption, in profiles
_MISFIT = 0.01  # relative error of the model itself at a shape, before it is measured
_MISFIT_WEIGHT = 2.0
_MISFITS = np.logspace(-8, 0, 65)  # candidates for the variance of the misfit
_DRIFT = 0.01  # relative standard deviation that an hour of age adds (M and B are constant only "for a short time")
_ROUGH_STEPS = 4  # with weights for the least absolute deviation, on which an outlier has little influence
_STEPS = 16
_TOLERANCE = 1e-7
_OVERLAP_STEPS = 16  # with either kind of weights
_SMALL_STEP = 1e-4  # of a coefficient
_DAMPING = 0.01
_LEAST_TERM = 0.3  # of an iteration, at the start
_NO_TERM = 0.01  # of an iteration: where terms overlap, so small a term hardly counts, but can grow again by its slope
_LEAST_IMPROVEMENT = 16.0  # of the loss, for an overlap other than the prior's
_FAR = 3.0  # standard deviations beyond which an error counts linearly, not squared


@dataclass(frozen=True, slots=True)
class _Data:
    """Shapes of a window: features [n, 6], log seconds [n], profiles behind each [n], variance that age adds [n]."""

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
    """Variance of one profile: the scatter within shapes and, for shapes measured once, about the model."""
    once = data.counts < 1.5
    freedom = max(0.0, float(weights[once].sum()) - FEATURES)
    about_model = float((weights * residuals**2)[once].sum()) if freedom > 0 else 0.0
    total = _NOISE_WEIGHT * _NOISE**2 + data.within_scatter + about_model
    return total / (_NOISE_WEIGHT + data.within_freedom + freedom)


def _misfit_variance(
    residuals: NDArray[np.float64], weights: NDArray[np.float64], variance: NDArray[np.float64], noise: float
) -> float:
    """Variance of the model's own error, chosen so that the residuals agree with their variances."""
    repeated = variance < 0.75 * noise
    freedom = float(weights[repeated].sum())
    squares = (weights * residuals**2)[repeated]
    own = variance[repeated]
    excess = (squares[:, None] / (own[:, None] + _MISFITS)).sum(axis=0) + _MISFIT_WEIGHT * _MISFIT**2 / _MISFITS
    # excess falls as the misfit grows
    return float(np.exp(np.interp(-np.log(freedom + _MISFIT_WEIGHT), -np.log(excess), np.log(_MISFITS))))


@dataclass(frozen=True, slots=True)
class _Errors:
    """The estimated errors of the shapes: weights (0: outlier), variance of each, and variance of one profile."""

    weights: NDArray[np.float64]
    variance: NDArray[np.float64]
    noise: float

    @classmethod
    def of(cls, data: _Data) -> "_Errors":
        """Returns the errors before anything is fitted."""
        noise = (_NOISE_WEIGHT * _NOISE**2 + data.within_scatter) / (_NOISE_WEIGHT + data.within_freedom)
        return cls(np.ones(len(data.y)), noise / data.counts + data.drift + _MISFIT**2, noise)

    def seen(self, data: _Data, residuals: NDArray[np.float64], rough: bool) -> "_Errors":
        """Returns the errors after a step; `rough` weighs them for the least absolute deviation."""
        if rough:
            return replace(self, weights=1 / np.maximum(1.0, np.abs(residuals) / np.sqrt(self.variance)))
        distance = residuals / (TUKEY * np.sqrt(self.variance))
        weights = np.where(np.abs(distance) < 1, (1 - distance**2) ** 2, 0.0)
        noise = _noise_variance(data, residuals, weights)
        sampling = noise / data.counts + data.drift
        return _Errors(weights, sampling + _misfit_variance(residuals, weights, sampling, noise), noise)


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


@dataclass(frozen=True, slots=True)
class _Solution:
    """Coefficients, with the prior's covariance, and the errors about them."""

    model: Coefficients
    errors: _Errors

    def loss(self, data: _Data) -> float:
        """Sum of squared errors relative to their expected variances; large errors count linearly."""
        residuals = data.y - np.log(self.model.iteration_seconds(data.x))
        distance = np.abs(residuals) / np.sqrt(_Errors.of(data).variance)
        return float(np.where(distance < _FAR, distance**2, 2 * _FAR * distance - _FAR**2).sum())


def _robust_fit(data: _Data, prior: Prior) -> _Solution:
    """Fits the terms without overlap, one after the other in time."""
    prior_root = np.linalg.cholesky(_inverse(prior.covariance)).T.astype(np.float64)
    errors = _Errors.of(data)
    seconds = np.exp(data.y)
    c = _solve(data.x / seconds[:, None], np.ones(len(seconds)), 1 / errors.variance, prior_root, prior.mean)
    for step in range(_STEPS):
        predicted = np.maximum(data.x @ c, 1e-12 * seconds)
        residuals = data.y - np.log(predicted)
        errors = errors.seen(data, residuals, rough=step < _ROUGH_STEPS)
        target = 1 + np.clip(residuals, -0.7, 0.7)
        updated = _solve(data.x / predicted[:, None], target, errors.weights / errors.variance, prior_root, prior.mean)
        moved = float(np.abs(data.x @ (updated - c) / predicted).max())
        c = updated
        if step > _ROUGH_STEPS + 2 and moved < _TOLERANCE:
            break
    return _Solution(Coefficients(c, prior.covariance), errors)


def _overlapping_fit(data: _Data, prior: Prior, start: Coefficients) -> _Solution:
    """Fits at the overlap of `start`, by damped Gauss-Newton steps in the logarithms of its coefficients."""
    prior_root = np.linalg.cholesky(_inverse(prior.covariance)).T.astype(np.float64)
    # a term that does not count at the start would have no slope, and never count
    iteration = np.exp(np.median(data.y)) / np.median(data.x, axis=0)
    model = replace(start, mean=np.maximum(start.mean, _LEAST_TERM * iteration))
    model = replace(model, mean=model.mean * np.exp(np.median(data.y - np.log(model.iteration_seconds(data.x)))))
    errors, damping, rough = _Errors.of(data), _DAMPING, True
    for step in range(2 * _OVERLAP_STEPS):
        rough = rough and step < _OVERLAP_STEPS
        predicted = model.iteration_seconds(data.x)
        residuals = data.y - np.log(predicted)
        errors = errors.seen(data, residuals, rough)
        root = np.sqrt(errors.weights / errors.variance)
        matrix = np.vstack([root[:, None] * model.slopes(data.x) / predicted[:, None], prior_root]) * model.mean
        right = np.concatenate([root * residuals, prior_root @ (prior.mean - model.mean)])
        normal = matrix.T @ matrix
        step_to = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), matrix.T @ right)
        moved = replace(model, mean=np.maximum(model.mean * np.exp(np.clip(step_to, -1, 1)), _NO_TERM * iteration))
        ahead = np.concatenate(
            [root * (data.y - np.log(moved.iteration_seconds(data.x))), prior_root @ (prior.mean - moved.mean)]
        )
        if ahead @ ahead > right @ right:
            damping *= 8
            continue
        small = bool((np.abs(moved.mean / model.mean - 1) < _SMALL_STEP).all())
        model, damping = moved, damping / 4
        if small and not rough:
            break
        rough = rough and not small
    return _Solution(model, errors)


def _best_fit(data: _Data, prior: Prior) -> _Solution:
    """Fits at the overlap that fits best if there are enough shapes to tell, else at the prior's overlap."""
    one_by_one = _robust_fit(data, prior)

    def at(overlap: float, start: Coefficients) -> _Solution:
        return one_by_one if overlap == 1 else _overlapping_fit(data, prior, replace(start, overlap=overlap))

    best = believed = at(prior.overlap, Coefficients(prior.mean, prior.covariance))
    if len(data.y) <= FEATURES or believed.loss(data) <= _LEAST_IMPROVEMENT:
        return believed  # no other overlap can improve the loss enough
    for direction in (1, -1):
        worse = 0
        for overlap in sorted(OVERLAPS, reverse=direction < 0):
            if (overlap - prior.overlap) * direction <= 0:
                continue
            tried = at(overlap, best.model)
            if tried.loss(data) < best.loss(data):
                best, worse = tried, 0
            elif worse:
                break  # a single rise may be a bump: the outliers differ from overlap to overlap
            else:
                worse = 1
    return best if best.loss(data) < believed.loss(data) - _LEAST_IMPROVEMENT else believed


def fit_window(window: ProfileWindow, constants: ModelConstants, prior: Prior) -> ThroughputFit:
    """Fits the profiles of a window; if there are none, the prior is the fit.

    The covariance is the posterior's without the bound at 0, so a coefficient of 0 keeps its uncertainty.
    """
    if not window.shapes:
        return prior_fit(prior)
    data = _data(window, constants)
    solved = _best_fit(data, prior)
    model, errors = solved.model, solved.errors
    predicted = model.iteration_seconds(data.x)
    slopes = model.slopes(data.x) / predicted[:, None]
    prior_precision = _inverse(prior.covariance)
    covariance = _inverse(slopes.T @ (slopes * (errors.weights / errors.variance)[:, None]) + prior_precision)
    residuals = data.y - np.log(predicted)
    kept = errors.weights > 0
    set_aside = sum(shape.outliers for shape in window.shapes.values())
    dropped = [len(shape.log_seconds) for shape, keep in zip(window.shapes.values(), kept, strict=True) if not keep]
    between = float((data.counts * residuals**2)[kept].sum())
    rmsle = ((between + data.within_scatter) / max(1.0, float(data.counts[kept].sum()))) ** 0.5
    return ThroughputFit(
        coefficients=tuple(float(value) for value in model.mean),  # type: ignore[arg-type]  # six, as the features are
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
        noise=errors.noise**0.5,
        rmsle=rmsle,
        profiles=window.profiles,
        distinct_shapes=len(window.shapes),
        outliers=set_aside + sum(dropped),
        prior_share=float(np.clip(np.trace(covariance @ prior_precision) / FEATURES, 0, 1)),
        overlap=model.overlap,
    )


def prior_fit(prior: Prior) -> ThroughputFit:
    """The fit of a job that has not been measured yet."""
    return ThroughputFit(
        coefficients=tuple(float(value) for value in prior.mean),  # type: ignore[arg-type]  # six, as the features are
        covariance=tuple(tuple(float(value) for value in row) for row in prior.covariance),
        noise=_NOISE,
        rmsle=0.0,
        profiles=0,
        distinct_shapes=0,
        prior_share=1.0,
        overlap=prior.overlap,
    )


def first_prior(profiles: tuple[JobProfile, ...], window: ProfileWindow, constants: ModelConstants) -> Prior | None:
    """The prior of a job's own profiles: by processor times and stages, or by stages at the window's first shape."""
    if not window.shapes:
        return None
    stages = next((dict(p.stage_fractions) for p in reversed(profiles) if p.stage_fractions and not p.restarted), {})
    if (use := _cpu_use(profiles, window, constants)) is not None:
        return cpu_prior(use, stages)
    first = next(iter(window.shapes.values()))
    return weak_prior(features(constants, *first.key), float(np.exp(first.location)), stages)


def _cpu_use(profiles: tuple[JobProfile, ...], window: ProfileWindow, constants: ModelConstants) -> CpuUse | None:
    """The medians at each shape of the window whose profiles report processor times; None if none do."""
    used: dict[ShapeKey, list[tuple[float, float]]] = {}
    for profile in profiles:
        of_workers, of_ps = profile.worker_cpu_utilization, profile.ps_cpu_utilization
        key = shape_key(profile.shape)
        if not profile.restarted and key in window.shapes and min(of_workers, of_ps) > 0:
            used.setdefault(key, []).append((of_workers, of_ps))
    if not used:
        return None
    shares = np.array([np.median(of_shape, axis=0) for of_shape in used.values()])
    keys = np.array(list(used), dtype=np.float64)
    seconds = np.exp([window.shapes[key].location for key in used])
    return CpuUse(features(constants, *keys.T), seconds, shares[:, 0], shares[:, 1])
