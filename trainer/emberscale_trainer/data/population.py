"""Synthetic rows: every number depends only on the seed, the column and the row's number.

All randomness is counter-based (splitmix64's finaliser over counters), so rows are the same in any order and any chunks
of their generation.

The teacher is a factorisation machine with dense effects. An id's effect, and its latent vector in the columns that
interact, are drawn from a hash of (seed, column, id); the label is Bernoulli(sigmoid(logit)).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from emberscale_api.routing import MIX_1, MIX_2, mix64
from emberscale_trainer.data.calibration import calibrate
from emberscale_trainer.data.records import MISSING_ID
from emberscale_trainer.data.writers import MISSING_INTEGER
from emberscale_trainer.jit import kernel


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """floor(exp(mean + deviation * z)) - shift, with z roughly standard normal; `missing` is a ratio."""

    mean: float
    deviation: float
    missing: float
    shift: int = 0


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """Ids whose popularity falls with their rank as rank ** -exponent, up to rank `cardinality`.

    `effect` is the effect of an id by itself on the label, relative to the other columns; ids of columns that
    `interact` also have joint effects. With `arrival`, a new id becomes the most popular one every `arrival` rows, and
    all others fall by a rank.
    """

    cardinality: int
    exponent: float
    missing: float
    effect: float
    interacts: bool = False
    arrival: int = 0


DENSE = (
    DenseColumn(0.8, 1.2, 0.45),
    DenseColumn(2.2, 1.9, 0.0, shift=3),
    DenseColumn(1.9, 1.3, 0.21),
    DenseColumn(1.6, 0.9, 0.22),
    DenseColumn(7.9, 1.9, 0.03),
    DenseColumn(3.5, 1.6, 0.22),
    DenseColumn(1.4, 1.5, 0.04),
    DenseColumn(2.1, 0.9, 0.0),
    DenseColumn(3.7, 1.5, 0.04),
    DenseColumn(0.2, 0.5, 0.45),
    DenseColumn(0.7, 0.9, 0.04),
    DenseColumn(0.1, 0.8, 0.76),
    DenseColumn(1.5, 1.0, 0.22),
)

CATEGORICAL = (
    CategoricalColumn(1_460, 1.2, 0.0, 1.2, interacts=True),
    CategoricalColumn(583, 1.1, 0.0, 1.2, interacts=True),
    CategoricalColumn(10_131_227, 1.1, 0.034, 0.5),
    CategoricalColumn(2_202_608, 1.1, 0.034, 0.5, arrival=2_000),
    CategoricalColumn(305, 1.3, 0.0, 1.2),
    CategoricalColumn(24, 1.2, 0.12, 1.0),
    CategoricalColumn(12_517, 1.1, 0.0, 0.7, interacts=True),
    CategoricalColumn(633, 1.3, 0.0, 1.2),
    CategoricalColumn(3, 1.5, 0.0, 0.7),
    CategoricalColumn(93_145, 1.1, 0.0, 0.7),
    CategoricalColumn(5_683, 1.1, 0.0, 1.2, interacts=True),
    CategoricalColumn(8_351_593, 1.1, 0.034, 0.5),
    CategoricalColumn(3_194, 1.15, 0.0, 1.2),
    CategoricalColumn(27, 1.2, 0.0, 1.0, interacts=True),
    CategoricalColumn(14_992, 1.1, 0.0, 0.7),
    CategoricalColumn(5_461_306, 1.1, 0.034, 0.5),
    CategoricalColumn(10, 1.2, 0.0, 1.0),
    CategoricalColumn(5_652, 1.15, 0.0, 1.2),
    CategoricalColumn(2_173, 1.2, 0.44, 1.2),
    CategoricalColumn(4, 1.2, 0.44, 0.7),
    CategoricalColumn(7_046_547, 1.1, 0.034, 0.5, arrival=5_000),
    CategoricalColumn(18, 1.3, 0.76, 1.0),
    CategoricalColumn(15, 1.3, 0.0, 1.0, interacts=True),
    CategoricalColumn(286_181, 1.1, 0.034, 0.5),
    CategoricalColumn(105, 1.2, 0.44, 1.2),
    CategoricalColumn(142_572, 1.1, 0.44, 0.5),
)

POSITIVE_RATE = 0.25
TEACHER_AUC = 0.80
"""The expected AUC of the teacher, which no model can be expected to exceed."""


_PILOT_ROWS = 16_384
_PILOT_STRIDE = 977
# Chosen so that ids, pairs of ids and integers each matter, and a model learns most of it in one epoch.
_PAIR_WEIGHT = 0.25
_DENSE_WEIGHT = 0.8
_RANK = 4

# Streams of the counter-based generator, one per column.
_STREAM = 32
_INTEGERS, _CATEGORIES, _EFFECTS, _LATENTS, _NAMES, _DENSE_EFFECTS, _LABELS = range(0, 7 * _STREAM, _STREAM)

_GOLDEN = 0x9E3779B97F4A7C15
_U1, _U2, _U3 = np.uint64(MIX_1), np.uint64(MIX_2), np.uint64(_GOLDEN)
_S11, _S16, _S24, _S27, _S30, _S31 = (np.uint64(bits) for bits in (11, 16, 24, 27, 30, 31))
_LOW16, _LOW24, _LOW32 = np.uint64(0xFFFF), np.uint64(0xFFFFFF), np.uint64(0xFFFFFFFF)
_M1, _M2 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_S13 = np.uint64(13)
_SQRT_3 = 3.0**0.5
_SQRT_12 = 12.0**0.5


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as numbers: integers int64[n, 13] (or MISSING_INTEGER), ids int64[n, 26] (or MISSING_ID), labels uint8[n].

    `probabilities` float64[n] are the teacher's probabilities of label 1.
    """

    integers: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.uint8]
    probabilities: npt.NDArray[np.float64]


