"""The one place where the bytes of a row change.

Nothing else writes to a segment. A row is made for the gradient that steps it next (`make_row`), stepped by a gradient
(`step_rows`), replaced by a record that was saved or sent (`put_row`) or given back (`retire_row`). Each of the four
sees the row's old bytes before it writes and the new ones after, and marks the change. What must know of every change
belongs here: the parity delta `old ^ new` is to be taken around the write.

Between calls of a kernel, a row has counted a push or more, and a slot without a row is all zero: the bytes of a slot
say by themselves whether it is live.

A segment ends with bitmaps, one bit a slot and one bitmap a tracker: a change sets the row's bit in each, and the
tracker clears it when it has seen the row.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from emberscale_trainer.table import optimizers
from emberscale_trainer.table.compiled import part, routine
from emberscale_trainer.table.descriptor import (
    BITMAPS,
    DIMENSION,
    FREE,
    FREE_COUNT,
    INITIALIZER,
    NEXT_SLOT,
    OPTIMIZER,
    PARAMETERS_AT,
    PUSHES,
    SCALE,
    SEED,
    SEGMENT_COUNT,
    SEGMENT_ROWS,
    SLOT_BITS,
)
from emberscale_trainer.table.index import Geometry, geometry_of, row_address, segment_of
from emberscale_trainer.table.initializers import initial_weights
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES
from emberscale_trainer.table.memory import (
    copy,
    load_float64,
    load_int64,
    load_uint8,
    load_uint32,
    store_int64,
    store_uint8,
    store_uint32,
    zero,
)


class Tracker(IntEnum):
    """Who follows the changes of rows. Another one is another member here, and a bit a row."""

    CHECKPOINT = 0


BITMAPS_PER_SEGMENT = len(Tracker)
NO_SLOT = -1
MOST_PUSHES = 0xFFFFFFFF
"""Where the counter of a row stays: a live row never counts zero."""


def bitmap_bytes(segment_rows: int) -> int:
    """Bytes of one bitmap of a segment; the number of rows is a multiple of 8."""
    return segment_rows // 8


class _Marks(NamedTuple):
    """What it takes to find the bits of a slot."""

    geometry: Geometry
    bitmaps: int
    bitmap_bytes: int


@part
def _marks_of(table: int) -> _Marks:
    return _Marks(geometry_of(table), load_int64(table + BITMAPS), load_int64(table + SEGMENT_ROWS) >> 3)


@part
def _set_bit(marks: _Marks, bitmap: int, slot: int) -> None:
    row = slot & marks.geometry.row_mask
    at = segment_of(marks.geometry, slot) + marks.bitmaps + bitmap * marks.bitmap_bytes + (row >> 3)
    store_uint8(at, load_uint8(at) | (1 << (row & 7)))


@part
def _mark_changed(marks: _Marks, slot: int) -> None:
    for bitmap in range(BITMAPS_PER_SEGMENT):
        _set_bit(marks, bitmap, slot)


@routine
def take_slot(table: int) -> int:
    """A slot that holds no row: one given back, or the next that was never used. NO_SLOT when all are in use."""
    free = load_int64(table + FREE_COUNT)
    if free != 0:
        store_int64(table + FREE_COUNT, free - 1)
        return load_uint32(load_int64(table + FREE) + 4 * (free - 1))
    bits = load_int64(table + SLOT_BITS)
    slot = load_int64(table + NEXT_SLOT)
    if slot >> bits == load_int64(table + SEGMENT_COUNT):
        return NO_SLOT
    following = slot + 1
    if following & ((1 << bits) - 1) == load_int64(table + SEGMENT_ROWS):
        following = ((slot >> bits) + 1) << bits
    store_int64(table + NEXT_SLOT, following)
    return slot


@routine
def room_of(table: int) -> int:
    """Slots that hold no row."""
    bits = load_int64(table + SLOT_BITS)
    slot = load_int64(table + NEXT_SLOT)
    segments = load_int64(table + SEGMENT_COUNT) - (slot >> bits)
    return load_int64(table + FREE_COUNT) + segments * load_int64(table + SEGMENT_ROWS) - (slot & ((1 << bits) - 1))


@routine
def make_row(table: int, slot: int, key: int, key_hash: int) -> None:
    """Writes initial weights and state into a slot that held no row; `step_rows` must follow, which makes it live."""
    marks = _marks_of(table)
    row = row_address(marks.geometry, slot)
    dimension = load_int64(table + DIMENSION)
    store_int64(row, key)
    initial_weights(
        row + KEY_BYTES,
        dimension,
        load_int64(table + INITIALIZER),
        load_float64(table + SCALE),
        load_int64(table + SEED),
        key,
        key_hash,
    )
    optimizers.initial_state(load_int64(table + OPTIMIZER), row + KEY_BYTES, dimension, table + PARAMETERS_AT)
    _mark_changed(marks, slot)


@routine
def put_row(table: int, slot: int, record: int) -> None:
    """Replaces a row, or fills a slot that held none, by a live record."""
    marks = _marks_of(table)
    copy(row_address(marks.geometry, slot), record, marks.geometry.stride)
    _mark_changed(marks, slot)


@routine
def retire_row(table: int, slot: int) -> None:
    """Zeroes a row and gives its slot back; the list of free slots has room for it."""
    marks = _marks_of(table)
    zero(row_address(marks.geometry, slot), marks.geometry.stride)
    row = slot & marks.geometry.row_mask
    for bitmap in range(BITMAPS_PER_SEGMENT):
        at = segment_of(marks.geometry, slot) + marks.bitmaps + bitmap * marks.bitmap_bytes + (row >> 3)
        store_uint8(at, load_uint8(at) & ~(1 << (row & 7)))
    free = load_int64(table + FREE_COUNT)
    store_uint32(load_int64(table + FREE) + 4 * free, slot)
    store_int64(table + FREE_COUNT, free + 1)


def _stepper(
    load_parameters: Callable[[int], Any], apply: Callable[..., None]
) -> Callable[[int, int, int, int, int], None]:
    """The loop of `step_rows` for one rule, so that nothing is decided row by row."""

    @routine
    def step_with_rule(table: int, slots: int, rows: int, count: int, gradients: int) -> None:
        parameters = load_parameters(table + PARAMETERS_AT)
        dimension = load_int64(table + DIMENSION)
        pushes_offset = load_int64(table + PUSHES)
        marks = _marks_of(table)
        for at in range(0, 8 * count, 8):
            row = load_int64(rows + at)
            apply(row + KEY_BYTES, gradients, dimension, parameters)
            pushes = load_uint32(row + pushes_offset)
            store_uint32(row + pushes_offset, pushes + (pushes < MOST_PUSHES))
            _mark_changed(marks, load_int64(slots + at))
            gradients += FLOAT_BYTES * dimension

    return step_with_rule


_step_sgd = _stepper(optimizers.rate_of, optimizers.apply_sgd)
_step_momentum = _stepper(optimizers.two_parameters, optimizers.apply_momentum)
_step_adagrad = _stepper(optimizers.two_parameters, optimizers.apply_adagrad)
_step_row_wise_adagrad = _stepper(optimizers.two_parameters, optimizers.apply_row_wise_adagrad)
_step_adam = _stepper(optimizers.adam_parameters, optimizers.apply_adam)
_step_dense_adam = _stepper(optimizers.adam_parameters, optimizers.apply_dense_adam)
_step_ftrl = _stepper(optimizers.three_parameters, optimizers.apply_ftrl)


@routine
def step_rows(table: int, slots: int, rows: int, count: int, gradients: int) -> None:
    """Applies `count` gradients to rows, one after another, and counts them.

    `slots` and `rows` are the addresses of int64[count]: slots, and where their rows begin.
    """
    optimizer = load_int64(table + OPTIMIZER)
    if optimizer == optimizers.ROW_WISE_ADAGRAD:
        _step_row_wise_adagrad(table, slots, rows, count, gradients)
    elif optimizer == optimizers.ADAGRAD:
        _step_adagrad(table, slots, rows, count, gradients)
    elif optimizer == optimizers.ADAM:
        _step_adam(table, slots, rows, count, gradients)
    elif optimizer == optimizers.DENSE_ADAM:
        _step_dense_adam(table, slots, rows, count, gradients)
    elif optimizer == optimizers.FTRL:
        _step_ftrl(table, slots, rows, count, gradients)
    elif optimizer == optimizers.MOMENTUM:
        _step_momentum(table, slots, rows, count, gradients)
    else:
        _step_sgd(table, slots, rows, count, gradients)
