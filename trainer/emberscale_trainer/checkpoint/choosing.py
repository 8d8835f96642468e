"""Chooses priority rows to save, by the values of rows when last saved, a sample of pushes, and the best scores."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table import RowLayout

_LEAST_MERGED = 1 << 16
"""The number of noted values, or sampled keys, that justifies a merge."""

_LEAST_ROOM = 1024
"""The room for records beyond those that are kept."""

Keys = NDArray[np.int64]
Records = NDArray[np.uint8]


class SavedValues:
    """The values of rows of one table when they were last saved: a value [width] by key.

    Newly noted values wait until they are as many as the merged ones: `n` rows take n log n time, and temporarily twice
    their memory.
    """

    def __init__(self, dtype: type[np.generic], width: int) -> None:
        self._keys: Keys = np.zeros(0, np.int64)  # ascending
        self._values: NDArray[Any] = np.zeros((0, width), dtype)
        self._later: list[tuple[Keys, NDArray[Any]]] = []
        self._waiting = 0

    def __len__(self) -> int:
        """The number of rows with a known value."""
        self._merge()
        return len(self._keys)

    def note(self, keys: Keys, values: NDArray[Any]) -> None:
        """Notes saved rows: their keys [n] and values [n, width], which may be overwritten later."""
        self._later.append((keys.copy(), values.copy()))
        self._waiting += len(keys)
        if self._waiting >= max(_LEAST_MERGED, len(self._keys)):
            self._merge()

    def forget(self, keys: Keys) -> None:
        """Notes that the rows of these keys, int64 [n], were retired; they count as never saved."""
        if len(keys):
            self._merge()
            places, is_known = self._find(np.sort(keys))
            self._keys = np.delete(self._keys, places[is_known])
            self._values = np.delete(self._values, places[is_known], axis=0)

    def of(self, keys: Keys) -> NDArray[Any]:
        """Returns the values of these keys, [n, width]; zeros for rows that were never saved."""
        self._merge()
        order = np.argsort(keys)  # neighbours are looked up together, as their values share cache lines
        places, is_known = self._find(keys[order])
        found = np.zeros((len(keys), self._values.shape[1]), self._values.dtype)
        found[order[is_known]] = self._values[places[is_known]]
        return found

    def _find(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the places of ascending keys, or their insertion points, and which of the keys are known."""
        places = np.searchsorted(self._keys, keys)
        is_known = np.zeros(len(keys), np.bool_)
        within = np.searchsorted(places, len(self._keys))
        is_known[:within] = self._keys[places[:within]] == keys[:within]
        return places, is_known

    def _merge(self) -> None:
        if not self._later:
            return
        keys = np.concatenate([keys for keys, _ in self._later])
        values = np.concatenate([values for _, values in self._later])
        self._later, self._waiting = [], 0
        order = np.argsort(keys, kind="stable")  # stable: among equal keys, the last was noted last
        keys = keys[order]
        is_last = np.ones(len(keys), np.bool_)
        is_last[:-1] = keys[1:] != keys[:-1]
        keys, values = keys[is_last], values[order[is_last]]
        places, is_known = self._find(keys)
        self._values[places[is_known]] = values[is_known]
        self._values = np.insert(self._values, places[~is_known], values[~is_known], axis=0)
        self._keys = np.insert(self._keys, places[~is_known], keys[~is_known])


class SampledKeys:
    """Distinct keys of a sample of the pushes to one table, at most as many as may be saved (CPR-SSU)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._listed: Keys = np.zeros(0, np.int64)
        self._later: list[Keys] = []
        self._waiting = 0

    def add(self, keys: Keys) -> bool:
        """Adds the keys of a push, int64 [n]; returns whether enough have accumulated to call `keep`."""
        self._later.append(keys.copy())
        self._waiting += len(keys)
        return self._waiting >= max(_LEAST_MERGED, len(self._listed))

    def keep(self, most: int) -> None:
        """Keeps at most `most` keys, and drops others at random."""
        listed = np.unique(np.concatenate([self._listed, *self._later]))
        self._listed = listed if len(listed) <= most else np.sort(self._random.choice(listed, most, replace=False))
        self._later, self._waiting = [], 0

    def take(self, most: int) -> Keys:
        """Returns the kept keys, ascending, and starts a new list."""
        self.keep(most)
        taken, self._listed = self._listed, np.zeros(0, np.int64)
        return taken


def among(keys: Keys, listed: Keys) -> NDArray[np.bool_]:
    """Returns which of the keys [n] are in a list, ascending [m], in n log m time."""
    if not len(listed):
        return np.zeros(len(keys), np.bool_)
    found: NDArray[np.bool_] = listed[np.minimum(np.searchsorted(listed, keys), len(listed) - 1)] == keys
    return found


class First:
    """The records with the highest positive scores, from a sequence of chunks.

    Takes the memory of `most` records plus an eighth.
    """

    def __init__(self, most: int, layout: RowLayout) -> None:
        self._most = most
        room = most + max(_LEAST_ROOM, most // 8)
        self._records, self._scores = layout.empty(room), np.zeros(room, np.float64)
        self._count = 0

    def add(self, records: Records, scores: NDArray[np.float64]) -> None:
        """Adds records, uint8 [n, stride], which may be overwritten later, with their scores, float64 [n]."""
        room = len(self._scores)
        chosen = np.flatnonzero(scores > 0)
        while len(chosen):
            if self._count == room:
                self._reduce()
            some, chosen = np.split(chosen, [room - self._count])
            end = self._count + len(some)
            self._records[self._count : end], self._scores[self._count : end] = records[some], scores[some]
            self._count = end

    def _reduce(self) -> None:
        """Moves the best ones to the front, without a copy of all."""
        most, count = self._most, self._count
        if count <= most:
            return
        best = np.argpartition(self._scores[:count], count - most - 1)[count - most :]
        is_kept = np.zeros(count, np.bool_)
        is_kept[best] = True
        places, late = np.flatnonzero(~is_kept[:most]), most + np.flatnonzero(is_kept[most:])
        self._records[places], self._scores[places] = self._records[late], self._scores[late]
        self._count = most

    def records(self) -> Records:
        """Returns the records with the highest scores, in no particular order."""
        self._reduce()
        return self._records[: self._count]
