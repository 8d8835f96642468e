"""How a worker reacts to servers that move rows, forget, refuse or go away: real sockets, scripted peers."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, piece_length
from emberscale_api.wire import Header, Kind, Status, counts_bytes
from emberscale_trainer.data.source import Batch
from emberscale_trainer.partition import buckets_of
from emberscale_trainer.transport import Connection, ConnectionLostError, accept_connection, listen
from emberscale_trainer.worker import keys
from emberscale_trainer.worker import servers as servers_module
from emberscale_trainer.worker.keys import KeyPlanner, RequestTooLargeError
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.rows import EmbeddingLayout
from emberscale_trainer.worker.servers import (
    BatchName,
    HistoryChangedError,
    Identity,
    LeaseFencedError,
    ParameterServers,
    RequestRefusedError,
    RoundTooLargeError,
)

TABLES = [TableSpec(0, "t", 0, 2, OptimizerSpec(), InitializerSpec(), 0)]
BATCH = Batch(
    number=3,
    start=3,
    stop=4,
    labels=np.ones(1, np.float32),
    dense=np.empty((1, 0), np.float32),
    ids=np.array([[7]]),
    lists=(),
    bad_records=(),
    truncated_records=0,
)
NAME = BatchName(epoch=0, number=3, shard=0, token=9)
IDENTITY = Identity("secret", worker=1, session=5)

Answer = Callable[[Header], tuple[Status, bytes] | None]
"""The answer of a peer to a request; None to hang up."""

PIECE = piece_length(8)


@dataclass
class StandingRoutes:
    """Routing tables that are there without a wait."""

    table: RoutingTable
    later: RoutingTable | None = None

    def newer(self, version: int) -> RoutingTable | None:
        return self.later


class Peer:
    """A server that answers from a script, and records the requests."""

    def __init__(self, folder: Path, name: str, answer: Answer, hello: Status = Status.OK) -> None:
        self.ended = threading.Event()
        self.asked: list[Header] = []
        self.payloads: list[bytes] = []
        self._answer = answer
        self._hello = hello
        self._listener, self.address = listen(f"unix://{folder}/{name}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(accept_connection(stream, None),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.receive()
            connection.send(Header(self._hello))
            while True:
                header, payload = connection.receive()
                self.payloads.append(payload.tobytes())
                self.asked.append(header)
                if header.kind == Kind.COMPLETE:
                    continue
                said = self._answer(header)
                if said is None:
                    break
                connection.send(Header(said[0], payload_bytes=len(said[1])), [said[1]])
        except ConnectionLostError:
            pass
        connection.close()
        self.ended.set()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Callable[[str, Answer], Peer]]:
    peers: list[Peer] = []

    def start(name: str, answer: Answer) -> Peer:
        peers.append(Peer(tmp_path, name, answer))
        return peers[-1]

    yield start
    for one in peers:
        one.close()


def table(*peers: Peer, version: int = 1) -> RoutingTable:
    """Returns a table: the last server owns all buckets, the first all dense pieces."""
    servers = tuple(PsAddress(index, f"i{index}", one.address, "") for index, one in enumerate(peers))
    return RoutingTable(1, version, servers, (len(peers) - 1,) * BUCKETS, (0,) * DENSE_PIECES)


def connected(routes: StandingRoutes) -> ParameterServers:
    def make_planner(routing: RoutingTable, in_rounds: bool) -> KeyPlanner:
        return KeyPlanner(routing, TABLES, 8, OptimizerType.ADAGRAD if in_rounds else None)

    return ParameterServers(cast(Routes, routes), IDENTITY, make_planner, EmbeddingLayout(TABLES))


def push(routes: StandingRoutes) -> None:
    servers = connected(routes)
    plan = KeyPlanner(routes.table, TABLES, 8).plan(BATCH.ids)
    gradients, dense = np.ones(plan.values, np.float32), np.zeros(DENSE_PIECES * 8, np.float32)
    try:
        servers.push(plan, BATCH, NAME, gradients, dense)
    finally:
        servers.close()


def kinds(peer: Peer) -> list[tuple[int, int]]:
    return [(header.kind, header.version) for header in peer.asked]


def test_a_server_that_takes_connections_and_answers_none_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a stopped process."""
    monkeypatch.setattr(servers_module, "_CONNECT_SECONDS", 0.2)
    listener, address = listen(f"unix://{tmp_path}/silent")
    routes = StandingRoutes(RoutingTable(1, 1, (PsAddress(0, "i0", address, ""),), (0,) * BUCKETS, (0,) * DENSE_PIECES))
    failures: list[str] = []

    def connect() -> None:
        try:
            connected(routes)
        except ConnectionLostError as error:
            failures.append(str(error))

    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(30)
    listener.close()
    assert failures == [f"{address}: the connection broke while receiving: timed out"]


