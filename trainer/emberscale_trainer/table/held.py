"""The update rules on rows that a worker holds: weights and state in one vector, without key or counter.

They are the additive rules of `optimizers`, applied as `rows` applies them, so that a row that only one worker steps is
the same in both places, bit by bit. A kernel gets `slab.TABLE`, from which it reads dimension, optimizer and
parameters.
"""

from emberscale_trainer.jit import entry, part, routine
from emberscale_trainer.jit.memory import (
    CACHE_LINE,
    copy,
    float32,
    load_float32,
    load_int64,
    load_uint32,
    prefetch,
    store_float32,
    store_uint32,
)
from emberscale_trainer.jit.vector import VECTOR_BYTES, WHOLE, load8, splat8, store8
from emberscale_trainer.table import optimizers
from emberscale_trainer.table.layout import FLOAT_BYTES
from emberscale_trainer.table.slab import DIMENSION, OPTIMIZER, PARAMETERS_AT

_AHEAD = 16
"""Ids between the one whose gradient is added and the one whose place is prefetched."""

_MOST_PREFETCHED = 512


@routine
def _step(table: int, weights: int, gradient: int) -> None:
    optimizer, dimension = load_int64(table + OPTIMIZER), load_int64(table + DIMENSION)
    parameters = table + PARAMETERS_AT
    if optimizer == optimizers.ROW_WISE_ADAGRAD:
        optimizers.apply_row_wise_adagrad(weights, gradient, dimension, optimizers.two_parameters(parameters))
    elif optimizer == optimizers.ADAGRAD:
        optimizers.apply_adagrad(weights, gradient, dimension, optimizers.two_parameters(parameters))
    else:
        optimizers.apply_sgd(weights, gradient, dimension, optimizers.rate_of(parameters))


@part
def _begin_sum(total: int, gradient: int, dimension: int, share: float) -> None:
    """Writes 0 + share * gradient: the sum begins with a zero, since -0.0 alone differs from 0 - 0.0."""
    none = float32(0)
    whole = FLOAT_BYTES * (dimension & WHOLE)
    for at in range(0, whole, VECTOR_BYTES):
        store8(total + at, splat8(none) + load8(gradient + at) * share)
    for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
        store_float32(total + at, none + load_float32(gradient + at) * share)


@part
def _add_to_sum(total: int, gradient: int, dimension: int, share: float) -> None:
    whole = FLOAT_BYTES * (dimension & WHOLE)
    for at in range(0, whole, VECTOR_BYTES):
        store8(total + at, load8(total + at) + load8(gradient + at) * share)
    for at in range(whole, FLOAT_BYTES * dimension, FLOAT_BYTES):
        store_float32(total + at, load_float32(total + at) + load_float32(gradient + at) * share)


@entry
def step_ids(
    table: int,
    held: int,
    offsets: int,
    offset_stride: int,
    ids: int,
    edges: int,
    mean: int,
    records: int,
    gradients: int,
    gradient_stride: int,
    places: int,
    owners: int,
    sums: int,
) -> int:
    """Steps each row that a batch looks up in one table, once, by the sum of its ids' gradients; returns how many.

    Row i of `ids` begins at float `offsets[i]` of `held`. `edges: int64[records + 1]` delimits the ids of each record;
    without edges, record r has id r. The gradient of record r is at `gradients + r * gradient_stride`; with `mean`, its
    ids share it. Strides are in bytes. The caller provides room for `owners: uint32[ids]`, `sums: float32[ids,
    dimension]` and `places: uint32[]`, one for each float of `held`. The room need not be cleared: a place counts only
    if the owner at that place names it (Briggs and Torczon 1993).
    """
    dimension = load_int64(table + DIMENSION)
    size = FLOAT_BYTES * dimension
    distinct = 0
    for record in range(records):
        first, stop, share = record, record + 1, float32(1)
        if edges != 0:
            first, stop = load_int64(edges + 8 * record), load_int64(edges + 8 * record + 8)
            if mean and stop > first:
                share = float32(1) / float32(stop - first)
        gradient = gradients + gradient_stride * record
        for item in range(first, stop):
            if item + _AHEAD < ids:
                prefetch(places + 4 * load_uint32(offsets + offset_stride * (item + _AHEAD)))
            offset = load_uint32(offsets + offset_stride * item)
            place = load_uint32(places + 4 * offset)
            if place < distinct and load_uint32(owners + 4 * place) == offset:
                _add_to_sum(sums + size * place, gradient, dimension, share)
                continue
            row = held + FLOAT_BYTES * offset
            for at in range(0, min(size + FLOAT_BYTES, _MOST_PREFETCHED), CACHE_LINE):
                prefetch(row + at)
            store_uint32(places + 4 * offset, distinct)
            store_uint32(owners + 4 * distinct, offset)
            _begin_sum(sums + size * distinct, gradient, dimension, share)
            distinct += 1
    for place in range(distinct):
        _step(table, held + FLOAT_BYTES * load_uint32(owners + 4 * place), sums + size * place)
    return distinct


@entry
def step_pieces(table: int, held: int, stride: int, pieces: int, gradients: int, weights: int) -> int:
    """Steps pieces that begin `stride` bytes apart by gradients side by side, and copies their weights to `weights`."""
    size = FLOAT_BYTES * load_int64(table + DIMENSION)
    for piece in range(pieces):
        _step(table, held + stride * piece, gradients + size * piece)
        copy(weights + size * piece, held + stride * piece, size)
    return pieces
