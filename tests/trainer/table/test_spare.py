"""Memory that snapshots keep for the next one."""

import numpy as np

from emberscale_trainer.table.slab import SEGMENT_BYTES
from emberscale_trainer.table.spare import SpareMemory

ROOM_FOR_TWO = 2 * 16 * SEGMENT_BYTES


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