def test_a_worker_that_one_server_refuses_leaves_no_connection_to_the_others(
    peer: Callable[[str, Answer], Peer], tmp_path: Path
) -> None:
    first, second = peer("0", lambda header: None), Peer(tmp_path, "1", lambda header: None, Status.REFUSED)
    with pytest.raises(RequestRefusedError) as refused:
        connected(StandingRoutes(table(first, second)))
    second.close()
    assert first.ended.wait(10.0)
    assert refused.tb is not None  # the traceback still refers to the unfinished object


def test_a_server_that_has_answered_may_take_its_time(peer: Callable[[str, Answer], Peer]) -> None:
    servers = connected(StandingRoutes(table(peer("0", lambda header: None))))
    assert [one._stream.gettimeout() for one in servers._connections.values()] == [None]
    servers.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, ConnectionLostError),
        ((Status.REFRESH, b""), HistoryChangedError),
        ((Status.FENCED, b""), LeaseFencedError),
        ((Status.REFUSED, b"no"), RequestRefusedError),
    ],
)
def test_what_a_server_says_ends_a_push(
    peer: Callable[[str, Answer], Peer], answer: tuple[Status, bytes] | None, error: type[Exception]
) -> None:
    first, second = peer("0", lambda header: (Status.OK, b"")), peer("1", lambda header: answer)
    with pytest.raises(error):
        push(StandingRoutes(table(first, second)))
    assert kinds(first) == [(Kind.PUSH, 1)]


def test_a_server_that_goes_away_ends_a_pull(peer: Callable[[str, Answer], Peer]) -> None:
    first = peer("0", lambda header: None)
    routes = StandingRoutes(table(first))
    servers = connected(routes)
    with pytest.raises(ConnectionLostError):
        servers.pull(KeyPlanner(routes.table, TABLES, 8).plan(BATCH.ids), BATCH, NAME, read_only=False)
    servers.close()


def test_a_push_that_moved_goes_to_the_servers_of_the_newer_table(peer: Callable[[str, Answer], Peer]) -> None:
    def moved(header: Header) -> tuple[Status, bytes]:
        return (Status.OK if header.version > 1 else Status.MOVED), b""

    first, second = peer("0", moved), peer("1", lambda header: (Status.OK, b""))
    old = table(first)
    new = replace(table(first, second), version=2)
    push(StandingRoutes(old, new))
    assert kinds(first)[:2] == [(Kind.PUSH, 1), (Kind.PUSH, 2)]
    assert kinds(second) == [(Kind.PUSH, 2)]
    assert all((header.token, header.worker) == (9, 1) for header in (*first.asked, *second.asked))


def test_a_move_into_another_history_ends_a_push(peer: Callable[[str, Answer], Peer]) -> None:
    with pytest.raises(HistoryChangedError):
        push(StandingRoutes(table(peer("0", lambda header: (Status.MOVED, b"")))))


