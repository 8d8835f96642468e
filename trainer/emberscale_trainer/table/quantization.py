"""Rows with quantised weights, for checkpoints (Check-N-Run, section 4.2).

A weight becomes the number of the nearest of 2^bits evenly spaced values between the two ends of its row's range:
`code = round((weight - low) / step)`, `step = (high - low) / (2^bits - 1)`. What differs is the range:

* symmetric: from -m to m, where m is the largest magnitude in the row.
* asymmetric: from the smallest weight to the largest.
* adaptive asymmetric: greedily narrower. One bin is cut off at the end where that leaves the smaller l2 error, again
  and again, and of all ranges on the way the one with the smallest error is taken. Weights outside it go to its ends.

Everything else of a row stays as it is, its optimizer state too: what the paper quantises is the embedding vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from emberscale_api.errors import InvalidError
from emberscale_trainer.table.compiled import entry, part, routine
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES, RowLayout
from emberscale_trainer.table.memory import (
    address_of,
    copy,
    float32,
    load_float32,
    load_int64,
    load_uint8,
    shift_right,
    store_float32,
    store_int64,
)
from emberscale_trainer.table.vector import (
    LANES,
    VECTOR_BYTES,
    WHOLE,
    add_product,
    greatest,
    least,
    load8,
    pick8,
    root,
    splat8,
    store8,
    turn8,
)

_INFINITY = float("inf")
_TO_INTEGER = 12582912.0
"""1.5 * 2^23: a float32 in [0, 2^22) that it is added to is rounded to an integer, which the low bits then hold."""

_RANGE_BYTES = 2 * FLOAT_BYTES
_SLACK_BYTES = 8
"""Behind encoded records, since the codes of eight weights are stored as eight bytes, whatever they take."""


class UnquantizableError(InvalidError):
    """A row has a weight that is NaN or infinite, or weights further apart than half of the largest float32."""


@dataclass(frozen=True)
class Quantizer:
    """How the weights of a row become codes.

    * `bits`: of a code; 1 to 8.
    * `symmetric`: whether the range is symmetric about zero.
    * `bins`: how many parts of the range the search may cut off; one narrows it by the range / `bins`.
    * `ratio`: the share of the range that it cuts off before it stops. With 0 there is no search.
    """

    bits: int
    symmetric: bool = False
    bins: int = 1
    ratio: float = 0.0

    @property
    def cuts(self) -> int:
        """The bins that the search cuts off. The range never becomes empty."""
        return min(int(self.ratio * self.bins + 1e-9), self.bins - 1)

    def code_bytes(self, dimension: int) -> int:
        """Bytes of the codes of a row."""
        return -(-dimension * self.bits // 8)


QUANTIZERS: Mapping[int, Quantizer] = MappingProxyType(
    {
        2: Quantizer(2, bins=25, ratio=0.5),
        3: Quantizer(3, bins=25, ratio=0.2),
        4: Quantizer(4, bins=45, ratio=0.1),
        8: Quantizer(8),
    }
)
"""By bits, what checkpoints are written with: the settings of the paper's section 4.2.3. It names no ratio for 4 bits,
where by `benchmarks/quantisation.py` more than this one gains nothing."""


@dataclass(frozen=True)
class PackedRows:
    """Records of which the weights are quantised: `before | low: float32 | step: float32 | codes | after`.

    `before` and `after` are the bytes that surround the weights in a record, without the padding at its end. The codes
    are a string of bits: weight i has the bits from i * bits on, the lowest of a byte first. A weight is
    `low + code * step`.

    * `head`, `tail`: bytes before and after the weights.
    * `record`: bytes of a record with its weights as float32, in memory.
    """

    quantizer: Quantizer
    dimension: int
    head: int
    tail: int
    record: int

    @classmethod
    def of(cls, layout: RowLayout, bits: int) -> "PackedRows":
        """The rows of a table. Raises UnquantizableError for a number of bits that there is no quantiser for."""
        if bits not in QUANTIZERS:
            raise UnquantizableError(
                f"weights cannot be stored in {bits} bits, but in {', '.join(map(str, QUANTIZERS))}"
            )
        counters = layout.touched_offset or layout.pushes_offset
        head = KEY_BYTES
        tail = counters + FLOAT_BYTES - head - FLOAT_BYTES * layout.dimension
        return cls(QUANTIZERS[bits], layout.dimension, head, tail, layout.stride)

    @property
    def stride(self) -> int:
        """Bytes of a packed record."""
        return self.head + _RANGE_BYTES + self.quantizer.code_bytes(self.dimension) + self.tail

    def pack(self, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns uint8 [n, stride] of contiguous records, uint8 [n, record]. Raises UnquantizableError."""
        self._check(records, self.record)
        count = len(records)
        packed = np.empty(count * self.stride + _SLACK_BYTES, np.uint8)
        scratch = np.empty(VECTOR_BYTES * (self.dimension + 2), np.uint8)
        quantizer = self.quantizer
        done = _pack(
            address_of(records),
            count,
            self.record,
            address_of(packed),
            self.stride,
            self.head,
            self.dimension,
            self.tail,
            quantizer.bits,
            int(quantizer.symmetric),
            quantizer.bins,
            quantizer.cuts,
            address_of(scratch),
        )
        if done < count:
            weights = records[done, self.head :][: FLOAT_BYTES * self.dimension].copy().view(np.float32)
            raise UnquantizableError(
                f"the weights of a row lie between {weights.min():g} and {weights.max():g}, which cannot be quantised"
            )
        return packed[: count * self.stride].reshape(count, self.stride)

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns records, uint8 [n, record], with the weights' quantised values, of contiguous uint8 [n, stride]."""
        self._check(packed, self.stride)
        records = np.zeros((len(packed), self.record), np.uint8)
        _unpack(
            address_of(packed),
            len(packed),
            self.stride,
            address_of(records),
            self.record,
            self.head,
            self.dimension,
            self.tail,
            self.quantizer.bits,
        )
        return records

    @staticmethod
    def _check(rows: NDArray[np.uint8], width: int) -> None:
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != width or not rows.flags.c_contiguous:
            raise ValueError(f"records are contiguous uint8 [n, {width}], not {rows.dtype} {list(rows.shape)}")


