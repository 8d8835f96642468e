"""A parameter server under concurrent pulls, pushes and barriers, over real sockets."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_api.wire import Flag, Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError, Outcome
from emberscale_trainer.server.core import Assignment, Decision, ServerCore, Wait
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.state import NotSettledError, ServerState
from emberscale_trainer.table import DensePieces, Reader, RowLayout, TableStore
from emberscale_trainer.table.snapshot import Lock
from emberscale_trainer.transport import ConnectionLostError, listen
from memory_limit import refused_beyond
from moves import EVERYTHING, await_removal, table_that_owns
from snapshots import records_of
from waiting import noted_call
from wire_client import WireClient

SECONDS = 60.0
PARAMETERS = 3
LENGTH = piece_length(PARAMETERS)
SGD = OptimizerSpec(type=OptimizerType.SGD, learning_rate=1.0)
TABLES = [TableSpec(number, f"C{number}", number, 4, SGD, InitializerSpec(), seed=0) for number in range(2)]
KEYS = [[1, 2], [1], [0, 63]]
"""The keys of each table, and two dense pieces."""

VALUES = 4 * 3 + 2 * LENGTH


def tables() -> TableStore:
    return TableStore(TABLES, DensePieces.of(np.zeros(PARAMETERS, dtype=np.float32), SGD))


def ones(count: int = VALUES) -> NDArray[np.float32]:
    return np.ones(count, dtype=np.float32)


class NoticedCore(ServerCore):
    """Signals when a push is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = threading.Event()

    def push(self, session: int, header: Header, arrived: float, now: float) -> Decision:
        decision = super().push(session, header, arrived, now)
        if isinstance(decision, Wait):
            self.held.set()
        return decision


class Served:
    """A server on a Unix socket, and workers connected to it."""

    def __init__(self, folder: Path) -> None:
        self.core = NoticedCore()
        self.state = ServerState(core=self.core)
        self.listener, self.address = listen(f"unix://{folder}/ps.sock")
        DataPlane(self.listener, self.state, "secret", "i").start()
        self.opened: list[WireClient] = []
        self.threads = ThreadPoolExecutor(8)
        self.generation = 0

    def assign(self, bound: StalenessBound | None = None) -> None:
        """Serves empty tables of a new generation, with the same number as version."""
        self.generation += 1
        wanted = Assignment(self.generation, self.generation, "")
        self.state.assign(wanted)
        assert self.state.adopt(wanted, tables(), EVERYTHING, AppliedBatches(), bound)

    def connect(self, session: int = 1, token: str = "secret", generation: int = 1) -> WireClient:
        self.opened.append(WireClient(self.address, token, session, generation))
        return self.opened[-1]

    def close(self) -> None:
        for client in self.opened:
            client.close()
        self.listener.close()
        self.threads.shutdown()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.assign()
    yield served
    served.close()


def held(state: ServerState, number: int = 1) -> None:
    state.hold(*state.core.known, number, 60)


def switched(state: ServerState, version: int, barrier: int, owned: Ownership) -> None:
    """Ends a barrier with a move to this table; the move's number is the version."""
    state.prepare(version, state.core.known[1], table_that_owns(owned, version), 0)
    assert state.prepared(version, SECONDS)
    state.switch(1, barrier, version, AppliedBatches())


def test_a_push_changes_what_the_next_pull_sees(served: Served) -> None:
    client = served.connect()
    _, before = client.pull(KEYS)
    assert client.push(0, KEYS, ones()) is Status.OK
    _, after = client.pull(KEYS)
    np.testing.assert_allclose(after, before - 1, rtol=1e-6)


def test_a_repeated_push_changes_nothing(served: Served) -> None:
    client = served.connect()
    client.push(0, KEYS, ones())
    _, once = client.pull(KEYS)
    assert client.push(0, KEYS, ones(), token=2) is Status.REPEATED
    np.testing.assert_array_equal(client.pull(KEYS)[1], once)
    assert served.state.totals.repeated == 1


