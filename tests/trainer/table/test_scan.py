"""Scans: successive copies of a table's rows, which in the end equal the table to the bit."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberscale_api.job import OptimizerSpec, OptimizerType
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_trainer.partition import buckets_of
from emberscale_trainer.table import DensePieces, Reader, Scan, SnapshotAbandonedError, TableStore
from emberscale_trainer.table.descriptors import Descriptors
from emberscale_trainer.table.scan import CHUNK_BYTES
from snapshots import records_of

Push = Callable[..., None]

NO_LOCK = nullcontext()
WIDE = 512
STEP = CHUNK_BYTES // (4 * WIDE + 12) // 8 * 8
"""The slots of an SGD table of dimension WIDE that are read at a time."""
ROWS = 5 * STEP
ALL = np.ones(BUCKETS, np.bool_)
EVEN = np.arange(BUCKETS) % 2 == 0


@pytest.fixture
def store(make_spec: Any, push: Push) -> TableStore:
    store = TableStore([make_spec(dimension=WIDE)])
    push(store, (range(ROWS), np.ones(ROWS * WIDE)))
    store.readers.track(Reader.MOVE)
    return store


class Copy:
    """A receiver's copy of one table."""

    def __init__(self, wanted: NDArray[np.bool_] = ALL) -> None:
        self.rows: dict[int, bytes] = {}
        self._wanted = wanted

    def take(self, scan: Scan, meanwhile: Callable[[int], None] = lambda number: None) -> int:
        """Takes a scan; returns the number of rows that came."""
        for key in scan.retired[0].tolist():
            self.rows.pop(key, None)
        came = 0
        for number, (whom, records) in enumerate(scan.read(0, {7: self._wanted})):
            assert whom == 7
            self.rows |= {int(record[:8].view(np.int64)[0]): record.tobytes() for record in records}
            came += len(records)
            meanwhile(number)
        return came


def now(store: TableStore, table: int = 0) -> dict[int, bytes]:
    return records_of(store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK), table)


def test_the_first_scan_is_of_all_rows_and_the_next_of_what_changed(store: TableStore, push: Push) -> None:
    copy = Copy()
    assert copy.take(store.readers.scan(Reader.MOVE, NO_LOCK)) == ROWS
    push(store, ([5, ROWS], np.ones(2 * WIDE)))
    assert copy.take(store.readers.scan(Reader.MOVE, NO_LOCK)) == 2
    assert copy.rows == now(store)
    assert copy.take(store.readers.scan(Reader.MOVE, NO_LOCK)) == 0


def test_rows_that_change_before_the_scan_comes_to_them_are_left_for_the_next(store: TableStore, push: Push) -> None:
    copy, hot = Copy(), [0, ROWS - 2, ROWS - 1]

    def train(_: int) -> None:
        push(store, (hot, np.ones(len(hot) * WIDE)))

    first = store.readers.scan(Reader.MOVE, NO_LOCK)
    assert copy.take(first, train) == ROWS - 2, "the first row was copied before it changed"
    assert first.postponed == 2
    assert copy.rows != now(store)
    last = store.readers.scan(Reader.MOVE, NO_LOCK)
    assert copy.take(last) == len(hot)
    assert last.postponed == 0
    assert copy.rows == now(store)


def test_each_receiver_gets_the_rows_of_its_buckets(store: TableStore) -> None:
    odd, even = Copy(~EVEN), Copy(EVEN)
    for whom, records in store.readers.scan(Reader.MOVE, NO_LOCK).read(0, {0: EVEN, 1: ~EVEN}):
        (even, odd)[whom].rows.update({int(record[:8].view(np.int64)[0]): record.tobytes() for record in records})
    expected = now(store)
    assert even.rows == {key: row for key, row in expected.items() if EVEN[buckets_of(np.array([key]))[0]]}
    assert odd.rows == {key: row for key, row in expected.items() if key not in even.rows}


def test_dense_pieces_are_wanted_by_their_numbers(make_spec: Any) -> None:
    dense = DensePieces.of(np.zeros(8 * DENSE_PIECES, np.float32), OptimizerSpec(type=OptimizerType.SGD))
    store = TableStore([make_spec()], dense)
    pieces = np.arange(DENSE_PIECES, dtype=np.int64)
    store.push(np.array([0, DENSE_PIECES], np.uint32), pieces, np.ones(8 * DENSE_PIECES, np.float32))
    store.readers.track(Reader.MOVE)
    wanted = pieces < 5
    found = [records for _, records in store.readers.scan(Reader.MOVE, NO_LOCK).read(1, {0: wanted})]
    assert [record[:8].view(np.int64)[0] for record in np.concatenate(found)] == [0, 1, 2, 3, 4]


