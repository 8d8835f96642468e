"""The kernels that TableStore calls: one call a request, for all tables.

All arguments are numbers and addresses. `tables` is the address of `descriptor.TABLE[table_count]`. Keys are worked on
in blocks, each in three passes, so that the cache misses of a block overlap: hash and ask for the index entry; probe
and ask for the row; use the row.

A kernel that needs a segment for a new row returns how many keys it has finished, and is called again with that number
as `start` once TableStore has added one.
"""

from emberscale_trainer.table.compiled import entry, part
from emberscale_trainer.table.descriptor import DIMENSION, DIRECTORY, INITIALIZER, SCALE, SEED, STRIDE, TABLE_BYTES
from emberscale_trainer.table.hashing import mix64
from emberscale_trainer.table.index import (
    NOT_FOUND,
    drop_bucket,
    find,
    insert,
    make_room,
    prefetch_entry,
    probable_slot,
    row_address,
    slots_of_bucket,
)
from emberscale_trainer.table.initializers import initial_weights
from emberscale_trainer.table.layout import FLOAT_BYTES, KEY_BYTES
from emberscale_trainer.table.memory import (
    CACHE_LINE,
    copy,
    load_float64,
    load_int64,
    load_uint32,
    prefetch,
    store_int64,
)
from emberscale_trainer.table.rows import NO_SLOT, make_row, put_row, retire_row, step_row, take_slot

BLOCK = 64
"""Keys whose cache misses overlap."""

SCRATCH_BYTES = 3 * 8 * BLOCK

MISMATCH = -1
"""The counts do not add up to the sizes of the buffers; nothing was done."""

NO_MEMORY = -2
"""The system refused memory for a sub-index; what was done before stays."""

_NO_MEMORY_SLOT = -2
_HASHES = 0
_SLOTS = 8 * BLOCK
_ROWS = 16 * BLOCK


@part
def _seek(table: int, keys: int, count: int, row_bytes: int, scratch: int) -> None:
    """Writes the hashes, probable slots and their rows' addresses (0: no slot) of up to BLOCK keys to the scratch."""
    directory = load_int64(table + DIRECTORY)
    for number in range(0, 8 * count, 8):
        key_hash = mix64(load_int64(keys + number))
        store_int64(scratch + _HASHES + number, key_hash)
        prefetch_entry(directory, key_hash)
    for number in range(0, 8 * count, 8):
        slot = probable_slot(directory, load_int64(scratch + _HASHES + number))
        row = 0
        if slot != NOT_FOUND:
            row = row_address(table, slot)
            for at in range(0, row_bytes, CACHE_LINE):
                prefetch(row + at)
            prefetch(row + row_bytes - 1)
        store_int64(scratch + _SLOTS + number, slot)
        store_int64(scratch + _ROWS + number, row)


@part
def _add(table: int, key_hash: int) -> int:
    """Gives a key that is not there a slot, without a row yet. NO_SLOT or _NO_MEMORY_SLOT if that cannot be."""
    if not make_room(table, key_hash):
        return _NO_MEMORY_SLOT
    slot = take_slot(table)
    if slot != NO_SLOT:
        insert(table, key_hash, slot)
    return slot


@part
def _find_or_make(table: int, key: int, key_hash: int) -> int:
    slot = find(table, key, key_hash)
    if slot == NOT_FOUND:
        slot = _add(table, key_hash)
        if slot >= 0:
            make_row(table, slot, key, key_hash)
    return slot


@part
def _fits(tables: int, table_count: int, counts: int, key_count: int, value_count: int) -> bool:
    keys, values = 0, 0
    for number in range(table_count):
        count = load_uint32(counts + 4 * number)
        keys += count
        values += count * load_int64(tables + TABLE_BYTES * number + DIMENSION)
    return keys == key_count and values == value_count


@part
def _write_initial_weights(table: int, key_hash: int, target: int) -> None:
    initial_weights(
        target,
        load_int64(table + DIMENSION),
        load_int64(table + INITIALIZER),
        load_float64(table + SCALE),
        load_int64(table + SEED),
        key_hash,
    )


