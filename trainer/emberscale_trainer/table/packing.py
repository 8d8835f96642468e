"""The kernels that write and read blocks of rows with quantised weights, whose form `packed` describes."""

from emberscale_trainer.jit import entry, part
from emberscale_trainer.jit.memory import (
    copy,
    float32,
    load_float32,
    load_int64,
    load_uint8,
    load_uint32,
    shift_right,
    store_float32,
    store_int64,
    store_uint8,
    store_uint32,
)
from emberscale_trainer.jit.vector import (
    LANES,
    VECTOR_BYTES,
    WHOLE,
    greatest,
    join8,
    pick8,
    store8,
    sum8,
)
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES
from emberscale_trainer.table.quantization import chosen, encode, ranges, turned

HALF_BYTES = 2
START_PARTS = 1000
"""Kernels take integers only: the `start` of a quantiser in thousandths."""

_TOLERANCE = 16
"""The start and the width of a range may change by one of this many parts of its step to become float16."""

_INFINITY = float("inf")
_HALF_SPLIT = float(2**13 + 1)
"""Multiplying by this, and subtracting the difference again, leaves the 11 bits of a float32 that a float16 has."""

_LEAST_HALF, _MOST_HALF = 2.0**-14, 65504.0
_HALF_BIAS = 112 << 10
"""The exponent of a float32 less that of a float16, at its place in a float16."""


@entry
def pack_records(
    source: int,
    count: int,
    record: int,
    target: int,
    first_key: int,
    key_bytes: int,
    float_bytes: int,
    dimension: int,
    state_bytes: int,
    bits: int,
    symmetric: int,
    bins: int,
    start: int,
    cuts: int,
    fits: int,
    scratch: int,
) -> int:
    """Packs records, without counters, up to the first that cannot be quantised; returns how many.

    Returns -1 if ranges cannot be stored in `float_bytes`.
    """
    levels = float32((1 << bits) - 1)
    begun = float32(start) / float32(START_PARTS)
    code_bytes = (dimension * bits + 7) >> 3
    state_offset = KEY_BYTES + FLOAT_BYTES * dimension
    groups = (dimension + LANES - 1) >> 3
    lanes = scratch + LANES * VECTOR_BYTES * groups
    for first in range(0, count, LANES):
        rows = min(LANES, count - first)
        turned(source + KEY_BYTES, record, rows, dimension, scratch)
        low, high = ranges(scratch, dimension)
        base = low
        if symmetric:
            high = greatest(high, float32(0) - low)
            low = float32(0) - high
        store8(lanes, (high - low) * float32(2))  # half of it to spare: step * levels may round up
        for number in range(rows):
            if not load_float32(lanes + FLOAT_BYTES * number) < float32(_INFINITY):
                return first + number
        begin, step = chosen(scratch, dimension, base, high, levels, begun, bins, cuts, fits)
        if symmetric:
            begin, step = low - base, (high - low) / levels
        low = base + begin
        if float_bytes == HALF_BYTES:
            exact_low, exact_step = low, step
            low, step = _as_half(low), _as_half(step)
            if _misfits(low, exact_low, exact_step) or _misfits(levels * step, levels * exact_step, exact_step):
                return -1
        encode(scratch, dimension, low - base, step, levels)
        for group in range(groups):
            join8(scratch + LANES * VECTOR_BYTES * group, bits, scratch + LANES * KEY_BYTES * group)
        store8(lanes, low)
        store8(lanes + VECTOR_BYTES, step)
        for number in range(rows):
            store_int64(target, load_int64(source) - first_key)
            target += key_bytes
            for value in range(lanes + FLOAT_BYTES * number, lanes + 2 * VECTOR_BYTES, VECTOR_BYTES):
                if float_bytes == HALF_BYTES:
                    _store_half(target, load_uint32(value))
                else:
                    copy(target, value, FLOAT_BYTES)
                target += float_bytes
            codes = scratch + KEY_BYTES * number
            for group in range(groups):  # in order, as each may store more bytes than it has
                store_int64(target + bits * group, load_int64(codes + LANES * KEY_BYTES * group))
            target += code_bytes
            copy(target, source + state_offset, state_bytes)
            target += state_bytes
            source += record
    return count


