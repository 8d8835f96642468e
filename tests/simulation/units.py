"""The units that a batch changes: some rows and all dense pieces, few enough to check all of them after every step."""

from collections.abc import Collection
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from buckets import bucket_of
from emberscale_api.routing import DENSE_PIECES, RoutingTable, mix64
from emberscale_api.wire import Header

Batch = tuple[int, int]
"""An epoch, and a batch number in it."""

Unit = tuple[str, int]
"""`("key", key)` stands for its bucket, `("piece", number)` for a dense piece."""

KEYS = (3, 17, 40, 101, 250, 777)
PIECES = (0, DENSE_PIECES // 3, 2 * DENSE_PIECES // 3, DENSE_PIECES - 1)
UNITS: tuple[Unit, ...] = (*(("key", key) for key in KEYS), *(("piece", piece) for piece in PIECES))

_BUCKETS = {key: bucket_of(key) for key in KEYS}


@lru_cache(maxsize=4096)
def touched(batch: Batch) -> tuple[Unit, ...]:
    """Returns the units that a batch changes: all pieces, and about half of the keys."""
    mixed = mix64(batch[0] << 32 | batch[1])
    return tuple(unit for place, unit in enumerate(UNITS) if unit[0] == "piece" or mixed >> place & 1)


def touching(batches: Collection[Batch], unit: Unit) -> set[Batch]:
    """Returns the batches that change a unit."""
    return set(batches) if unit[0] == "piece" else {batch for batch in batches if unit in touched(batch)}


def batches_in(header: Header) -> tuple[Batch, ...]:
    """Returns the batches that a request is for."""
    return tuple((header.epoch, number) for number in header.numbers)


@lru_cache(maxsize=4096)
def changed(batches: tuple[Batch, ...]) -> tuple[Unit, ...]:
    """Returns the units that a round changes."""
    if len(batches) == 1:
        return touched(batches[0])
    any_of = {unit for batch in batches for unit in touched(batch)}
    return tuple(unit for unit in UNITS if unit in any_of)


def owner(table: RoutingTable, unit: Unit) -> int:
    """Returns the index of the server that owns a unit."""
    kind, number = unit
    return table.bucket_owners[_BUCKETS[number]] if kind == "key" else table.piece_owners[number]


@lru_cache(maxsize=4096)
def request(units: tuple[Unit, ...]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Returns counts and keys of a request for units, keys first; both arrays are read-only."""
    count = sum(kind == "key" for kind, _ in units)
    counts = np.array([count, len(units) - count], dtype=np.uint32)
    keys = np.array([number for _, number in units], dtype=np.int64)
    counts.flags.writeable = keys.flags.writeable = False
    return counts, keys


def named_by(units: tuple[Unit, ...]) -> tuple[tuple[int, None, NDArray[np.int64]], ...]:
    """Returns what a request for units, keys first, names: tables without sketches."""
    counts, keys = request(units)
    return tuple((table, None, part) for table, part in enumerate(np.split(keys, [int(counts[0])])))
