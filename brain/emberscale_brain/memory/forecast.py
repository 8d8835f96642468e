"""PS memory: what each PS will need at the end of a job for any number of PS, and when the present limit is reached."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.memory.growth import Band, Expectation, Growth, fit_growth
from emberscale_brain.planner.types import JobMetadata, MemoryForecast

MOST_POINTS = 48
HEADROOM = 1.10  # buffers of pulls and pushes, and growth of slabs by whole segments
_UNIT = 1 << 26
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
        """The track with the profiles that are further on than it and report memory."""
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
    """Bytes that one of p PS needs: `fixed + shared / p`, and how unsure that is.

    `doubt` is (a, b, c) of the variance `a + 2 b / p + c / p^2`, in bytes squared.
    """

    fixed: float
    shared: float
    doubt: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def each(self, ps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that each PS needs, for counts of PS; rounded up to 64 MiB."""
        a, b, c = self.doubt
        unsure = _SURE * np.sqrt(np.maximum(a + 2 * b / ps + c / ps**2, 0.0))
        need: NDArray[np.int64] = (np.ceil((self.fixed + self.shared / ps + unsure) / _UNIT) * _UNIT).astype(np.int64)
        return need


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How a PS's memory divides: `fixed` bytes whatever it holds, and `per_unit` for each row (or byte of tables).

    Measurements at one number of PS and with few rows cannot tell them apart; `variance` is that of `fixed`, their
    covariance, and that of `per_unit`.
    """

    fixed: float
    per_unit: float
    variance: tuple[float, float, float]

    def doubt(self, units: float) -> float:
        """Standard deviation, in bytes, of the memory of a PS with so many units."""
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
        """What to provide for the rest of the job: the upper end of the band, with headroom."""
        upper = self.growth.at(self.end_samples).upper
        a, b, c = self.split.variance
        return PsMemoryNeed(
            HEADROOM * self.split.fixed, HEADROOM * self.split.per_unit * upper, (a, b * upper, c * upper**2)
        )

    def forecast(self, shape: JobShape) -> MemoryForecast:
        """What the largest PS of a shape will hold at the end, and when it reaches its limit."""
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

    Before rows have grown, or their number of PS has changed, the prior says how the bytes divide: a server of some
    hundred MiB, and rows of as many floats as the tables are wide on average, their optimizer's state and their index.
    """
    matrix = np.array([[1.0, point.rows / point.ps] for point in points])
    held = np.array([point.ps_memory for point in points])
    row = 8.0 * metadata.embedding_dimension / max(1, metadata.tables) + 32.0
    mean, spread = np.array([_SERVER_BYTES, row]), np.array([_SERVER_BYTES, row])
    error = _MEASUREMENT * held.max() + _UNIT / 4
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
    """The model of a job's PS memory; None before anything is measured.

    `expected_rows` is what jobs like it had at the end of its first epoch.
    """
    if not track.points:
        return None
    an_epoch = metadata.total_samples / metadata.epochs
    first_epoch = [point for point in track.points if point.samples <= an_epoch] or list(track.points[:1])
    samples = np.array([min(point.samples, an_epoch) for point in first_epoch])
    if all(point.rows > 0 for point in track.points):
        grown = np.array([point.rows for point in first_epoch])
        split = _split_of(track.points, metadata)
        latest = track.points[-1].rows
    else:
        # without rows, all of the memory is taken to be shared among the PS, but for what any server may have
        grown = np.array([point.ps_memory * point.ps for point in first_epoch])
        split = MemorySplit(0.0, 1.0, ((_SERVER_BYTES / 2) ** 2, 0.0, 0.0))
        latest = track.points[-1].ps_memory * track.points[-1].ps
        expected_rows = None
    if track.points[-1].samples > an_epoch:
        samples, grown = np.append(samples, an_epoch), np.append(grown, latest)
    return PsMemoryModel(fit_growth(samples, grown, expected_rows), split, an_epoch)
