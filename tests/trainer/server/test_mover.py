"""Live moves between servers over real sockets, with pushes at every point of a move."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberscale_api.job import OptimizerType
from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.checkpoint import Share, Work
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server import mover as mover_module
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.retiring import Retirement
from emberscale_trainer.server.sending import CopyProgress
from emberscale_trainer.table import Reader, Scan, TableStore, keys_of
from master_stand_in import write_snapshot
from moves import (
    EVERYTHING,
    KEYS,
    SECONDS,
    TABLES,
    Batch,
    Gate,
    MovingServer,
    await_removal,
    rows_in,
    table_of,
    trained_tables,
)
from snapshots import records_of, snapshot_of
from waiting import noted_call


def tables() -> TableStore:
    return trained_tables(OptimizerType.ADAGRAD)


class Servers:
    """Some servers, a single store that applies every batch, and the actions of a master."""

    def __init__(self, folder: Path, serving: int, spare: int) -> None:
        self.all = [MovingServer(index, folder) for index in range(serving + spare)]
        self.table = table_of(1, [server.address for server in self.all[:serving]])
        self.stores = {server.index: tables() for server in self.all}
        self.whole = tables()
        self.barrier = 0
        self.batches = 0
        self.random = np.random.default_rng(0)
        for server in self.all[:serving]:
            server.assign(self.table, self.stores[server.index])

    def push(self, rows: int = 200) -> None:
        """Trains one batch on all servers of the table in force."""
        batch = Batch(self.random, self.batches, rows)
        self.batches += 1
        self.whole.push(*batch.part(EVERYTHING))
        for server in self.all[: len(self.table.servers)]:
            header = Header(Kind.PUSH, generation=1, version=self.table.version, batch=batch.number, token=1, tables=3)
            part = batch.part(Ownership.of(self.table, server.index))
            assert server.state.push(0, header, *part) is Status.OK

    def prepare(self, count: int) -> RoutingTable:
        """Begins a move to `count` servers, for which all are ready; its number is its version."""
        wanted = self.begin(count)
        assert all(server.state.prepared(wanted.version, SECONDS) for server in self.all)
        return wanted

    def begin(self, count: int, number: int = 0) -> RoutingTable:
        """Begins a move, for which servers may not be ready yet; 0: of the next number."""
        wanted = table_of(number or self.table.version + 1, [server.address for server in self.all[:count]])
        for server in self.all:
            since = self.table.version if server.index < len(self.table.servers) else 0
            if server.state.prepare(wanted.version, since, wanted, server.index).joins:
                self.stores[server.index] = tables()
                server.state.stage(wanted.version, self.stores[server.index])
        return wanted

    def copied(self, wanted: RoutingTable) -> list[CopyProgress]:
        """Waits until little remains to copy; returns the progress of all servers."""
        return [server.mover.copy(wanted.version, SECONDS) for server in self.all]

    def switch(self, wanted: RoutingTable) -> None:
        """Runs the barrier of a move."""
        self.barrier += 1
        serving = self.all[: len(self.table.servers)]
        for server in serving:
            server.state.hold(1, self.table.version, self.barrier, SECONDS)
        applied = [server.state.settle(1, self.barrier, [], SECONDS, 0) for server in serving]
        for server in serving:
            server.state.hand_over(1, self.barrier, wanted.version, SECONDS)
            server.mover.hand_over(wanted.version, SECONDS)
        for server in self.all:
            server.state.switch(1, self.barrier, wanted.version, applied[0])
        self.table = wanted

    def reported_rows(self) -> int:
        """Rows of the first table, as all servers report them."""
        return sum(server.state.figures().rows.get("C0", 0) for server in self.all)

    def check(self) -> None:
        """Checks that each server holds exactly its rows, to the bit as the single store; one that left holds none."""
        for server in self.all:
            expected = {}
            owned = Ownership.of(self.table, server.index)
            for number in range(3):
                records = records_of(self.whole.readers.snapshot(Reader.FLASH, threading.RLock()), number)
                keys = np.array(sorted(records), np.int64)
                mine = keys[owned.among(keys, dense=number == 2)].tolist()
                expected[number] = {key: records[key] for key in mine}
            store = self.stores[server.index]
            await_removal(store, owned)
            with server.state.lock:
                snapshot = store.readers.snapshot(Reader.FLASH, server.state.lock)
                found = {number: records_of(snapshot, number) for number in range(3)}
            assert found == expected, f"ps-{server.index}"

    def close(self) -> None:
        for server in self.all:
            server.close()


def joined(threads: list[threading.Thread]) -> None:
    """Waits until these threads, at least one, have ended."""
    assert threads
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Moves that spare training rest for ever after a piece; is set once one rests."""
    monkeypatch.setattr(mover_module, "_SPARING_REST", 1e12)
    monkeypatch.setattr(mover_module, "_LONGEST_REST_SECONDS", 1e6)
    return noted_call(monkeypatch, mover_module._MoveSending, "_rest")


