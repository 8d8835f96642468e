"""Snapshots and change sets: what a reader gets during training. `test_store_model` covers calls in any order."""

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buckets import bucket_of
from emberscale_api.job import OptimizerType
from emberscale_trainer.table import Reader, SnapshotAbandonedError, TableStore
from emberscale_trainer.table import readers as readers_module
from emberscale_trainer.table import snapshot as snapshot_module
from memory_limit import refused_beyond
from snapshots import records_of, rows_of_bucket

Pull = Callable[..., NDArray[np.float32]]
Push = Callable[..., None]

NO_LOCK = nullcontext()
SEGMENTS = 5
WIDE = 2048
ROWS = SEGMENTS * 512
"""Rows of an SGD table of dimension WIDE that fill SEGMENTS segments."""


@pytest.fixture
def store(make_spec: Any, push: Push) -> TableStore:
    store = TableStore([make_spec(dimension=WIDE)])
    push(store, (range(ROWS), np.ones(ROWS * WIDE)))
    return store


def rows_now(store: TableStore, table: int = 0) -> dict[int, bytes]:
    return records_of(store.readers.snapshot(Reader.MOVE, NO_LOCK), table)


def test_a_snapshot_is_of_the_moment_at_which_it_began(store: TableStore, push: Push) -> None:
    expected = rows_now(store)
    snapshot = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK)
    push(store, ([0, ROWS], np.ones(2 * WIDE)))
    store.remove_bucket(0, bucket_of(ROWS - 1))
    store.retire(0, np.array([1]))
    push(store, ([1, 2], np.ones(2 * WIDE)))  # one takes the slot of a retired row
    assert records_of(snapshot) == expected
    snapshot.commit()
    assert rows_now(store) != expected


def test_committed_changes_are_taken_again_with_later_ones(store: TableStore, push: Push) -> None:
    store.readers.track(Reader.FLASH)
    push(store, ([*range(10), ROWS], np.ones(11 * WIDE)))
    store.retire(0, np.array([0]))
    first = store.readers.take(Reader.FLASH, NO_LOCK)
    earlier, bytes_of_a_row = first.changes, store.layouts[0].stride
    assert earlier is not None
    assert records_of(first).keys() == {*range(1, 10), ROWS}
    first.commit()
    push(store, ([*range(5, 20), *range(ROWS, ROWS + 1024)], np.ones((15 + 1024) * WIDE)))  # the bitmaps grow
    store.retire(0, np.array([6]))
    assert (
        store.readers.bytes_to_take(Reader.FLASH, earlier) - store.readers.bytes_to_take(Reader.FLASH)
        == 4 * bytes_of_a_row
    )
    store.readers.take_again(Reader.FLASH, earlier)
    second = store.readers.take(Reader.FLASH, NO_LOCK)
    assert second.retired[0].tolist() == [0, 6]
    taken = records_of(second)
    assert taken == {key: row for key, row in rows_now(store).items() if key in range(1, 20) or key >= ROWS}
    second.commit()
    assert not records_of(store.readers.take(Reader.FLASH, NO_LOCK))


def test_rows_that_did_not_change_are_taken_with_those_that_did(store: TableStore, push: Push) -> None:
    store.readers.track(Reader.FLASH)
    push(store, ([*range(100), ROWS], np.ones(101 * WIDE)))
    store.retire(0, np.array([0, ROWS - 1]))
    first = store.readers.take(Reader.FLASH, NO_LOCK)
    earlier, bytes_of_a_row = first.changes, store.layouts[0].stride
    assert earlier is not None
    records_of(first)
    first.commit()
    push(store, (range(ROWS, ROWS + 1024), np.ones(1024 * WIDE)))  # two in slots of retired rows; the bitmaps grow
    assert 0 <= store.readers.unchanged_bytes(Reader.FLASH, earlier) // bytes_of_a_row - (ROWS - 101) <= 2
    store.readers.take_unchanged(Reader.FLASH, earlier)
    second = store.readers.take(Reader.FLASH, NO_LOCK)
    taken = records_of(second)
    assert taken == {key: row for key, row in rows_now(store).items() if key >= 100}
    second.commit()
    assert not records_of(store.readers.take(Reader.FLASH, NO_LOCK))


