"""Forecasts the memory of the parameter servers, for any number of PS, and when they reach the present limit.

Embedding tables do not grow linearly with the samples, as DLRover-RM section 5.3 assumes, because ids repeat. Four laws
compete: linear; Heaps' power law; exponential saturation at a finite vocabulary; and a power law that saturates. Each
is `offset + scale * g(samples)`, where `g` has at most two further parameters. For a grid of these, offset and scale
follow in closed form. The forecast is the mixture of the whole grid: while the measurements cannot tell the laws apart,
its band is wide.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.planner.types import MEMORY_UNIT, JobMetadata, MemoryForecast

Floats = NDArray[np.float64]

LAWS = ("linear", "power law", "exponential saturation", "saturating power law")

# Growth is smooth, so points next to each other repeat the same evidence.
_MOST_EVIDENCE = 12.0
_LEAST_MISFIT = 0.002  # of the last value: no law is trusted to be closer

_LAW_DOUBT = 0.05  # of the growth to come
_MOST_SURPRISE = 4.0  # standard deviations: an expectation that is entirely wrong must not rule anything out


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
    """A fitted mixture, anchored at the last measurement; arrays are float64[members]. No value exceeds `most`."""

    last_samples: float
    last_value: float
    scales: Floats
    now: Floats
    weights: Floats
    misfit: float
    most: float = np.inf

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
        # the error of the past grows with the distance of the forecast, and no law is exact
        spread = 2 * self.misfit * min(1.0, samples / self.last_samples - 1) + _LAW_DOUBT * (median - self.last_value)
        most = max(self.last_value, self.most)
        band = (median, max(self.last_value, lower - spread), upper + spread)
        return Band(*(min(value, most) for value in band))

    def reaches(self, value: float) -> Band:
        """Samples after which `value` is reached, infinite for never; `lower` is the soonest."""
        if value <= self.last_value:
            return Band(self.last_samples, self.last_samples, self.last_samples)
        if value > self.most:
            return Band(np.inf, np.inf, np.inf)
        with np.errstate(divide="ignore", over="ignore"):
            level = self.now + (value - self.last_value) / self.scales
            reached = np.maximum(1.0, _inverse_growth(level)) * self.last_samples
        lower, median, upper = _quantiles(reached, self.weights, (0.025, 0.5, 0.975))
        sooner, later = _LAW_DOUBT * (lower - self.last_samples), _LAW_DOUBT * (upper - self.last_samples)
        return Band(median, lower - sooner if np.isfinite(lower) else lower, upper + later)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A value that is expected after `samples`, with a relative standard deviation of `doubt`."""

    samples: float
    value: float
    doubt: float


def fit_growth(samples: Floats, values: Floats, expected: Expectation | None = None) -> Growth:
    """Fits measurements: `values` (rows or bytes) after `samples` samples, both float64[n], n >= 1, samples above 0.

    With fewer than three points the laws keep their prior weights, except as `expected` changes them.
    """
    if len(samples) < 1 or len(samples) != len(values) or not (samples > 0).all():
        raise ValueError("growth is fitted to at least one value, each at a number of samples above 0")
    order = np.argsort(samples)
    samples, values = samples[order], values[order]
    unit = float(samples[-1])
    g = _growth(samples / unit)
    weights = np.sqrt(samples / unit)  # recent measurements tell more about the future
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


MOST_POINTS = 48
HEADROOM = 1.10  # buffers of pulls and pushes, and growth of slabs by whole segments
_SURE = 2.0  # standard deviations: 97.5% on one side
_SERVER_BYTES = 4e8  # of a PS without rows, give or take as much
_MEASUREMENT = 0.01  # relative error of a measured size


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """One measurement: samples seen, rows (0: not reported), number of PS, bytes of the largest PS."""

    samples: float
    rows: float
    ps: int
    ps_memory: float


@dataclass(frozen=True, slots=True)
class MemoryTrack:
    """A job's memory measurements from its start on, thinned to `MOST_POINTS`, in the order of `samples`."""

    points: tuple[MemoryPoint, ...] = ()

    def add(self, profiles: Iterable[JobProfile]) -> "MemoryTrack":
        """Returns the track with the profiles that report memory at more samples than its last point."""
        points = list(self.points)
        for profile in profiles:
            if profile.ps_memory > 0 and profile.samples > (points[-1].samples if points else 0):
                points.append(MemoryPoint(profile.samples, profile.rows, profile.shape.ps, profile.ps_memory))
        if len(points) > 2 * MOST_POINTS:
            course = np.array([point.samples for point in points])
            even = np.searchsorted(course, np.linspace(course[0], course[-1], MOST_POINTS))
            points = [points[index] for index in np.unique(even)]
        while len(points) > MOST_POINTS:
            closest = min(range(1, len(points) - 1), key=lambda i: points[i + 1].samples - points[i - 1].samples)
            del points[closest]
        return MemoryTrack(tuple(points))