@pytest.fixture
def make_servers(tmp_path: Path) -> Iterator[Callable[[int, int], Servers]]:
    made: list[Servers] = []

    def make(serving: int, spare: int) -> Servers:
        made.append(Servers(tmp_path, serving, spare))
        return made[-1]

    yield make
    for servers in made:
        servers.close()


@pytest.mark.parametrize(("serving", "spare", "wanted"), [(1, 1, 2), (2, 1, 3), (3, 0, 2), (3, 0, 1), (2, 2, 4)])
def test_rows_are_the_same_after_a_move_to_another_number_of_servers(
    make_servers: Callable[[int, int], Servers], serving: int, spare: int, wanted: int
) -> None:
    servers = make_servers(serving, spare)
    for _ in range(20):
        servers.push()
    table = servers.prepare(wanted)
    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(servers.copied, table)
        while not copying.done():
            servers.push(50)
        copying.result()
    for _ in range(5):
        servers.push()
    servers.switch(table)
    servers.check()
    for _ in range(5):
        servers.push()
    servers.check()


def test_a_server_returns_the_memory_of_rows_that_it_gave_away(make_servers: Callable[[int, int], Servers]) -> None:
    servers, rows = make_servers(1, 3), 400_000
    layout = servers.stores[0].layouts[0]
    records = layout.empty(rows)
    fields = layout.fields(records)
    fields["key"], fields["pushes"] = np.arange(rows), 1
    servers.stores[0].load(0, records)
    giver = servers.all[0].state
    before = giver.figures().table_bytes
    wanted = servers.prepare(4)
    servers.copied(wanted)
    running = set(threading.enumerate())
    servers.switch(wanted)
    joined([thread for thread in set(threading.enumerate()) - running if thread.name == "retire"])
    assert giver.figures().table_bytes < before / 2
    assert servers.reported_rows() == rows


def test_each_row_counts_once_during_a_move_and_after_it(make_servers: Callable[[int, int], Servers]) -> None:
    servers = make_servers(2, 1)
    servers.push()
    rows = servers.reported_rows()
    table = servers.prepare(3)
    assert servers.reported_rows() == rows
    servers.copied(table)
    assert servers.reported_rows() == rows
    servers.switch(table)
    assert servers.reported_rows() == rows


def test_there_and_back_again(make_servers: Callable[[int, int], Servers]) -> None:
    servers = make_servers(2, 1)
    for wanted in (3, 2, 3, 1, 2):
        servers.push()
        table = servers.prepare(wanted)
        servers.copied(table)
        servers.push()
        servers.switch(table)
        servers.check()


def test_an_abandoned_move_leaves_nothing_behind(make_servers: Callable[[int, int], Servers]) -> None:
    servers = make_servers(3, 0)
    servers.push()
    table = servers.prepare(2)
    servers.copied(table)
    for server in servers.all:
        server.state.abandon(table.version)
    servers.push()
    servers.check()
    with pytest.raises(NotHeldError):
        servers.all[1].mover.copy(table.version, 0)


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_bucket_that_returns_while_its_rows_are_removed_has_those_of_its_giver(
    make_servers: Callable[[int, int], Servers], abandoned: bool
) -> None:
    servers = make_servers(3, 0) if abandoned else make_servers(2, 1)
    for _ in range(5):
        servers.push()
    table, gate, server = servers.prepare(2 if abandoned else 3), Gate(), servers.all[0]
    servers.copied(table)
    with server.state.lock:
        server.state.protect_by(gate)
    if abandoned:
        for one in servers.all:
            one.mover.abandon(table.version)
    else:
        servers.switch(table)
    assert gate.stopped.wait(SECONDS)
    owned = server.state.core.owned
    for one in servers.all:  # what else a stale row could undo: it changes, or leaves
        keys = np.arange(0, KEYS, 3)
        with one.state.lock:
            for number in range(TABLES):
                one.state.tables.retire(number, keys[one.state.core.owned.among(keys, dense=False)])
    for number in range(TABLES):
        servers.whole.retire(number, keys)
    servers.push()
    assert rows_in(servers.stores[0], ~owned.buckets)
    back = servers.begin(2, table.version + 1)
    assert not server.state.prepared(back.version, 0)
    gate.open.set()
    assert all(one.state.prepared(back.version, SECONDS) for one in servers.all)
    servers.copied(back)
    servers.push()
    servers.switch(back)
    servers.check()


