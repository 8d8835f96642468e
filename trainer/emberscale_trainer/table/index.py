"""Maps keys to slots: one small open-addressing table per bucket, and the hash of keys.

The hash is that of `emberscale_api.routing`. Bits 0-9 are the bucket. Bits 32-63 are the fingerprint: a sub-index of
2^b entries is probed from its highest b bits.

An entry is 8 bytes, `fingerprint << 32 | slot + 1`; 0 is empty. Probing is linear and begins at the fingerprint's
highest bits, so growth needs no keys, and touches only one bucket's entries: 1/1024 of the table. When an entry
leaves, the entries behind it that probing could no longer find move up, so there are no tombstones.

The directory holds one number per bucket: the address of its entries, a multiple of 64, plus the binary logarithm of
their count; 0 if the bucket has none yet.
"""

from typing import NamedTuple

from emberscale_api.routing import BUCKETS, MIX_1, MIX_2
from emberscale_trainer.jit import part, routine
from emberscale_trainer.jit.memory import (
    CACHE_LINE,
    allocate,
    load_int64,
    load_uint32,
    prefetch,
    release,
    shift_right,
    store_int64,
    store_uint32,
    zero,
)
from emberscale_trainer.table.slab import BUCKET_ROWS, DIRECTORY, SEGMENTS, SLOT_BITS, STRIDE

BUCKET_MASK = BUCKETS - 1


def as_signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_MIX_1 = as_signed(MIX_1)
_MIX_2 = as_signed(MIX_2)


@part
def mix64(key: int) -> int:
    """The finaliser of splitmix64, a bijection of 64-bit numbers; equals `routing.mix64` bit by bit."""
    value = (key ^ shift_right(key, 30)) * _MIX_1
    value = (value ^ shift_right(value, 27)) * _MIX_2
    return value ^ shift_right(value, 31)


_UNMIX_1 = as_signed(pow(MIX_1, -1, 1 << 64))
_UNMIX_2 = as_signed(pow(MIX_2, -1, 1 << 64))


@part
def unmix64(key_hash: int) -> int:
    """The key with this hash: the inverse of `mix64`."""
    value = (key_hash ^ shift_right(key_hash, 31) ^ shift_right(key_hash, 62)) * _UNMIX_2
    value = (value ^ shift_right(value, 27) ^ shift_right(value, 54)) * _UNMIX_1
    return value ^ shift_right(value, 30) ^ shift_right(value, 60)


ENTRY_BYTES = 8
SMALLEST_BITS = 3
"""A bucket begins with one cache line of entries."""

NOT_FOUND = -1

_SLOT_MASK = 0xFFFFFFFF
_BITS_MASK = CACHE_LINE - 1


class Geometry(NamedTuple):
    """The layout of a table's rows in memory, loaded from its descriptor once for many rows."""

    segments: int
    slot_bits: int
    row_mask: int
    stride: int


@part
def geometry_of(table: int) -> Geometry:
    """Reads the geometry of a table. It holds until a segment is added."""
    bits = load_int64(table + SLOT_BITS)
    return Geometry(load_int64(table + SEGMENTS), bits, (1 << bits) - 1, load_int64(table + STRIDE))


@part
def segment_of(geometry: Geometry, slot: int) -> int:
    """Returns the address of a slot's segment."""
    return load_int64(geometry.segments + 8 * (slot >> geometry.slot_bits))


@part
def row_address(geometry: Geometry, slot: int) -> int:
    """Returns the address of a slot's row."""
    return segment_of(geometry, slot) + (slot & geometry.row_mask) * geometry.stride


@part
def _home(entries: int, key_hash: int) -> int:
    """The position at which probing begins."""
    return shift_right(key_hash, 64 - (entries & _BITS_MASK))


@part
def prefetch_entry(directory: int, key_hash: int) -> None:
    """Prefetches the cache line in which probing will begin."""
    entries = load_int64(directory + 8 * (key_hash & BUCKET_MASK))
    if entries != 0:
        prefetch((entries & ~_BITS_MASK) + ENTRY_BYTES * _home(entries, key_hash))


@part
def probable_slot(directory: int, key_hash: int) -> int:
    """The first slot with the key's fingerprint, or NOT_FOUND. Its row may be another key's: compare."""
    entries = load_int64(directory + 8 * (key_hash & BUCKET_MASK))
    if entries == 0:
        return NOT_FOUND
    first = entries & ~_BITS_MASK
    mask = (1 << (entries & _BITS_MASK)) - 1
    fingerprint = shift_right(key_hash, 32)
    position = _home(entries, key_hash)
    while True:
        entry = load_int64(first + ENTRY_BYTES * position)
        if entry == 0:
            return NOT_FOUND
        if shift_right(entry, 32) == fingerprint:
            return (entry & _SLOT_MASK) - 1
        position = (position + 1) & mask


