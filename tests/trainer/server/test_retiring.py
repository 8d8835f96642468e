"""Rows that a server has given away leave it while it serves, and are gone before their buckets return."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from emberscale_api.job import OptimizerType
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server import retiring as retiring_module
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind
from emberscale_trainer.table import TableStore
from moves import EVERYTHING, SECONDS, TABLES, Batch, Gate, await_removal, rows_in, table_that_owns, trained_tables
from snapshots import all_rows

HALF = Ownership(np.arange(BUCKETS) < BUCKETS // 2, np.arange(DENSE_PIECES) < DENSE_PIECES // 2)
OTHER_HALF = EVERYTHING.without(HALF)
DENSE = TABLES


class Giver(Gate):
    """A server that gives half of its rows away, and a gate on the way of these rows.

    `starved` counts the removals before which no other thread could take the lock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.fatal: list[BaseException] = []
        self.state = ServerState(fatal=self.fatal.append)
        self.tables = trained_tables(OptimizerType.ADAGRAD)
        self.tables.push(*Batch(np.random.default_rng(0), 0, 1000).part(EVERYTHING))
        wanted = Assignment(1, 1, "")
        self.state.assign(wanted)
        assert self.state.adopt(wanted, self.tables, EVERYTHING, AppliedBatches(), None)
        self.threads = ThreadPoolExecutor(1)
        self.starved = 0
        self._waits = False
        remove = TableStore.remove_bucket

        def removed(store: TableStore, table: int, bucket: int) -> int:
            rows = remove(store, table, bucket)
            if rows and store is self.tables:  # servers of earlier tests may still remove theirs
                self.starved += self._waits
                self._waits = True
            return rows

        monkeypatch.setattr(TableStore, "remove_bucket", removed)
        self.state.protect_by(self)

    def catch_up(self) -> None:
        super().catch_up()
        self.threads.submit(self._take_lock).result(SECONDS)

    def _take_lock(self) -> None:
        with self.state.lock:
            self._waits = False

    def give(self) -> None:
        """Gives the other half away; returns after the first removal."""
        self.state.prepare(2, 1, table_that_owns(HALF, 2), 0)
        self.state.hold(1, 1, 1, SECONDS)
        self.state.settle(1, 1, [], SECONDS, 0)
        self.state.switch(1, 1, 2, AppliedBatches())
        assert self.stopped.wait(SECONDS)
        assert rows_in(self.tables, OTHER_HALF.buckets)


@pytest.fixture
def giver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Giver]:
    before = set(threading.enumerate())
    giver = Giver(monkeypatch)
    yield giver
    giver.open.set()
    giver.state.assign(Assignment(2, 1, ""))  # ends the removal
    for thread in set(threading.enumerate()) - before:
        if thread.name == "retire":
            thread.join(SECONDS)
    giver.threads.shutdown()


def test_pulls_and_pushes_get_the_lock_while_rows_are_left_at_a_barrier(giver: Giver) -> None:
    giver.give()
    giver.state.hold(1, 2, 2, SECONDS)
    giver.state.settle(1, 2, [], SECONDS, 0)
    giver.open.set()
    await_removal(giver.tables, HALF)
    assert not giver.starved
    assert not giver.fatal


def test_pulls_and_pushes_get_the_lock_while_rows_are_left_at_the_next_move(giver: Giver) -> None:
    giver.give()
    giver.state.prepare(3, 2, table_that_owns(EVERYTHING, 3), 0)
    assert not giver.starved
    giver.open.set()
    assert giver.state.prepared(3, SECONDS)
    assert not rows_in(giver.tables, OTHER_HALF.buckets)
    assert not giver.starved
    assert not giver.fatal