@pytest.mark.parametrize(("is_round", "error"), [(True, RoundTooLargeError), (False, RequestTooLargeError)])
def test_a_round_beyond_a_frame_under_a_newer_table_does_not_end_the_job(
    peer: Callable[[str, Answer], Peer], is_round: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = peer("0", lambda header: (Status.MOVED, b""))
    routes = StandingRoutes(table(first), replace(table(first), version=2))
    servers = connected(routes)
    plan = KeyPlanner(routes.table, TABLES, 8, OptimizerType.ADAGRAD if is_round else None).plan(BATCH.ids)
    monkeypatch.setattr(keys, "MAX_PAYLOAD_BYTES", 8)
    with pytest.raises(error):
        servers.pull(plan, BATCH, replace(NAME, is_round=is_round), read_only=False)
    servers.close()


IDS = np.arange(32, dtype=np.int64).reshape(-1, 1)
MANY = replace(BATCH, ids=IDS)


def floats_of(rows: NDArray[np.int64], pieces: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns the floats of rows and dense pieces on the wire; each float identifies its row or piece."""
    of_rows = (100 * rows[:, None] + np.arange(2)).reshape(-1)
    of_pieces = (10_000 + 100 * pieces[:, None] + np.arange(PIECE)).reshape(-1)
    return np.concatenate([of_rows, of_pieces]).astype(np.float32)


def split(*peers: Peer, version: int, turned: bool) -> RoutingTable:
    """Returns a table whose buckets and pieces alternate between servers; `turned` gives each to the other server."""
    owners = [(number + turned) % 2 for number in range(BUCKETS)]
    servers = tuple(PsAddress(index, f"i{index}", one.address, "") for index, one in enumerate(peers))
    return RoutingTable(1, version, servers, tuple(owners), tuple(owners[:DENSE_PIECES]))


def owned_by(routing: RoutingTable, server: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the keys of the batch and the dense pieces that a server owns."""
    keys = IDS.reshape(-1)
    return keys[np.array(routing.bucket_owners)[buckets_of(keys)] == server], np.array(routing.pieces_of(server))


def test_a_pull_that_moved_halfway_has_every_row_as_the_newer_table_lays_it_out(
    peer: Callable[[str, Answer], Peer],
) -> None:
    """The first server answered under the older table; nothing of that answer may stay."""
    tables: dict[int, RoutingTable] = {}

    def answer(server: int) -> Answer:
        def say(header: Header) -> tuple[Status, bytes]:
            if server == 1 and header.version == 1:
                return Status.MOVED, b""
            return Status.OK, floats_of(*owned_by(tables[header.version], server)).tobytes()

        return say

    peers = peer("0", answer(0)), peer("1", answer(1))
    tables |= {version: split(*peers, version=version, turned=version > 1) for version in (1, 2)}
    servers = connected(StandingRoutes(tables[1], tables[2]))
    plan, pulled = servers.pull(KeyPlanner(tables[1], TABLES, 8).plan(IDS), MANY, NAME, read_only=False)
    servers.close()
    assert plan.routing.version == 2
    expected = floats_of(IDS.reshape(-1), np.arange(DENSE_PIECES))
    rows = pulled.rows[plan.offsets[:, 0][:, None] + np.arange(2)].reshape(-1)
    assert np.concatenate([rows, pulled.dense]).tolist() == expected.tolist()


def test_a_push_that_moved_halfway_brings_each_gradient_to_the_newer_owner(
    peer: Callable[[str, Answer], Peer],
) -> None:
    peers = (
        peer("0", lambda header: (Status.OK, b"")),
        peer("1", lambda header: (Status.MOVED if header.version == 1 else Status.OK, b"")),
    )
    old, new = (split(*peers, version=version, turned=version > 1) for version in (1, 2))
    plan = KeyPlanner(old, TABLES, 8).plan(IDS)
    whole = floats_of(IDS.reshape(-1), np.arange(DENSE_PIECES))
    gradients = np.empty(plan.values, np.float32)
    gradients[plan.offsets[:, 0][:, None] + np.arange(2)] = whole[: 2 * len(IDS)].reshape(-1, 2)
    servers = connected(StandingRoutes(old, new))
    servers.push(plan, MANY, NAME, gradients, whole[2 * len(IDS) :])
    servers.close()
    for server, one in enumerate(peers):
        [payload] = [
            payload
            for header, payload in zip(one.asked, one.payloads, strict=True)
            if (header.kind, header.version) == (Kind.PUSH, 2)
        ]
        start, (rows, pieces) = counts_bytes(2), owned_by(new, server)
        stop = start + 8 * (len(rows) + len(pieces))
        sent = np.frombuffer(payload[start:stop], np.int64)
        assert sorted(sent[: len(rows)]) == rows.tolist()
        assert np.array_equal(np.frombuffer(payload[stop:], np.float32), floats_of(sent[: len(rows)], pieces))
