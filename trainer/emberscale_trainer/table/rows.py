"""The only code that changes the bytes of a row.

Nothing else writes to a segment. A row is made for the gradient or change that follows (`make_row`), stepped by it
(`step_rows`), replaced by a record that was saved or sent (`put_row`), or retired (`retire_row`); a sketch counts a
push (`count_push`). The last four tell the readers first, while the row has its old bytes: code that must see every
change belongs there.

Between calls of a kernel, a row has counted at least one push, and a slot without a row is all zero: the bytes of a
slot alone tell whether it is live.

A table whose changes are logged (`deltas`) also writes `old ^ new` of each row that changes, in the same pass; in a log
that merges, it writes only the old bytes, when a row first changes.

A reader of a table costs nothing until it is active. A reader that tracks changes has a bitmap, with one bit per slot.
A reader with an open snapshot gets a copy of a row's old bytes, unless it has passed the row or the row is not in its
scope; room for the copies is made before the change, like room for rows.
"""

from collections.abc import Callable
from typing import Any

from emberscale_trainer.jit import part, routine
from emberscale_trainer.jit.memory import (
    copy,
    load_float32,
    load_float64,
    load_int64,
    load_uint8,
    load_uint32,
    shift_right,
    store_float32,
    store_int64,
    store_uint8,
    store_uint32,
    zero,
)
from emberscale_trainer.jit.vector import VECTOR_BYTES, WHOLE, load8, store8
from emberscale_trainer.table import optimizers
from emberscale_trainer.table.deltas import begin_delta, end_delta
from emberscale_trainer.table.index import geometry_of, row_address
from emberscale_trainer.table.initializers import GIVEN, initial_weights
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES
from emberscale_trainer.table.slab import (
    CHANGED,
    CLOCK,
    DIMENSION,
    END,
    FREE,
    FREE_COUNT,
    INITIALIZER,
    LOGGED,
    NEXT_SLOT,
    OPENED,
    OPTIMIZER,
    PARAMETERS_AT,
    PASSED,
    PUSHES,
    READER_BYTES,
    READERS_AT,
    SAVED,
    SAVED_COUNT,
    SAVED_ROOM,
    SCALE,
    SCOPE,
    SEED,
    SEGMENT_COUNT,
    SEGMENT_ROWS,
    SLOT_BITS,
    STRIDE,
    TOUCHED,
    Reader,
)

NO_SLOT = -1

SKETCH_COUNTERS = 2048
"""Counters of a sketch, one byte each: the weights of its row. A power of two."""

_COUNTER_MASK = SKETCH_COUNTERS - 1
_FIRST_COUNTER, _SECOND_COUNTER, _THIRD_COUNTER = 10, 21, 32
"""The bits of a key's hash that select its counters; lower bits are the same for all keys of a bucket."""

_MOST_COUNTED = 0xFF
_HALVED = 0x7F7F7F7F7F7F7F7F
MOST_PUSHES = 0xFFFFFFFF
"""The most that the counter of a row counts; it stays there, since a live row never counts zero."""

_READERS = len(Reader)
_PLENTY = 1 << 62


@part
def _mark(changed: int, slot: int) -> None:
    at = changed + (slot >> 3)
    store_uint8(at, load_uint8(at) | (1 << (slot & 7)))


@part
def _save(table: int, reader: int, slot: int, row: int) -> None:
    """Keeps the old bytes of a row for the reader's snapshot, if it will still ask for them."""
    if slot >= load_int64(reader + END):
        return
    byte, bit = slot >> 3, 1 << (slot & 7)
    at = load_int64(reader + PASSED) + byte
    passed = load_uint8(at)
    scope = load_int64(reader + SCOPE)
    if passed & bit or (scope != 0 and not load_uint8(scope + byte) & bit):
        return
    store_uint8(at, passed | bit)
    if load_uint32(row + load_int64(table + PUSHES)) != 0:  # else the slot held no row
        stride = load_int64(table + STRIDE)
        saved = load_int64(reader + SAVED_COUNT)
        copy(load_int64(reader + SAVED) + stride * saved, row, stride)
        store_int64(reader + SAVED_COUNT, saved + 1)


@routine
def _tell_readers(table: int, slots: int, rows: int, count: int) -> None:
    """Tells the readers that rows are about to change; `slots` and `rows` are addresses of int64[count]: slots, and the
    addresses of their rows."""
    for number in range(_READERS):
        reader = table + READERS_AT + READER_BYTES * number
        if load_int64(reader + PASSED) != 0:
            for at in range(0, 8 * count, 8):
                _save(table, reader, load_int64(slots + at), load_int64(rows + at))
        changed = load_int64(reader + CHANGED)
        if changed != 0:
            for at in range(0, 8 * count, 8):
                _mark(changed, load_int64(slots + at))