def test_a_move_that_brings_a_bucket_back_waits_until_its_rows_are_gone(giver: Giver) -> None:
    records = all_rows(giver.tables, 0)
    giver.give()
    giver.state.prepare(3, 2, table_that_owns(EVERYTHING, 3), 0)
    assert not giver.state.prepared(3, 0)
    with pytest.raises(NotHeldError, match="are being removed"):
        giver.state.receive(3, Item(ItemKind.ROWS, 0, records))
    giver.state.hold(1, 2, 2, SECONDS)
    giver.state.settle(1, 2, [], SECONDS, 0)
    with pytest.raises(NotHeldError, match="are being removed"):
        giver.state.switch(1, 2, 3, AppliedBatches())
    giver.open.set()
    assert giver.state.prepared(3, SECONDS)


def test_a_move_waits_only_for_the_buckets_that_it_brings(giver: Giver) -> None:
    giver.give()
    bucket = int(np.flatnonzero(OTHER_HALF.buckets & (giver.tables.bucket_rows(0) > 0))[-1])
    more = HALF.copy()
    more.buckets[bucket] = True
    giver.state.prepare(3, 2, table_that_owns(HALF, 3), 0)
    assert giver.state.prepared(3, 0), "it brings nothing"
    giver.state.prepare(4, 2, table_that_owns(more, 4), 0)
    assert not giver.state.prepared(4, 0)
    before = rows_in(giver.tables, OTHER_HALF.buckets)
    stop_after = giver.tables.bucket_rows(0)[bucket] + giver.tables.bucket_rows(1)[bucket]
    left: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(giver.state.prepared, 4, SECONDS)
        waiting.add_done_callback(lambda _: left.append(rows_in(giver.tables, OTHER_HALF.buckets)))
        giver.open.set()
        assert waiting.result(SECONDS)
    assert before - left[0] >= stop_after
    await_removal(giver.tables, HALF)


def test_whoever_waits_for_room_hears_that_the_move_is_abandoned(giver: Giver) -> None:
    giver.give()
    giver.state.prepare(3, 2, table_that_owns(EVERYTHING, 3), 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(giver.state.prepared, 3, SECONDS)
        giver.state.abandon(3)
        with pytest.raises(NotHeldError):
            waiting.result(SECONDS)


@pytest.mark.parametrize("failures", [1, 3])
def test_rows_for_whose_removal_there_was_no_memory_are_removed_later(
    giver: Giver, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(retiring_module, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(
        TableStore, "remove_bucket", failing(giver.tables, TableStore.remove_bucket, MemoryError, failures)
    )
    giver.open.set()
    giver.give()
    await_removal(giver.tables, HALF)
    giver.state.prepare(3, 2, table_that_owns(EVERYTHING, 3), 0)
    assert giver.state.prepared(3, SECONDS)
    assert not giver.fatal


def test_dense_pieces_for_whose_removal_there_was_no_memory_are_removed_later(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableStore, "retire", failing(giver.tables, TableStore.retire, MemoryError, 1))
    giver.open.set()
    giver.give()
    giver.state.prepare(3, 2, table_that_owns(EVERYTHING, 3), 0)
    assert giver.state.prepared(3, SECONDS)
    assert giver.tables.slots[DENSE].rows == HALF.pieces.sum()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_leaves_the_tables_half_changed_ends_the_process(
    giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(giver.state._served.retirement, "_fatal", lambda _: told.set())
    monkeypatch.setattr(TableStore, "remove_bucket", failing(giver.tables, TableStore.remove_bucket, RuntimeError, 1))
    before = set(threading.enumerate())
    giver.stopped.set()
    giver.give()
    assert told.wait(SECONDS)
    for thread in set(threading.enumerate()) - before:
        thread.join(SECONDS)  # so that its error is of this test


def failing(tables: TableStore, remove: Callable[..., int], error: type[Exception], times: int) -> Callable[..., int]:
    """Returns a function that fails some times, on these tables, before it does what `remove` does."""
    failures = [error("refused")] * times

    def attempt(store: TableStore, *arguments: object) -> int:
        if failures and store is tables:
            raise failures.pop()
        return remove(store, *arguments)

    return attempt
