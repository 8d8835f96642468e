"""How rows grow with the samples seen: several laws, weighed by how well each explains what was measured.

Embedding tables are not linear in the samples (DLRover-RM section 5.3 assumes they are): ids that were seen once are
seen again. Four laws compete: linear; Heaps' power law; exponential saturation at a finite vocabulary; and a power law
that saturates. Each is `offset + scale * g(samples)` with `g` of at most two further parameters, so offset and scale
follow in closed form for a grid of those. The forecast is the mixture of the whole grid: where the measurements cannot
tell the laws apart yet, its band is wide.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LAWS = ("linear", "power law", "exponential saturation", "saturating power law")

# Growth is smooth, so points next to each other repeat the same evidence.
_MOST_EVIDENCE = 12.0
_LEAST_MISFIT = 0.002  # of the last value: no law is trusted to be closer

_LAW_DOUBT = 0.05  # of the growth to come
_MOST_SURPRISE = 4.0  # standard deviations: an expectation that is wrong altogether rules nothing out


def _shapes_of_growth() -> tuple[NDArray[np.int64], Floats, Floats]:
    """The grid: law, exponent and saturation point (in units of the last sample), each float64[members]."""
    exponents = np.linspace(0.1, 0.98, 45)
    exponential = np.logspace(-1, 2, 97)
    hill_exponents = np.linspace(0.2, 1.0, 17)
    hill = np.logspace(-1, 2, 19)
    pairs = np.array([(e, k) for e in hill_exponents for k in hill])
    law = np.concatenate([[0], np.full(45, 1), np.full(97, 2), np.full(len(pairs), 3)])
    exponent = np.concatenate([[1.0], exponents, np.ones(97), pairs[:, 0]])
    point = np.concatenate([[1.0], np.ones(45), exponential, pairs[:, 1]])
    return law, exponent, point


_LAW, _EXPONENT, _POINT = _shapes_of_growth()
_PRIOR = np.array([1 / len(LAWS) / np.count_nonzero(law == _LAW) for law in _LAW])


def _growth(samples: Floats) -> Floats:
    """g of every member of the grid; `samples` float64[n] in units of the last; float64[members, n]."""
    values = np.empty((len(_LAW), len(samples)))
    for law, grow in enumerate(_GROW):
        rows = law == _LAW
        values[rows] = grow(samples[None, :], _EXPONENT[rows, None], _POINT[rows, None])
    return values


def _hill(s: Floats, exponent: Floats, point: Floats) -> Floats:
    power: Floats = s**exponent
    saturated: Floats = power / (1 + (s / point) ** exponent)
    return saturated


_GROW: tuple[Callable[[Floats, Floats, Floats], Floats], ...] = (
    lambda s, _exponent, _point: s,
    lambda s, exponent, _point: s**exponent,
    lambda s, _exponent, point: -np.expm1(-s / point),
    _hill,
)


def _inverse_growth(level: Floats) -> Floats:
    """Samples (in units of the last) at which each member's g reaches its `level`; infinite where it never does."""
    reached = np.full(len(_LAW), np.inf)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        reached[_LAW == 0] = level[_LAW == 0]
        power = _LAW == 1
        reached[power] = level[power] ** (1 / _EXPONENT[power])
        exponential = (_LAW == 2) & (level < 1)
        reached[exponential] = -_POINT[exponential] * np.log1p(-level[exponential])
        inner = 1 - level * _POINT**-_EXPONENT
        hill = (_LAW == 3) & (inner > 0)
        reached[hill] = (level[hill] / inner[hill]) ** (1 / _EXPONENT[hill])
    return reached


def _quantiles(values: Floats, weights: Floats, shares: tuple[float, ...]) -> list[float]:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    return [float(values[order[min(int(np.searchsorted(cumulative, q)), len(values) - 1)]]) for q in shares]