@routine
def find(table: int, key: int, key_hash: int) -> int:
    """The slot of a key, or NOT_FOUND."""
    entries = load_int64(load_int64(table + DIRECTORY) + 8 * (key_hash & BUCKET_MASK))
    if entries == 0:
        return NOT_FOUND
    geometry = geometry_of(table)
    first = entries & ~_BITS_MASK
    mask = (1 << (entries & _BITS_MASK)) - 1
    fingerprint = shift_right(key_hash, 32)
    position = _home(entries, key_hash)
    while True:
        entry = load_int64(first + ENTRY_BYTES * position)
        if entry == 0:
            return NOT_FOUND
        if shift_right(entry, 32) == fingerprint:
            slot = (entry & _SLOT_MASK) - 1
            if load_int64(row_address(geometry, slot)) == key:
                return slot
        position = (position + 1) & mask


@part
def _put(first: int, mask: int, position: int, entry: int) -> None:
    while load_int64(first + ENTRY_BYTES * position) != 0:
        position = (position + 1) & mask
    store_int64(first + ENTRY_BYTES * position, entry)


@routine
def make_room(table: int, key_hash: int) -> bool:
    """Makes room for one more entry in the bucket of a hash, at a load of at most 3/4. Returns False without memory."""
    bucket = key_hash & BUCKET_MASK
    return make_room_for(table, bucket, load_uint32(load_int64(table + BUCKET_ROWS) + 4 * bucket) + 1)


@routine
def make_room_for(table: int, bucket: int, rows: int) -> bool:
    """Makes room for `rows` entries in a bucket, those that it has included. Returns False without memory."""
    entries = load_int64(load_int64(table + DIRECTORY) + 8 * bucket)
    bits = SMALLEST_BITS if entries == 0 else entries & _BITS_MASK
    while 4 * rows > 3 << bits:
        bits += 1
    return (entries != 0 and bits == entries & _BITS_MASK) or _grow(table, bucket, bits)


@routine
def _grow(table: int, bucket: int, bits: int) -> bool:
    """Gives a bucket 2^bits entries, more than it has. Returns False without memory."""
    at = load_int64(table + DIRECTORY) + 8 * bucket
    entries = load_int64(at)
    size = ENTRY_BYTES << bits
    grown = allocate(CACHE_LINE, size)
    if grown == 0:
        return False
    zero(grown, size)
    if entries != 0:
        first = entries & ~_BITS_MASK
        mask = (1 << bits) - 1
        for old in range(first, first + (ENTRY_BYTES << (entries & _BITS_MASK)), ENTRY_BYTES):
            entry = load_int64(old)
            if entry != 0:
                _put(grown, mask, shift_right(entry, 64 - bits), entry)
        release(first)
    store_int64(at, grown | bits)
    return True


@routine
def insert(table: int, key_hash: int, slot: int) -> None:
    """Adds the slot of a key that has none yet; call `make_room` first."""
    bucket = key_hash & BUCKET_MASK
    entries = load_int64(load_int64(table + DIRECTORY) + 8 * bucket)
    mask = (1 << (entries & _BITS_MASK)) - 1
    entry = (shift_right(key_hash, 32) << 32) | (slot + 1)
    _put(entries & ~_BITS_MASK, mask, _home(entries, key_hash), entry)
    rows = load_int64(table + BUCKET_ROWS) + 4 * bucket
    store_uint32(rows, load_uint32(rows) + 1)


@routine
def remove(table: int, key: int, key_hash: int) -> int:
    """Removes a key; returns its slot, or NOT_FOUND."""
    bucket = key_hash & BUCKET_MASK
    entries = load_int64(load_int64(table + DIRECTORY) + 8 * bucket)
    slot = find(table, key, key_hash)
    if slot == NOT_FOUND:
        return NOT_FOUND
    bits = entries & _BITS_MASK
    first, mask = entries & ~_BITS_MASK, (1 << bits) - 1
    gap = _home(entries, key_hash)
    while load_int64(first + ENTRY_BYTES * gap) & _SLOT_MASK != slot + 1:
        gap = (gap + 1) & mask
    position = (gap + 1) & mask
    while True:
        entry = load_int64(first + ENTRY_BYTES * position)
        if entry == 0:
            break
        home = shift_right(entry, 64 - bits)
        if (position - home) & mask >= (position - gap) & mask:  # probing for it passes the gap
            store_int64(first + ENTRY_BYTES * gap, entry)
            gap = position
        position = (position + 1) & mask
    store_int64(first + ENTRY_BYTES * gap, 0)
    rows = load_int64(table + BUCKET_ROWS) + 4 * bucket
    store_uint32(rows, load_uint32(rows) - 1)
    return slot


@routine
def slots_of_bucket(table: int, bucket: int, target: int) -> int:
    """Writes the slots of a bucket as int64 to an address with room for all; returns their number."""
    entries = load_int64(load_int64(table + DIRECTORY) + 8 * bucket)
    if entries == 0:
        return 0
    found = 0
    first = entries & ~_BITS_MASK
    for at in range(first, first + (ENTRY_BYTES << (entries & _BITS_MASK)), ENTRY_BYTES):
        entry = load_int64(at)
        if entry != 0:
            store_int64(target + 8 * found, (entry & _SLOT_MASK) - 1)
            found += 1
    return found


@routine
def drop_bucket(table: int, bucket: int) -> None:
    """Forgets all entries of a bucket and gives their memory back."""
    at = load_int64(table + DIRECTORY) + 8 * bucket
    release(load_int64(at) & ~_BITS_MASK)
    store_int64(at, 0)
    store_uint32(load_int64(table + BUCKET_ROWS) + 4 * bucket, 0)
