"""Parity between servers over real sockets: the rows of servers lost at any moment are rebuilt to the bit."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from emberscale_api import metrics
from emberscale_api.job import OptimizerType
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.stream import Item, ItemKind, StreamSender
from emberscale_trainer.table import DeltaLog, Reader, TableStore
from eventually import eventually, unwrap
from moves import (
    EVERYTHING,
    KEYS,
    SECONDS,
    TABLES,
    Batch,
    MovingServer,
    await_removal,
    rows_in,
    table_of,
    trained_tables,
)
from snapshots import all_rows, records_of


def tables() -> TableStore:
    return trained_tables(OptimizerType.ADAM)


def rows_of(store: TableStore) -> list[dict[int, bytes]]:
    return [records_of(store.snapshot(Reader.FLASH, threading.RLock()), number) for number in range(3)]


class Servers:
    """Servers that protect each other, a twin of each that is never lost, and the actions of a master."""

    def __init__(self, folder: Path, count: int, parity: int = 1) -> None:
        self._folder = folder
        self._parity = parity
        self.made = [MovingServer(index, folder) for index in range(count)]
        self.serving = list(self.made)
        self.table = table_of(1, [server.address for server in self.serving])
        self.stores = [tables() for _ in range(count)]
        self.twins = [tables() for _ in range(count)]
        self.applied = [AppliedBatches() for _ in range(count)]
        self.random = np.random.default_rng(0)
        self.batches = 0
        for server, store in zip(self.serving, self.stores, strict=True):
            server.assign(self.table, store)

    def protect(self) -> None:
        """Forms the group of every server; returns when all rows are protected."""
        for server in self.serving:
            server.mover.protection.form(self.table, server.index, self._parity)
        protections = [server.mover.protection for server in self.serving]
        eventually(lambda: all(one.version == self.table.version for one in protections))

    def batch(self) -> Batch:
        self.batches += 1
        return Batch(self.random, self.batches - 1)

    def push(self, batch: Batch, *indexes: int) -> list[Status]:
        """Pushes a batch to the given servers, by default to all; the twins apply what their servers do."""
        said = []
        for index in indexes or range(len(self.serving)):
            part = batch.part(Ownership.of(self.table, index))
            header = Header(
                Kind.PUSH,
                generation=self.table.generation,
                version=self.table.version,
                batch=batch.number,
                token=1,
                tables=TABLES + 1,
            )
            said.append(self.serving[index].state.push(0, header, *part))
            if said[-1] is Status.OK:
                self.twins[index].push(*part)
                self.applied[index].record(0, batch.number)
        return said

    def successors(self, *lost: int) -> tuple[list[MovingServer], RoutingTable]:
        """Starts processes in the places of lost ones; returns them and the table with them."""
        joined = [MovingServer(index, self._folder, f"ps-{index}-{len(self.made)}") for index in lost]
        self.made += joined
        addresses = [*self.table.servers]
        for one in joined:
            addresses[one.index] = PsAddress(one.index, one.incarnation, one.address, "")
        return joined, replace(self.table, version=self.table.version + 1, servers=tuple(addresses))

    def rebuild(
        self, joined: Sequence[MovingServer], table: RoutingTable, number: int
    ) -> list[Mapping[int, AppliedBatches]]:
        """Rebuilds lost servers; returns, for each survivor, the batches in the rows that it sent."""
        lost = tuple(one.index for one in joined)
        others = [server for server in self.serving if server.index not in lost]
        for server in others:
            server.state.prepare(number, self.table.version, table, server.index, lost=lost)
        for one in joined:
            assert one.state.prepare(number, 0, table, one.index, lost=lost).joins
            self.stores[one.index] = store = tables()
            one.state.stage(number, store)
            assert one.mover.copy(number, SECONDS).ready
        with ThreadPoolExecutor(len(others)) as threads:
            said = [*threads.map(lambda server: server.mover.copy(number, SECONDS), others)]
        assert all(one.ready for one in said)
        return [one.rebuilt for one in said]

    def switch(
        self, joined: Sequence[MovingServer], table: RoutingTable, number: int, rest: Mapping[int, AppliedBatches]
    ) -> None:
        """Switches to the table with the successors, and protects it."""
        for one in joined:
            self.serving[one.index] = one
        for server in self.serving:
            server.state.switch(table.generation, number, number, rest.get(server.index, AppliedBatches()))
        self.table = table
        self.protect()

    def replace(self, *lost: int) -> Mapping[int, AppliedBatches]:
        """Loses servers and rebuilds them; returns the batches in the rows of each."""
        joined, table = self.successors(*lost)
        rebuilt = self.rebuild(joined, table, table.version)
        for index in lost:
            assert len({_ranges(one[index]) for one in rebuilt}) == 1
        self.switch(joined, table, table.version, rebuilt[0])
        return rebuilt[0]

    def check(self) -> None:
        """Checks that all rows are those of the twins to the bit."""
        for store, twin in zip(self.stores, self.twins, strict=True):
            assert rows_of(store) == rows_of(twin)

    def close(self) -> None:
        for server in self.made:
            with server.state.lock:
                server.state.protect_by(None)  # ends its threads
            server.close()


def _ranges(applied: AppliedBatches) -> tuple[tuple[int, int], ...]:
    return tuple(applied.ranges(0))


@pytest.fixture
def make_servers(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(count: int, parity: int = 1) -> Servers:
        made.append(Servers(tmp_path, count, parity))
        return made[-1]

    yield make
    for servers in made:
        servers.close()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_lost_servers_rows_are_rebuilt_to_the_bit(make_servers: Callable[[int], Servers], count: int) -> None:
    servers = make_servers(count)
    for _ in range(10):
        servers.push(servers.batch())  # before there is parity
    servers.protect()
    for lost in (0, count - 1, count // 2):
        for _ in range(10):
            assert set(servers.push(servers.batch())) == {Status.OK}
        rest = servers.replace(lost)
        assert _ranges(rest[lost]) == _ranges(servers.applied[lost])
        servers.check()
    servers.push(servers.batch())
    servers.check()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_any_two_servers_lost_at_once_are_rebuilt_to_the_bit(make_servers: Callable[..., Servers], count: int) -> None:
    servers = make_servers(count, parity=2)
    for _ in range(10):
        servers.push(servers.batch())  # before there is parity
    servers.protect()
    for pair in combinations(range(count), 2):
        for _ in range(3):
            assert set(servers.push(servers.batch())) == {Status.OK}
        rest = servers.replace(*pair)
        assert {one: _ranges(rest[one]) for one in pair} == {one: _ranges(servers.applied[one]) for one in pair}
        servers.check()
    for lost in range(count):
        servers.push(servers.batch())
        servers.replace(lost)
        servers.check()


def test_two_lost_servers_may_have_applied_different_batches(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(4, parity=2)
    servers.protect()
    servers.push(servers.batch())
    half, other = servers.batch(), servers.batch()
    assert servers.push(half, 0, 1) == [Status.OK, Status.OK]
    assert servers.push(other, 0, 2) == [Status.OK, Status.OK]
    rest = servers.replace(1, 2)
    assert (_ranges(rest[1]), _ranges(rest[2])) == (((0, 2),), ((0, 1), (2, 3)))
    assert servers.push(half) == [Status.REPEATED, Status.REPEATED, Status.OK, Status.OK]
    assert servers.push(other) == [Status.REPEATED, Status.OK, Status.REPEATED, Status.OK]
    servers.check()


def test_successors_of_two_servers_that_are_lost_too_are_followed_by_others(
    make_servers: Callable[..., Servers],
) -> None:
    servers = make_servers(4, parity=2)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    first, table = servers.successors(1, 3)
    servers.rebuild(first, table, 2)
    second, table = servers.successors(1, 3)
    rebuilt = servers.rebuild(second, table, 3)
    servers.switch(second, table, 3, rebuilt[0])
    servers.check()


def test_a_batch_that_some_servers_lack_is_applied_where_it_is_lacking(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    half, other = servers.batch(), servers.batch()
    assert servers.push(half, 0, 1) == [Status.OK, Status.OK]
    assert servers.push(other, 0) == [Status.OK]
    servers.replace(1)
    assert servers.push(half) == [Status.REPEATED, Status.REPEATED, Status.OK]
    assert servers.push(other) == [Status.REPEATED, Status.OK, Status.OK]
    servers.check()


def test_a_push_is_answered_only_when_all_other_servers_have_its_deltas(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    group = servers.serving[2].mover.protection.group
    assert group is not None
    batch, answered = servers.batch(), threading.Event()

    def push() -> None:
        servers.push(batch, 0)
        answered.set()

    with group.changed:  # as if the holder were slow
        pushing = threading.Thread(target=push)
        pushing.start()
        eventually(lambda: servers.serving[0].state.totals.pushes == 1)
        assert not answered.wait(0.3)
    pushing.join(SECONDS)
    assert answered.is_set()


def test_what_a_server_sends_and_holds_can_be_scraped(make_servers: Callable[[int], Servers]) -> None:
    servers, registry = make_servers(2), CollectorRegistry()
    server = servers.serving[0]
    ServerMetrics(server.state, server.mover.protection, registry)
    assert registry.get_sample_value(metrics.PS_PARITY_LAG_ITEMS) is None
    servers.protect()
    before = registry.get_sample_value(metrics.PS_PARITY_DELTAS_TOTAL) or 0.0
    servers.push(servers.batch())
    assert registry.get_sample_value(metrics.PS_PARITY_DELTAS_TOTAL) == before + 1
    assert (registry.get_sample_value(metrics.PS_PARITY_SENT_BYTES_TOTAL) or 0.0) > 100 * 4
    assert registry.get_sample_value(metrics.PS_PARITY_LAG_ITEMS) == 0
    servers.push(servers.batch())  # tells the holders that the previous batch is stored
    assert (registry.get_sample_value(metrics.PS_PARITY_BYTES) or 0.0) > 0


def test_what_a_lost_server_did_not_get_to_all_others_is_undone(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    torn = servers.batch()
    group = servers.serving[2].mover.protection.group
    assert group is not None
    joined, table = servers.successors(1)
    with ThreadPoolExecutor(1) as threads:
        with group.changed:  # ps-1 is lost while only one of two holders has the deltas
            part = torn.part(Ownership.of(servers.table, 1))
            header = Header(Kind.PUSH, generation=1, version=1, batch=torn.number, token=1, tables=TABLES + 1)
            pushing = threads.submit(servers.serving[1].state.push, 0, header, *part)
            holder = servers.serving[0].mover.protection.group
            assert holder is not None
            eventually(lambda: servers.serving[1].state.totals.pushes == 2)
            before = holder.holding
            eventually(lambda: before.received(1) == group.holding.received(1) + 1)
            group.holding.lose(1)
        rebuilt = servers.rebuild(joined, table, 2)
        lost = servers.serving[1]
        assert not pushing.done(), "a push whose deltas are not everywhere was answered"
        lost.state.protect_by(None)  # the process ends
        pushing.result(SECONDS)
    assert [_ranges(one[1]) for one in rebuilt] == [((0, 1),), ((0, 1),)]
    servers.switch(joined, table, 2, rebuilt[0])
    servers.check()
    assert servers.push(torn) == [Status.OK] * 3
    servers.check()


def test_a_successor_that_is_lost_too_is_followed_by_another(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    first, table = servers.successors(1)
    servers.rebuild(first, table, 2)
    second, table = servers.successors(1)
    rebuilt = servers.rebuild(second, table, 3)
    servers.switch(second, table, 3, rebuilt[0])
    servers.check()


def test_a_server_whose_rows_are_not_protected_yet_cannot_be_rebuilt(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    joined, table = servers.successors(1)
    survivor = servers.serving[0]
    survivor.state.prepare(2, 1, table, 0, lost=(1,))
    with pytest.raises(NotHeldError, match="no parity is held here"):
        survivor.mover.copy(2, SECONDS)
    joined[0].close()


def test_retired_rows_leave_nothing_in_the_parity(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    keys = np.arange(0, KEYS, 2)
    with servers.serving[1].state.lock:
        for number in range(TABLES):
            servers.stores[1].retire(number, keys)
            servers.twins[1].retire(number, keys)
    servers.push(servers.batch())
    servers.replace(1)
    servers.check()


def test_rows_of_an_abandoned_move_leave_nothing_in_the_parity(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    server, owned = servers.serving[1], Ownership.of(servers.table, 1)
    gained = server.state.prepare(2, 1, table_of(2, ["", ""]), 1).gained
    other = tables()
    for _ in range(5):
        other.push(*servers.batch().part(gained))
    for number in range(TABLES):
        server.state.receive(2, Item(ItemKind.ROWS, number, all_rows(other, number)))
    servers.push(servers.batch())
    assert rows_in(servers.stores[1], gained.buckets)
    server.state.abandon(2)
    servers.push(servers.batch())
    await_removal(servers.stores[1], owned)
    servers.push(servers.batch())
    servers.replace(1)
    servers.check()


def test_rows_that_a_lost_server_did_not_own_are_not_rebuilt(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    other = tables()
    other.push(*servers.batch().part(Ownership.of(servers.table, 0)))
    snapshot = other.snapshot(Reader.FLASH, threading.RLock())
    with servers.serving[1].state.lock:  # as in an abandoned move, or before the rows of a finished one are retired
        for number in range(TABLES + 1):
            for records in snapshot.read(number):
                servers.stores[1].load(number, records)
    servers.push(servers.batch())
    servers.replace(1)
    servers.check()


def test_a_history_of_the_same_version_is_protected_anew(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    for _ in range(20):
        servers.push(servers.batch())
    servers.table = replace(servers.table, generation=2)  # from a master that lost its ledger
    servers.stores, servers.twins = [tables() for _ in range(2)], [tables() for _ in range(2)]
    for server, store in zip(servers.serving, servers.stores, strict=True):
        server.assign(servers.table, store)
    servers.protect()
    assert servers.push(servers.batch()) == [Status.OK, Status.OK]
    servers.replace(1)
    servers.check()


def group_of(server: MovingServer) -> Group:
    return unwrap(server.mover.protection.group)


def test_a_push_to_a_group_that_has_parted_is_told_of(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    assert all(server.mover.protection.trouble is None for server in servers.serving)
    group_of(servers.serving[2]).holding.lose(1)  # told by a master whose successor does not know of the loss
    with ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(servers.push, servers.batch(), 1)
        eventually(lambda: servers.serving[1].mover.protection.trouble is not None)
        trouble = unwrap(servers.serving[1].mover.protection.trouble)
        assert (trouble.version, trouble.broken) == (1, True)
        assert trouble.message.startswith("ps-2 takes no more of its changes: the receiver refuses the stream")
        assert not pushing.done()
        servers.serving[1].state.assign(Assignment(2, 2, ""))  # the master then rolls back
        assert pushing.result(SECONDS) == [Status.OK]
    assert servers.serving[1].mover.protection.trouble is None


@pytest.mark.parametrize("is_rebuilt", [True, False], ids=["rebuilt", "rolled back"])
def test_a_push_is_answered_as_soon_as_it_waits_for_nobody_any_more(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch, is_rebuilt: bool
) -> None:
    monkeypatch.setattr("emberscale_trainer.server.parity_group._WAIT_SECONDS", 2 * SECONDS)
    servers = make_servers(2)
    servers.protect()
    servers.push(servers.batch())
    with ThreadPoolExecutor(1) as threads, group_of(servers.serving[1]).changed:  # as if the holder was stopped
        pushing = threads.submit(servers.push, servers.batch(), 0)
        eventually(lambda: servers.serving[0].state.totals.pushes == 2)
        if is_rebuilt:
            servers.rebuild(*servers.successors(1), 2)
        else:
            servers.serving[0].state.assign(Assignment(2, 2, ""))
        assert pushing.result(SECONDS) == [Status.OK]


def test_a_server_that_took_another_for_lost_says_so(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    joined, table = servers.successors(1)
    servers.rebuild(joined, table, 2)
    trouble = unwrap(servers.serving[0].mover.protection.trouble)
    assert trouble.broken
    assert trouble.message.startswith("ps-1 was taken for lost")
    servers.switch(joined, table, 2, {})
    assert servers.serving[0].mover.protection.trouble is None


def test_a_holder_that_acknowledges_nothing_is_told_of(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale_trainer.server.parity_group._SLOW_SECONDS", 0.05)
    servers = make_servers(3)
    servers.protect()
    protection = servers.serving[0].mover.protection
    with ThreadPoolExecutor(1) as threads:
        with group_of(servers.serving[2]).changed:  # as if the holder was stopped
            pushing = threads.submit(servers.push, servers.batch(), 0)
            eventually(lambda: protection.trouble is not None)
            trouble = unwrap(protection.trouble)
            assert (trouble.broken, trouble.message) == (False, "ps-2 does not acknowledge its changes")
            eventually(lambda: unwrap(protection.trouble).seconds > trouble.seconds)
        assert pushing.result(SECONDS) == [Status.OK]
    assert protection.trouble is None


def test_servers_that_have_yet_to_reach_another_train_on_without_parity(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale_trainer.server.parity_group._SLOW_SECONDS", 0.0)
    servers = make_servers(3)
    for server in servers.serving[:2]:  # as if no other reached the third
        server.mover.protection.form(servers.table, server.index)
    protection = servers.serving[1].mover.protection
    for _ in range(5):
        assert servers.push(servers.batch()) == [Status.OK] * 3
    assert group_of(servers.serving[1]).lag == 1, "nothing piles up"
    said = "it has yet to reach ps-2, and trains on without parity"
    eventually(lambda: unwrap(protection.trouble).message == said)
    trouble = unwrap(protection.trouble)
    assert (trouble.seconds, trouble.broken, protection.version) == (0.0, False, 0)
    servers.protect()
    servers.push(servers.batch())
    servers.replace(1)
    servers.check()


def test_a_holder_does_not_wait_for_who_is_held_up_by_another(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make_servers(3)
    servers.protect()
    monkeypatch.setattr(StreamSender, "send_queued", lambda _: None)
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(servers.push, servers.batch()).result(SECONDS) == [Status.OK] * 3


def test_what_changes_without_a_push_is_sent_too(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    server, store = servers.serving[1], servers.stores[1]
    sent = group_of(server).lag, group_of(servers.serving[0]).holding.received(1)
    with server.state.lock:
        for number in range(TABLES):
            store.retire(number, np.arange(KEYS))
            servers.twins[1].retire(number, np.arange(KEYS))
    holding = group_of(servers.serving[0]).holding
    eventually(lambda: holding.received(1) > sent[1] and group_of(server).lag == 0)
    servers.replace(1)
    servers.check()


def test_rows_for_which_there_is_no_memory_are_protected_later(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, lacking = DeltaLog.fill, threading.Event()

    def no_memory(log: DeltaLog, most_bytes: int) -> None:
        if lacking.is_set():
            raise MemoryError("cannot allocate")
        fill(log, most_bytes)

    monkeypatch.setattr("emberscale_trainer.server.parity_group._LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(DeltaLog, "fill", no_memory)
    servers = make_servers(2)
    servers.push(servers.batch())
    lacking.set()
    for server in servers.serving:
        server.mover.protection.form(servers.table, server.index)
    protection = servers.serving[0].mover.protection
    eventually(lambda: protection.trouble is not None)
    trouble = unwrap(protection.trouble)
    assert (trouble.broken, protection.version) == (False, 0)
    assert trouble.message == "it has no memory to send its rows to their parity servers, and tries again"
    assert servers.push(servers.batch()) == [Status.OK] * 2
    lacking.clear()
    eventually(lambda: protection.version == 1)
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
    eventually(failed.is_set)
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
    one, other = group_of(servers.serving[0]), group_of(servers.serving[3])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.rebuild, lost)
        with monkeypatch.context() as patched:
            patched.setattr(one.blocks, "halves", no_memory)
            with pytest.raises(MemoryError):
                one.rebuild(lost)
        again, all_the_time = one.rebuild(lost), waiting.result(SECONDS)
    assert {member: _ranges(again[member]) for member in lost} == {1: ((0, 1),), 2: ((0, 1),)}
    assert {member: _ranges(all_the_time[member]) for member in lost} == {1: ((0, 1),), 2: ((0, 1),)}


def no_memory(*_: object) -> None:
    raise MemoryError("cannot allocate")


def test_a_group_that_cannot_go_on_says_so(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(log: DeltaLog, most_bytes: int) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(DeltaLog, "fill", defect)
    servers = make_servers(2)
    for server in servers.serving:
        server.mover.protection.form(servers.table, server.index)
    eventually(lambda: servers.serving[0].mover.protection.trouble is not None)
    trouble = unwrap(servers.serving[0].mover.protection.trouble)
    assert trouble.broken
    assert "KeyError('a defect')" in trouble.message


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


def test_what_is_pushed_while_a_lost_server_is_rebuilt_waits_for_nobody(
    make_servers: Callable[[int], Servers],
) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1)
    rebuilt = servers.rebuild(joined, table, 2)
    batch = servers.batch()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(servers.push, batch, 0, 2).result(SECONDS) == [Status.OK] * 2
    servers.switch(joined, table, 2, rebuilt[0])
    assert servers.push(batch) == [Status.REPEATED, Status.OK, Status.REPEATED]
    servers.check()


def test_a_server_counts_what_it_takes_out_of_the_parity(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1)
    servers.rebuild(joined, table, 2)
    assert servers.serving[0].mover.copy(2, SECONDS).rounds == group_of(servers.serving[0]).rebuild_pieces > 1


def test_a_server_counts_what_it_sends_to_other_holders(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    send_halves, withdrawn = Group._send_halves, dict[int, int]()

    def noting(group: Group) -> None:
        withdrawn[group.me] = group.rebuild_pieces
        send_halves(group)

    monkeypatch.setattr(Group, "_send_halves", noting)
    servers = make_servers(4, parity=2)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1, 2)
    servers.rebuild(joined, table, 2)
    group = group_of(servers.serving[3])
    halves = sum(len([*group.blocks.halves(frozenset({1, 2}), number)]) for number in range(TABLES + 1))
    assert group.rebuild_pieces == withdrawn[3] + halves > withdrawn[3]


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
    kept = [weakref.ref(segment) for slots in server.state.tables.slots for segment in slots.segments]
    group = weakref.ref(group_of(server))
    servers.stores.clear()
    server.state.assign(Assignment(2, 5, ""))
    server.mover.stop()
    eventually(lambda: group() is None and all(segment() is None for segment in kept))


def test_no_parity_stays_of_a_group_from_which_rows_were_rebuilt(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    before = [weakref.ref(group_of(server)) for server in servers.serving]
    lost = servers.serving[2]
    servers.push(servers.batch())
    servers.replace(2)
    lost.state.assign(Assignment(2, 5, ""))
    lost.mover.stop()
    eventually(lambda: all(group() is None for group in before))


def test_the_parity_of_a_group_goes_with_it_where_none_follows(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    server = servers.serving[0]
    group = weakref.ref(group_of(server))
    wanted = table_of(2, [one.address for one in servers.serving])
    server.state.prepare(2, 1, wanted, 0)
    server.state.hold(1, 1, 2, SECONDS)
    server.state.settle(1, 2, [], SECONDS, 0)
    server.state.hand_over(1, 2, 2, SECONDS)
    server.state.switch(1, 2, 2, AppliedBatches())
    server.mover.protection.form(wanted, 0, 0)
    eventually(lambda: group() is None)