@dataclass(frozen=True, slots=True)
class Band:
    """Median and 95% band."""

    expected: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Growth:
    """A fitted mixture, anchored at the last measurement; arrays are float64[members]."""

    last_samples: float
    last_value: float
    scales: Floats
    now: Floats
    weights: Floats
    misfit: float

    @property
    def law(self) -> str:
        """The law that carries most of the weight."""
        return LAWS[int(np.argmax(np.bincount(_LAW, self.weights)))]

    def at(self, samples: float) -> Band:
        """The value after `samples` samples; not less than the last measured."""
        if samples <= self.last_samples:
            return Band(self.last_value, self.last_value, self.last_value)
        then = _growth(np.array([samples / self.last_samples]))[:, 0]
        values = self.last_value + self.scales * np.maximum(0.0, then - self.now)
        lower, median, upper = _quantiles(values, self.weights, (0.025, 0.5, 0.975))
        # the misfit of the past grows with the distance of the future; and the truth is none of these laws exactly
        spread = 2 * self.misfit * min(1.0, samples / self.last_samples - 1) + _LAW_DOUBT * (median - self.last_value)
        return Band(median, max(self.last_value, lower - spread), upper + spread)

    def reaches(self, value: float) -> Band:
        """Samples after which `value` is reached, infinite for never; `lower` is the soonest."""
        if value <= self.last_value:
            return Band(self.last_samples, self.last_samples, self.last_samples)
        with np.errstate(divide="ignore", over="ignore"):
            level = self.now + (value - self.last_value) / self.scales
            reached = np.maximum(1.0, _inverse_growth(level)) * self.last_samples
        lower, median, upper = _quantiles(reached, self.weights, (0.025, 0.5, 0.975))
        away = _LAW_DOUBT * (median - self.last_samples) if np.isfinite(median) else 0.0
        return Band(median, max(self.last_samples, lower - away), upper + away)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A value that is believed to be reached after `samples`, with a relative standard deviation of `doubt`."""

    samples: float
    value: float
    doubt: float


def fit_growth(samples: Floats, values: Floats, expected: Expectation | None = None) -> Growth:
    """Fits measurements: `values` (rows or bytes) after `samples` samples, both float64[n], n >= 1, samples above 0.

    With fewer than three points the laws keep their prior weights, but for what `expected` says of them.
    """
    if len(samples) < 1 or len(samples) != len(values) or not (samples > 0).all():
        raise ValueError("growth is fitted to at least one value, each at a number of samples above 0")
    order = np.argsort(samples)
    samples, values = samples[order], values[order]
    unit = float(samples[-1])
    g = _growth(samples / unit)
    weights = np.sqrt(samples / unit)  # the recent past says more of the future
    weights = weights / weights.sum()
    mean_g, mean_v = g @ weights, float(values @ weights)
    centred_g, centred_v = g - mean_g[:, None], values - mean_v
    covariance = (centred_g * centred_v) @ weights
    variance = centred_g**2 @ weights
    scale = np.maximum(0.0, covariance / np.maximum(variance, 1e-300))
    # an offset below 0 means that the curve starts at 0
    through_origin = np.maximum(0.0, (g * values) @ weights / np.maximum(g**2 @ weights, 1e-300))
    starts_below = (mean_v - scale * mean_g < 0) | (len(samples) < 2)
    scale = np.where(starts_below, through_origin, scale)
    offset = np.where(starts_below, 0.0, mean_v - scale * mean_g)
    errors = ((values - offset[:, None] - scale[:, None] * g) ** 2) @ weights
    least = max(float(errors.min()), (_LEAST_MISFIT * float(values[-1])) ** 2, 1e-300)
    evidence = min(float(len(samples)), _MOST_EVIDENCE) if len(samples) >= 3 else 0.0
    log_likelihood = -0.5 * evidence * (errors - errors.min()) / least
    if expected is not None and expected.samples > unit and expected.value > 0:
        then = _growth(np.array([expected.samples / unit]))[:, 0]
        reached = np.maximum(values[-1] + scale * np.maximum(0.0, then - g[:, -1]), 1e-300)
        surprise = np.minimum(np.abs(np.log(reached / expected.value)) / expected.doubt, _MOST_SURPRISE)
        log_likelihood = log_likelihood - 0.5 * surprise**2
    likelihood = _PRIOR * np.exp(log_likelihood - log_likelihood.max())
    return Growth(unit, float(values[-1]), scale, g[:, -1], likelihood / likelihood.sum(), least**0.5)
