"""Pushes that are answered before other servers have their deltas, and what is left of them after a loss."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore, current_thread

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from tests.trainer.server.protection.conftest import Servers, await_refusal, group_of, ranges_of, tables

from emberscale_api import metrics
from emberscale_api.wire import Status
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.stream import Item, StreamSender
from emberscale_trainer.table import DeltaLog, TableStore
from moves import SECONDS, Batch, MovingServer
from waiting import noted_call

LAG = LagBound(pushes=4, nbytes=1 << 30, item_pushes=2, item_bytes=1 << 30)
NEVER = 1e6


def lagging(make_servers: Callable[..., Servers], count: int, lag: LagBound = LAG, parity: int = 1) -> Servers:
    servers = make_servers(count, parity, lag)
    servers.protect()
    return servers


def lags(servers: Servers) -> list[int]:
    """Returns the lag of each server in pushes, once the holders have all that is sent."""
    for server in servers.serving:
        group_of(server).await_holders()
    return [group_of(server).lag_pushes for server in servers.serving]


def pushes_pause(server: MovingServer) -> None:
    """Has a server send what has gathered, as after a pause in pushes."""
    group_of(server).send_what_is_due(time.monotonic() + NEVER)


def sent_items(servers: Servers, index: int) -> int:
    return servers.serving[index].mover.protection.totals.items


@pytest.fixture
def only_full_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pushes are sent before enough have gathered."""
    monkeypatch.setattr("emberscale_trainer.server.parity_group._GATHER_SECONDS", NEVER)


@pytest.mark.usefixtures("only_full_items")
def test_a_push_waits_only_while_more_pushes_than_the_bound_are_left_to_store(
    make_servers: Callable[..., Servers], push_waits: Event
) -> None:
    servers = lagging(make_servers, 3)
    group = group_of(servers.serving[0])
    with ThreadPoolExecutor(1, "pushes") as threads:
        with group_of(servers.serving[2]).changed:  # as if the holder was stopped
            for _ in range(4):
                assert threads.submit(servers.push, servers.batch(), 0).result(SECONDS) == [Status.OK]
            assert not push_waits.is_set()
            waiting = threads.submit(servers.push, servers.batch(), 0)
            assert push_waits.wait(SECONDS)
            assert not waiting.done()
            assert group.lag_pushes == 5
            assert group.lag_bytes > 0
        assert waiting.result(SECONDS) == [Status.OK]
    pushes_pause(servers.serving[0])
    assert lags(servers)[0] == group.lag_bytes == 0


def test_a_push_waits_while_more_bytes_than_the_bound_are_left_to_store(
    make_servers: Callable[..., Servers], push_waits: Event
) -> None:
    servers = lagging(make_servers, 3, LagBound(pushes=100, nbytes=1, item_pushes=1, item_bytes=1))
    with ThreadPoolExecutor(1, "pushes") as threads:
        with group_of(servers.serving[2]).changed:
            pushing = threads.submit(servers.push, servers.batch(), 0)
            assert push_waits.wait(SECONDS)
            assert not pushing.done()
        assert pushing.result(SECONDS) == [Status.OK]


@pytest.mark.parametrize("lag", [None, LAG], ids=["Sync", "Async"])
def test_no_push_is_remembered_longer_than_it_is_left_to_store(
    make_servers: Callable[..., Servers], lag: LagBound | None
) -> None:
    servers = make_servers(3, lag=lag)
    servers.protect()
    for _ in range(40):
        servers.push(servers.batch())
    assert len(group_of(servers.serving[0])._lag._sent) <= LAG.pushes


@pytest.mark.usefixtures("only_full_items")
def test_the_changes_of_several_pushes_are_one_item(make_servers: Callable[..., Servers]) -> None:
    servers = lagging(make_servers, 3)
    before = sent_items(servers, 0)
    for _ in range(6):
        servers.push(servers.batch())
    assert sent_items(servers, 0) == before + 3 * 2, "one item for two pushes, to each of two holders"
    servers.replace(0)
    servers.check()


@pytest.mark.usefixtures("only_full_items")
def test_what_has_gathered_is_sent_when_pushes_pause(make_servers: Callable[..., Servers]) -> None:
    servers = lagging(make_servers, 3, LagBound(item_pushes=64))
    servers.push(servers.batch())
    for server in servers.serving:
        group_of(server).send_what_is_due(time.monotonic())
    assert lags(servers) == [1, 1, 1]
    for server in servers.serving:
        pushes_pause(server)
    assert lags(servers) == [0, 0, 0]
    assert ranges_of(servers.replace(1)[1]) == ((0, 1),)
    servers.check()


@pytest.mark.usefixtures("only_full_items")
@pytest.mark.parametrize(("count", "parity", "lost"), [(2, 1, (0,)), (4, 1, (2,)), (4, 2, (0, 1))])
def test_a_lost_server_lacks_what_had_gathered_and_survivors_lack_nothing(
    make_servers: Callable[..., Servers], count: int, parity: int, lost: tuple[int, ...]
) -> None:
    servers = lagging(make_servers, count, LagBound(item_pushes=4), parity)
    batches = [servers.batch() for _ in range(7)]
    for batch in batches:
        assert set(servers.push(batch)) == {Status.OK}
    assert lags(servers) == [3] * count
    rest = servers.replace(*lost)
    for index in lost:
        assert ranges_of(rest[index]) == ((0, 4),)
        servers.twins[index] = replayed(servers, index, batches[:4])
    servers.check()
    for batch in batches[4:]:  # as of a worker that had not reported them
        said = servers.push(batch)
        assert said == [Status.OK if index in lost else Status.REPEATED for index in range(count)]
    servers.check()