@entry
def _pack(
    source: int,
    count: int,
    record: int,
    target: int,
    stride: int,
    head: int,
    dimension: int,
    tail: int,
    bits: int,
    symmetric: int,
    bins: int,
    cuts: int,
    scratch: int,
) -> int:
    """Packs records up to the first that cannot be quantised; returns how many.

    Works on the weights of eight records at once, a lane each: no loop is then shorter for rows that are.
    """
    levels = float32((1 << bits) - 1)
    after = head + FLOAT_BYTES * dimension
    codes = head + _RANGE_BYTES
    packed_after = codes + ((dimension * bits + 7) >> 3)
    lanes = scratch + VECTOR_BYTES * dimension
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        _turn(source + head, record, rows, dimension, scratch)
        low, high = _ranges(scratch, dimension)
        if symmetric:
            high = greatest(high, float32(0) - low)
            low = float32(0) - high
        store8(lanes, (high - low) * float32(2))  # half of it to spare: step * levels may round up
        for number in range(rows):
            if not load_float32(lanes + FLOAT_BYTES * number) < float32(_INFINITY):
                return first + number
        if cuts:
            low, high = _narrowed(scratch, dimension, low, high, levels, bins, cuts)
        step = (high - low) / levels
        _encode(scratch, dimension, low, step, levels)
        store8(lanes, low)
        store8(lanes + VECTOR_BYTES, step)
        for number in range(rows):
            lane = FLOAT_BYTES * number
            copy(target, source, head)
            copy(target + head, lanes + lane, FLOAT_BYTES)
            copy(target + head + FLOAT_BYTES, lanes + VECTOR_BYTES + lane, FLOAT_BYTES)
            _join(scratch + lane, dimension, bits, target + codes)
            copy(target + packed_after, source + after, tail)  # over what the codes stored too much
            source += record
            target += stride
    return count


