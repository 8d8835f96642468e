"""The kernels that TableStore calls: one call per request, for all tables.

All arguments are numbers and addresses. `tables` is the address of `slab.TABLE[table_count]`. Kernels process keys in
blocks, each in passes, so that the cache misses of a block overlap: hash the keys and prefetch the index entries; probe
these and prefetch the rows; resolve the guesses; read or step all rows. Only a push makes rows.

A kernel that makes rows never waits for a segment: TableStore calls `lacking` first, and adds the segments that a
request could need before anything changes. Only the memory of a sub-index is allocated on the way.
"""

from emberscale_api.routing import BUCKETS
from emberscale_trainer.jit import entry, part, routine
from emberscale_trainer.jit.memory import (
    CACHE_LINE,
    copy,
    load_float32,
    load_float64,
    load_int64,
    load_uint8,
    load_uint32,
    prefetch,
    store_float32,
    store_int64,
    store_uint32,
    zero,
)
from emberscale_trainer.jit.vector import VECTOR_BYTES, WHOLE, load8, store8
from emberscale_trainer.table import optimizers
from emberscale_trainer.table.index import (
    BUCKET_MASK,
    NOT_FOUND,
    drop_bucket,
    find,
    geometry_of,
    insert,
    make_room,
    make_room_for,
    mix64,
    prefetch_entry,
    probable_slot,
    remove,
    row_address,
    slots_of_bucket,
    unmix64,
)
from emberscale_trainer.table.initializers import initial_weights
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES
from emberscale_trainer.table.rows import (
    NO_SLOT,
    SKETCH_COUNTERS,
    count_push,
    floats_of,
    make_row,
    put_row,
    retire_row,
    room_for_changes,
    room_of,
    step_rows,
    take_slot,
)
from emberscale_trainer.table.slab import (
    ADMITTED,
    DIMENSION,
    DIRECTORY,
    INITIALIZER,
    MIN_COUNT,
    OPTIMIZER,
    PARAMETERS_AT,
    PUSHES,
    REFUSED,
    SCALE,
    SEED,
    SKETCH,
    STRIDE,
    TABLE_BYTES,
    TOUCHED,
)

BLOCK = 64
"""Keys whose cache misses overlap."""

SCRATCH_BYTES = 4 * 8 * BLOCK

MISMATCH = -1
"""The counts do not add up to the sizes of the buffers; nothing was done."""

NO_MEMORY = -2
"""The system refused memory for a sub-index, or there was no slot; earlier changes stay."""

NONE = -3
"""No table lacks room."""

_MOST_PREFETCHED = 1024
"""Bytes of a row that are prefetched; the processor itself prefetches the rest of a longer row."""

_ROWS_AHEAD = 8
"""Rows between the one that is read and the one whose key is prefetched."""

_HASHES = 0
_SLOTS = 8 * BLOCK
_ROWS = 16 * BLOCK
_KEYS = 24 * BLOCK


@routine
def _seek(table: int, keys: int, count: int, row_bytes: int, scratch: int) -> None:
    """Writes the hashes, probable slots and their rows' addresses (0: no slot) of up to BLOCK keys to the scratch."""
    directory = load_int64(table + DIRECTORY)
    geometry = geometry_of(table)
    row_bytes = min(row_bytes, _MOST_PREFETCHED)
    for at in range(0, 8 * count, 8):
        key_hash = mix64(load_int64(keys + at))
        store_int64(scratch + _HASHES + at, key_hash)
        prefetch_entry(directory, key_hash)
    for at in range(0, 8 * count, 8):
        slot = probable_slot(directory, load_int64(scratch + _HASHES + at))
        row = 0
        if slot != NOT_FOUND:
            row = row_address(geometry, slot)
            for offset in range(0, row_bytes, CACHE_LINE):
                prefetch(row + offset)
            prefetch(row + row_bytes - 1)
        store_int64(scratch + _SLOTS + at, slot)
        store_int64(scratch + _ROWS + at, row)


@routine
def _resolve(table: int, keys: int, count: int, make: int, scratch: int) -> int:
    """Corrects the guesses of `_seek`: every key gets its slot and row, or 0; with `make`, missing rows are made.

    A key that is not admitted gets no row, but its push is counted.

    Returns `count`, or NO_MEMORY; rows made until then stay.
    """
    geometry = geometry_of(table)
    for at in range(0, 8 * count, 8):
        key = load_int64(keys + at)
        row = load_int64(scratch + _ROWS + at)
        if row != 0 and load_int64(row) == key:
            continue
        key_hash = load_int64(scratch + _HASHES + at)
        slot = find(table, key, key_hash)  # another key had the fingerprint, or this block has just made the row
        if slot == NOT_FOUND and make:
            admitted = _admit(table, key_hash)
            if admitted < 0:
                return NO_MEMORY
            if admitted:
                slot = _add(table, key_hash)
                if slot < 0:
                    return NO_MEMORY
                make_row(table, slot, key, key_hash)
        store_int64(scratch + _SLOTS + at, slot)
        store_int64(scratch + _ROWS + at, 0 if slot == NOT_FOUND else row_address(geometry, slot))
    return count