@routine
def _tell_readers_of_one(table: int, slot: int, row: int) -> None:
    for number in range(_READERS):
        reader = table + READERS_AT + READER_BYTES * number
        if load_int64(reader + PASSED) != 0:
            _save(table, reader, slot, row)
        changed = load_int64(reader + CHANGED)
        if changed != 0:
            _mark(changed, slot)


@routine
def room_for_changes(table: int) -> int:
    """Returns the number of rows that may change before an open snapshot needs more memory for their old bytes."""
    room = _PLENTY
    for number in range(_READERS):
        reader = table + READERS_AT + READER_BYTES * number
        if load_int64(reader + PASSED) != 0:
            room = min(room, load_int64(reader + SAVED_ROOM) - load_int64(reader + SAVED_COUNT))
    return room


@routine
def take_slot(table: int) -> int:
    """Takes a slot without a row: a slot given back, or the next unused one. Returns NO_SLOT if all are in use."""
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
    """Writes initial weights and state into a slot without a row; `step_rows` must follow, which makes the row live."""
    row = row_address(geometry_of(table), slot)
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


@routine
def put_row(table: int, slot: int, record: int) -> None:
    """Replaces a row, or fills an empty slot, with a live record."""
    row = row_address(geometry_of(table), slot)
    _tell_readers_of_one(table, slot, row)
    delta = begin_delta(table, slot, row)
    copy(row, record, load_int64(table + STRIDE))
    end_delta(table, delta, row)


@routine
def retire_row(table: int, slot: int) -> None:
    """Zeroes a row and gives its slot back; the list of free slots has room for it."""
    row = row_address(geometry_of(table), slot)
    _tell_readers_of_one(table, slot, row)
    delta = begin_delta(table, slot, row)
    zero(row, load_int64(table + STRIDE))
    end_delta(table, delta, row)
    free = load_int64(table + FREE_COUNT)
    store_uint32(load_int64(table + FREE) + 4 * free, slot)
    store_int64(table + FREE_COUNT, free + 1)


@part
def _count(counter: int, steps: int) -> None:
    store_uint32(counter, min(load_uint32(counter) + steps, MOST_PUSHES))


def _stepper(load_parameters: Callable[[int], Any], apply: Callable[..., None]) -> Callable[[int, int, int, int], None]:
    """Makes the loop of `step_rows` for one rule, without decisions row by row."""

    @routine
    def step_with_rule(table: int, rows: int, count: int, gradients: int) -> None:
        parameters = load_parameters(table + PARAMETERS_AT)
        dimension = load_int64(table + DIMENSION)
        pushes_offset = load_int64(table + PUSHES)
        for at in range(0, 8 * count, 8):
            row = load_int64(rows + at)
            apply(row + KEY_BYTES, gradients, dimension, parameters)
            _count(row + pushes_offset, 1)
            gradients += FLOAT_BYTES * dimension

    return step_with_rule


_step_sgd = _stepper(optimizers.rate_of, optimizers.apply_sgd)
_step_momentum = _stepper(optimizers.two_parameters, optimizers.apply_momentum)
_step_adagrad = _stepper(optimizers.two_parameters, optimizers.apply_adagrad)
_step_row_wise_adagrad = _stepper(optimizers.two_parameters, optimizers.apply_row_wise_adagrad)
_step_adam = _stepper(optimizers.adam_parameters, optimizers.apply_adam)
_step_dense_adam = _stepper(optimizers.adam_parameters, optimizers.apply_dense_adam)
_step_ftrl = _stepper(optimizers.three_parameters, optimizers.apply_ftrl)


@part
def floats_of(table: int, state: int) -> int:
    """Floats of a row of a table: its weights, and with `state` the optimizer's too."""
    if state:
        return (load_int64(table + PUSHES) - KEY_BYTES) // FLOAT_BYTES
    return load_int64(table + DIMENSION)


@part
def _add(floats: int, change: int, count: int) -> None:
    whole = FLOAT_BYTES * (count & WHOLE)
    for at in range(0, whole, VECTOR_BYTES):
        store8(floats + at, load8(floats + at) + load8(change + at))
    for at in range(whole, FLOAT_BYTES * count, FLOAT_BYTES):
        store_float32(floats + at, load_float32(floats + at) + load_float32(change + at))


@routine
def _add_changes(table: int, rows: int, count: int, changes: int, batches: int) -> None:
    """As the loops of the rules, for changes of weights and state by `batches` batches, which all step each piece."""
    floats = floats_of(table, 1)
    steps = batches if load_int64(table + INITIALIZER) == GIVEN else 1
    pushes_offset = load_int64(table + PUSHES)
    for at in range(0, 8 * count, 8):
        row = load_int64(rows + at)
        _add(row + KEY_BYTES, changes, floats)
        _count(row + pushes_offset, steps)
        changes += FLOAT_BYTES * floats