@pytest.mark.parametrize("ends", ["later", "abandoned", "switched"])
def test_a_checkpoint_holds_what_the_server_owns_during_a_move_and_after_it(
    make_servers: Callable[[int, int], Servers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(Retirement, "_run", lambda *_: None)  # so that the rows of the move stay
    servers = make_servers(2, 1) if ends == "switched" else make_servers(3, 0)
    servers.push()
    table = servers.prepare(3 if ends == "switched" else 2)
    servers.copied(table)
    if ends == "switched":
        servers.switch(table)
    server = servers.all[0]
    server.state.hold(1, servers.table.version, 9, SECONDS)
    server.state.settle(1, 9, [], SECONDS, 0)
    if ends == "abandoned":
        server.state.abandon(table.version)
    owned = server.state.core.owned
    assert rows_in(servers.stores[0], ~owned.buckets), "it holds rows that it does not own"
    snapshot, tables, applied = snapshot_of(server.state, 1, 9)
    share = Share(0, owned, applied, tables.dense_parameters)
    write_snapshot(snapshot, tables.specs, share, str(tmp_path / "saved"), Work())
    layout = tables.layouts[0]
    for number in range(2):
        content = (tmp_path / f"saved/ps-0/table-{number}-0.rows").read_bytes()
        keys = keys_of(np.frombuffer(content, np.uint8).reshape(-1, layout.stride))
        assert len(keys)
        assert owned.among(keys, dense=False).all()


def test_a_move_that_the_master_forgets_is_given_up(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make_servers(3, 0)
    servers.push()
    table = servers.prepare(2)
    servers.copied(table)
    monkeypatch.setattr("emberscale_trainer.server.moves.PATIENCE_SECONDS", 0.0)
    for server in servers.all:
        server.mover.look()
    with pytest.raises(NotHeldError):
        servers.switch(table)
    for server in servers.all:
        server.state.resume(1, servers.barrier)
    servers.check()


def test_a_receiver_that_gives_the_move_up_fails_it_for_the_sender(
    make_servers: Callable[[int, int], Servers],
) -> None:
    servers = make_servers(2, 1)
    servers.push()
    table = servers.prepare(3)
    servers.copied(table)
    servers.all[2].state.abandon(table.version)
    servers.push()
    for call in (servers.all[1].mover.hand_over, servers.all[1].mover.copy):
        with pytest.raises(NotHeldError, match="not under way"):
            call(table.version, SECONDS)


def test_a_move_spares_training_from_its_first_piece_and_hurries_once_it_is_urgent(
    make_servers: Callable[[int, int], Servers], rests: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make_servers(2, 1)
    servers.push()
    table = servers.prepare(3)
    server = servers.all[0]
    with monkeypatch.context() as patch:
        patch.setattr(mover_module._MoveSending, "spare", lambda *_: None)  # as if the thread were faster
        assert not server.mover.copy(table.version, 0, 1e6).ready
        assert rests.wait(SECONDS)
        assert not server.mover.copy(table.version, 0.3, 1e6).rounds
    servers.copied(table)
    servers.push()
    servers.switch(table)
    servers.check()


def test_a_move_that_rests_is_abandoned_at_once(
    make_servers: Callable[[int, int], Servers], rests: threading.Event
) -> None:
    servers = make_servers(2, 1)
    servers.push()
    table, before = servers.prepare(3), set(threading.enumerate())
    servers.all[0].mover.copy(table.version, 0, 1e6)
    assert rests.wait(SECONDS)
    resting = [thread for thread in set(threading.enumerate()) - before if thread.name == "move"]
    servers.all[0].mover.abandon(table.version)
    joined(resting)


def test_a_late_call_of_an_earlier_move_leaves_the_later_one_alone(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make_servers(2, 1)
    servers.push()
    servers.prepare(3)
    server = servers.all[0]
    earlier = server.state.renew_move(2)
    table = table_of(3, [one.address for one in servers.all])
    for one in servers.all:
        if one.state.prepare(3, 1 if one.index < 2 else 0, table, one.index).joins:
            servers.stores[one.index] = tables()
            one.state.stage(3, servers.stores[one.index])
        assert one.state.prepared(3, SECONDS)
    servers.copied(table)
    with monkeypatch.context() as late:
        # as if asked before the later move was prepared
        late.setattr(server.state, "renew_move", lambda number: earlier)
        with pytest.raises(NotHeldError, match="move 2 is over"):
            server.mover.copy(2, 0)
    servers.push()
    servers.switch(table)
    servers.check()


@pytest.mark.parametrize("hands_over", [False, True])
def test_whoever_waits_for_a_move_hears_that_it_is_abandoned(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch, hands_over: bool
) -> None:
    monkeypatch.setattr(mover_module._MoveSending, "_round", lambda self: self._closed.wait())  # it never progresses
    servers = make_servers(3, 0)
    table = servers.prepare(2)
    server, asked = servers.all[2], threading.Event()
    renew_move = server.state.renew_move
    assert not server.mover.copy(table.version, 0).ready

    def noted(number: int) -> Transfer:
        transfer = renew_move(number)
        asked.set()
        return transfer

    monkeypatch.setattr(server.state, "renew_move", noted)
    wait = server.mover.hand_over if hands_over else server.mover.copy
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(wait, table.version, SECONDS)
        asked.wait()
        server.mover.abandon(table.version)
        with pytest.raises(NotHeldError, match="move 2 has failed here: it was abandoned"):
            waiting.result()


def test_what_is_pushed_after_the_last_round_is_not_lost_when_the_barrier_comes_later(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "_PAUSE_SECONDS", SECONDS)  # no round by itself
    servers = make_servers(2, 1)
    servers.push()
    monkeypatch.setattr(mover_module, "MOST_ROUNDS", 1)
    table = servers.prepare(3)
    servers.copied(table)
    servers.push()
    servers.switch(table)
    servers.check()


def test_rounds_end_once_rows_change_as_fast_as_they_are_copied(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round sends as much as the one before, and takes too long for a barrier."""
    servers = make_servers(2, 1)
    servers.push()
    monkeypatch.setattr(mover_module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(mover_module, "SHORT_SECONDS", -1.0)
    sends, rounds = mover_module._MoveSending._send, 0

    def send_and_push(self: Any, *arguments: Any, **options: Any) -> None:
        nonlocal rounds
        if self._state is servers.all[0].state and not self._progress.ready:
            servers.push()
            rounds += 1
        sends(self, *arguments, **options)

    monkeypatch.setattr(mover_module._MoveSending, "_send", send_and_push)
    table = servers.prepare(3)
    assert servers.all[0].mover.copy(table.version, SECONDS).ready
    assert rounds < mover_module.MOST_ROUNDS  # of later ones, none has anything to send
    servers.copied(table)
    servers.push()
    servers.switch(table)
    servers.check()


def test_a_hand_over_ends_with_a_round_that_leaves_no_row_for_another(
    make_servers: Callable[[int, int], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "_PAUSE_SECONDS", SECONDS)  # no round by itself
    servers = make_servers(2, 1)
    servers.push()
    table = servers.prepare(3)
    servers.all[0].mover.hand_over(table.version, SECONDS)
    read, left = Scan.read, [True, True]

    def leave(self: Scan, *arguments: Any) -> Iterator[Any]:
        yield from read(self, *arguments)
        if arguments[0] == 0 and left:
            left.pop()
            self.postponed += 1

    before = servers.all[0].mover.copy(table.version, 0).rounds
    monkeypatch.setattr(Scan, "read", leave)
    servers.all[0].mover.hand_over(table.version, SECONDS)
    assert servers.all[0].mover.copy(table.version, 0).rounds == before + 3


def test_a_server_that_joins_knows_what_is_applied(make_servers: Callable[[int, int], Servers]) -> None:
    servers = make_servers(1, 1)
    servers.push()
    table = servers.prepare(2)
    servers.copied(table)
    servers.switch(table)
    joined = servers.all[1].state
    header = Header(Kind.PUSH, generation=1, version=2, batch=0, token=1, tables=3)
    assert (
        joined.push(0, header, np.zeros(3, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.float32))
        is Status.REPEATED
    )
    assert joined.core.known == (1, 2)
    assert AppliedBatches.merged([joined.hold(1, 2, 99, 1)]).ranges(0) == [(0, 1)]


def test_a_server_says_under_which_table_its_rows_have_left(make_servers: Callable[[int, int], Servers]) -> None:
    servers = make_servers(2, 0)
    servers.push()
    table = servers.prepare(1)
    servers.copied(table)
    servers.switch(table)
    assert servers.all[1].state.core.known == (1, 2)


@pytest.mark.parametrize(("index", "since"), [(0, 1), (0, 0), (1, 1)])
def test_a_move_from_a_table_that_is_not_in_force_is_refused(
    make_servers: Callable[[int, int], Servers], index: int, since: int
) -> None:
    """A master whose ledger lost a switch would take a server that gave its rows away for one that joins."""
    servers = make_servers(2, 0)
    servers.push()
    table = servers.prepare(1)
    servers.copied(table)
    servers.switch(table)
    wanted = table_of(100, [server.address for server in servers.all])
    with pytest.raises(NotHeldError, match=f"the move is from version {since}"):
        servers.all[index].state.prepare(100, since, wanted, index)


def test_a_server_that_joins_after_a_roll_back_keeps_no_rows_of_before(
    make_servers: Callable[[int, int], Servers],
) -> None:
    servers = make_servers(1, 1)
    servers.push()
    table = servers.prepare(2)
    servers.copied(table)
    servers.switch(table)
    joined = servers.all[1].state
    assert sum(joined.figures().rows.values())
    later = table_of(10, [server.address for server in servers.all], generation=2)
    assert joined.prepare(10, 0, later, 1).joins
    assert not joined.figures().rows
