"""A sliding window of a job's profiles, summarized per shape and robust to outliers within a shape.

A shape keeps only its latest profiles, and the window its latest shapes: a job that stays at one shape for a day keeps
what it learned at others. Adding profiles touches only their shapes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from emberscale_api.readable import duration_text
from emberscale_api.shape import JobProfile, JobShape

PROFILES_PER_SHAPE = 32
SHAPES = 32

TUKEY = 4.685  # 95% efficient on normal noise
_LEAST_SCATTER = 0.01  # of log time: profiles closer together than this are never outliers of each other

ShapeKey = tuple[int, int, float, float]


def shape_key(shape: JobShape) -> ShapeKey:
    """Returns the part of a shape that its speed depends on."""
    return shape.workers, shape.ps, shape.worker_cpu, shape.ps_cpu


def problem_with(profile: JobProfile, now: float) -> str | None:
    """Returns why a profile is implausible, or None."""
    for name in ("time", "iteration_seconds", "throughput"):
        value = getattr(profile, name)
        if not math.isfinite(value):
            return f"{name} is not finite: {value}"
        if value < 0 or (value == 0 and (name == "time" or not profile.restarted)):
            return f"{name} is not above 0: {value}"
    for name in ("batch_size", "samples", "rows", "ps_memory", "worker_memory"):
        value = getattr(profile, name)
        if value < 0 or (name == "batch_size" and value == 0):
            return f"{name} is out of range: {value}"
    for name in ("worker_cpu_utilization", "ps_cpu_utilization"):
        value = getattr(profile, name)
        if not math.isfinite(value) or value < 0:
            return f"{name} is not a share: {value}"
    if profile.time > now:
        return f"time is {duration_text(profile.time - now)} in the future"
    return None


@dataclass(frozen=True, slots=True)
class ShapeSummary:
    """The window's summary of one shape.

    `log_seconds` are logarithms of iteration seconds, oldest first. `location` is their robust mean, `inliers` the
    number of profiles it effectively rests on, and `scatter` their sum of squares about it.
    """

    key: ShapeKey
    log_seconds: tuple[float, ...]
    location: float
    inliers: float
    scatter: float
    outliers: int
    latest: float


def _summarize(key: ShapeKey, log_seconds: tuple[float, ...], latest: float) -> ShapeSummary:
    values = np.array(log_seconds)
    if len(values) < 3:
        location = float(values.mean())
        return ShapeSummary(key, log_seconds, location, len(values), float(((values - location) ** 2).sum()), 0, latest)
    median = float(np.median(values))
    spread = max(1.4826 * float(np.median(np.abs(values - median))), _LEAST_SCATTER)
    distance = (values - median) / (TUKEY * spread)
    weights = np.where(np.abs(distance) < 1, (1 - distance**2) ** 2, 0.0)
    location = float(weights @ values / weights.sum())
    kept = weights > 0
    return ShapeSummary(
        key=key,
        log_seconds=log_seconds,
        location=location,
        inliers=float(kept.sum()),
        scatter=float(((values[kept] - location) ** 2).sum()),
        outliers=int((~kept).sum()),
        latest=latest,
    )


@dataclass(frozen=True, slots=True)
class ProfileWindow:
    """Immutable: `add` returns the next window."""

    shapes: Mapping[ShapeKey, ShapeSummary] = field(default_factory=lambda: MappingProxyType({}))
    latest: float = -math.inf

    def add(self, profiles: Iterable[JobProfile], now: float) -> "ProfileWindow":
        """Returns the window with those of `profiles` that are newer than it; itself if none are.

        Restarted and implausible profiles (`problem_with`) are left out. A profile's iteration seconds are computed
        from its throughput, which is what the model predicts (equation 1).
        """
        fresh: dict[ShapeKey, list[float]] = {}
        times: dict[ShapeKey, float] = {}
        latest = self.latest
        for profile in profiles:
            if profile.time <= self.latest or problem_with(profile, now) is not None:
                continue
            latest = max(latest, profile.time)
            if profile.restarted:
                continue
            key = shape_key(profile.shape)
            seconds = profile.shape.workers * profile.batch_size / profile.throughput
            fresh.setdefault(key, []).append(math.log(seconds))
            times[key] = profile.time
        if not fresh:
            return self if latest == self.latest else replace(self, latest=latest)
        shapes = dict(self.shapes)
        for key, values in fresh.items():
            known = shapes[key].log_seconds if key in shapes else ()
            shapes[key] = _summarize(key, (*known, *values)[-PROFILES_PER_SHAPE:], times[key])
        if len(shapes) > SHAPES:
            newest = sorted(shapes.values(), key=lambda shape: shape.latest)[-SHAPES:]
            shapes = {summary.key: summary for summary in newest}
        return ProfileWindow(MappingProxyType(shapes), latest)

    @property
    def profiles(self) -> int:
        """The number of profiles that the window holds."""
        return sum(len(shape.log_seconds) for shape in self.shapes.values())
