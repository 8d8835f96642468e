"""Rows of one lost server that are served before they are rebuilt: those that are wanted come first."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.trainer.server.protection.conftest import Servers, group_of, is_formed

from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.parity import Holding, ParityBlocks
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server import mover, rebuild
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.moves import stream_of
from emberscale_trainer.server.withdrawing import Withdrawing
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamSender
from eventually import eventually, unwrap
from moves import SECONDS, TABLES, Batch, MovingServer, table_of
from snapshots import all_rows

pytestmark = pytest.mark.parametrize("on_demand", [True], indirect=True)


class Losing:
    """Three servers, of which ps-1 is lost and has a successor that serves; the rest follows once `go_on` is called."""

    def __init__(self, servers: Servers, may_go_on: threading.Event) -> None:
        self.servers = servers
        self._may_go_on = may_go_on
        servers.protect()
        for _ in range(5):
            servers.push(servers.batch())
        self.joined, self.table = servers.successors(1)
        self.rest = servers.rebuild(self.joined, self.table, 2)[0]

    @property
    def successor(self) -> MovingServer:
        return self.joined[0]

    @property
    def missing(self) -> int:
        found = self.successor.state.missing
        return 0 if found is None else found.count

    def switch(self) -> None:
        self.servers.begin_switch(self.joined, self.table, 2, self.rest)

    def go_on(self) -> None:
        self._may_go_on.set()

    def pull(self, batch: Batch, index: int = 1) -> NDArray[np.float32]:
        counts, keys, _ = batch.part(Ownership.of(self.servers.table, index))
        header = Header(Kind.PULL, generation=1, version=2, batch=batch.number, token=1, tables=TABLES + 1)
        status, values, _ = self.servers.serving[index].state.pull(
            0, header, counts, keys, lambda floats: np.zeros(floats, np.float32)
        )
        assert status is Status.OK
        return unwrap(values)

    def expected(self, batch: Batch) -> NDArray[np.float32]:
        counts, keys, _ = batch.part(Ownership.of(self.servers.table, 1))
        twin = self.servers.twins[1]
        values = np.zeros(twin.values_per_request(counts), np.float32)
        twin.pull(counts, keys, values)
        return values


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Rows that nobody wants stay in the parity until the event is set."""
    may_go_on = threading.Event()
    withdraw_next = Withdrawing.withdraw_next

    def waiting(self: Withdrawing) -> bool:
        return withdraw_next(self) if may_go_on.is_set() else False

    monkeypatch.setattr(Withdrawing, "withdraw_next", waiting)
    yield may_go_on
    may_go_on.set()


@pytest.fixture
def losing(make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch) -> Iterator[Losing]:
    with held_back(monkeypatch) as may_go_on:
        yield Losing(make_servers(3), may_go_on)


def test_rows_that_are_pulled_come_before_others(losing: Losing) -> None:
    losing.switch()
    before = losing.missing
    batch = losing.servers.batch()
    assert np.array_equal(losing.pull(batch), losing.expected(batch))
    assert 0 < losing.missing < before
    assert 0 < losing.successor.state.totals.wanted_rows <= before - losing.missing
    losing.go_on()
    losing.servers.protect()
    losing.servers.check()