@part
def _as_half(value: float) -> float:
    """Rounds eight float32 to the precision of float16 without subnormals; `_misfits` finds too large values."""
    split = value * float32(_HALF_SPLIT)
    rounded = split - (split - value)
    magnitude = greatest(rounded, float32(0) - rounded)
    return pick8(magnitude, float32(_LEAST_HALF), float32(0), rounded)


@part
def _misfits(rounded: float, exact: float, step: float) -> bool:
    """Whether any of eight values is no float16, or off by more than the tolerance."""
    off = greatest(rounded - exact, exact - rounded)
    too_far = pick8(step / float32(_TOLERANCE), off, float32(1), float32(0))
    too_large = pick8(float32(_MOST_HALF), greatest(exact, float32(0) - exact), float32(1), float32(0))
    return sum8(too_far + too_large) > float32(0)


@part
def _store_half(target: int, value: int) -> None:
    """Stores the bits of a float32 as a float16, which has the same value; two bytes more are undefined."""
    magnitude = value & 0x7FFFFFFF
    half = shift_right(magnitude, 13) - _HALF_BIAS if magnitude else 0
    store_uint32(target, shift_right(value, 16) & 0x8000 | half)


@part
def _half(low: int, high: int) -> int:
    """Returns the bits of the float32 with the value of a float16 with these bytes."""
    magnitude = (high & 0x7F) << 8 | low
    bits = (magnitude + _HALF_BIAS) << 13 if magnitude else 0
    return (high & 0x80) << 24 | bits


@entry
def pack_counters(source: int, count: int, record: int, target: int) -> int:
    """Writes the counters at `source` and every `record` bytes from there; returns where they end."""
    for _ in range(count):
        value = load_uint32(source)
        while value > 127:
            store_uint8(target, value & 127 | 128)
            value = shift_right(value, 7)
            target += 1
        store_uint8(target, value)
        target += 1
        source += record
    return target


@entry
def unpack_records(
    source: int,
    count: int,
    target: int,
    record: int,
    first_key: int,
    key_bytes: int,
    float_bytes: int,
    dimension: int,
    state_bytes: int,
    bits: int,
) -> int:
    """The reverse of `pack_records`."""
    code_bytes = (dimension * bits + 7) >> 3
    state_offset = KEY_BYTES + FLOAT_BYTES * dimension
    mask = (1 << bits) - 1
    whole = dimension & WHOLE
    for _ in range(count):
        store_int64(target, _bytes(source, key_bytes) + first_key)
        source += key_bytes
        weights = target + KEY_BYTES
        low = _range_float(source, float_bytes, weights)
        step = _range_float(source + float_bytes, float_bytes, weights)
        source += 2 * float_bytes
        at = source
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
        source += code_bytes
        copy(target + state_offset, source, state_bytes)
        source += state_bytes
        target += record
    return count


@part
def _range_float(source: int, float_bytes: int, room: int) -> float:
    """Reads a number of a range, by way of four bytes of room."""
    if float_bytes == HALF_BYTES:
        store_uint32(room, _half(load_uint8(source), load_uint8(source + 1)))
    else:
        copy(room, source, FLOAT_BYTES)
    return load_float32(room)


@part
def _bytes(address: int, count: int) -> int:
    joined = 0
    for number in range(count):
        joined |= load_uint8(address + number) << (8 * number)
    return joined


@entry
def unpack_counters(source: int, end: int, count: int, target: int, record: int) -> int:
    """The reverse of `pack_counters`; returns where it stopped, or 0 if a counter does not end by `end`."""
    for _ in range(count):
        value, shift, byte = 0, 0, 128
        while byte > 127:
            if source >= end or shift > 28:
                return 0
            byte = load_uint8(source)
            source += 1
            value |= (byte & 127) << shift
            shift += 7
        store_uint32(target, value)
        target += record
    return source