def test_a_key_that_came_again_is_not_retired_after_its_row_was_copied(store: TableStore, push: Push) -> None:
    """Otherwise the scan after the one that copied the new row would remove it again."""
    copy, last = Copy(), ROWS - 1

    def come_again(number: int) -> None:
        if not number:
            store.retire(0, np.array([0, last]))
            push(store, ([last], np.ones(WIDE)))  # in the slot that this row or row 0 left

    copy.take(store.readers.scan(Reader.MOVE, NO_LOCK), come_again)
    second = store.readers.scan(Reader.MOVE, NO_LOCK)
    assert second.retired[0].tolist() == [0]
    copy.take(second)
    third = store.readers.scan(Reader.MOVE, NO_LOCK)
    assert not len(third.retired[0])
    copy.take(third)
    assert copy.rows == now(store)


def test_a_scan_ends_with_the_next_and_where_changes_are_forgotten(store: TableStore, push: Push) -> None:
    first = store.readers.scan(Reader.MOVE, NO_LOCK).read(0, {0: ALL})
    next(first)
    store.readers.scan(Reader.MOVE, NO_LOCK)
    with pytest.raises(SnapshotAbandonedError):
        next(first)
    push(store, ([1], np.ones(WIDE)))
    third = store.readers.scan(Reader.MOVE, NO_LOCK).read(0, {0: ALL})
    store.readers.untrack(Reader.MOVE)
    with pytest.raises(SnapshotAbandonedError):
        next(third)
    with pytest.raises(ValueError, match="no changes are tracked"):
        store.readers.scan(Reader.MOVE, NO_LOCK)
    store.readers.track(Reader.MOVE)
    assert Copy().take(store.readers.scan(Reader.MOVE, NO_LOCK)) == ROWS


def test_no_change_is_lost_where_there_is_no_memory_for_a_scan(store: TableStore, push: Push) -> None:
    copy = Copy()
    copy.take(store.readers.scan(Reader.MOVE, NO_LOCK))
    push(store, ([3], np.ones(WIDE)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Descriptors, "absent", refuse)
        with pytest.raises(MemoryError):
            store.readers.scan(Reader.MOVE, NO_LOCK)
    push(store, ([4], np.ones(WIDE)))
    assert copy.take(store.readers.scan(Reader.MOVE, NO_LOCK)) == 2
    assert copy.rows == now(store)


def refuse(*_: object) -> NDArray[np.int64]:
    raise MemoryError


def test_rows_that_a_thread_changes_meanwhile_are_never_torn(store: TableStore, push: Push) -> None:
    lock, ends = threading.RLock(), threading.Event()
    copy = Copy()

    def train() -> None:
        random = np.random.default_rng(0)
        while not ends.is_set():
            keys = random.choice(ROWS + 50, 40, replace=False)
            with lock:
                push(store, (keys, random.standard_normal(40 * WIDE)))
                store.retire(0, keys[:3].astype(np.int64))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(20):
            with lock:
                scan = store.readers.scan(Reader.MOVE, lock)
            copy.take(scan)
    finally:
        ends.set()
        thread.join()
    copy.take(store.readers.scan(Reader.MOVE, lock))
    assert copy.rows == now(store)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "retire", "load", "scan"]), st.integers(0, ROWS + 20), st.sampled_from([1, 3, 40])
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS)
def test_a_copy_is_equal_after_any_changes_between_the_chunks_of_scans(
    make_spec: Any, push: Push, actions: list[tuple[str, int, int]]
) -> None:
    store = TableStore([make_spec(dimension=WIDE)])
    push(store, (range(ROWS), np.ones(ROWS * WIDE)))
    store.readers.track(Reader.MOVE)
    copy, left = Copy(EVEN), list(actions)

    def change(_: int = 0) -> None:
        while left:
            name, first, count = left.pop()
            keys = np.arange(first, first + count)
            if name == "push":
                push(store, (keys.tolist(), np.full(count * WIDE, first)))
            elif name == "retire":
                store.retire(0, keys)
            elif name == "load":
                records = store.layouts[0].empty(count)
                fields = store.layouts[0].fields(records)
                fields["key"], fields["weights"], fields["pushes"] = keys, 7, count
                store.load(0, records)
            else:
                return

    while left:
        copy.take(store.readers.scan(Reader.MOVE, NO_LOCK), change)
        change()
    last = store.readers.scan(Reader.MOVE, NO_LOCK)
    copy.take(last)
    assert not last.postponed
    assert copy.rows == {key: row for key, row in now(store).items() if EVEN[buckets_of(np.array([key]))[0]]}