@routine
def _turn(weights: int, record: int, rows: int, dimension: int, columns: int) -> None:
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
def _ranges(columns: int, dimension: int) -> tuple[float, float]:
    """The smallest and the largest weights; NaN in lanes where a weight is NaN or infinite."""
    low = high = load8(columns)
    nothing = low * float32(0)  # of anything that is not finite, NaN
    for at in range(columns + VECTOR_BYTES, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
        weight = load8(at)
        low, high = least(weight, low), greatest(weight, high)
        nothing = nothing + weight * float32(0)
    return low + nothing, high + nothing


@part
def _miss(weight: float, low: float, inverse: float, levels: float) -> float:
    """The error of a weight in steps, `inverse` being 1 / step."""
    place = (weight - low) * inverse
    return place - (least(greatest(place, float32(0)), levels) + float32(_TO_INTEGER) - float32(_TO_INTEGER))


@routine
def _narrowed(
    columns: int, dimension: int, low: float, high: float, levels: float, bins: int, cuts: int
) -> tuple[float, float]:
    """The ranges that the greedy search finds. In one without width no error is a number, and none is smaller."""
    end = columns + VECTOR_BYTES * dimension
    bin_width = (high - low) / float32(bins)
    best_low, best_high = low, high
    step = (high - low) / levels
    inverse = float32(1) / step
    error = splat8(float32(0))
    for at in range(columns, end, VECTOR_BYTES):
        miss = _miss(load8(at), low, inverse, levels)
        error = add_product(error, miss, miss)
    best = root(error) * step
    for _ in range(cuts):
        # both ranges are as wide, so that their errors in steps compare
        step = (high - low - bin_width) / levels
        inverse = float32(1) / step
        cut_low = low + bin_width
        above = below = splat8(float32(0))
        for at in range(columns, end, VECTOR_BYTES):
            weight = load8(at)
            miss = _miss(weight, cut_low, inverse, levels)
            above = add_product(above, miss, miss)
            miss = _miss(weight, low, inverse, levels)
            below = add_product(below, miss, miss)
        low, high = pick8(above, below, cut_low, low), pick8(above, below, high, high - bin_width)
        error = root(least(above, below)) * step
        best_low, best_high = pick8(error, best, low, best_low), pick8(error, best, high, best_high)
        best = least(error, best)
    return best_low, best_high


@routine
def _encode(columns: int, dimension: int, low: float, step: float, levels: float) -> None:
    """Replaces weights by numbers whose low bits are the codes."""
    for at in range(columns, columns + VECTOR_BYTES * dimension, VECTOR_BYTES):
        place = (load8(at) - low) / step  # in a range without width NaN, of which the greatest is 0
        store8(at, least(greatest(place, float32(0)), levels) + float32(_TO_INTEGER))


@part
def _join(codes: int, dimension: int, bits: int, target: int) -> None:
    """Writes one lane's codes as a string of bits, and up to seven bytes more."""
    mask = (1 << bits) - 1
    for first in range(0, dimension, LANES):
        joined = 0
        for number in range(min(LANES, dimension - first)):
            code = load_uint8(codes + VECTOR_BYTES * (first + number)) & mask
            joined |= code << (bits * number)
        store_int64(target, joined)
        target += bits


@entry
def _unpack(
    source: int, count: int, stride: int, target: int, record: int, head: int, dimension: int, tail: int, bits: int
) -> int:
    """The reverse of `_pack`."""
    after = head + FLOAT_BYTES * dimension
    codes = head + _RANGE_BYTES
    packed_after = codes + ((dimension * bits + 7) >> 3)
    mask = (1 << bits) - 1
    whole = dimension & WHOLE
    for _ in range(count):
        low, step = load_float32(source + head), load_float32(source + head + FLOAT_BYTES)
        weights, at = target + head, source + codes
        copy(target, source, head)
        for _ in range(0, whole, LANES):
            joined = load_int64(at) if bits == 8 else _bytes(at, bits)
            for number in range(LANES):
                code = shift_right(joined, bits * number) & mask
                store_float32(weights + FLOAT_BYTES * number, low + float32(code) * step)
            weights += VECTOR_BYTES
            at += bits
        left = dimension - whole
        if left:
            joined = _bytes(at, (left * bits + 7) >> 3)
            for number in range(left):
                code = shift_right(joined, bits * number) & mask
                store_float32(weights + FLOAT_BYTES * number, low + float32(code) * step)
        copy(target + after, source + packed_after, tail)
        source += stride
        target += record
    return count


@part
def _bytes(address: int, count: int) -> int:
    joined = 0
    for number in range(count):
        joined |= load_uint8(address + number) << (8 * number)
    return joined
