"""Weights as codes of a few bits, for checkpoints (Check-N-Run, section 4.2).

A weight becomes the number of the nearest of 2^bits evenly spaced values between the two ends of its row's range:
`code = round((weight - low) / step)`, `step = (high - low) / (2^bits - 1)`. The range is one of:

* symmetric: from -m to m, where m is the largest magnitude in the row.
* asymmetric: from the smallest weight to the largest.
* adaptive asymmetric: greedily narrowed. The search repeatedly cuts one bin off the end that leaves the smaller l2
  error, and takes the range with the smallest error on the way. Weights outside of it get its ends.
  Here the search takes few and wide bins, and least squares refine the range: in turns, the best range for the codes,
  and the best codes for the weights. Neither makes the error larger.

The kernels work on the weights of eight rows at once, one row per lane, so that short rows do not make short loops.
Such a group is `dimension` columns of eight float32, relative to the smallest weight of each row.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from emberscale_api.errors import InvalidError
from emberscale_trainer.jit import part, routine
from emberscale_trainer.jit.memory import copy, float32
from emberscale_trainer.jit.vector import (
    LANES,
    VECTOR_BYTES,
    WHOLE,
    add_product,
    greatest,
    least,
    load8,
    nearest,
    pick8,
    splat8,
    store8,
    turn8,
)
from emberscale_trainer.table.layout import FLOAT_BYTES

_INFINITY = float("inf")
_NEGLIGIBLE = 1e-6
"""A range with at most this mean squared error of its row, in steps, is not fitted: it has the weights' values."""

_SMALL, _LARGER = 2.0**-100, 2.0**100
"""A step below the first is multiplied by the second, so that its inverse is finite."""


class UnquantizableError(InvalidError):
    """A row has a weight that is NaN or infinite, or weights further apart than half of the largest float32."""


