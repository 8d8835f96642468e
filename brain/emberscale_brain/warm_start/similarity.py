"""How alike two jobs are, feature by feature, so that it can be said why a past job was leant on."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from emberscale_brain.planner.types import JobMetadata, PastJob, SimilarJob

# What a job's speed depends on weighs most; who submits it and how it is called tells whether it is the same again.
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
    """The words of a name without its digits: a job that is submitted daily changes its date, not its words."""
    return frozenset(_WORD.findall(name.lower()))


def _shared_words(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a | b else 0.0


@dataclass(frozen=True, slots=True)
class NewJob:
    """What is known of a job at submission."""

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
        """Likeness of each feature to that of every past job, 0 to 1.

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
        """The `count` most similar past jobs, most similar first; none below `least`. Of equals, the latest."""
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
                    _one(features, i),
                    past.final_shape,
                ),
            )
            for i, past in ((int(i), self.history[int(i)]) for i in order)
            if similarity[i] >= least
        )


def _one(features: dict[str, NDArray[np.float64]], index: int) -> MappingProxyType[str, float]:
    return MappingProxyType({name: float(features[name][index]) for name in WEIGHTS})


def describe(similar: SimilarJob) -> str:
    """In words: what is alike, and what differs most."""
    alike = [name for name, value in similar.features.items() if value >= 0.95]
    differing = sorted((value, name) for name, value in similar.features.items() if value < 0.95)
    name = similar.id or "a job of another owner"
    text = f"{name} ({similar.similarity:.0%} similar: same {', '.join(alike) or 'nothing'}"
    if differing:
        text += "; differs in " + ", ".join(f"{name} ({value:.0%} alike)" for value, name in differing[:3])
    return text + ")"