@part
def _copy_floats(target: int, source: int, count: int) -> None:
    whole = FLOAT_BYTES * (count & WHOLE)
    for at in range(0, whole, VECTOR_BYTES):
        store8(target + at, load8(source + at))
    for at in range(whole, FLOAT_BYTES * count, FLOAT_BYTES):
        store_float32(target + at, load_float32(source + at))


@routine
def _add(table: int, key_hash: int) -> int:
    """Gives a new key a slot, without a row yet. Returns NO_SLOT if there is no slot or no memory."""
    if not make_room(table, key_hash):
        return NO_SLOT
    slot = take_slot(table)
    if slot != NO_SLOT:
        insert(table, key_hash, slot)
    return slot


@routine
def _admit(table: int, key_hash: int) -> int:
    """Decides whether a push gives a key its row: 1, or 0 if the push only counts, or NO_MEMORY."""
    sketches = load_int64(table + SKETCH)
    if sketches == 0:
        return 1
    bucket = key_hash & BUCKET_MASK
    key = unmix64(bucket)
    slot = find(sketches, key, bucket)
    if slot == NOT_FOUND:
        slot = _add(sketches, bucket)
        if slot < 0:
            return NO_MEMORY
        make_row(sketches, slot, key, bucket)
    least = load_int64(table + MIN_COUNT)
    is_admitted = count_push(sketches, slot, key_hash, least * SKETCH_COUNTERS // 4) >= least
    total = table + (ADMITTED if is_admitted else REFUSED)
    store_int64(total, load_int64(total) + 1)
    return 1 if is_admitted else 0


@routine
def _step_admitted(table: int, count: int, gradients: int, scratch: int) -> None:
    """Steps the rows of those keys of a block that have rows."""
    size = FLOAT_BYTES * load_int64(table + DIMENSION)
    first = 0
    while first < count:
        end = first
        while end < count and load_int64(scratch + _ROWS + 8 * end) != 0:
            end += 1
        if end > first:
            at = 8 * first
            step_rows(table, scratch + _SLOTS + at, scratch + _ROWS + at, end - first, gradients + size * first, 0)
        first = end + 1


@routine
def _fits(tables: int, table_count: int, counts: int, key_count: int, value_count: int, state: int) -> bool:
    keys, values = 0, 0
    for number in range(table_count):
        count = load_uint32(counts + 4 * number)
        keys += count
        values += count * floats_of(tables + TABLE_BYTES * number, state)
    return keys == key_count and values == value_count


@routine
def _write_initial(table: int, key: int, key_hash: int, target: int, floats: int) -> None:
    """Writes the initial weights to `target`, and the state behind them if `floats` leaves room."""
    dimension = load_int64(table + DIMENSION)
    initial_weights(
        target,
        dimension,
        load_int64(table + INITIALIZER),
        load_float64(table + SCALE),
        load_int64(table + SEED),
        key,
        key_hash,
    )
    if floats > dimension:
        zero(target + FLOAT_BYTES * dimension, FLOAT_BYTES * (floats - dimension))
        optimizers.initial_state(load_int64(table + OPTIMIZER), target, dimension, table + PARAMETERS_AT)


@entry
def lacking(tables: int, table_count: int, counts: int, key_count: int, value_count: int, state: int) -> int:
    """Returns the first table without room for `counts` new rows and as many changes; NONE if all have, or MISMATCH.

    That includes the table's sketches, of which one may change for each key. With `state`, there is a value for each
    float of weights and state.
    """
    if not _fits(tables, table_count, counts, key_count, value_count, state):
        return MISMATCH
    for number in range(table_count):
        table = tables + TABLE_BYTES * number
        count = load_uint32(counts + 4 * number)
        if min(room_of(table), room_for_changes(table)) < count:
            return number
        sketches = load_int64(table + SKETCH)
        if sketches != 0 and min(room_of(sketches), room_for_changes(sketches)) < min(count, BUCKETS):
            return number
    return NONE


@entry
def room(table: int) -> int:
    """Returns the number of new rows that a table has room for."""
    return room_of(table)


@entry
def pull(
    tables: int,
    table_count: int,
    counts: int,
    keys: int,
    key_count: int,
    values: int,
    value_count: int,
    state: int,
    scratch: int,
) -> int:
    """Writes the weights of the keys to `values`, with `state` the state behind each; returns their number or MISMATCH.

    A key without a row gets the initial values of its row; no row is made.
    """
    if not _fits(tables, table_count, counts, key_count, value_count, state):
        return MISMATCH
    first = 0
    for number in range(table_count):
        table = tables + TABLE_BYTES * number
        floats = floats_of(table, state)
        size = FLOAT_BYTES * floats
        end = first + load_uint32(counts + 4 * number)
        for block in range(first, end, BLOCK):
            count = min(BLOCK, end - block)
            _seek(table, keys + 8 * block, count, KEY_BYTES + size, scratch)
            _resolve(table, keys + 8 * block, count, 0, scratch)
            for at in range(0, 8 * count, 8):
                row = load_int64(scratch + _ROWS + at)
                if row != 0:
                    _copy_floats(values, row + KEY_BYTES, floats)
                else:
                    key = load_int64(keys + 8 * block + at)
                    _write_initial(table, key, load_int64(scratch + _HASHES + at), values, floats)
                values += size
        first = end
    return first


@entry
def push(
    tables: int,
    table_count: int,
    counts: int,
    keys: int,
    key_count: int,
    gradients: int,
    gradient_count: int,
    changes_of: int,
    scratch: int,
) -> int:
    """Steps the rows of the keys by `gradients`, in order; returns the keys' number, MISMATCH or NO_MEMORY.

    All tables must have room for the counts. With `changes_of`, as in `step_rows`, no table may have sketches.
    """
    if not _fits(tables, table_count, counts, key_count, gradient_count, changes_of):
        return MISMATCH
    first = 0
    for number in range(table_count):
        table = tables + TABLE_BYTES * number
        size = FLOAT_BYTES * floats_of(table, changes_of)
        end = first + load_uint32(counts + 4 * number)
        for block in range(first, end, BLOCK):
            count = min(BLOCK, end - block)
            _seek(table, keys + 8 * block, count, load_int64(table + STRIDE), scratch)
            if _resolve(table, keys + 8 * block, count, 1, scratch) < 0:
                return NO_MEMORY
            if load_int64(table + SKETCH) == 0:
                step_rows(table, scratch + _SLOTS, scratch + _ROWS, count, gradients, changes_of)
            else:
                _step_admitted(table, count, gradients, scratch)
            gradients += count * size
        first = end
    return first


@entry
def make_room_in(table: int, wanted: int, rows: int) -> int:
    """Makes room in the index for `rows` rows in each wanted bucket; returns 0, or NO_MEMORY.

    `wanted` is the address of bool[BUCKETS].
    """
    for bucket in range(BUCKETS):
        if load_uint8(wanted + bucket) != 0 and not make_room_for(table, bucket, rows):
            return NO_MEMORY
    return 0


@entry
def load(table: int, records: int, count: int, wanted: int, scratch: int) -> int:
    """Puts records into a table that has room for them, over rows of equal keys; returns their number or NO_MEMORY.

    `wanted` is the address of bool[BUCKETS]; records of other buckets are left out.
    """
    stride = load_int64(table + STRIDE)
    for block in range(0, count, BLOCK):
        size = min(BLOCK, count - block)
        record = records + stride * block
        for at in range(0, 8 * size, 8):
            store_int64(scratch + _KEYS + at, load_int64(record))
            record += stride
        _seek(table, scratch + _KEYS, size, stride, scratch)
        record = records + stride * block
        for at in range(0, 8 * size, 8):
            if load_uint8(wanted + (load_int64(scratch + _HASHES + at) & BUCKET_MASK)) == 0:
                record += stride
                continue
            key = load_int64(scratch + _KEYS + at)
            slot = load_int64(scratch + _SLOTS + at)
            row = load_int64(scratch + _ROWS + at)
            if row == 0 or load_int64(row) != key:  # another key had the fingerprint, or this block has added the row
                key_hash = load_int64(scratch + _HASHES + at)
                slot = find(table, key, key_hash)
                if slot == NOT_FOUND:
                    slot = _add(table, key_hash)
                    if slot < 0:
                        return NO_MEMORY
            put_row(table, slot, record)
            record += stride
    return count


@entry
def read_marks(table: int, buckets: int, bucket_count: int, slots: int, marks: int) -> int:
    """Writes `key, pushes, touched` of the rows of `buckets: int64[bucket_count]` to `marks: int64[rows, 3]`.

    They are in the order of the buckets; `slots` and `marks` have room for all. Returns their number.
    """
    geometry = geometry_of(table)
    pushes, touched = load_int64(table + PUSHES), load_int64(table + TOUCHED)
    count = 0
    for at in range(buckets, buckets + 8 * bucket_count, 8):
        count += slots_of_bucket(table, load_int64(at), slots + 8 * count)
    for number in range(count):
        prefetch(row_address(geometry, load_int64(slots + 8 * number)) + pushes)
    for number in range(count):
        row = row_address(geometry, load_int64(slots + 8 * number))
        store_int64(marks, load_int64(row))
        store_int64(marks + 8, load_uint32(row + pushes))
        store_int64(marks + 16, load_uint32(row + touched))
        marks += 24
    return count


@entry
def retire_bucket(table: int, bucket: int, keys: int) -> int:
    """Retires all rows of a bucket and its sub-index; writes their keys to `keys`, and returns their number."""
    geometry = geometry_of(table)
    count = slots_of_bucket(table, bucket, keys)
    for at in range(keys, keys + 8 * count, 8):
        slot = load_int64(at)
        store_int64(at, load_int64(row_address(geometry, slot)))
        retire_row(table, slot)
    drop_bucket(table, bucket)
    return count


@entry
def retire(table: int, keys: int, count: int, retired: int) -> int:
    """Retires the rows of keys; writes the keys that had one to `retired`, and returns their number."""
    found = 0
    for at in range(0, 8 * count, 8):
        key = load_int64(keys + at)
        slot = remove(table, key, mix64(key))
        if slot != NOT_FOUND:
            retire_row(table, slot)
            store_int64(retired + 8 * found, key)
            found += 1
    return found


@entry
def read_rows(rows: int, count: int, stride: int, pushes: int, scope: int, records: int, places: int) -> int:
    """Copies the live rows of `count` slots, and the number of each slot to `places: uint32[]`; returns how many.

    `scope` is the address of a bitmap of the slots to read, or 0. Other threads may change rows meanwhile: the copy of
    such a row must not be used.
    """
    found = 0
    for number in range(count):
        if scope != 0:
            bits = load_uint8(scope + (number >> 3))
            if not bits & (1 << (number & 7)):
                continue
        row = rows + stride * number
        if load_uint32(row + pushes) != 0:
            copy(records + stride * found, row, stride)
            store_uint32(places + 4 * found, number)
            found += 1
    return found


@entry
def read_wanted(
    rows: int,
    count: int,
    stride: int,
    pushes: int,
    scope: int,
    changed: int,
    wanted: int,
    dense: int,
    records: int,
    places: int,
    skipped: int,
) -> int:
    """As `read_rows`, but copies only rows with wanted keys, and leaves out rows that are marked as changed.

    `wanted` is the address of a bool for each bucket, or with `dense` for each key. `changed` is the address of a
    bitmap of slots, to which other threads may write; the number of rows left out for it is added to the int64 at
    `skipped`.
    """
    found = 0
    for number in range(count):
        byte, bit = number >> 3, 1 << (number & 7)
        if scope != 0 and not load_uint8(scope + byte) & bit:
            continue
        row = rows + stride * number
        prefetch(row + stride * _ROWS_AHEAD)
        key = load_int64(row)
        at = key if dense else mix64(key) & BUCKET_MASK
        if load_uint8(wanted + at) == 0 or load_uint32(row + pushes) == 0:
            continue
        if load_uint8(changed + byte) & bit:
            store_int64(skipped, load_int64(skipped) + 1)
            continue
        copy(records + stride * found, row, stride)
        store_uint32(places + 4 * found, number)
        found += 1
    return found


@entry
def drop_records(records: int, count: int, stride: int, places: int, dropped: int) -> int:
    """Closes the gaps of the records whose place has a bit in `dropped`; returns how many are left."""
    left = 0
    for number in range(count):
        place = load_uint32(places + 4 * number)
        if not load_uint8(dropped + (place >> 3)) & (1 << (place & 7)):
            if left != number:
                copy(records + stride * left, records + stride * number, stride)
            left += 1
    return left


@entry
def absent(table: int, keys: int, count: int, missing: int) -> int:
    """Writes those of the keys that have no row to `missing`, and returns their number."""
    found = 0
    for at in range(0, 8 * count, 8):
        key = load_int64(keys + at)
        if find(table, key, mix64(key)) == NOT_FOUND:
            store_int64(missing + 8 * found, key)
            found += 1
    return found


@entry
def drop_index(table: int, buckets: int) -> int:
    """Frees the sub-indexes of all buckets."""
    for bucket in range(buckets):
        drop_bucket(table, bucket)
    return buckets
