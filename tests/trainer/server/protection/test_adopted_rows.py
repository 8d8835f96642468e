"""Servers that are left adopt the rows of lost ones to the bit, also where only some had applied a batch."""

import math
from collections.abc import Callable
from itertools import combinations

import pytest
from tests.trainer.server.protection.conftest import Servers, await_fill, await_protection, ranges_of

from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server import parity_group
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.stream import Item, ItemKind, StreamSender
from emberscale_trainer.table import keys_of
from moves import SECONDS, TABLES, Batch, await_removal
from snapshots import all_rows
from waiting import noted_call


@pytest.mark.parametrize("count", [4, 7])
def test_survivors_have_the_rows_of_a_lost_server_to_the_bit(make_servers: Callable[..., Servers], count: int) -> None:
    servers = make_servers(count)
    servers.push(servers.batch())  # before there is parity
    servers.protect()
    for lost in [one for one in (1, 5, 4, 0, 6, 3) if one < count]:
        for _ in range(10):
            assert set(servers.push(servers.batch())) == {Status.OK}
        rest = servers.adopt(lost)
        assert ranges_of(rest[lost]) == ranges_of(servers.applied[lost])
        servers.check()
    assert servers.push(servers.batch()) == [Status.OK], "one server has all rows"
    servers.check()


@pytest.mark.parametrize("count", [3, 4, 7])
def test_survivors_have_the_rows_of_two_lost_servers_to_the_bit(
    make_servers: Callable[..., Servers], count: int
) -> None:
    for pair in combinations(range(count), 2):
        servers = make_servers(count, parity=2)
        servers.protect()
        for _ in range(5):
            servers.push(servers.batch())
        servers.adopt(*pair)
        servers.check()
        assert set(servers.push(servers.batch())) == {Status.OK}
        servers.check()
        servers.close()


@pytest.mark.parametrize("lost", [(1,), (1, 2)])
def test_successors_get_rows_that_the_others_failed_to_adopt(
    make_servers: Callable[..., Servers], lost: tuple[int, ...]
) -> None:
    servers = make_servers(4, parity=2)
    servers.protect()
    for _ in range(3):
        servers.push(servers.batch())
    servers.copy_to_survivors(2, *lost)
    for server in servers.left:
        server.mover.abandon(2)
        await_removal(servers.stores[server.index], Ownership.of(servers.table, server.index))
    servers.check()
    servers.gone.clear()
    joined, table = servers.successors(*lost)
    rebuilt = servers.rebuild(joined, table, 3)
    servers.switch(joined, table, 3, rebuilt[0])
    servers.check()
    assert set(servers.push(servers.batch())) == {Status.OK}
    servers.check()


