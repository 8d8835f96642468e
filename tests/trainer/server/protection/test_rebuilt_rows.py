"""The rows of servers lost at any moment are rebuilt from parity to the bit."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from tests.trainer.server.protection.conftest import Servers, group_of, ranges_of, rows_of, tables, withdrawing_of

from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server import withdrawing
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.eviction import BackgroundEviction
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.server.withdrawing import Withdrawing
from emberscale_trainer.stream import Item, ItemKind
from emberscale_trainer.table import Reader
from eventually import eventually
from moves import KEYS, SECONDS, TABLES, await_removal, rows_in, table_of
from snapshots import all_rows
from waiting import wait_at


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_a_lost_servers_rows_are_rebuilt_to_the_bit(make_servers: Callable[[int], Servers], count: int) -> None:
    servers = make_servers(count)
    for _ in range(10):
        servers.push(servers.batch())  # before there is parity
    servers.protect()
    for lost in (0, count - 1, count // 2):
        for _ in range(10):
            assert set(servers.push(servers.batch())) == {Status.OK}
        rest = servers.replace(lost)
        assert ranges_of(rest[lost]) == ranges_of(servers.applied[lost])
        servers.check()
    servers.push(servers.batch())
    servers.check()


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_any_two_servers_lost_at_once_are_rebuilt_to_the_bit(make_servers: Callable[..., Servers], count: int) -> None:
    servers = make_servers(count, parity=2)
    for _ in range(10):
        servers.push(servers.batch())  # before there is parity
    servers.protect()
    for pair in combinations(range(count), 2):
        for _ in range(3):
            assert set(servers.push(servers.batch())) == {Status.OK}
        rest = servers.replace(*pair)
        assert {one: ranges_of(rest[one]) for one in pair} == {one: ranges_of(servers.applied[one]) for one in pair}
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
    assert (ranges_of(rest[1]), ranges_of(rest[2])) == (((0, 2),), ((0, 1), (2, 3)))
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
            before = holder.core.holding
            wait_at(holder.changed, lambda: before.received(1) == group.core.holding.received(1) + 1)
            group.core.holding.lose(1)
        rebuilt = servers.rebuild(joined, table, 2)
        lost = servers.serving[1]
        assert not pushing.done(), "a push whose deltas are not everywhere was answered"
        lost.state.protect_by(None)  # the process ends
        pushing.result(SECONDS)
    assert [ranges_of(one[1]) for one in rebuilt] == [((0, 1),), ((0, 1),)]
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
    snapshot = other.readers.snapshot(Reader.FLASH, threading.RLock())
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


def test_what_changes_without_a_push_is_sent_too(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    server, store = servers.serving[1], servers.stores[1]
    holder = group_of(servers.serving[0])
    sent = holder.core.holding.received(1)
    with server.state.lock:
        for number in range(TABLES):
            store.retire(number, np.arange(KEYS))
            servers.twins[1].retire(number, np.arange(KEYS))
    wait_at(holder.changed, lambda: holder.core.holding.received(1) > sent)
    group_of(server).await_holders()
    assert group_of(server).lag_items == 0
    servers.replace(1)
    servers.check()


@pytest.mark.parametrize("on_demand", [False], indirect=True)
@pytest.mark.parametrize("lost", [(1,), (1, 2)])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_rows_that_were_due_to_leave_lost_servers_leave_their_successors(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], *, is_adopted: bool
) -> None:
    """The servers are lost after a batch, and before they sweep what it has made due."""
    monkeypatch.setattr(BackgroundEviction, "_run", lambda *_: None)
    servers = make_servers(4, parity=2, ttl_batches=8)
    servers.protect()
    for _ in range(9):  # the rows of the first are due after the last
        servers.push(servers.batch())
    before, gone = servers.table, [(servers.serving[index], servers.stores[index]) for index in lost]
    servers.adopt(*lost) if is_adopted else servers.replace(*lost)
    for server in servers.left:
        with server.state.lock:
            server.state._served.eviction.finish()
    for server, store in gone:
        rows, owned = sum(store.rows().values()), Ownership.of(before, server.index)
        with server.state.lock:
            server.state._served.eviction.finish()
        assert 0 < sum(store.rows().values()) < rows
        for number, expected in enumerate(rows_of(store)):
            found = [one for left in servers.left for one in rows_of(servers.stores[left.index])[number].items()]
            mine = owned.among(np.array([key for key, _ in found], np.int64), number == TABLES)
            assert {key: row for (key, row), is_mine in zip(found, mine, strict=True) if is_mine} == expected


@pytest.mark.parametrize("on_demand", [False], indirect=True)
def test_a_server_counts_what_it_takes_out_of_the_parity(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1)
    servers.rebuild(joined, table, 2)
    assert servers.serving[0].mover.copy(2, SECONDS).rounds == withdrawing_of(servers.serving[0]).pieces > 1


@pytest.mark.parametrize("on_demand", [False], indirect=True)
def test_rows_leave_the_parity_only_a_few_pieces_ahead_of_the_holders(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw, ahead = Group.withdraw, list[int]()

    def noting(group: Group, kind: ItemKind = ItemKind.WITHDRAWAL, what: Sequence[int] = ()) -> None:
        withdraw(group, kind, what)
        ahead.append(group.lag_items)

    monkeypatch.setattr(Group, "withdraw", noting)
    monkeypatch.setattr(withdrawing, "_WITHDRAW_BYTES", 512)
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1)
    first, holder = group_of(servers.serving[0]), group_of(servers.serving[2])
    with ThreadPoolExecutor(1) as thread:
        with holder.changed:  # it takes nothing meanwhile
            rebuilding = thread.submit(servers.rebuild, joined, table, 2)
            eventually(lambda: first.lag_items == withdrawing._WITHDRAW_AHEAD + 1)
        rebuilt = rebuilding.result()
    assert max(ahead) == withdrawing._WITHDRAW_AHEAD + 1 < len(ahead)
    servers.switch(joined, table, 2, rebuilt[0])
    servers.check()


def test_a_server_counts_what_it_sends_to_other_holders(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    send_halves, withdrawn = Withdrawing._send_halves, dict[int, int]()

    def noting(withdrawing: Withdrawing) -> None:
        withdrawn[withdrawing.group.me] = withdrawing.pieces
        send_halves(withdrawing)

    monkeypatch.setattr(Withdrawing, "_send_halves", noting)
    servers = make_servers(4, parity=2)
    servers.protect()
    servers.push(servers.batch())
    joined, table = servers.successors(1, 2)
    servers.rebuild(joined, table, 2)
    last = withdrawing_of(servers.serving[3])
    group = last.group
    halves = sum(len([*group.blocks.halves(frozenset({1, 2}), number)]) for number in range(TABLES + 1))
    assert last.pieces == withdrawn[3] + halves > withdrawn[3]