def test_a_take_that_finds_no_memory_needs_none_to_keep_the_changes(
    store: TableStore, push: Push, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bitmaps that it took may be longer than new ones, as they have grown by doubling."""
    store.readers.track(Reader.FLASH)
    push(store, (range(ROWS, ROWS + 1024), np.ones(1024 * WIDE)))

    def refuse(*arguments: object) -> None:
        raise MemoryError

    def refuse_from_now_on(*arguments: object) -> None:
        monkeypatch.setattr(snapshot_module, "_bitmap", refuse)
        refuse()

    with monkeypatch.context() as patched:
        patched.setattr(readers_module, "TableShare", refuse_from_now_on)
        with pytest.raises(MemoryError):
            store.readers.take(Reader.FLASH, NO_LOCK)
    monkeypatch.undo()
    push(store, ([0], np.ones(WIDE)))
    assert records_of(store.readers.take(Reader.FLASH, NO_LOCK)).keys() == {0, *range(ROWS, ROWS + 1024)}


def test_joined_changes_leave_both_as_they_were(store: TableStore, push: Push) -> None:
    store.readers.track(Reader.FLASH)
    taken = []
    for key in (0, 1):
        push(store, ([key, 7], np.ones(2 * WIDE)))
        store.retire(0, np.array([7]))
        snapshot = store.readers.take(Reader.FLASH, NO_LOCK)
        taken.append(snapshot.changes)
        records_of(snapshot)
        snapshot.commit()
    first, second = taken
    assert first is not None
    assert second is not None
    before = [(changes.rows(), changes.retired_bytes()) for changes in (first, second)]
    both = second.joined(first)
    assert both.rows() == second.rows(first)
    assert (both.retired_keys()[0].tolist(), both.retired_bytes()) == ([7], 8)
    assert [(changes.rows(), changes.retired_bytes()) for changes in (first, second)] == before


def test_rows_change_behind_the_read_and_before_it(store: TableStore, push: Push) -> None:
    expected = rows_now(store)
    snapshot = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK)
    found: dict[int, bytes] = {}
    for number, chunk in enumerate(snapshot.read(0)):
        found |= {int(record[:8].view(np.int64)[0]): record.tobytes() for record in chunk}
        push(store, (range(number, ROWS, 7), np.ones((len(range(number, ROWS, 7)), WIDE))))
    assert found == expected


def test_two_readers_have_snapshots_at_once(store: TableStore, push: Push) -> None:
    first, expected_first = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK), rows_now(store)
    push(store, ([5], np.ones(WIDE)))
    second, expected_second = store.readers.snapshot(Reader.FLASH, NO_LOCK), rows_now(store)
    push(store, ([5, 6], np.ones(2 * WIDE)))
    assert records_of(second) == expected_second
    assert records_of(first) == expected_first


def test_a_reader_that_begins_anew_gives_up_what_it_had_begun(store: TableStore, push: Push) -> None:
    abandoned = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK)
    read = abandoned.read(0)
    next(read)
    push(store, ([0, ROWS - 1], np.ones(2 * WIDE)))
    snapshot, expected = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK), rows_now(store)
    push(store, ([0, ROWS - 1], np.ones(2 * WIDE)))
    with pytest.raises(SnapshotAbandonedError):
        next(read)
    abandoned.give_back()
    assert records_of(snapshot) == expected
    with pytest.raises(SnapshotAbandonedError):
        abandoned.commit()


def test_a_store_abandons_the_snapshots_of_all_readers(store: TableStore, push: Push) -> None:
    store.readers.track(Reader.FLASH)
    push(store, ([1], np.ones(WIDE)))
    reads = [
        store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK).read(0),
        store.readers.take(Reader.FLASH, NO_LOCK).read(0),
    ]
    store.readers.abandon()
    for read in reads:
        with pytest.raises(SnapshotAbandonedError):
            list(read)
    assert set(records_of(store.readers.take(Reader.FLASH, NO_LOCK))) == {1}


@pytest.mark.parametrize("takes", [False, True])
def test_an_abandoned_read_keeps_no_rows_of_a_store_that_is_dropped(make_spec: Any, push: Push, takes: bool) -> None:
    """The thread of a read may wait for hanging storage while the server loads other rows."""
    store = TableStore([make_spec(dimension=WIDE)])
    store.readers.track(Reader.CHECKPOINT)
    push(store, (range(ROWS), np.ones(ROWS * WIDE)))
    snapshot = (store.readers.take if takes else store.readers.snapshot)(Reader.CHECKPOINT, NO_LOCK)
    read = snapshot.read(0)
    next(read)
    segments = [weakref.ref(one) for one in store.slots[0].segments]
    store.readers.abandon()
    del store
    assert sum(one() is not None for one in segments) <= 1, "the one that is being read"
    with pytest.raises(SnapshotAbandonedError):
        list(read)


def test_a_snapshot_is_not_committed_before_it_is_read(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec(), make_spec(1)])
    push(store, ([1], np.ones(4)), ([1], np.ones(4)))
    snapshot = store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK)
    records_of(snapshot, 0)
    with pytest.raises(RuntimeError, match="all of its tables"):
        snapshot.commit()
    records_of(snapshot, 1)
    snapshot.commit()


def test_a_take_brings_what_changed_since_the_last_one(make_spec: Any, push: Push, pull: Pull) -> None:
    store = TableStore([make_spec()])
    store.readers.track(Reader.CHECKPOINT)
    push(store, (range(1000), np.ones(4000)))
    first = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    assert set(records_of(first)) == set(range(1000))
    first.commit()
    assert records_of(store.readers.take(Reader.CHECKPOINT, NO_LOCK)) == {}

    pull(store, [1, 2])  # reading is no change
    push(store, ([3, 500], np.ones(8)))
    push(store, ([5000], np.ones(4)))
    store.load(0, rows_of_bucket(store, 0, bucket_of(7)))
    neighbours = {key for key in range(1000) if bucket_of(key) == bucket_of(7)}
    store.retire(0, np.array([500, 501]))
    second = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    assert set(records_of(second)) == {3, 5000} | neighbours
    assert second.retired[0].tolist() == [500, 501]


def test_a_take_holds_nothing_but_the_changes_though_others_change_while_it_is_read(
    store: TableStore, push: Push
) -> None:
    store.readers.track(Reader.CHECKPOINT)
    push(store, (range(0, ROWS, 100), np.ones((len(range(0, ROWS, 100)), WIDE))))
    expected = {key: record for key, record in rows_now(store).items() if key % 100 == 0}
    taken = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    push(store, (range(ROWS), np.ones((ROWS, WIDE))))
    assert records_of(taken) == expected


def test_what_is_given_back_comes_again_with_what_changed_meanwhile(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec()])
    push(store, (range(10), np.ones(40)))
    store.readers.track(Reader.CHECKPOINT)
    push(store, ([1, 2], np.ones(8)))
    store.retire(0, np.array([3, 4]))
    failed = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    next(failed.read(0))
    push(store, ([2, 5], np.ones(8)))
    push(store, ([4], np.ones(4)))  # the row is there again
    store.retire(0, np.array([1]))
    failed.give_back()
    taken = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    rows = records_of(taken)
    assert set(rows) == {2, 4, 5}
    assert rows[4] == rows_now(store)[4]
    assert taken.retired[0].tolist() == [1, 3, 4]


def test_a_full_snapshot_that_is_given_back_loses_no_change_either(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec()])
    store.readers.track(Reader.CHECKPOINT)
    push(store, ([1], np.ones(4)))
    store.retire(0, np.array([1]))
    push(store, ([2], np.ones(4)))
    store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK).give_back()
    taken = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    assert (set(records_of(taken)), taken.retired[0].tolist()) == ({2}, [1])


def test_changes_are_tracked_reader_by_reader_and_only_when_asked(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec()])
    with pytest.raises(ValueError, match="no changes are tracked for FLASH"):
        store.readers.take(Reader.FLASH, NO_LOCK)
    store.readers.track(Reader.CHECKPOINT)
    with pytest.raises(ValueError, match="already"):
        store.readers.track(Reader.CHECKPOINT)
    push(store, ([1], np.ones(4)))
    store.readers.track(Reader.FLASH)
    push(store, ([2], np.ones(4)))
    assert set(records_of(store.readers.take(Reader.CHECKPOINT, NO_LOCK))) == {1, 2}
    assert set(records_of(store.readers.take(Reader.FLASH, NO_LOCK))) == {2}
    store.readers.untrack(Reader.FLASH)
    with pytest.raises(ValueError, match="no changes are tracked for FLASH"):
        store.readers.take(Reader.FLASH, NO_LOCK)


def test_changes_are_tracked_through_growth(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec(dimension=64)])
    store.readers.track(Reader.CHECKPOINT)
    for first in range(0, 60_000, 20_000):
        push(store, (range(first, first + 20_000), np.ones((20_000, 64))))
    taken = store.readers.take(Reader.CHECKPOINT, NO_LOCK)
    push(store, (range(60_000, 100_000), np.ones((40_000, 64))))
    assert set(records_of(taken)) == set(range(60_000))
    taken.give_back()
    assert set(records_of(store.readers.take(Reader.CHECKPOINT, NO_LOCK))) == set(range(100_000))


def test_a_push_whose_old_rows_cannot_be_saved_changes_nothing(store: TableStore) -> None:
    before, snapshot = rows_now(store), store.readers.snapshot(Reader.CHECKPOINT, NO_LOCK)
    counts, keys = np.array([ROWS], np.uint32), np.arange(ROWS)
    gradients = np.ones(ROWS * WIDE, np.float32)
    with refused_beyond(4 << 20), pytest.raises(MemoryError):
        store.push(counts, keys, gradients)
    assert rows_now(store) == before
    store.push(counts, keys, gradients)
    assert records_of(snapshot) == before


def test_a_read_beside_pushes_gives_the_rows_of_its_beginning(make_spec: Any) -> None:
    """Threads push without a pause, and each read waits for some of the pushes between its chunks."""
    specs = [make_spec(0, 64, OptimizerType.ADAM), make_spec(1, 16, OptimizerType.ROW_WISE_ADAGRAD)]
    store, lock, known = TableStore(specs), threading.Condition(), 60_000
    pushes, stop = [0], threading.Event()

    def push(random: np.random.Generator, keys: NDArray[np.int64]) -> None:
        counts = np.array([len(keys), len(keys)], np.uint32)
        gradients = random.standard_normal(80 * len(keys), np.float32)
        with lock:
            store.push(counts, np.concatenate([keys, keys]), gradients)
            if random.random() < 0.2:
                store.retire(int(random.integers(2)), random.integers(0, known, 20))
            pushes[0] += 1
            lock.notify_all()

    def reached(count: int) -> bool:
        return pushes[0] >= count

    def train(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not stop.is_set():
            push(random, np.unique(random.integers(0, 2 * known, 500)))

    push(np.random.default_rng(0), np.arange(known))
    store.readers.track(Reader.CHECKPOINT)
    threads = [threading.Thread(target=train, args=[seed], daemon=True) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    try:
        told: list[dict[int, bytes]] = []
        for whole in (True, False, False, True, False):
            with lock:
                snapshot = (store.readers.snapshot if whole else store.readers.take)(Reader.CHECKPOINT, lock)
                expected = [rows_now(store, table) for table in range(2)]
            if whole:
                told = [{}, {}]
            for table in range(2):
                for key in snapshot.retired[table].tolist():
                    told[table].pop(key, None)
                for chunk in snapshot.read(table):
                    told[table] |= {int(record[:8].view(np.int64)[0]): record.tobytes() for record in chunk}
                    with lock:
                        assert lock.wait_for(partial(reached, pushes[0] + 5), timeout=60)
            snapshot.commit()
            assert told == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
