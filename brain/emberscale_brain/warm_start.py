"""The first shape of a job, smoothed over the final shapes of the most similar past jobs (DLRover-RM Algorithm 1).

Similarity is measured feature by feature, so that a plan can say why it relies on a past job.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from emberscale_api.shape import DIMENSIONS, JobShape
from emberscale_brain.planner.types import MEMORY_UNIT, JobMetadata, PastJob, ShapeBounds, SimilarJob

# Features that determine a job's speed weigh most; the owner and the name tell whether it is the same job again.
WEIGHTS = MappingProxyType(
    {
        "architecture": 3.0,
        "batch size": 2.0,
        "dense parameters": 2.0,
        "embedding width": 2.0,
        "tables": 1.0,
        "samples": 2.0,
        "data size": 1.0,
        "optimizer": 0.5,
        "owner": 2.0,
        "name": 1.5,
    }
)

_SIZES: dict[str, Callable[[JobMetadata], float]] = {
    "batch size": lambda m: m.batch_size,
    "dense parameters": lambda m: m.dense_bytes,
    "embedding width": lambda m: m.embedding_dimension,
    "tables": lambda m: m.tables,
    "samples": lambda m: m.total_samples,
    "data size": lambda m: m.data_bytes,
}

_WORD = re.compile(r"[a-z]+")


def name_words(name: str) -> frozenset[str]:
    """Returns the words of a name without its digits: a daily job changes the date in its name, not the words."""
    return frozenset(_WORD.findall(name.lower()))


def _shared_words(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


@dataclass(frozen=True, slots=True)
class NewJob:
    """The facts about a job at its submission."""

    owner: str
    metadata: JobMetadata


class HistoryIndex:
    """Past jobs as arrays, so that one new job is compared with all of them at once."""

    def __init__(self, history: Sequence[PastJob]) -> None:
        self.history = history
        self._sizes = {
            name: np.array([size(past.metadata) for past in history], dtype=np.float64) for name, size in _SIZES.items()
        }
        self._architecture = np.array([past.metadata.architecture for past in history], dtype=np.str_)
        self._optimizer = np.array([past.metadata.optimizer for past in history], dtype=np.str_)
        self._owner = np.array([past.owner for past in history], dtype=np.str_)
        words = [name_words(past.metadata.name) for past in history]
        self._names = sorted(set(words), key=sorted)
        number = {name: index for index, name in enumerate(self._names)}
        self._name = np.array([number[name] for name in words], dtype=np.int64)
        self._age = -np.array([past.finished_at for past in history], dtype=np.float64)

    def __len__(self) -> int:
        return len(self.history)

    def features(self, new: NewJob) -> dict[str, NDArray[np.float64]]:
        """Returns the similarity of each feature to that of every past job, 0 to 1.

        Sizes: the smaller over the larger, so 1/2 for a factor of two. Names: the share of common words.
        """
        metadata = new.metadata
        alike: dict[str, NDArray[np.float64]] = {
            "architecture": (self._architecture == metadata.architecture).astype(np.float64),
            "optimizer": (self._optimizer == metadata.optimizer).astype(np.float64),
            "owner": (self._owner == new.owner).astype(np.float64),
        }
        for name, size in _SIZES.items():
            mine, theirs = float(size(metadata)), self._sizes[name]
            larger = np.maximum(mine, theirs)
            alike[name] = np.where(larger > 0, np.minimum(mine, theirs) / np.maximum(larger, 1e-300), 1.0)
        words = name_words(metadata.name)
        shared = np.array([_shared_words(words, other) for other in self._names])
        alike["name"] = shared[self._name] if len(self._names) else np.empty(0)
        return alike

    def rank(self, new: NewJob, count: int, least: float = 0.5) -> tuple[tuple[PastJob, SimilarJob], ...]:
        """Returns the `count` most similar past jobs, most similar first, of equals the latest; none below `least`."""
        if not len(self):
            return ()
        features = self.features(new)
        total = sum(WEIGHTS.values())
        similarity = sum((WEIGHTS[name] * value for name, value in features.items()), np.zeros(len(self))) / total
        order = np.lexsort((self._age, -np.round(similarity, 9)))[:count]
        return tuple(
            (
                past,
                SimilarJob(
                    past.id if past.owner == new.owner else None,
                    float(similarity[i]),
                    MappingProxyType({name: float(features[name][i]) for name in WEIGHTS}),
                    past.final_shape,
                ),
            )
            for i, past in ((int(i), self.history[int(i)]) for i in order)
            if similarity[i] >= least
        )


def describe(similar: SimilarJob) -> str:
    """Describes which features are alike, and which differ most."""
    alike = [name for name, value in similar.features.items() if value >= 0.95]
    differing = sorted((value, name) for name, value in similar.features.items() if value < 0.95)
    name = similar.id or "a job of another owner"
    text = f"{name} ({similar.similarity:.0%} similar: same {', '.join(alike) or 'nothing'}"
    if differing:
        text += "; differs in " + ", ".join(f"{name} ({value:.0%} alike)" for value, name in differing[:3])
    return text + ")"


LEAST_SIMILARITY = 0.6
WITHIN_BEST = 0.15  # jobs less similar than the best one by more than this add nothing

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
    rows = np.array([astuple(shape) for shape in shapes])
    smoothed = rows[0]
    for row in rows[1:]:
        smoothed = mu * row + (1 - mu) * smoothed
    return _whole(smoothed)


def _whole(dimensions: Iterable[float]) -> JobShape:
    """Returns the nearest shape with whole processes, and memory in whole units."""
    workers, ps, worker_cpu, ps_cpu, worker_memory, ps_memory = map(float, dimensions)
    return JobShape(
        workers=max(1, round(workers)),
        ps=max(1, round(ps)),
        worker_cpu=worker_cpu,
        ps_cpu=ps_cpu,
        worker_memory=round(worker_memory / MEMORY_UNIT) * MEMORY_UNIT,
        ps_memory=round(ps_memory / MEMORY_UNIT) * MEMORY_UNIT,
    )


def more_rows(new: JobMetadata, past: JobMetadata) -> float:
    """Returns the factor from the rows of a past job to those expected of a similar new one.

    Rows are assumed to grow with the square root of the samples: half-way between not at all and proportionally.
    """
    return math.sqrt(new.epoch_samples / past.epoch_samples)


def with_room(near: Sequence[PastJob], shape: JobShape, new: NewJob) -> JobShape:
    """Returns the shape with memory for the largest final tables of similar jobs, since running out costs a restart."""
    worker_memory, ps_memory = shape.worker_memory, shape.ps_memory
    for past in near:
        final = past.final_shape
        more = max(1.0, more_rows(new.metadata, past.metadata))
        tables = final.ps * max(0, final.ps_memory - _SERVER_BYTES) * more
        needed = _SERVER_BYTES + tables / shape.ps
        worker_memory = max(worker_memory, final.worker_memory)
        ps_memory = max(ps_memory, math.ceil(needed / MEMORY_UNIT) * MEMORY_UNIT)
    return shape.with_memory(worker_memory, ps_memory)


def within(shape: JobShape, bounds: ShapeBounds) -> JobShape:
    """Returns the nearest shape that the bounds allow; cores are multiples of the step, or at their lower bound."""

    def cores(value: float, low: float, high: float) -> float:
        multiple = float(np.clip(round(value / bounds.cpu_step) * bounds.cpu_step, low, high))
        return low if abs(value - low) < abs(value - multiple) else multiple

    return JobShape(
        workers=int(np.clip(shape.workers, *bounds.workers)),
        ps=int(np.clip(shape.ps, *bounds.ps)),
        worker_cpu=cores(shape.worker_cpu, *bounds.worker_cpu),
        ps_cpu=cores(shape.ps_cpu, *bounds.ps_cpu),
        worker_memory=int(np.clip(shape.worker_memory, *bounds.worker_memory)),
        ps_memory=int(np.clip(shape.ps_memory, *bounds.ps_memory)),
    )


def cold_start(bounds: ShapeBounds) -> JobShape:
    """Returns the geometric middle of the bounds, which is far from neither end."""

    both = (getattr(bounds, name) for name in DIMENSIONS)
    return within(_whole(math.sqrt(low) * math.sqrt(high) for low, high in both), bounds)


def warm_start(new: NewJob, bounds: ShapeBounds, index: HistoryIndex, neighbours: int, mu: float) -> WarmStart:
    """Returns the first shape of a job; the middle of the bounds if no past job is similar enough."""
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