class Population:
    """All the rows of a seed; immutable, so threads may share it."""

    def __init__(self, seed: int) -> None:
        self._keys = np.array(
            [mix64(mix64(seed + _GOLDEN) ^ mix64(stream)) for stream in range(7 * _STREAM)], np.uint64
        )
        self._dense = np.array([(c.mean, c.deviation, c.missing, c.shift) for c in DENSE])
        # The inverse of the distribution function of a continuous power law on [1, cardinality + 1).
        self._categorical = np.array(
            [
                (c.missing, c.effect, (c.cardinality + 1.0) ** (1 - c.exponent) - 1, 1 / (1 - c.exponent))
                for c in CATEGORICAL
            ]
        )
        self._numbering = np.array([(c.cardinality, c.arrival, c.interacts) for c in CATEGORICAL], dtype=np.int64)
        pilot = np.arange(_PILOT_ROWS, dtype=np.int64) * _PILOT_STRIDE
        scores, *_ = self._score(pilot, None)
        self._offset, self._slope = calibrate(scores, POSITIVE_RATE, TEACHER_AUC)

    def rows(self, start: int, stop: int, seen: "SeenIds | None" = None) -> Rows:
        """The rows [start, stop); their ids are noted in `seen`."""
        numbers = np.arange(start, stop, dtype=np.int64)
        scores, integers, ids = self._score(numbers, seen)
        labels = np.empty(numbers.size, dtype=np.uint8)
        _draw_labels(numbers, self._keys, self._offset, self._slope, scores, labels)
        return Rows(integers, ids, labels, scores)

    def _score(
        self, numbers: npt.NDArray[np.int64], seen: "SeenIds | None"
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        integers = np.empty((numbers.size, len(DENSE)), dtype=np.int64)
        ids = np.empty((numbers.size, len(CATEGORICAL)), dtype=np.int64)
        scores = np.empty(numbers.size, dtype=np.float64)
        flags, offsets = (seen.flags, seen.offsets) if seen else _NOTHING_SEEN
        _make_rows(
            numbers, self._keys, self._dense, self._categorical, self._numbering, integers, ids, scores, flags, offsets
        )
        return scores, integers, ids


class SeenIds:
    """The ids that occurred in rows below `rows`; counts distinct ids exactly."""

    def __init__(self, rows: int) -> None:
        sizes = [c.cardinality + (rows // c.arrival if c.arrival else 0) + 1 for c in CATEGORICAL]
        self.offsets = np.cumsum([0, *sizes])
        self.flags = np.zeros(self.offsets[-1], dtype=np.uint8)

    def counts(self) -> list[int]:
        """The number of distinct ids of each column, without empty fields."""
        return [int(part.sum(dtype=np.int64)) for part in np.split(self.flags, self.offsets[1:-1])]


_NOTHING_SEEN = (np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))


@kernel
def _mix(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _S30)) * _U1
    value = (value ^ (value >> _S27)) * _U2
    return value ^ (value >> _S31)


@kernel
def _name(number: np.uint64, key: np.uint64) -> np.uint64:
    """A bijection of 32-bit numbers (murmur3's finaliser), so that distinct ids have distinct names."""
    value = (number + key) & _LOW32
    value = ((value ^ (value >> _S16)) * _M1) & _LOW32
    value = ((value ^ (value >> _S13)) * _M2) & _LOW32
    return value ^ (value >> _S16)


@kernel
def _make_rows(
    numbers: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    dense: npt.NDArray[np.float64],
    categorical: npt.NDArray[np.float64],
    numbering: npt.NDArray[np.int64],
    integers: npt.NDArray[np.int64],
    ids: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    seen: npt.NDArray[np.uint8],
    seen_offsets: npt.NDArray[np.int64],
) -> None:
    """Writes integers and ids, and the teacher's score before calibration."""
    latent = np.empty(_RANK)
    for place in range(numbers.size):
        counter = np.uint64(numbers[place]) * _U3
        score = 0.0
        for column in range(dense.shape[0]):
            bits = _mix(keys[_INTEGERS + column] + counter)
            mean, deviation, missing, shift = dense[column]
            # The sum of four uniforms is close to normal; the bits used last decide whether the field is missing.
            total = 0.0
            gate = _mix(bits)
            for _ in range(4):
                total += np.float64(bits & _LOW16)
                bits >>= _S16
            normal = (total / 65536.0 - 2.0 + 2.0 / 65536.0) * _SQRT_3
            if np.float64(gate >> _S11) * 2.0**-53 < missing:
                integers[place, column] = MISSING_INTEGER
                feature = 0.0
            else:
                value = np.int64(np.exp(mean + deviation * normal)) - np.int64(shift)
                integers[place, column] = value
                feature = np.log1p(np.float64(value)) if value > 0 else 0.0
            weight = np.float64(_mix(keys[_DENSE_EFFECTS + column]) >> _S11) * 2.0**-52 - 1.0
            score += _DENSE_WEIGHT * weight * feature
        latent[:] = 0.0
        squares = 0.0
        for column in range(categorical.shape[0]):
            bits = _mix(keys[_CATEGORIES + column] + counter)
            missing, effect, span, inverse = categorical[column]
            cardinality, arrival, interacts = numbering[column]
            if np.float64(bits & _LOW24) * 2.0**-24 < missing:
                number = np.int64(-1)
                ids[place, column] = MISSING_ID
            else:
                uniform = np.float64(bits >> _S24) * 2.0**-40
                rank = min(np.int64((1.0 + uniform * span) ** inverse), cardinality)
                newest = cardinality + (numbers[place] // arrival if arrival else 0)
                number = newest - rank
                ids[place, column] = np.int64(_name(np.uint64(number), keys[_NAMES + column]))
                if seen.size:
                    seen[seen_offsets[column] + number] = 1
            bits = _mix(keys[_EFFECTS + column] + np.uint64(number) * _U3)
            score += effect * (np.float64(bits >> _S11) * 2.0**-52 - 1.0) * _SQRT_3
            if interacts:
                bits = _mix(keys[_LATENTS + column] + np.uint64(number) * _U3)
                for axis in range(_RANK):
                    component = (np.float64(bits & _LOW16) / 65536.0 - 0.5) * _SQRT_12
                    bits >>= _S16
                    latent[axis] += component
                    squares += component * component
        pairs = -squares
        for axis in range(_RANK):
            pairs += latent[axis] * latent[axis]
        scores[place] = score + _PAIR_WEIGHT * 0.5 * pairs


@kernel
def _draw_labels(
    numbers: npt.NDArray[np.int64],
    keys: npt.NDArray[np.uint64],
    offset: float,
    slope: float,
    scores: npt.NDArray[np.float64],
    labels: npt.NDArray[np.uint8],
) -> None:
    """Turns scores into probabilities in place, and draws a label from each."""
    for place in range(numbers.size):
        probability = 1.0 / (1.0 + np.exp(-(offset + slope * scores[place])))
        bits = _mix(keys[_LABELS] + np.uint64(numbers[place]) * _U3)
        labels[place] = np.float64(bits >> _S11) * 2.0**-53 < probability
        scores[place] = probability
