"""Logs of changes in which a row has one delta, however often it has changed."""

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table import DeltaLog, TableStore
from emberscale_trainer.table.deltas import DELTA_BYTES

TABLE = TableSpec(0, "C0", 0, 4, OptimizerSpec(type=OptimizerType.ADAGRAD), InitializerSpec(), seed=3)
STORED = [(0,)]


@pytest.fixture
def store() -> TableStore:
    return TableStore([TABLE])


def log_of(store: TableStore, *, merges: bool = True) -> DeltaLog:
    log = store.log_deltas(1, lambda _table, _segment: 0, merges=merges)
    while not log.is_whole:
        log.fill(1 << 20)
    log.take(STORED)
    return log


def push(store: TableStore, *keys: int) -> None:
    store.push(np.array([len(keys)], np.uint32), np.array(keys, np.int64), np.ones(4 * len(keys), np.float32))


def parity(deltas: NDArray[np.uint8], stride: int) -> dict[int, bytes]:
    """Returns the sum of the deltas of each slot, by slot; without slots whose sum is zero."""
    sums: dict[int, NDArray[np.uint8]] = {}
    at = 0
    while at < len(deltas):
        first, word = deltas[at : at + DELTA_BYTES].view("<u4").tolist()
        at += DELTA_BYTES
        for slot in range(first, first + (word & 0xFFFF)):
            sums[slot] = sums.get(slot, np.zeros(stride, np.uint8)) ^ deltas[at : at + stride]
            at += stride
    return {slot: row.tobytes() for slot, row in sums.items() if row.any()}


def rows_of(store: TableStore) -> dict[int, bytes]:
    slots = store.slots[0].segments[0].rows
    return {slot: row.tobytes() for slot, row in enumerate(slots) if row.any()}


def test_a_row_that_changes_often_has_one_delta(store: TableStore) -> None:
    log, stride = log_of(store), store.layouts[0].stride
    for _ in range(5):
        push(store, 1, 2, 2)
    push(store, 3)
    (deltas,) = log.take(STORED)
    assert len(deltas) == 3 * (DELTA_BYTES + stride)
    assert parity(deltas, stride) == rows_of(store)


def test_without_merging_each_change_has_one(store: TableStore) -> None:
    log, stride = log_of(store, merges=False), store.layouts[0].stride
    for _ in range(5):
        push(store, 1)
    (deltas,) = log.take(STORED)
    assert len(deltas) == 5 * (DELTA_BYTES + stride)
    assert parity(deltas, stride) == rows_of(store)


def test_after_a_take_a_row_has_another_delta(store: TableStore) -> None:
    log, stride = log_of(store), store.layouts[0].stride
    taken = []
    for _ in range(3):
        push(store, 1, 2)
        taken += log.take(STORED)
    assert [len(deltas) for deltas in taken] == [2 * (DELTA_BYTES + stride)] * 3
    assert parity(np.concatenate(taken), stride) == rows_of(store)


def test_a_row_that_comes_and_goes_leaves_nothing(store: TableStore) -> None:
    log, stride = log_of(store), store.layouts[0].stride
    push(store, 1)
    store.retire(0, np.array([1], np.int64))
    (deltas,) = log.take(STORED)
    assert parity(deltas, stride) == {}
    push(store, 2)
    store.retire(0, np.array([2], np.int64))
    push(store, 3)  # in the slot of the other
    taken = [deltas, *log.take(STORED)]
    assert parity(np.concatenate(taken), stride) == rows_of(store)


def test_what_is_withdrawn_changes_no_more(store: TableStore) -> None:
    log, stride = log_of(store), store.layouts[0].stride
    push(store, 1, 2)
    taken = log.take(STORED)
    push(store, 1)
    while not log.is_empty:
        log.withdraw(1 << 20)
    push(store, 1, 2)  # before what is withdrawn is taken
    deltas = np.concatenate([*taken, *log.take(STORED)])
    assert parity(deltas, stride) == {}


def test_rows_of_new_segments_are_merged_too(store: TableStore) -> None:
    log, layout = log_of(store), store.layouts[0]
    keys = np.arange(layout.segment_rows + 5, dtype=np.int64)
    for _ in range(2):
        store.push(np.array([len(keys)], np.uint32), keys, np.ones(4 * len(keys), np.float32))
    (deltas,) = log.take(STORED)
    assert len(deltas) == len(keys) * (DELTA_BYTES + layout.stride)
    assert len(parity(deltas, layout.stride)) == len(keys)


def test_rows_of_a_segment_for_which_the_log_lacked_memory_are_logged(
    store: TableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, layout = log_of(store), store.layouts[0]
    with monkeypatch.context() as patched:
        patched.setattr(DeltaLog, "_make_room_to_open", no_memory)
        with pytest.raises(MemoryError):
            push(store, 1, 2)
    push(store, 1, 2)
    (deltas,) = log.take(STORED)
    assert parity(deltas, layout.stride) == rows_of(store)


def no_memory(*_: object) -> None:
    raise MemoryError("cannot allocate")
