"""Rows that are due leave a server although the memory to remove them is short for a while."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from emberscale_api.job import EvictionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.eviction import BackgroundEviction
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import DensePieces, Eviction, Sweep, TableStore
from emberscale_trainer.table.eviction import _Rule
from moves import EVERYTHING, SECONDS, await_removal, table_that_owns

SGD = OptimizerSpec(type=OptimizerType.SGD, learning_rate=0.1)
PLAIN = TableSpec(0, "C0", 0, 4, SGD, InitializerSpec(), seed=0)
HALF = Ownership(np.arange(BUCKETS) < BUCKETS // 2, np.arange(DENSE_PIECES) < DENSE_PIECES // 2)
ROWS = 4 * BUCKETS


@pytest.fixture
def state() -> Iterator[ServerState]:
    """A server whose rows leave eight batches after their last push."""
    state, wanted = ServerState(), Assignment(1, 1, "")
    spec = replace(PLAIN, eviction=EvictionSpec(ttl_batches=8))
    state.assign(wanted)
    tables = TableStore([spec], DensePieces.of(np.zeros(3, np.float32), SGD))
    assert state.adopt(wanted, tables, EVERYTHING, AppliedBatches(), None)
    yield state
    state.assign(Assignment(2, 1, ""))


def push(state: ServerState, batch: int, keys: int = 0) -> None:
    header = Header(Kind.PUSH, generation=1, version=1, batch=batch, tables=2)
    gradients = np.ones(4 * keys, np.float32)
    assert state.push(0, header, np.array([keys, 0], np.uint32), np.arange(keys), gradients) is Status.OK


def refusing(refuses: Callable[[], bool]) -> Callable[[Eviction, Sweep], int]:
    """Returns a sweep that lacks memory while `refuses` says so."""
    sweep = Eviction.sweep

    def attempt(eviction: Eviction, due: Sweep) -> int:
        if refuses():
            raise MemoryError("refused")
        return sweep(eviction, due)

    return attempt


def test_a_row_from_a_server_with_a_later_batch_is_no_less_frequent_for_that() -> None:
    rule = _Rule(EvictionSpec(max_rows=2 * BUCKETS))
    marks = np.array([(1, 1, 5), (2, 1, 6), (3, 4, 11)])
    assert rule.leaving(np.array([0]), np.array([3]), marks, 10).tolist() == [1]


def test_rows_for_whose_eviction_there_was_no_memory_leave_without_another_push(
    state: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, swept, pushes_sweep = [True], threading.Event(), Eviction.sweep
    sweep = refusing(lambda: failures != [] and failures.pop())

    def of_thread(eviction: Eviction, due: Sweep) -> int:
        if threading.current_thread().name != "evict":  # the pushes sweep as well, the thread alone after the last
            return pushes_sweep(eviction, due)
        if count := sweep(eviction, due):
            swept.set()
        return count

    monkeypatch.setattr(Eviction, "sweep", of_thread)
    push(state, 0, ROWS)
    for batch in range(1, 9):
        push(state, batch)
    assert swept.wait(SECONDS)
    with state.lock:
        assert state.tables.rows()["C0"] < ROWS
    assert not failures


def test_rows_that_a_switch_gives_away_leave_although_it_lacked_memory_at_first(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_short = threading.Event()
    is_short.set()
    monkeypatch.setattr(BackgroundEviction, "_run", lambda *_: None)  # the switch comes before the thread
    state: ServerState = request.getfixturevalue("state")  # starts the thread
    monkeypatch.setattr(Eviction, "sweep", refusing(is_short.is_set))
    push(state, 0, ROWS)
    is_short.clear()
    for batch in range(1, 9):
        push(state, batch)
    is_short.set()
    state.prepare(2, 1, table_that_owns(HALF, 2), 0)
    state.hold(1, 1, 1, SECONDS)
    state.settle(1, 1, [], SECONDS, 0)
    with pytest.raises(MemoryError):
        state.switch(1, 1, 2, AppliedBatches())
    is_short.clear()
    state.switch(1, 1, 2, AppliedBatches())
    assert state.core.known == (1, 2)
    await_removal(state.tables, HALF)