@routine
def _touch(table: int, rows: int, count: int) -> None:
    """Notes the present batch in rows as the last one that pushed them."""
    offset, clock = load_int64(table + TOUCHED), load_int64(load_int64(table + CLOCK))
    for at in range(0, 8 * count, 8):
        store_uint32(load_int64(rows + at) + offset, clock)


@routine
def count_push(sketches: int, slot: int, key_hash: int, period: int) -> int:
    """Counts a push of a key in a sketch, a row of its table; returns the key's count, or more.

    Only the lowest counters of a key grow (Estan and Varghese 2002: conservative update). After `period` pushes all
    counters are halved, and so is the number of pushes (Einziger et al. 2017, section 3.3: reset).
    """
    row = row_address(geometry_of(sketches), slot)
    _tell_readers_of_one(sketches, slot, row)
    delta = begin_delta(sketches, slot, row)
    counters = row + KEY_BYTES
    first = counters + (shift_right(key_hash, _FIRST_COUNTER) & _COUNTER_MASK)
    second = counters + (shift_right(key_hash, _SECOND_COUNTER) & _COUNTER_MASK)
    third = counters + (shift_right(key_hash, _THIRD_COUNTER) & _COUNTER_MASK)
    lowest = min(load_uint8(first), min(load_uint8(second), load_uint8(third)))
    if lowest < _MOST_COUNTED:
        for counter in (first, second, third):
            if load_uint8(counter) == lowest:
                store_uint8(counter, lowest + 1)
    pushes = load_uint32(row + load_int64(sketches + PUSHES)) + 1
    if pushes >= period:
        for counter in range(counters, counters + SKETCH_COUNTERS, 8):
            store_int64(counter, shift_right(load_int64(counter), 1) & _HALVED)
        pushes >>= 1
    store_uint32(row + load_int64(sketches + PUSHES), pushes)
    end_delta(sketches, delta, row)
    return lowest + 1


@routine
def _step(table: int, rows: int, count: int, gradients: int, changes_of: int) -> None:
    if load_int64(table + TOUCHED) != 0:
        _touch(table, rows, count)
    optimizer = load_int64(table + OPTIMIZER)
    if changes_of:
        _add_changes(table, rows, count, gradients, changes_of)
    elif optimizer == optimizers.ROW_WISE_ADAGRAD:
        _step_row_wise_adagrad(table, rows, count, gradients)
    elif optimizer == optimizers.ADAGRAD:
        _step_adagrad(table, rows, count, gradients)
    elif optimizer == optimizers.ADAM:
        _step_adam(table, rows, count, gradients)
    elif optimizer == optimizers.DENSE_ADAM:
        _step_dense_adam(table, rows, count, gradients)
    elif optimizer == optimizers.FTRL:
        _step_ftrl(table, rows, count, gradients)
    elif optimizer == optimizers.MOMENTUM:
        _step_momentum(table, rows, count, gradients)
    else:
        _step_sgd(table, rows, count, gradients)


@routine
def _step_logged(table: int, slots: int, rows: int, count: int, gradients: int, changes_of: int) -> None:
    """Steps row by row, since a row that is stepped twice has two deltas."""
    size = FLOAT_BYTES * floats_of(table, changes_of)
    for at in range(0, 8 * count, 8):
        row = load_int64(rows + at)
        delta = begin_delta(table, load_int64(slots + at), row)
        _step(table, rows + at, 1, gradients, changes_of)
        end_delta(table, delta, row)
        gradients += size


@routine
def _open_deltas(table: int, slots: int, rows: int, count: int) -> None:
    """Begins the deltas of rows in a log that merges, where they stay open."""
    for at in range(0, 8 * count, 8):
        begin_delta(table, load_int64(slots + at), load_int64(rows + at))


@routine
def step_rows(table: int, slots: int, rows: int, count: int, gradients: int, changes_of: int) -> None:
    """Applies `count` gradients to rows, one after another, and counts them.

    `slots` and `rows` are the addresses of int64[count]: slots, and the addresses of their rows. With `changes_of`,
    changes of weights and state by that many batches stand in place of each gradient, and are added.
    """
    _tell_readers(table, slots, rows, count)
    if load_int64(table + LOGGED) != 0:
        if load_int64(table + OPENED) == 0:
            _step_logged(table, slots, rows, count, gradients, changes_of)
            return
        _open_deltas(table, slots, rows, count)
    _step(table, rows, count, gradients, changes_of)