def replayed(servers: Servers, index: int, batches: list[Batch]) -> TableStore:
    """Returns the rows of a server after these batches alone."""
    store = tables()
    for batch in batches:
        store.push(*batch.part(Ownership.of(servers.table, index)))
    return store


def test_a_server_that_was_taken_for_lost_answers_no_more_pushes_than_the_bound(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = lagging(make_servers, 3)
    group_of(servers.serving[2]).core.holding.lose(1)
    waits = noted_call(monkeypatch, group_of(servers.serving[1]).changed, "wait", thread="pushes")
    batches = [servers.batch() for _ in range(LAG.pushes + 1)]
    with ThreadPoolExecutor(1, "pushes") as threads:
        pushing = threads.submit(lambda: [servers.push(batch, 1) for batch in batches])
        await_refusal(servers.serving[1], 2)
        assert group_of(servers.serving[1]).trouble is not None
        assert waits.wait(SECONDS)
        assert not pushing.done()
        with servers.serving[1].state.lock:
            servers.serving[1].state.protect_by(None)  # as with another table
        assert pushing.result(SECONDS) == [[Status.OK]] * len(batches)


def test_rows_that_are_filled_in_meanwhile_come_with_the_pushes_in_them(make_servers: Callable[..., Servers]) -> None:
    servers = make_servers(3, lag=LAG)
    for _ in range(20):
        servers.push(servers.batch())
    with ThreadPoolExecutor(1) as threads:
        protecting = threads.submit(servers.protect)
        while not protecting.done():
            servers.push(servers.batch())
        protecting.result(SECONDS)
    for server in servers.serving:
        pushes_pause(server)
    assert lags(servers) == [0, 0, 0]
    assert ranges_of(servers.replace(2)[2]) == ((0, servers.batches),)
    servers.check()


def test_the_lag_can_be_scraped(make_servers: Callable[..., Servers]) -> None:
    servers, registry = lagging(make_servers, 3), CollectorRegistry()
    server = servers.serving[0]
    ServerMetrics(server.state, server.mover.protection, registry)
    with group_of(servers.serving[2]).changed:
        servers.push(servers.batch(), 0)
        assert registry.get_sample_value(metrics.PS_PARITY_LAG_PUSHES) == 1
        assert (registry.get_sample_value(metrics.PS_PARITY_LAG_BYTES) or 0.0) > 100 * 4
    pushes_pause(server)
    group_of(server).await_holders()
    assert registry.get_sample_value(metrics.PS_PARITY_LAG_PUSHES) == 0


@pytest.mark.usefixtures("only_full_items")
def test_pushes_wait_while_memory_is_too_short_to_send_what_has_gathered(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale_trainer.server.parity_group._FIRST_PAUSE", 0.01)
    servers = lagging(make_servers, 3)
    log, take, is_short = group_of(servers.serving[1]).log, DeltaLog.take, Event()
    refused = Semaphore(0)

    def taken(self: DeltaLog, receivers: list[list[int]]) -> list[NDArray[np.uint8]]:
        if self is log and is_short.is_set():
            if current_thread().name.startswith("pushes"):
                refused.release()
            raise MemoryError("there is no room for a copy")
        return take(self, receivers)

    monkeypatch.setattr(DeltaLog, "take", taken)
    is_short.set()
    for _ in range(LAG.pushes):
        servers.push(servers.batch())
    with ThreadPoolExecutor(1, "pushes") as threads:
        batch = servers.batch()
        waiting = threads.submit(servers.push, batch, 1)
        for _ in range(3):  # as part of the push, and then again and again
            assert refused.acquire(timeout=SECONDS)
        assert not waiting.done()
        is_short.clear()
        assert waiting.result(SECONDS) == [Status.OK]
    servers.push(batch, 0, 2)
    assert lags(servers) == [1, 0, 1]
    servers.replace(1)
    servers.check()


def test_a_server_that_cannot_send_what_it_has_taken_ends(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parity lacks changes from then on, and would be wrong, not merely late."""
    servers = lagging(make_servers, 3, LagBound(item_pushes=64))
    ended, put = Event(), StreamSender.put
    server = servers.serving[1]
    monkeypatch.setattr(server.state, "_fatal", lambda cause: ended.set())
    mine = group_of(server)._senders.values()

    def without_memory(self: StreamSender, item: Item, wait_seconds: float, *, now: bool = True) -> int:
        if self in mine:
            raise MemoryError("there is no room for an item")
        return put(self, item, wait_seconds, now=now)

    monkeypatch.setattr(StreamSender, "put", without_memory)
    servers.push(servers.batch())
    assert ended.wait(SECONDS)


@pytest.mark.usefixtures("only_full_items")
def test_pushes_count_as_lag_while_their_item_is_queued(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = lagging(make_servers, 3)
    group, put = group_of(servers.serving[0]), StreamSender.put
    seen: list[int] = []

    def watched(self: StreamSender, item: Item, wait_seconds: float, *, now: bool = True) -> int:
        if self in group._senders.values():
            seen.append(group.lag_pushes)
        return put(self, item, wait_seconds, now=now)

    monkeypatch.setattr(StreamSender, "put", watched)
    with group_of(servers.serving[2]).changed:
        for _ in range(2):
            servers.push(servers.batch(), 0)
    assert seen == [2, 2]
