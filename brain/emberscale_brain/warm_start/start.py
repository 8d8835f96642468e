"""DLRover-RM Algorithm 1: the first shape is smoothed over the final shapes of the most similar past jobs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import PastJob, ShapeBounds, SimilarJob
from emberscale_brain.warm_start.similarity import HistoryIndex, NewJob, describe

LEAST_SIMILARITY = 0.6
WITHIN_BEST = 0.15  # jobs less similar than the best by more than this say nothing that it does not say better

_UNIT = 1 << 26
_SERVER_BYTES = 1 << 28  # of a PS without rows


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A first shape and why; `similar` are the past jobs behind it, most similar first, empty for a cold start."""

    shape: JobShape
    similar: tuple[SimilarJob, ...]
    past: tuple[PastJob, ...]
    reason: str


def smooth(shapes: Sequence[JobShape], mu: float) -> JobShape:
    """Equation 10: A <- mu A_i + (1 - mu) A from the least to the most similar; `shapes` are in that order.

    Counts are rounded to the nearest whole number. Raises ValueError without shapes or for mu outside (0, 1].
    """
    if not shapes:
        raise ValueError("Algorithm 1 needs at least one shape")
    if not 0 < mu <= 1:
        raise ValueError(f"mu must be above 0 and at most 1, not {mu}")
    rows = np.array([[s.workers, s.ps, s.worker_cpu, s.ps_cpu, s.worker_memory, s.ps_memory] for s in shapes])
    smoothed = rows[0]
    for row in rows[1:]:
        smoothed = mu * row + (1 - mu) * smoothed
    workers, ps, worker_cpu, ps_cpu, worker_memory, ps_memory = (float(value) for value in smoothed)
    return JobShape(
        workers=max(1, round(workers)),
        ps=max(1, round(ps)),
        worker_cpu=worker_cpu,
        ps_cpu=ps_cpu,
        worker_memory=round(worker_memory / _UNIT) * _UNIT,
        ps_memory=round(ps_memory / _UNIT) * _UNIT,
    )


def with_room(near: Sequence[PastJob], shape: JobShape, new: NewJob) -> JobShape:
    """The shape with memory for the largest of the tables that similar jobs ended with: running out costs a restart.

    More samples than theirs bring more rows, but fewer than in proportion.
    """
    worker_memory, ps_memory = shape.worker_memory, shape.ps_memory
    an_epoch = new.metadata.total_samples / new.metadata.epochs
    for past in near:
        final = past.final_shape
        more = max(1.0, an_epoch * past.metadata.epochs / past.metadata.total_samples) ** 0.5
        tables = final.ps * max(0, final.ps_memory - _SERVER_BYTES) * more
        needed = _SERVER_BYTES + tables / shape.ps
        worker_memory = max(worker_memory, final.worker_memory)
        ps_memory = max(ps_memory, math.ceil(needed / _UNIT) * _UNIT)
    return shape.with_memory(worker_memory, ps_memory)


def within(shape: JobShape, bounds: ShapeBounds) -> JobShape:
    """The nearest shape that the bounds allow, with cores on the bounds' grid."""

    def cores(value: float, low: float, high: float) -> float:
        return float(np.clip(round(value / bounds.cpu_step) * bounds.cpu_step, low, high))

    return JobShape(
        workers=int(np.clip(shape.workers, *bounds.workers)),
        ps=int(np.clip(shape.ps, *bounds.ps)),
        worker_cpu=cores(shape.worker_cpu, *bounds.worker_cpu),
        ps_cpu=cores(shape.ps_cpu, *bounds.ps_cpu),
        worker_memory=int(np.clip(shape.worker_memory, *bounds.worker_memory)),
        ps_memory=int(np.clip(shape.ps_memory, *bounds.ps_memory)),
    )


def cold_start(bounds: ShapeBounds) -> JobShape:
    """The geometric middle of the bounds: nothing is far from it, in either direction."""

    def middle(low: float, high: float) -> float:
        return math.sqrt(low) * math.sqrt(high)

    shape = JobShape(
        workers=round(middle(*bounds.workers)),
        ps=round(middle(*bounds.ps)),
        worker_cpu=middle(*bounds.worker_cpu),
        ps_cpu=middle(*bounds.ps_cpu),
        worker_memory=round(middle(*bounds.worker_memory) / _UNIT) * _UNIT,
        ps_memory=round(middle(*bounds.ps_memory) / _UNIT) * _UNIT,
    )
    return within(shape, bounds)


def warm_start(new: NewJob, bounds: ShapeBounds, index: HistoryIndex, neighbours: int, mu: float) -> WarmStart:
    """The first shape of a job; a middling one where no past job is similar enough."""
    ranked = index.rank(new, neighbours, LEAST_SIMILARITY)
    if not ranked:
        shape = cold_start(bounds)
        best = index.rank(new, 1, 0.0)
        why = f"the most similar of {len(index)} is {describe(best[0][1])}" if best else "there is no history"
        return WarmStart(shape, (), (), f"cold start with {shape.describe()}: no past job is similar enough; {why}")
    best_similarity = ranked[0][1].similarity
    near = [(past, similar) for past, similar in ranked if similar.similarity >= best_similarity - WITHIN_BEST]
    smoothed = smooth([past.final_shape for past, _ in reversed(near)], mu)
    shape = within(with_room([past for past, _ in near], smoothed, new), bounds)
    reason = f"warm start with {shape.describe()}, smoothed over {len(near)} past jobs, first {describe(near[0][1])}"
    return WarmStart(shape, tuple(similar for _, similar in near), tuple(past for past, _ in near), reason)
