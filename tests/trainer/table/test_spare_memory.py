"""Memory that snapshots keep for the next one."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from emberscale_trainer.table import Reader, SnapshotAbandonedError, TableStore
from emberscale_trainer.table.slab import SEGMENT_BYTES, SpareMemory

ROOM_FOR_TWO = 2 * 16 * SEGMENT_BYTES
NO_LOCK = nullcontext()
WIDE = 2048
PUSHED = 500
"""Rows of an SGD table of dimension WIDE that nearly fill a segment."""
PUSHES = 34


@pytest.fixture
def store(make_spec: Any, push: Callable[..., None]) -> TableStore:
    store = TableStore([make_spec(dimension=WIDE)])
    for first in range(0, PUSHES * PUSHED, PUSHED):
        push(store, (range(first, first + PUSHED), np.ones(PUSHED * WIDE)))
    return store


def kept_after_snapshot(store: TableStore, push: Callable[..., None]) -> Callable[[], int]:
    """Takes a snapshot for which rows are saved; returns what counts the pieces of that memory that are still there."""
    snapshot, pieces = store.readers.snapshot(Reader.FLASH, NO_LOCK), []
    for first in range(0, 3 * PUSHED, PUSHED):
        push(store, (range(first, first + PUSHED), np.ones(PUSHED * WIDE)))
    for records in snapshot.read(0):
        memory: Any = records.base
        if memory.size == SEGMENT_BYTES:
            pieces.append(weakref.ref(memory))
    snapshot.commit()
    assert len(pieces) == 3
    return lambda: sum(piece() is not None for piece in pieces)


def test_a_piece_that_was_given_back_is_used_again() -> None:
    spare = SpareMemory()
    spare.bound(ROOM_FOR_TWO)
    piece = spare.take(100)
    assert len(piece) == SEGMENT_BYTES
    spare.give_back(piece)
    assert spare.take(SEGMENT_BYTES) is piece
    assert not np.shares_memory(spare.take(100), piece)


def test_more_than_the_bound_is_not_kept() -> None:
    spare = SpareMemory()
    spare.bound(ROOM_FOR_TWO)
    pieces = [spare.take(1) for _ in range(3)]
    for piece in pieces:
        spare.give_back(piece)
    again = [spare.take(1) for _ in range(3)]
    assert sum(any(one is piece for piece in pieces) for one in again) == 2


def test_a_smaller_bound_frees_what_is_kept() -> None:
    spare = SpareMemory()
    spare.bound(ROOM_FOR_TWO)
    piece = spare.take(1)
    spare.give_back(piece)
    spare.bound(0)
    assert spare.take(1) is not piece


def test_memory_for_one_large_push_is_not_kept() -> None:
    spare = SpareMemory()
    spare.bound(ROOM_FOR_TWO)
    large = spare.take(SEGMENT_BYTES + 1)
    assert len(large) == SEGMENT_BYTES + 1
    spare.give_back(large)
    assert spare.take(SEGMENT_BYTES + 1) is not large


def test_an_abandoned_read_keeps_no_spare_memory_of_a_store_that_is_dropped(
    store: TableStore, push: Callable[..., None]
) -> None:
    kept = kept_after_snapshot(store, push)
    assert kept() == 2
    read = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK).read(0)
    next(read)
    store.readers.abandon()
    del store
    assert kept() == 0
    with pytest.raises(SnapshotAbandonedError):
        next(read)


def test_memory_for_rows_that_have_left_is_not_kept(store: TableStore, push: Callable[..., None]) -> None:
    kept = kept_after_snapshot(store, push)
    assert kept() == 2
    store.retire(0, np.arange(PUSHES // 4 * PUSHED, PUSHES * PUSHED))
    store.readers.snapshot(Reader.FLASH, NO_LOCK)
    assert kept() == 0