def test_rows_that_an_undone_move_has_brought_are_removed_without_the_lost_server_and_then_adopted(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gave its rows away as it died, so the others remove those that they adopt next."""
    monkeypatch.setattr(parity_group, "_REMOVED_BYTES", 256)  # a removal soon waits for the holders of parity
    monkeypatch.setattr(parity_group, "_WAIT_SECONDS", 0.1)
    waits = noted_call(monkeypatch, StreamSender, "reach", thread="retire")
    servers = make_servers(3)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    table = servers.without(1)
    left = [servers.serving[0], servers.serving[2]]
    for server in left:
        gained = server.state.prepare(1, servers.table.version, table, server.index).gained
        for number in range(TABLES):
            rows = all_rows(servers.twins[1], number)
            server.state.receive(1, Item(ItemKind.ROWS, number, rows[gained.among(keys_of(rows), False)]))
    with servers.serving[1].state.lock:
        servers.serving[1].state.protect_by(None)  # the process ends
    for server in left:
        server.state.abandon(1)
    assert waits.wait(SECONDS)
    servers.adopt(1)
    servers.check()


def test_rows_that_a_server_rebuilds_for_itself_count(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(2)
    servers.protect()
    servers.push(servers.batch())
    servers.adopt(1)
    assert servers.adopted_bytes > 0


def torn(servers: Servers, lag: LagBound | None = None) -> tuple[Batch, Batch]:
    """ps-1 is lost after it alone has applied one batch, and ps-0 alone another; ps-0 and ps-2 adopt its rows.

    From then on, parity may lag.
    """
    servers.protect()
    servers.push(servers.batch())
    ahead, behind = servers.batch(), servers.batch()
    assert servers.push(ahead, 1) == [Status.OK]
    assert servers.push(behind, 0) == [Status.OK]
    before = servers.table
    servers.lag = lag
    servers.adopt(1)
    servers.check()
    adopted = Ownership.of(before, 1).within(Ownership.of(servers.table, 0))
    assert adopted
    return ahead, behind


def push(servers: Servers, batch: Batch, index: int, lacking: Ownership) -> Status:
    """Pushes a batch to one server, and to its twin the part that the server lacks."""
    header = Header(
        Kind.PUSH, generation=1, version=servers.table.version, batch=batch.number, token=1, tables=TABLES + 1
    )
    status = servers.serving[index].state.push(0, header, *batch.part(Ownership.of(servers.table, index)))
    if status is Status.OK:
        servers.twins[index].push(*batch.part(lacking))
    return status


def test_a_torn_batch_is_applied_to_the_rows_that_lack_it(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(3)
    first = servers.table
    ahead, behind = torn(servers)
    for index in (0, 2):
        own, all_owned = Ownership.of(first, index), Ownership.of(servers.table, index)
        assert push(servers, ahead, index, own) is Status.OK, "the adopted rows have it"
        servers.check()
        assert push(servers, ahead, index, own) is Status.REPEATED
        lacking = all_owned.without(own) if index == 0 else all_owned
        assert push(servers, behind, index, lacking) is Status.OK
        servers.check()
        assert push(servers, behind, index, lacking) is Status.REPEATED
    assert set(servers.push(servers.batch())) == {Status.OK}
    servers.check()


def test_no_barrier_sees_rows_with_different_batches(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(3)
    first = servers.table
    ahead, behind = torn(servers)
    state, version = servers.serving[0].state, servers.table.version
    protection, own = servers.serving[0].mover.protection, Ownership.of(first, 0)
    assert protection.version == 0, "nobody could tell which rows have which batches"
    push(servers, behind, 0, Ownership.of(servers.table, 0).without(own))
    with pytest.raises(NotHeldError, match="some rows lack 1 batch that others have, since they were adopted here"):
        state.hold(1, version, 9, 10.0)
    push(servers, ahead, 0, own)
    assert [*state.hold(1, version, 9, 10.0).ranges(0)] == [(0, 3)]
    await_protection(servers.serving[0])
    assert protection.version == version


def test_rows_are_protected_only_once_others_know_that_a_torn_batch_is_complete(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_group, "_GATHER_SECONDS", math.inf)
    servers = make_servers(3)
    first = servers.table
    ahead, behind = torn(servers, lag=LagBound(item_pushes=64))
    for index in (0, 2):
        await_fill(servers.serving[index])
        own, all_owned = Ownership.of(first, index), Ownership.of(servers.table, index)
        push(servers, ahead, index, own)
        push(servers, behind, index, all_owned.without(own) if index == 0 else all_owned)
    for index in (0, 2):
        await_protection(servers.serving[index])
        assert servers.serving[index].mover.protection.version == servers.table.version
    rest = servers.adopt(0)
    assert ranges_of(rest[0]) == ((0, 3),), "its rows have all three, and would get one twice"
    servers.check()


def test_an_adopter_that_is_lost_later_is_adopted_itself(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(4)
    servers.protect()
    servers.push(servers.batch())
    half = servers.batch()
    first = servers.table
    assert servers.push(half, 0) == [Status.OK]
    servers.adopt(1)
    for index in (0, 2, 3):
        own, all_owned = Ownership.of(first, index), Ownership.of(servers.table, index)
        assert push(servers, half, index, all_owned.without(own) if index == 0 else all_owned) is Status.OK
        servers.applied[index].record(0, half.number)
    await_protection(servers.serving[0])  # its rows did not have the same batches before
    rest = servers.adopt(0)
    assert ranges_of(rest[0]) == ((0, 2),)
    servers.check()