def test_a_push_that_was_under_way_across_a_change_is_not_refused_for_its_size(served: Served) -> None:
    served.assign()
    client = served.connect(generation=1)
    assert client.push(0, [[1], [2]], ones(9)) is Status.REFRESH
    newer = served.connect(generation=2)
    assert newer.push(0, [[1], [2]], ones(9), version=1) is Status.MOVED
    assert newer.push(0, KEYS, ones(), version=2) is Status.OK


def test_only_a_push_makes_rows(served: Served) -> None:
    client = served.connect()
    client.pull(KEYS)
    assert served.state.figures().rows == {"C0": 0, "C1": 0}
    client.push(0, KEYS, ones())
    assert served.state.figures().rows == {"C0": 2, "C1": 1}


def test_without_the_token_nothing_is_served(served: Served) -> None:
    with pytest.raises((PermissionError, ConnectionLostError)):
        served.connect(token="guess")


@pytest.mark.parametrize(
    ("keys", "values", "reason"),
    [
        (KEYS, VALUES + 1, "add up"),
        ([[1, 2], [1]], VALUES, "2 entries for 3 tables"),
        ([], 0, "0 entries for 3 tables"),
        ([[1, 2], [1], [0, 64]], VALUES, "dense pieces"),
        ([[1, 2], [1], [0, -1]], VALUES, "dense pieces"),
    ],
)
def test_a_push_that_does_not_fit_the_model_is_refused_and_changes_nothing(
    served: Served, keys: list[list[int]], values: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        served.connect().push(0, keys, ones(values))
    assert served.state.totals.pushes == 0
    assert served.state.figures().rows == {"C0": 0, "C1": 0}
    assert served.connect().push(0, KEYS, ones()) is Status.OK


@pytest.mark.parametrize("spoilt", [1, VALUES - 1])
def test_a_push_with_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(served: Served, spoilt: int) -> None:
    gradients = ones()
    gradients[spoilt] = np.nan
    with pytest.raises(ValueError, match="is nan"):
        served.connect().push(0, KEYS, gradients)
    assert served.state.figures().rows == {"C0": 0, "C1": 0}
    assert served.connect().push(0, KEYS, ones()) is Status.OK


MANY = [list(range(200_000)), [], []]
"""Enough new rows for segments of about 6 MB."""


def test_a_push_for_which_there_is_no_memory_can_be_sent_again(served: Served) -> None:
    header = Header(Kind.PUSH, generation=1, version=1)
    counts, keys = np.array([len(keys) for keys in MANY], np.uint32), np.array(MANY[0], np.int64)
    gradients = ones(4 * len(keys))
    with refused_beyond(3 << 20), pytest.raises(MemoryError):
        served.state.push(0, header, counts, keys, gradients)
    assert served.state.figures().rows == {"C0": 0, "C1": 0}
    _, before = served.connect().pull(MANY)
    assert served.state.push(0, header, counts, keys, gradients) is Status.OK
    np.testing.assert_allclose(served.connect().pull(MANY)[1], before - 1, rtol=1e-6)


def test_a_round_for_whose_record_there_is_no_memory_can_be_sent_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, keys, values = np.array([1, 0, 0], np.uint32), np.array([1], np.int64), ones(4)
    first = Header(Kind.PUSH, generation=1, version=1, batch=0)
    assert served.state.push(0, first, counts, keys, values) is Status.OK
    room = len(served.state.core.applied._counts[0])
    grow = AppliedBatches._grow

    def without_memory(self: AppliedBatches, epoch: int, batches: int) -> NDArray[np.uint8]:
        if batches > room:
            raise MemoryError("cannot allocate")
        return grow(self, epoch, batches)

    header = Header(Kind.PUSH, Flag.ROUND, generation=1, version=1, batch=room - 2, batches=4)
    with monkeypatch.context() as patched:
        patched.setattr(AppliedBatches, "_grow", without_memory)
        with pytest.raises(MemoryError):
            served.state.push(0, header, counts, keys, values)
    assert served.state.push(0, header, counts, keys, values) is Status.OK


HALF_A_PUSH = """
import numpy as np
from emberscale_api.wire import Header, Kind
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.state import ServerState
from memory_limit import refused_beyond
from moves import EVERYTHING
from test_state import tables

counts, keys = np.array([400_000, 0, 0], np.uint32), np.arange(400_000)
gradients = np.ones(1_600_000, np.float32)
store, state, wanted = tables(), ServerState(), Assignment(1, 1, "")
store.reserve(counts, keys, gradients)
state.assign(wanted)
state.adopt(wanted, store, EVERYTHING, AppliedBatches(), None)
print("pushing", flush=True)
with refused_beyond(0):  # of the memory for the index, a reserve knows nothing
    state.push(0, Header(Kind.PUSH, generation=1, version=1), counts, keys, gradients)
print("survived")
"""


def test_a_push_that_fails_half_way_ends_the_process() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", HALF_A_PUSH],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "MemoryError" not in ended.stderr, "the thread ended, and not the process"
    assert "survived" not in ended.stdout
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (1, "pushing"), ended.stderr


def test_a_barrier_waits_for_what_others_have_applied_and_holds_everything_else(served: Served) -> None:
    clients = [served.connect(session) for session in range(2)]
    clients[0].push(0, KEYS, ones())
    assert served.state.hold(1, 1, 1, 60).ranges(0) == [(0, 1)]
    pushes = [
        served.threads.submit(client.push, number, KEYS, ones(), token=number, shard=number)
        for client, number in zip(clients, (1, 2), strict=True)
    ]
    assert served.state.settle(1, 1, [(0, 0, 1), (0, 2, 3)], 60, SECONDS).ranges(0) == [(0, 1), (2, 3)]
    seen: list[float] = []
    store = tables()

    def take(rows: TableStore, lock: Lock, _: Outcome) -> None:
        records = b"".join(records_of(rows.readers.snapshot(Reader.CHECKPOINT, lock), 2).values())
        seen.append(float(np.frombuffer(records, RowLayout.of(store.specs[2]).dtype)["weights"][0, 0]))

    outcome = served.state.snapshot(1, 1, take)
    assert outcome.applied.ranges(0) == [(0, 1), (2, 3)]
    assert seen == [-2.0], "the rows are those of two batches"
    assert [push.result(SECONDS) for push in pushes] == [Status.OK] * 2
    assert served.state.totals.pushes == 3


def test_a_barrier_whose_batches_do_not_come_is_not_settled(served: Served) -> None:
    held(served.state)
    with pytest.raises(NotSettledError, match="did not come"):
        served.state.settle(1, 1, [(0, 5, 6)], 60, 0)
    served.state.resume(1, 1)
    assert served.connect().push(0, KEYS, ones()) is Status.OK
    with pytest.raises(NotHeldError):
        served.state.settle(1, 1, [], 60, 0)


def held_push(served: Served) -> "Future[Status]":
    """Starts a push, and returns once the server has decided to hold it for the barrier."""
    served.core.held.clear()
    pushed = served.threads.submit(served.connect(session=9).push, 0, KEYS, ones())
    assert served.core.held.wait(SECONDS)
    return pushed


def test_a_held_push_is_told_to_refresh_when_the_server_is_reassigned(served: Served) -> None:
    held(served.state)
    pushed = held_push(served)
    served.assign()
    assert pushed.result(SECONDS) is Status.REFRESH
    assert served.state.totals.pushes == 0


def test_a_held_push_has_moved_when_the_barrier_ends_with_a_switch(served: Served) -> None:
    held(served.state)
    pushed = held_push(served)
    served.state.settle(1, 1, [], 60, 0)
    switched(served.state, 2, 1, EVERYTHING)
    assert pushed.result(SECONDS) is Status.MOVED


def test_a_held_push_goes_on_when_the_barrier_lapses(served: Served) -> None:
    served.state.hold(1, 1, 1, 0.2)
    assert held_push(served).result(SECONDS) is Status.OK
    with pytest.raises(NotHeldError):
        served.state.settle(1, 1, [], 60, 0)


def test_rows_and_pieces_that_a_switch_gives_away_are_gone(served: Served) -> None:
    served.connect().push(0, [list(range(1000)), [], list(range(DENSE_PIECES))], ones(4000 + DENSE_PIECES * LENGTH))
    held(served.state)
    served.state.settle(1, 1, [], 60, 0)
    half = Ownership(np.arange(1024) < 512, np.arange(64) < 32)
    switched(served.state, 2, 1, half)
    await_removal(served.state.tables, half)
    held(served.state, 2)
    served.state.settle(1, 2, [], 60, 0)
    left = served.state.figures().rows["C0"]
    assert 400 < left < 600
    client = served.connect()
    assert client.pull([[], [], [40]], version=1)[0] is Status.MOVED
    switched(served.state, 3, 2, EVERYTHING)
    _, weights = client.pull([[], [], [31, 40]], version=3)
    assert weights[0] == -1
    assert weights[LENGTH] == 0


def test_with_no_staleness_the_next_pull_waits_for_the_push(served: Served) -> None:
    served.assign(StalenessBound(0))
    pulls, pushes = (served.connect(generation=2) for _ in range(2))
    assert pulls.admit(0) is Status.OK
    second = served.threads.submit(pulls.admit, 1)
    assert pushes.push(0, KEYS, ones(), version=2) is Status.OK
    pushes.complete(0)
    assert second.result(SECONDS) is Status.OK


def test_a_worker_that_dies_does_not_hold_the_others(served: Served) -> None:
    served.assign(StalenessBound(0))
    dead, alive = (served.connect(session, generation=2) for session in (1, 2))
    assert dead.admit(0) is Status.OK
    second = served.threads.submit(alive.admit, 1, 2, 1)
    dead.close()
    assert second.result(SECONDS) is Status.OK


def test_a_request_that_waits_is_given_up_with_its_session(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = noted_call(monkeypatch, served.state._requests, "_wait")
    served.assign(StalenessBound(0))
    other, pulls, pushes = (served.connect(session, generation=2) for session in (1, 2, 2))
    assert other.admit(0) is Status.OK
    waiting = served.threads.submit(pulls.admit, 1, 2, 1)
    assert waits.wait(SECONDS)
    pushes.close()
    with pytest.raises(ConnectionLostError):
        waiting.result(SECONDS)
    assert other.push(0, KEYS, ones(), version=2) is Status.OK


def test_a_worker_that_hangs_holds_the_others_no_longer_than_its_leases_last(served: Served) -> None:
    served.assign(StalenessBound(0))
    hanging, alive = (served.connect(session, generation=2) for session in (1, 2))
    assert hanging.admit(0, token=1) is Status.OK
    second = served.threads.submit(alive.admit, 1, 2, 1)
    served.state.hear_leases(2, live=[2], next_token=3)
    assert second.result(SECONDS) is Status.OK
    assert hanging.push(0, KEYS, ones(), token=1, version=2) is Status.FENCED


def test_a_report_does_not_wait_for_a_lock_that_is_held_for_long(served: Served) -> None:
    served.connect().push(0, KEYS, ones())
    before = served.state.figures()
    release, taken = threading.Event(), threading.Event()

    def take(*_: object) -> None:
        taken.set()
        release.wait(SECONDS)

    held(served.state)
    served.state.settle(1, 1, [], 60, 0)
    snapshot = served.threads.submit(served.state.snapshot, 1, 1, take)
    assert taken.wait(SECONDS)
    assert served.state.figures() == before
    release.set()
    snapshot.result(SECONDS)
