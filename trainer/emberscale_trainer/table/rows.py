"""The one place where the bytes of a row change.

Nothing else writes to a segment. A row is made (`make_row`), stepped by a gradient (`step_row`), replaced by a record
that was saved or sent (`put_row`) or given back (`retire_row`); a slot that holds no row is all zero. Each of the four
sees the row's old bytes before it writes and the new ones after, and marks the change in the row's flags. What must
know of every change belongs here: the parity delta `old ^ new` is to be taken around the write.

The flags are one byte a slot, outside of the row. Bit 7 says that the slot holds a row; each other bit belongs to a
tracker, who clears it when it has seen the row. A change sets them all in one store, so trackers cost nothing.
"""

from enum import IntEnum

from emberscale_trainer.table.compiled import part
from emberscale_trainer.table.descriptor import (
    DIMENSION,
    FLAGS,
    FREE,
    FREE_COUNT,
    INITIALIZER,
    OPTIMIZER,
    PARAMETERS_AT,
    PUSHES,
    SCALE,
    SEED,
    SEGMENT_COUNT,
    SEGMENT_ROWS,
    SEGMENTS,
    SLOT_BITS,
    STRIDE,
    USED,
)
from emberscale_trainer.table.index import row_address
from emberscale_trainer.table.initializers import initial_weights
from emberscale_trainer.table.layout import KEY_BYTES
from emberscale_trainer.table.memory import (
    copy,
    load_float64,
    load_int64,
    load_uint32,
    store_int64,
    store_uint8,
    store_uint32,
    zero,
)
from emberscale_trainer.table.optimizers import initial_state, step

LIVE = 0x80
_CHANGED = 0xFF
NO_SLOT = -1


class Tracker(IntEnum):
    """Who follows the changes of rows; the value is the tracker's bit in the flags. There is room for seven."""

    CHECKPOINT = 0x01


@part
def _mark(table: int, slot: int, flags: int) -> None:
    bits = load_int64(table + SLOT_BITS)
    segment = load_int64(load_int64(table + SEGMENTS) + 8 * (slot >> bits))
    store_uint8(segment + load_int64(table + FLAGS) + (slot & ((1 << bits) - 1)), flags)


@part
def take_slot(table: int) -> int:
    """A slot that holds no row: one given back, or the next of the last segment. NO_SLOT when all are in use."""
    free = load_int64(table + FREE_COUNT)
    if free != 0:
        store_int64(table + FREE_COUNT, free - 1)
        return load_uint32(load_int64(table + FREE) + 4 * (free - 1))
    used = load_int64(table + USED)
    segments = load_int64(table + SEGMENT_COUNT)
    if segments == 0 or used == load_int64(table + SEGMENT_ROWS):
        return NO_SLOT
    store_int64(table + USED, used + 1)
    return ((segments - 1) << load_int64(table + SLOT_BITS)) | used


@part
def make_row(table: int, slot: int, key: int, key_hash: int) -> None:
    """Writes a row with its initial weights and state into a slot that held none."""
    row = row_address(table, slot)
    dimension = load_int64(table + DIMENSION)
    store_int64(row, key)
    initial_weights(
        row + KEY_BYTES,
        dimension,
        load_int64(table + INITIALIZER),
        load_float64(table + SCALE),
        load_int64(table + SEED),
        key_hash,
    )
    initial_state(load_int64(table + OPTIMIZER), row + KEY_BYTES, dimension, table + PARAMETERS_AT)
    _mark(table, slot, _CHANGED)


@part
def step_row(table: int, slot: int, row: int, gradient: int) -> None:
    """Applies a gradient to a row and counts it."""
    step(
        load_int64(table + OPTIMIZER),
        row + KEY_BYTES,
        gradient,
        load_int64(table + DIMENSION),
        table + PARAMETERS_AT,
    )
    pushes = row + load_int64(table + PUSHES)
    store_uint32(pushes, load_uint32(pushes) + 1)
    _mark(table, slot, _CHANGED)


@part
def put_row(table: int, slot: int, record: int) -> None:
    """Replaces a row, or fills a slot that held none, by a record."""
    copy(row_address(table, slot), record, load_int64(table + STRIDE))
    _mark(table, slot, _CHANGED)


@part
def retire_row(table: int, slot: int) -> None:
    """Zeroes a row and gives its slot back; the list of free slots has room for it."""
    zero(row_address(table, slot), load_int64(table + STRIDE))
    _mark(table, slot, 0)
    free = load_int64(table + FREE_COUNT)
    store_uint32(load_int64(table + FREE) + 4 * free, slot)
    store_int64(table + FREE_COUNT, free + 1)