@entry
def pull(
    tables: int,
    table_count: int,
    counts: int,
    keys: int,
    key_count: int,
    values: int,
    value_count: int,
    make: int,
    start: int,
    scratch: int,
) -> int:
    """Writes the weights of the keys to `values`; returns the keys finished, MISMATCH or NO_MEMORY.

    A key without a row gets one, or, unless `make`, is answered with the weights that it would begin with.
    """
    if not _fits(tables, table_count, counts, key_count, value_count):
        return MISMATCH
    first = 0
    for number in range(table_count):
        table = tables + TABLE_BYTES * number
        size = FLOAT_BYTES * load_int64(table + DIMENSION)
        end = first + load_uint32(counts + 4 * number)
        skipped = min(max(start, first), end)
        values += (skipped - first) * size
        for block in range(skipped, end, BLOCK):
            count = min(BLOCK, end - block)
            _seek(table, keys + 8 * block, count, KEY_BYTES + size, scratch)
            for at in range(count):
                key = load_int64(keys + 8 * (block + at))
                row = load_int64(scratch + _ROWS + 8 * at)
                if row == 0 or load_int64(row) != key:
                    key_hash = load_int64(scratch + _HASHES + 8 * at)
                    slot = _find_or_make(table, key, key_hash) if make else find(table, key, key_hash)
                    row = 0
                    if slot >= 0:
                        row = row_address(table, slot)
                    elif not make:
                        _write_initial_weights(table, key_hash, values)
                    elif slot == NO_SLOT:
                        return block + at
                    else:
                        return NO_MEMORY
                if row != 0:
                    copy(values, row + KEY_BYTES, size)
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
    start: int,
    scratch: int,
) -> int:
    """Steps the rows of the keys by `gradients`, in order; returns the keys finished, MISMATCH or NO_MEMORY."""
    if not _fits(tables, table_count, counts, key_count, gradient_count):
        return MISMATCH
    first = 0
    for number in range(table_count):
        table = tables + TABLE_BYTES * number
        size = FLOAT_BYTES * load_int64(table + DIMENSION)
        end = first + load_uint32(counts + 4 * number)
        skipped = min(max(start, first), end)
        gradients += (skipped - first) * size
        for block in range(skipped, end, BLOCK):
            count = min(BLOCK, end - block)
            _seek(table, keys + 8 * block, count, load_int64(table + STRIDE), scratch)
            for at in range(count):
                key = load_int64(keys + 8 * (block + at))
                slot = load_int64(scratch + _SLOTS + 8 * at)
                row = load_int64(scratch + _ROWS + 8 * at)
                if row == 0 or load_int64(row) != key:
                    slot = _find_or_make(table, key, load_int64(scratch + _HASHES + 8 * at))
                    if slot == NO_SLOT:
                        return block + at
                    if slot < 0:
                        return NO_MEMORY
                    row = row_address(table, slot)
                step_row(table, slot, row, gradients)
                gradients += size
        first = end
    return first


@entry
def load(table: int, records: int, count: int, start: int) -> int:
    """Puts records into a table, over rows of equal keys; returns the records finished or NO_MEMORY."""
    stride = load_int64(table + STRIDE)
    for number in range(start, count):
        record = records + stride * number
        key = load_int64(record)
        key_hash = mix64(key)
        slot = find(table, key, key_hash)
        if slot == NOT_FOUND:
            slot = _add(table, key_hash)
            if slot == NO_SLOT:
                return number
            if slot < 0:
                return NO_MEMORY
        put_row(table, slot, record)
    return count


@entry
def read_bucket(table: int, bucket: int, slots: int, records: int) -> int:
    """Copies the rows of a bucket to `records`; `slots` and `records` have room for all. Returns their number."""
    stride = load_int64(table + STRIDE)
    count = slots_of_bucket(table, bucket, slots)
    for number in range(count):
        copy(records + stride * number, row_address(table, load_int64(slots + 8 * number)), stride)
    return count


@entry
def remove_bucket(table: int, bucket: int, slots: int) -> int:
    """Gives back all rows of a bucket and its sub-index; returns their number. `slots` has room for all."""
    count = slots_of_bucket(table, bucket, slots)
    for number in range(count):
        retire_row(table, load_int64(slots + 8 * number))
    drop_bucket(table, bucket)
    return count


@entry
def drop_index(table: int, buckets: int) -> int:
    """Frees the sub-indexes of all buckets."""
    for bucket in range(buckets):
        drop_bucket(table, bucket)
    return buckets