@dataclass(frozen=True, slots=True)
class PsMemoryNeed:
    """Bytes that each of p PS needs: `fixed + shared / p`, and their uncertainty.

    `doubt` is (a, b, c) of the variance `a + 2 b / p + c / p^2`, in bytes squared.
    """

    fixed: float
    shared: float
    doubt: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def each(self, ps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that each PS needs, for counts of PS; rounded up to MEMORY_UNIT."""
        a, b, c = self.doubt
        unsure = _SURE * np.sqrt(np.maximum(a + 2 * b / ps + c / ps**2, 0.0))
        units: NDArray[np.int64] = np.ceil((self.fixed + self.shared / ps + unsure) / MEMORY_UNIT).astype(np.int64)
        return units * MEMORY_UNIT


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """The parts of a PS's memory: `fixed` bytes, and `per_unit` bytes for each row (or byte of tables).

    Measurements at one number of PS and with few rows cannot tell the parts apart. `variance` is (variance of `fixed`,
    covariance, variance of `per_unit`).
    """

    fixed: float
    per_unit: float
    variance: tuple[float, float, float]

    def doubt(self, units: float) -> float:
        """Standard deviation, in bytes, of the memory of a PS with this many units."""
        a, b, c = self.variance
        return float(np.sqrt(max(a + 2 * b * units + c * units**2, 0.0)))


@dataclass(frozen=True, slots=True)
class PsMemoryModel:
    """Growth of the rows (or of all tables' bytes), and the bytes that go with them.

    The largest PS has `fixed + per_unit * grown / ps` bytes; `end_samples` is where the growth ends: rows appear in
    the first epoch only.
    """

    growth: Growth
    split: MemorySplit
    end_samples: float

    def need(self) -> PsMemoryNeed:
        """Returns the memory to provide for the rest of the job: the upper end of the band, with headroom."""
        upper = self.growth.at(self.end_samples).upper
        a, b, c = self.split.variance
        return PsMemoryNeed(
            HEADROOM * self.split.fixed, HEADROOM * self.split.per_unit * upper, (a, b * upper, c * upper**2)
        )

    def forecast(self, shape: JobShape) -> MemoryForecast:
        """Forecasts the bytes of a shape's largest PS at the end, and when it reaches its limit."""
        end, split = self.growth.at(self.end_samples), self.split

        def held(grown: float, sure: float) -> float:
            units = grown / shape.ps
            return max(0.0, split.fixed + split.per_unit * units + sure * split.doubt(units))

        oom: Band | None = None
        if split.per_unit > 0:
            oom = self.growth.reaches((shape.ps_memory - split.fixed) * shape.ps / split.per_unit)
        in_time = oom is not None and oom.expected < self.end_samples
        possible = oom is not None and oom.lower < self.end_samples
        return MemoryForecast(
            law=self.growth.law,
            expected=held(end.expected, 0.0),
            lower=held(end.lower, -_SURE),
            upper=held(end.upper, _SURE),
            oom_at_samples=oom.expected if oom and in_time else None,
            oom_band=(oom.lower, oom.upper) if oom and possible else None,
        )


def _split_of(points: Sequence[MemoryPoint], metadata: JobMetadata) -> MemorySplit:
    """Bayesian linear regression of bytes on rows of a PS, so that no measurement lies above.

    Until the number of rows or of PS changes, the prior divides the bytes: a server takes a few hundred MiB, and a row
    takes floats for the average width of the tables, the same for the optimizer's state, and its place in the index.
    """
    matrix = np.array([[1.0, point.rows / point.ps] for point in points])
    held = np.array([point.ps_memory for point in points])
    row = 8.0 * metadata.embedding_dimension / max(1, metadata.tables) + 32.0
    mean, spread = np.array([_SERVER_BYTES, row]), np.array([_SERVER_BYTES, row])
    error = _MEASUREMENT * held.max() + MEMORY_UNIT / 4
    scaled = matrix * spread / error
    covariance = np.linalg.inv(scaled.T @ scaled + np.eye(2))
    fixed, per_row = np.maximum(0.0, mean + spread * (covariance @ scaled.T @ ((held - matrix @ mean) / error)))
    covariance = covariance * np.outer(spread, spread)
    above = float(np.max(held - matrix @ np.array([fixed, per_row])))
    variance = (float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1]))
    return MemorySplit(float(fixed) + max(0.0, above), float(per_row), variance)


def fit_memory(
    track: MemoryTrack, metadata: JobMetadata, expected_rows: Expectation | None = None
) -> PsMemoryModel | None:
    """Fits a job's PS memory; None before anything is measured.

    `expected_rows` is the number of rows that similar jobs predict for the end of the first epoch.
    """
    if not track.points:
        return None
    an_epoch = metadata.epoch_samples
    most = np.inf
    first_epoch = [point for point in track.points if point.samples <= an_epoch] or list(track.points[:1])
    samples = np.array([min(point.samples, an_epoch) for point in first_epoch])
    if all(point.rows > 0 for point in track.points):
        grown = np.array([point.rows for point in first_epoch])
        split = _split_of(track.points, metadata)
        latest = track.points[-1].rows
        most = metadata.most_rows or np.inf
    else:
        # without rows, all memory is assumed to be shared among the PS, except what each server may need for itself
        grown = np.array([point.ps_memory * point.ps for point in first_epoch])
        split = MemorySplit(0.0, 1.0, ((_SERVER_BYTES / 2) ** 2, 0.0, 0.0))
        latest = track.points[-1].ps_memory * track.points[-1].ps
        expected_rows = None
    if track.points[-1].samples > an_epoch:
        samples, grown = np.append(samples, an_epoch), np.append(grown, latest)
    growth = replace(fit_growth(samples, grown, expected_rows), most=most)
    return PsMemoryModel(growth, split, an_epoch)