@dataclass(frozen=True)
class Quantizer:
    """The settings by which the weights of a row become codes.

    * `bits`: of a code; 1 to 8.
    * `symmetric`: whether the range is symmetric about zero.
    * `bins`: the number of parts of the range that the search may cut off; each narrows it by the range / `bins`.
    * `ratio`: the share of the range that the search cuts off before it stops. With 0 there is no search.
    * `start`: the share of the range that is cut off at both ends before the search, which tries the whole range, too.
    * `fits`: how often least squares move the range that the search found.
    """

    bits: int
    symmetric: bool = False
    bins: int = 1
    ratio: float = 0.0
    start: float = 0.0
    fits: int = 0

    @property
    def cuts(self) -> int:
        """The bins that the search cuts off. The range never becomes empty."""
        begun = 2 * self.start
        return max(0, min(int((self.ratio - begun) * self.bins + 1e-9), math.ceil((1 - begun) * self.bins - 1e-9) - 1))

    def code_bytes(self, dimension: int) -> int:
        """Bytes of the codes of a row."""
        return -(-dimension * self.bits // 8)


QUANTIZERS: Mapping[int, Quantizer] = MappingProxyType(
    {
        2: Quantizer(2, bins=10, ratio=0.36, start=0.08, fits=2),
        3: Quantizer(3, bins=25, ratio=0.14, start=0.03, fits=1),
        4: Quantizer(4, bins=45, ratio=0.1, fits=2),
        8: Quantizer(8),
    }
)
"""The quantisers of checkpoints, by bits: as accurate as with the settings of Check-N-Run, with a shorter search."""


@routine
def turned(weights: int, record: int, rows: int, dimension: int, columns: int) -> None:
    """Writes the weights of up to eight records as `dimension` columns of eight; lanes without a record get zeros."""
    whole = dimension & WHOLE if rows == LANES else 0
    for element in range(0, whole, LANES):
        turn8(weights + FLOAT_BYTES * element, record, columns + VECTOR_BYTES * element, VECTOR_BYTES)
    for element in range(whole, dimension):
        column = columns + VECTOR_BYTES * element
        store8(column, splat8(float32(0)))
        for number in range(rows):
            copy(column + FLOAT_BYTES * number, weights + record * number + FLOAT_BYTES * element, FLOAT_BYTES)


@routine
def ranges(columns: int, dimension: int) -> tuple[float, float]:
    """The smallest and the largest weights; NaN in lanes where a weight is NaN or infinite."""
    low = high = load8(columns)
    nothing = low * float32(0)  # of anything that is not finite, NaN
    for at in range(columns + VECTOR_BYTES, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
        weight = load8(at)
        low, high = least(weight, low), greatest(weight, high)
        nothing = add_product(nothing, weight, float32(0))
    return low + nothing, high + nothing


@routine
def chosen(
    columns: int, dimension: int, low: float, high: float, levels: float, start: float, bins: int, cuts: int, fits: int
) -> tuple[float, float]:
    """Subtracts `low` from all weights; returns the starts of the ranges above `low`, and their steps."""
    for at in range(columns, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
        store8(at, load8(at) - low)
    width = high - low
    begin, step = splat8(float32(0)), width / levels
    if cuts or fits:
        share, rest, error = _narrowed(columns, dimension, levels / width, levels, start, bins, cuts)
        begin, step = width * share, width * rest / levels
        begin, step = _fitted(columns, dimension, begin, step, error, width, levels, fits)
    return begin, step


@part
def _miss(place: float, levels: float) -> float:
    """The distance of a place, in steps from the lower end of a range, from the place of its code."""
    return place - nearest(least(greatest(place, float32(0)), levels))


@part
def _error(columns: int, end: int, per_step: float, offset: float, levels: float) -> float:
    """The sum of the squared errors of one range, in steps."""
    error = splat8(float32(0))
    for at in range(columns, end, VECTOR_BYTES):
        miss = _miss(add_product(offset, load8(at), per_step), levels)
        error = add_product(error, miss, miss)
    return error


@routine
def _narrowed(
    columns: int, dimension: int, scale: float, levels: float, start: float, bins: int, cuts: int
) -> tuple[float, float, float]:
    """Finds ranges by the greedy search: returns the shares of the whole ranges that are cut off below, and are left.

    Also returns the sums of their squared errors, in steps of the whole ranges.
    `scale` is steps per unit of weight in the whole range. In a range without width all errors are NaN, and none is
    smaller than another.
    """
    end = columns + VECTOR_BYTES * dimension
    bin_width, left, cut_below = float32(1) / float32(bins), splat8(float32(1)), splat8(float32(0))
    best = _error(columns, end, scale, cut_below, levels)
    best_below, best_left = cut_below, left
    if start > float32(0):
        left, cut_below = left - start * float32(2), cut_below + start
        error = _error(columns, end, scale / left, cut_below * (float32(0) - levels) / left, levels) * (left * left)
        best_below = pick8(error, best, cut_below, best_below)
        best_left = pick8(error, best, left, best_left)
        best = least(error, best)
    for _ in range(cuts):
        # both ranges are as wide, so that their errors in steps compare
        left = left - bin_width
        per_step, bin_steps = scale / left, bin_width * levels / left
        below = cut_below * (float32(0) - levels / left)
        cut_error = kept_error = splat8(float32(0))
        for at in range(columns, end, VECTOR_BYTES):
            place = add_product(below, load8(at), per_step)
            miss = _miss(place - bin_steps, levels)
            cut_error = add_product(cut_error, miss, miss)
            miss = _miss(place, levels)
            kept_error = add_product(kept_error, miss, miss)
        cut_below = pick8(cut_error, kept_error, cut_below + bin_width, cut_below)
        error = least(cut_error, kept_error) * (left * left)
        best_below = pick8(error, best, cut_below, best_below)
        best_left = pick8(error, best, left, best_left)
        best = least(error, best)
    return best_below, best_left, best


@routine
def _fitted(
    columns: int, dimension: int, begin: float, step: float, error: float, width: float, levels: float, fits: int
) -> tuple[float, float]:
    """Moves ranges by least squares, so that the sum of the squares of (weight - begin - code * step) falls.

    `error` is this sum for the given ranges, in steps of the whole ones. A range stays unchanged if fitting would leave
    its first or its last value without a weight: otherwise a row that was quantised before would get another range each
    time.
    """
    count = float32(dimension)
    first_begin, first_step = begin, step
    # a range stays if its weights lie on its values already
    fittable = pick8(float32(_NEGLIGIBLE) * count, error, splat8(float32(1)), float32(0))
    for _ in range(fits):
        scale = float32(1) / step
        offset = begin * (float32(0) - scale)
        codes = squares = misses = products = splat8(float32(0))
        for at in range(columns, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
            place = add_product(offset, load8(at), scale)
            code = nearest(least(greatest(place, float32(0)), levels))
            miss = place - code
            codes = codes + code
            misses = misses + miss
            squares = add_product(squares, code, code)
            products = add_product(products, code, miss)
        spread = count * squares - codes * codes
        wider = (count * products - codes * misses) / spread
        moved = (misses - codes * wider) / count
        sound = spread * fittable  # nothing can be fitted to codes that are all the same
        begin = pick8(float32(0), sound, add_product(begin, moved, step), begin)
        step = pick8(float32(0), sound, add_product(step, wider, step), step)
    half = step * float32(0.5)
    sound = pick8(float32(0) - half, begin, step, float32(0))
    sound = pick8(begin + levels * step - width, half, sound, float32(0))
    return pick8(float32(0), sound, begin, first_begin), pick8(float32(0), sound, step, first_step)


@routine
def encode(columns: int, dimension: int, begin: float, step: float, levels: float) -> None:
    """Replaces weights by their codes, as float32."""
    larger = pick8(step, float32(_SMALL), float32(_LARGER), splat8(float32(1)))
    scale = float32(1) / (step * larger)
    for at in range(columns, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
        place = (load8(at) - begin) * larger * scale  # in a range without width NaN, of which the greatest is 0
        store8(at, nearest(least(greatest(place, float32(0)), levels)))