def test_rows_that_can_be_decoded_as_a_rebuild_begins_to_wait_are_sent(
    losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rebuild has withdrawn its own rows and seen nothing to send: the other's withdrawal comes only now."""
    losing.switch()
    first = unwrap(losing.servers.serving[0].mover._rebuild)
    withdrawing, waits = unwrap(first._withdrawing), threading.Event()
    withdraw_next, wait_for = Withdrawing.withdraw_next, Withdrawing.wait_for

    def other_comes_later(self: Withdrawing) -> bool:
        return withdraw_next(self) if self is withdrawing or waits.is_set() else False

    def late(self: Withdrawing, *arguments: Any) -> None:
        if self is withdrawing and self.has_withdrawn and not waits.is_set():
            waits.set()
            eventually(self.has_only_lost_rows)
            first._sending_pace.rest(1.0)
        wait_for(self, *arguments)

    monkeypatch.setattr(Withdrawing, "withdraw_next", other_comes_later)
    monkeypatch.setattr(Withdrawing, "wait_for", late)
    eventually(lambda: not withdrawing.has_decodable())
    losing.go_on()
    eventually(lambda: not losing.missing)
    losing.servers.protect()
    losing.servers.check()


def test_a_group_of_two_rebuilds_pulled_rows_before_others(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows can be decoded at once there, and are neither copied nor sent at once."""
    with monkeypatch.context() as nothing_is_due:
        nothing_is_due.setattr(rebuild._Pace, "left", SECONDS)
        losing = Losing(make_servers(2), threading.Event())
        losing.switch()
        before = losing.missing
        batch = losing.servers.batch()
        assert np.array_equal(losing.pull(batch), losing.expected(batch))
        assert 0 < losing.missing < before
    unwrap(losing.servers.serving[0].mover._rebuild).go_on()
    losing.servers.protect()
    losing.servers.check()


def test_a_push_waits_for_its_rows_and_steps_them(losing: Losing) -> None:
    losing.switch()
    assert losing.servers.push(losing.servers.batch()) == [Status.OK] * 3
    assert losing.missing
    losing.go_on()
    losing.servers.protect()
    losing.servers.check()


@pytest.mark.parametrize("count", [2, 3])
def test_rows_and_sketches_are_right_to_the_bit_where_keys_are_admitted(
    make_servers: Callable[..., Servers], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The tables of sketches come before those that requests name."""
    servers = make_servers(count, min_count=2)
    servers.protect()
    for _ in range(20):
        servers.push(servers.batch())
    joined, table = servers.successors(1)
    with held_back(monkeypatch):
        servers.begin_switch(joined, table, 2, servers.rebuild(joined, table, 2)[0])
        for _ in range(5):
            servers.push(servers.batch())
    servers.protect()
    servers.check()


def test_no_barrier_and_no_move_begins_while_rows_are_missing(losing: Losing) -> None:
    losing.switch()
    state = losing.successor.state
    assert losing.missing
    with pytest.raises(NotHeldError, match="have yet to arrive"):
        state.hold(1, 2, 7, SECONDS)
    with pytest.raises(NotHeldError, match="have yet to arrive"):
        state.prepare(8, 2, table_of(3, [""] * 3), 1)
    losing.go_on()
    losing.servers.protect()
    state.hold(1, 2, 7, SECONDS)


def test_keys_are_right_after_an_attempt_without_memory(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder whose parity changes again only in part has the next attempt find the same keys."""
    servers = make_servers(3)
    servers.protect()
    for _ in range(5):
        servers.push(servers.batch())
    resume, failed = Holding.resume, threading.Event()

    def failing(self: Holding[NDArray[np.uint8]]) -> None:
        if failed.is_set():
            resume(self)
            return
        failed.set()
        raise MemoryError

    monkeypatch.setattr(Holding, "resume", failing)
    joined, table = servers.successors(1)
    with pytest.raises(NotHeldError, match="has failed here"):
        servers.rebuild(joined, table, 2)
    for server in servers.serving:
        server.mover.abandon(2)
    servers.push(servers.batch(), 0, 2)
    joined, table = servers.successors(1)
    servers.switch(joined, table, 3, servers.rebuild(joined, table, 3)[0])
    servers.check()


@pytest.mark.parametrize("began_on_demand", [False, True])
def test_a_group_gives_up_its_rows_in_one_way(make_servers: Callable[[int], Servers], *, began_on_demand: bool) -> None:
    """A second successor that does not know how to wait for rows, or the first one."""
    servers = make_servers(3)
    servers.protect()
    servers.push(servers.batch())
    servers._on_demand = began_on_demand
    servers.rebuild(*servers.successors(1), 2)
    for server in servers.serving:
        server.mover.abandon(2)
    servers._on_demand = not began_on_demand
    with pytest.raises(NotHeldError, match="in another way"):
        servers.rebuild(*servers.successors(1), 3)


def test_rows_may_arrive_before_their_server_has_switched(losing: Losing) -> None:
    losing.go_on()
    servers = losing.servers
    servers.serving[1], servers.table = losing.successor, losing.table
    for index in (0, 2):
        servers.switch_one(servers.serving[index], 2, losing.rest)
    arrived = losing.successor.state._arriving.staged
    eventually(lambda: sum(unwrap(arrived).rows().values()), "rows arrive")
    servers.switch_one(losing.successor, 2, losing.rest)
    servers.protect()
    servers.check()


def test_a_barrier_of_the_others_is_held(losing: Losing) -> None:
    losing.switch()
    losing.servers.serving[0].state.hold(1, 2, 7, SECONDS)
    losing.go_on()


def test_servers_protect_the_next_table_only_once_all_rows_are_there(losing: Losing) -> None:
    losing.switch()
    assert not any(is_formed(server) for server in losing.servers.serving)
    assert all(server.mover.trouble is None for server in losing.servers.serving)
    losing.go_on()
    losing.servers.protect()
    assert all(is_formed(server) for server in losing.servers.serving)


def test_a_server_that_no_longer_rebuilds_says_so(losing: Losing) -> None:
    losing.switch()
    holder = losing.servers.serving[0].mover
    unwrap(holder._rebuild).close("its disk is on fire")
    eventually(lambda: unwrap(holder._rebuild).over, "it has ended")
    holder.look()
    trouble = unwrap(holder.trouble)
    assert (trouble.version, trouble.broken) == (2, True)
    assert trouble.message == "it no longer rebuilds rows: its disk is on fire"


def test_rows_follow_without_a_rest_while_nobody_trains(losing: Losing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "_REST", 1e9)
    monkeypatch.setattr(rebuild, "_IDLE_SECONDS", 0.0)
    losing.switch()
    losing.go_on()
    eventually(lambda: not losing.missing, "all rows are there")


def test_a_rebuild_that_is_given_up_before_the_switch_ends(losing: Losing) -> None:
    holder = losing.servers.serving[0].mover
    holder.abandon(2)
    with pytest.raises(NotHeldError):
        holder.copy(2, SECONDS)


def test_a_server_whose_rows_do_not_arrive_says_so(losing: Losing, monkeypatch: pytest.MonkeyPatch) -> None:
    losing.switch()
    before = losing.successor.mover.trouble
    monkeypatch.setattr(mover, "_MISSING_SECONDS", 0.0)
    trouble = unwrap(losing.successor.mover.trouble)
    assert before is None
    assert (trouble.version, trouble.broken) == (2, True)
    assert trouble.message == f"{losing.missing:,} rows that are rebuilt from parity do not arrive"


def test_a_roll_back_ends_the_wait_for_missing_rows(losing: Losing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Withdrawing, "withdraw_places", lambda *_: None)
    losing.switch()
    state, batch = losing.successor.state, losing.servers.batch()
    with ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(losing.servers.push, batch, 1)
        eventually(lambda: state._requests._waiting, "the push waits")
        state.assign(Assignment(2, 3, ""))
        losing.successor.mover.stop()
        assert pushing.result(SECONDS) == [Status.REFRESH]
    assert state.missing is None
    assert losing.successor.mover.trouble is None


@pytest.mark.parametrize("is_adopted", [False, True])
def test_rows_are_right_to_the_bit_whatever_is_pushed_meanwhile(
    make_servers: Callable[[int], Servers], *, is_adopted: bool
) -> None:
    """Several threads push while rows leave the parity, in one case also a batch that only some servers have."""
    servers = make_servers(4)
    servers.protect()
    for _ in range(20):
        servers.push(servers.batch())
    torn = [] if is_adopted else [servers.batch()]
    for batch in torn:
        assert servers.push(batch, 0, 2) == [Status.OK] * 2

    def push_more() -> None:
        batches = [*torn, *(servers.batch() for _ in range(30))]
        with ThreadPoolExecutor(4) as threads:
            indexes = [server.index for server in servers.left]
            said = [*threads.map(lambda index: [servers.push(batch, index)[0] for batch in batches], indexes)]
        assert {status for statuses in said for status in statuses[len(torn) :]} == {Status.OK}

    if is_adopted:
        servers.adopt(1, meanwhile=push_more)
    else:
        joined, table = servers.successors(1)
        servers.begin_switch(joined, table, 2, servers.rebuild(joined, table, 2)[0])
        push_more()
        servers.protect()
    servers.check()
    servers.adopt(2) if is_adopted else servers.replace(2)
    servers.check()


def test_a_rebuild_that_fails_is_reported_until_the_job_recovers(losing: Losing) -> None:
    """The others wait for what it has yet to send, also if nobody misses a row."""
    losing.switch()
    holder = losing.servers.serving[0].mover
    unwrap(holder._rebuild).close("its disk is on fire")
    eventually(lambda: unwrap(holder._rebuild).over, "it ends")
    holder.look()
    assert unwrap(holder.trouble).broken


def test_a_holder_that_has_begun_another_group_too_early_is_reported(losing: Losing) -> None:
    """It has all that it needs, and the connection broke before it could say so."""
    losing.switch()
    holder, other = losing.servers.serving[0], losing.servers.serving[2]
    before = group_of(other)
    holder.mover.protection.form(losing.table, 0)
    unwrap(before._senders[0]._current).hang_up()
    losing.go_on()
    trouble = eventually(lambda: other.mover.trouble, "it says so")
    assert (unwrap(trouble).version, unwrap(trouble).broken) == (2, True)


def test_a_later_move_that_is_abandoned_does_not_end_a_rebuild(losing: Losing) -> None:
    losing.switch()
    for server in losing.servers.serving:
        server.mover.abandon(3)
    losing.go_on()
    losing.servers.protect()
    losing.servers.check()


def test_rows_that_have_arrived_may_come_again(losing: Losing) -> None:
    """Their connection may break before their sender knows."""
    losing.switch()
    losing.go_on()
    losing.servers.protect()
    rows = all_rows(losing.servers.twins[1], 0)
    deliver = losing.successor.mover._accept(stream_of(2, 0), 1)
    deliver(Item(ItemKind.ROWS, 0, rows))
    losing.servers.check()


def test_rows_that_are_wanted_without_memory_are_tried_again_after_a_pause(
    losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def failing(*_: object) -> None:
        tries.append(1)
        raise MemoryError

    monkeypatch.setattr(Withdrawing, "withdraw_places", failing)
    losing.switch()
    for index in (0, 2):
        unwrap(losing.servers.serving[index].mover._rebuild).want(np.zeros(1, np.int64))
    threading.Event().wait(0.4)
    assert len(tries) == 2
    losing.go_on()


@pytest.mark.parametrize("count", [2, 3])
def test_rows_that_are_decoded_without_memory_are_tried_again(
    make_servers: Callable[[int], Servers], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(rebuild, "_AGAIN_SECONDS", 0.01)
    alone, calls = ParityBlocks.alone, itertools.count()

    def failing(*arguments: Any) -> NDArray[np.uint8]:
        if next(calls) in (0, 2, 3):
            raise MemoryError
        return alone(*arguments)

    monkeypatch.setattr(ParityBlocks, "alone", failing)
    losing = Losing(make_servers(count), threading.Event())
    losing.switch()
    batch = losing.servers.batch()
    assert np.array_equal(losing.pull(batch), losing.expected(batch))
    losing.servers.protect()
    losing.servers.check()


def test_others_are_asked_for_rows_once_one_takes_no_more_requests(
    losing: Losing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent all its rows, and another has yet to send those that it can decode."""
    put, asked = StreamSender.put, threading.Event()
    done, other = (losing.servers.serving[index].address for index in (0, 2))

    def refused(self: StreamSender, item: Item, *arguments: Any, **named: Any) -> None:
        if item.kind is ItemKind.WANTED and self._address == done:
            raise StreamLostError("the rebuild is over here")
        put(self, item, *arguments, **named)
        if item.kind is ItemKind.WANTED and self._address == other:
            asked.set()

    monkeypatch.setattr(StreamSender, "put", refused)
    losing.switch()
    with ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(losing.servers.push, losing.servers.batch(), 1)
        was_asked = asked.wait(SECONDS)
        losing.go_on()
        assert pushing.result(SECONDS) == [Status.OK]
    assert was_asked


def test_only_rows_that_follow_on_demand_are_noted_as_they_come(losing: Losing) -> None:
    state = losing.servers.serving[0].state
    state.prepare(9, 1, table_of(3, [""] * 3), 0)
    assert state._arriving._coming is None
