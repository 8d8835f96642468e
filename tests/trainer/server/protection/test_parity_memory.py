"""Parity where memory runs out, and the memory that parity gives back."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.trainer.server.protection.conftest import (
    Servers,
    await_protection,
    group_of,
    is_formed,
    ranges_of,
    tables,
)

from emberscale_api.wire import Status
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.withdrawing import Withdrawing
from emberscale_trainer.table import DeltaLog, TableStore
from eventually import unwrap
from moves import EVERYTHING, KEYS, SECONDS, TABLES, Batch, table_of
from waiting import Freed


def test_rows_for_which_there_is_no_memory_are_protected_later(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, lacking, refused = DeltaLog.fill, threading.Event(), threading.Semaphore(0)

    def no_memory(log: DeltaLog, most_bytes: int) -> None:
        if lacking.is_set():
            if log is group_of(servers.serving[0]).log:
                refused.release()
            raise MemoryError("cannot allocate")
        fill(log, most_bytes)

    for pause in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(f"emberscale_trainer.server.parity_group.{pause}", 0.05)
    monkeypatch.setattr(DeltaLog, "fill", no_memory)
    servers = make_servers(2)
    servers.push(servers.batch())
    lacking.set()
    for server in servers.serving:
        server.mover.protection.form(servers.table, server.index)
    protection = servers.serving[0].mover.protection
    for _ in range(2):  # at the second time, it has told of the first
        assert refused.acquire(timeout=SECONDS)
    trouble = unwrap(protection.trouble)
    assert (trouble.broken, protection.version) == (False, 0)
    assert trouble.message == "it has no memory to send its rows to their parity servers, and tries again"
    assert servers.push(servers.batch()) == [Status.OK] * 2
    lacking.clear()
    await_protection(servers.serving[0])
    assert protection.version == 1
    assert protection.trouble is None
    servers.protect()
    servers.replace(1)
    servers.check()


def test_changes_for_which_there_is_no_memory_are_sent_to_both_holders_later(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make_servers(4, parity=2)
    servers.protect()
    servers.push(servers.batch())
    joined, failed = np.concatenate, threading.Event()

    def no_memory_once(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "parity" and not failed.is_set():
            failed.set()
            raise MemoryError("cannot allocate")
        return joined(*arguments, **options)

    monkeypatch.setattr(np, "concatenate", no_memory_once)
    server, store = servers.serving[2], servers.stores[2]
    with server.state.lock:  # rows of two tables with a common holder
        for number in range(TABLES):
            store.retire(number, np.arange(KEYS))
            servers.twins[2].retire(number, np.arange(KEYS))
    assert failed.wait(SECONDS)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(servers.push, servers.batch()).result(SECONDS) == [Status.OK] * 4
    servers.replace(2, 3)
    servers.check()


def test_a_rebuild_that_fails_once_rows_have_left_the_parity_is_done_again(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, lost = make_servers(4, parity=2), frozenset({1, 2})
    servers.protect()
    servers.push(servers.batch())
    one, other = (Withdrawing(group_of(servers.serving[index])) for index in (0, 3))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.decode, lost)
        with monkeypatch.context() as patched:
            patched.setattr(one.group.blocks, "halves", no_memory)
            with pytest.raises(MemoryError):
                one.decode(lost)
        again, all_the_time = one.decode(lost), waiting.result(SECONDS)
    assert {member: ranges_of(again[member]) for member in lost} == {1: ((0, 1),), 2: ((0, 1),)}
    assert {member: ranges_of(all_the_time[member]) for member in lost} == {1: ((0, 1),), 2: ((0, 1),)}


def test_a_server_is_not_rebuilt_once_a_push_has_sent_the_withdrawal_that_failed(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have left the parity with the changes of the push, so that rebuilt rows would be wrong."""
    servers = make_servers(4, parity=2)
    servers.protect()
    servers.push(servers.batch())
    with monkeypatch.context() as patched:
        patched.setattr(DeltaLog, "take", no_memory)
        with pytest.raises(MemoryError):
            Withdrawing(group_of(servers.serving[0])).decode(frozenset({3}))
    assert servers.push(servers.batch(), 0) == [Status.OK]
    with pytest.raises(NotHeldError, match="begun to take their rows out"):
        group_of(servers.serving[1]).core.lose(frozenset({0, 3}))


