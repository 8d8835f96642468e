"""Compaction frees the memory of retired rows, without an effect on other rows, readers and snapshots."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberscale_api.routing import BUCKETS
from emberscale_trainer.table import Reader, TableStore
from emberscale_trainer.table.compaction import Compaction
from snapshots import records_of

Push = Callable[..., None]

NO_LOCK = nullcontext()
WIDE = 512
SEGMENTS = 6
ROWS = SEGMENTS * 2040
"""Rows of an SGD table of dimension WIDE that fill SEGMENTS segments or a little more."""


@pytest.fixture
def store(make_spec: Any, push: Push) -> TableStore:
    store = TableStore([make_spec(dimension=WIDE)])
    push(store, (range(ROWS), np.ones(ROWS * WIDE)))
    return store


def rows_now(store: TableStore) -> dict[int, bytes]:
    return records_of(store.readers.snapshot(Reader.MOVE, NO_LOCK), 0)


def leave(store: TableStore, part: int) -> None:
    """Removes all but one in `part` buckets."""
    for bucket in range(BUCKETS):
        if bucket % part:
            store.remove_bucket(0, bucket)


def compact(store: TableStore, between: Callable[[int], None] = lambda _: None) -> None:
    compaction, steps = Compaction(store, 0), 0
    while compaction.step(500):
        steps += 1
        between(steps)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_of_rows_that_left_goes_back_and_the_others_stay(store: TableStore) -> None:
    leave(store, 4)
    expected, before, resident_before = rows_now(store), store.allocated_bytes, resident()
    compact(store)
    released = resident_before - resident()  # before the rows are read again, since that takes memory, too
    assert rows_now(store) == expected
    assert before - store.allocated_bytes >= (SEGMENTS // 2) << 22
    assert released >= (SEGMENTS // 2 - 1) << 22


def test_a_table_without_rows_takes_no_memory(store: TableStore) -> None:
    for bucket in range(BUCKETS):
        store.remove_bucket(0, bucket)
    compact(store)
    assert store.allocated_bytes < 4 << 20
    assert rows_now(store) == {}


def test_memory_that_went_back_is_used_again(store: TableStore, push: Push) -> None:
    leave(store, 4)
    compact(store)
    kept, small = len(rows_now(store)), store.allocated_bytes
    keys = range(10 * ROWS, 10 * ROWS + 1000)
    push(store, (keys, np.ones(1000 * WIDE)))
    assert store.allocated_bytes - small <= 2 << 22  # the table does not grow back to its old end
    push(store, (range(20 * ROWS, 21 * ROWS), np.ones(ROWS * WIDE)))
    assert len(rows_now(store)) == kept + 1000 + ROWS


@pytest.mark.parametrize("rows", [1500, 3000, 6000])
def test_new_rows_take_no_more_memory_than_they_need(store: TableStore, push: Push, rows: int) -> None:
    """Regression: a few new rows were spread over all segments, and a server soon had its old memory again."""
    leave(store, 16)
    compact(store)
    kept = len(rows_now(store))
    push(store, (range(10 * ROWS, 10 * ROWS + rows), np.ones(rows * WIDE)))
    segments = -(-(kept + rows) // store.slots[0].layout.segment_rows)
    assert store.slots[0].allocated_bytes <= (segments << 22) + (1 << 20)


def test_a_full_table_stays_as_it_is(store: TableStore) -> None:
    expected, before = rows_now(store), store.allocated_bytes
    compact(store)
    assert (rows_now(store), store.allocated_bytes) == (expected, before)


@pytest.mark.parametrize("part", [2, 16])
def test_rows_come_and_go_between_the_steps(store: TableStore, push: Push, part: int) -> None:
    leave(store, part)
    expected = rows_now(store)
    random = np.random.default_rng(part)

    def train(step: int) -> None:
        new = range(ROWS * (step + 1), ROWS * (step + 1) + 300)
        push(store, (new, np.ones(300 * WIDE)))
        expected.update({key: record for key, record in rows_now(store).items() if key in new})
        gone = random.choice(np.array(sorted(expected)), 200, replace=False)
        store.retire(0, gone)
        for key in gone.tolist():
            del expected[key]

    compact(store, train)
    assert rows_now(store) == expected


def test_a_snapshot_is_of_its_moment_though_rows_move_before_and_behind_the_read(store: TableStore) -> None:
    leave(store, 4)
    expected, snapshot, compaction = (
        rows_now(store),
        store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK),
        Compaction(store, 0),
    )
    found: dict[int, bytes] = {}
    for chunk in snapshot.read(0):
        found |= {int(record[:8].view(np.int64)[0]): record.tobytes() for record in chunk}
        for _ in range(3):
            compaction.step(500)
    assert found == expected


def test_a_reader_of_changes_misses_nothing(store: TableStore) -> None:
    store.readers.track(Reader.FLASH)
    first = store.readers.snapshot(Reader.FLASH, NO_LOCK)
    copy: dict[int, bytes] = records_of(first, 0)
    first.commit()
    leave(store, 4)
    compact(store)
    taken = store.readers.take(Reader.FLASH, NO_LOCK)
    for key in taken.retired[0].tolist():
        copy.pop(key, None)
    copy |= records_of(taken, 0)
    assert copy == rows_now(store)


def test_a_step_without_memory_for_readers_does_nothing(store: TableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(store, 4)
    expected = rows_now(store)
    compaction = Compaction(store, 0)

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(store, "_make_room_to_retire", refuse)
    with pytest.raises(MemoryError):
        compaction.step(500)
    monkeypatch.undo()
    assert rows_now(store) == expected
