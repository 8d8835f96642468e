"""Which pushes wait for the other servers, and what a server says of those that keep it waiting."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry
from tests.trainer.server.protection.conftest import Servers, await_refusal, group_of

from emberscale_api import metrics
from emberscale_api.routing import ParityTrouble
from emberscale_api.wire import Status
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.parity_group import _SLOW_SECONDS
from emberscale_trainer.stream import StreamSender
from emberscale_trainer.table import DeltaLog
from emberscale_trainer.transport import ConnectionLostError
from eventually import unwrap
from moves import SECONDS
from waiting import wait_at


class SetClock:
    """Stands in for the module `time`: it is `now` until the test says otherwise."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_push_is_answered_only_when_all_other_servers_have_its_deltas(
    make_servers: Callable[[int], Servers], push_waits: threading.Event
) -> None:
    servers = make_servers(3)
    servers.protect()
    group = servers.serving[2].mover.protection.group
    assert group is not None
    with ThreadPoolExecutor(1, "pushes") as threads:
        with group.changed:  # as if the holder were slow
            pushing = threads.submit(servers.push, servers.batch(), 0)
            assert push_waits.wait(SECONDS)
            assert not pushing.done()
            assert servers.serving[0].state.totals.pushes == 1
        assert pushing.result(SECONDS) == [Status.OK]


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


def test_a_push_to_a_group_that_has_parted_is_told_of(make_servers: Callable[[int], Servers]) -> None:
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    assert all(server.mover.protection.trouble is None for server in servers.serving)
    group_of(servers.serving[2]).core.holding.lose(1)  # told by a master whose successor does not know of the loss
    with ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(servers.push, servers.batch(), 1)
        await_refusal(servers.serving[1], 2)
        trouble = unwrap(servers.serving[1].mover.protection.trouble)
        assert (trouble.version, trouble.broken) == (1, True)
        assert trouble.message.startswith("ps-2 takes no more of its changes: the receiver refuses the stream")
        assert not pushing.done()
        servers.serving[1].state.assign(Assignment(2, 2, ""))  # the master then rolls back
        assert pushing.result(SECONDS) == [Status.REFRESH], "the push is gone with the rows"
    assert servers.serving[1].mover.protection.trouble is None


@pytest.mark.parametrize("is_rebuilt", [True, False], ids=["rebuilt", "rolled back"])
def test_a_push_is_answered_as_soon_as_it_waits_for_nobody_any_more(
    make_servers: Callable[[int], Servers],
    monkeypatch: pytest.MonkeyPatch,
    push_waits: threading.Event,
    is_rebuilt: bool,
) -> None:
    monkeypatch.setattr("emberscale_trainer.server.parity_group._WAIT_SECONDS", 2 * SECONDS)
    servers = make_servers(2)
    servers.protect()
    servers.push(servers.batch())
    holder = group_of(servers.serving[1])
    with ThreadPoolExecutor(1, "pushes") as threads, holder.changed:  # as if the holder was stopped
        pushing = threads.submit(servers.push, servers.batch(), 0)
        assert push_waits.wait(SECONDS)
        if is_rebuilt:
            servers.rebuild(*servers.successors(1), 2)
        else:
            servers.serving[0].state.assign(Assignment(2, 2, ""))
        assert pushing.result(SECONDS) == [Status.OK if is_rebuilt else Status.REFRESH]


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
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch, push_waits: threading.Event
) -> None:
    clock = SetClock()
    monkeypatch.setattr("emberscale_trainer.stream.sender.time", clock)
    servers = make_servers(3)
    servers.protect()
    protection = servers.serving[0].mover.protection
    with ThreadPoolExecutor(1, "pushes") as threads:
        with group_of(servers.serving[2]).changed:  # as if the holder was stopped
            pushing = threads.submit(servers.push, servers.batch(), 0)
            assert push_waits.wait(SECONDS)
            group_of(servers.serving[0])._senders[1].flush(SECONDS)
            assert protection.trouble is None
            for seconds in (_SLOW_SECONDS, _SLOW_SECONDS + 1):
                clock.now = seconds
                said = "ps-2 does not acknowledge its changes"
                assert protection.trouble == ParityTrouble(servers.table.version, said, seconds)
        assert pushing.result(SECONDS) == [Status.OK]
    assert protection.trouble is None


def test_a_server_that_no_longer_reaches_another_says_so_before_a_push_waits(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    monkeypatch.setattr("emberscale_trainer.stream.sender.time", clock)
    servers = make_servers(3)
    servers.protect()
    protection, other = servers.serving[0].mover.protection, servers.serving[2]
    sender = group_of(servers.serving[0])._senders[2]
    sender.flush(SECONDS)
    with monkeypatch.context() as patched:
        patched.setattr(other.mover.protection, "accept", refuse_connections)
        clock.now = began = 1000.0  # nobody has waited for acknowledgements for long
        unwrap(sender._connection).hang_up()
        wait_at(sender._changed, lambda: sender._connection is None)
        assert protection.trouble is None
        for clock.now in (began + _SLOW_SECONDS, began + 1000 * _SLOW_SECONDS):
            said = "it no longer reaches ps-2, and both take part in the rebuild of a lost server"
            assert protection.trouble == ParityTrouble(servers.table.version, said), "the job goes on"
    wait_at(sender._changed, lambda: sender._connection is not None)
    assert protection.trouble is None


def refuse_connections(stream: int, generation: int) -> NoReturn:
    raise ConnectionLostError("out of reach")


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
    assert group_of(servers.serving[1]).lag_items == 1, "nothing piles up"
    group_of(servers.serving[1])._senders[0].flush(SECONDS)
    trouble = unwrap(protection.trouble)
    assert trouble.message == "it has yet to reach ps-2, and trains on without parity"
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


def test_a_group_that_cannot_go_on_says_so(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(log: DeltaLog, most_bytes: int) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(DeltaLog, "fill", defect)
    before = {*threading.enumerate()}
    servers = make_servers(2)
    for server in servers.serving:
        server.mover.protection.form(servers.table, server.index)
    group = group_of(servers.serving[0])
    wait_at(group.changed, lambda: group.trouble)
    trouble = unwrap(servers.serving[0].mover.protection.trouble)
    assert trouble.broken
    assert "KeyError('a defect')" in trouble.message
    for one in {*threading.enumerate()} - before:
        if one.name == "parity":  # its error must not come in a later test
            one.join(SECONDS)


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
