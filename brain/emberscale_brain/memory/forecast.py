"""PS memory: what each PS will need at the end of a job for any number of PS, and when the present limit is reached."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from emberscale_brain.memory.growth import Band, Growth, fit_growth
from emberscale_brain.planner.types import JobMetadata, JobProfile, JobShape, MemoryForecast

MOST_POINTS = 48
HEADROOM = 1.10  # buffers of pulls and pushes, and growth of slabs by whole segments
_UNIT = 1 << 26


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
    """Bytes that one of p PS needs: `fixed + shared / p`."""

    fixed: float
    shared: float

    def each(self, ps: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that each PS needs, for counts of PS; rounded up to 64 MiB."""
        need: NDArray[np.int64] = (np.ceil((self.fixed + self.shared / ps) / _UNIT) * _UNIT).astype(np.int64)
        return need


@dataclass(frozen=True, slots=True)
class PsMemoryModel:
    """Growth of the rows (or of all tables' bytes), and the bytes that go with them.

    The largest PS has `fixed + per_unit * grown / ps` bytes; `unit_samples` is where the growth ends: rows appear in
    the first epoch only.
    """

    growth: Growth
    fixed: float
    per_unit: float
    end_samples: float

    def need(self) -> PsMemoryNeed:
        """What to provide for the rest of the job: the upper end of the band, with headroom."""
        upper = self.growth.at(self.end_samples).upper
        return PsMemoryNeed(HEADROOM * self.fixed, HEADROOM * self.per_unit * upper)

    def forecast(self, shape: JobShape) -> MemoryForecast:
        """What the largest PS of a shape will hold at the end, and when it reaches its limit."""
        end = self.growth.at(self.end_samples)

        def held(grown: float) -> float:
            return self.fixed + self.per_unit * grown / shape.ps

        oom: Band | None = None
        if self.per_unit > 0:
            oom = self.growth.reaches((shape.ps_memory - self.fixed) * shape.ps / self.per_unit)
        in_time = oom is not None and oom.expected < self.end_samples
        possible = oom is not None and oom.lower < self.end_samples
        return MemoryForecast(
            law=self.growth.law,
            expected=held(end.expected),
            lower=held(end.lower),
            upper=held(end.upper),
            oom_at_samples=oom.expected if oom and in_time else None,
            oom_band=(oom.lower, oom.upper) if oom and possible else None,
        )


def _bytes_per_row(points: Sequence[MemoryPoint]) -> tuple[float, float]:
    """Fixed bytes of a PS and bytes per row, so that no measurement lies above."""
    matrix = np.array([[1.0, point.rows / point.ps] for point in points])
    held = np.array([point.ps_memory for point in points])
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    fixed, per_row = nnls(matrix / scale, held)[0] / scale
    above = float(np.max(held - matrix @ np.array([fixed, per_row])))
    return float(fixed) + max(0.0, above), float(per_row)


def fit_memory(track: MemoryTrack, metadata: JobMetadata) -> PsMemoryModel | None:
    """The model of a job's PS memory; None before anything is measured."""
    if not track.points:
        return None
    an_epoch = metadata.total_samples / metadata.epochs
    first_epoch = [point for point in track.points if point.samples <= an_epoch] or list(track.points[:1])
    samples = np.array([min(point.samples, an_epoch) for point in first_epoch])
    if all(point.rows > 0 for point in track.points):
        grown = np.array([point.rows for point in first_epoch])
        fixed, per_unit = _bytes_per_row(track.points)
        latest = track.points[-1].rows
    else:
        # without rows, all of the memory is taken to be shared among the PS
        grown = np.array([point.ps_memory * point.ps for point in first_epoch])
        fixed, per_unit = 0.0, 1.0
        latest = track.points[-1].ps_memory * track.points[-1].ps
    if track.points[-1].samples > an_epoch:
        samples, grown = np.append(samples, an_epoch), np.append(grown, latest)
    return PsMemoryModel(fit_growth(samples, grown), fixed, per_unit, an_epoch)