def no_memory(*_: object) -> None:
    raise MemoryError("cannot allocate")


def test_deltas_that_could_not_be_taken_are_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> NDArray[np.uint8]:
        raise MemoryError("cannot allocate")

    store = tables()
    log = store.log_deltas(2, lambda _, segment: segment % 2)
    while not log.is_whole:
        log.fill(1 << 20)
    part = Batch(np.random.default_rng(0), 0, rows=2000).part(EVERYTHING)
    for _ in range(8):  # more than one chunk of the log
        store.push(*part)
    pending = log.pending_bytes
    assert pending > 1 << 20
    with monkeypatch.context() as patched:
        patched.setattr(np, "concatenate", fails)
        with pytest.raises(MemoryError):
            log.take([(0, 1)])
    assert sum(map(len, log.take([(0, 1)]))) == pending
    assert log.pending_bytes == 0


def test_a_new_assignment_ends_protection(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    assert servers.serving[0].mover.protection.version > 0
    servers.serving[0].state.assign(Assignment(2, 2, ""))
    assert servers.serving[0].mover.protection.version == 0


def test_a_new_assignment_leaves_neither_rows_nor_parity_in_memory(make_servers: Callable[[int], Servers]) -> None:
    """The memory is free while the next rows are loaded, though the others may still be connected."""
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    servers.replace(2)
    server = servers.serving[0]
    rows = Freed(segment for slots in server.state.tables.slots for segment in slots.segments)
    parity = Freed([group_of(server)])
    servers.stores.clear()
    server.state.assign(Assignment(2, 5, ""))
    server.mover.stop()
    assert parity.wait()
    assert rows.wait()


def test_no_parity_stays_of_a_group_from_which_rows_were_rebuilt(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    before = Freed(group_of(server) for server in servers.serving)
    lost = servers.serving[2]
    servers.push(servers.batch())
    servers.replace(2)
    lost.state.assign(Assignment(2, 5, ""))
    lost.mover.stop()
    assert before.wait()


def test_the_parity_of_a_group_goes_with_it_where_none_follows(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    server = servers.serving[0]
    group = Freed([group_of(server)])
    wanted = table_of(2, [one.address for one in servers.serving])
    server.state.prepare(2, 1, wanted, 0)
    server.state.hold(1, 1, 2, SECONDS)
    server.state.settle(1, 2, [], SECONDS, 0)
    server.state.hand_over(1, 2, 2, SECONDS)
    server.state.switch(1, 2, 2, AppliedBatches())
    server.mover.protection.form(wanted, 0, 0)
    assert group.wait()


def test_pushes_go_on_while_there_is_no_memory_for_the_next_group(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have left the group before: nobody would acknowledge what is sent to it."""
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    wanted, mine = table_of(2, [one.address for one in servers.serving]), servers.stores[0]
    for server in servers.serving:
        server.state.prepare(2, 1, wanted, server.index)
        server.state.hold(1, 1, 2, SECONDS)
        server.state.settle(1, 2, [], SECONDS, 0)
        server.state.hand_over(1, 2, 2, SECONDS)
        server.state.switch(1, 2, 2, AppliedBatches())
    servers.table, log_deltas = wanted, TableStore.log_deltas

    def without_memory(store: TableStore, *arguments: Any, **options: Any) -> DeltaLog:
        if store is mine:
            raise MemoryError("cannot allocate")
        return log_deltas(store, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TableStore, "log_deltas", without_memory)
        for server in servers.serving:
            server.mover.protect(wanted, server.index)
        assert [is_formed(server) for server in servers.serving] == [False, True, True]
        with ThreadPoolExecutor(1) as threads:
            pushing = threads.submit(servers.push, servers.batch())
            assert pushing.result(SECONDS) == [Status.OK] * 3
    servers.protect()
    servers.replace(1)
    servers.check()
