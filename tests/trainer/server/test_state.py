"""A parameter server under concurrent pulls, pushes and cuts, over real sockets."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import PsAddress, RoutingTable, spread_evenly
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, DenseSlice, Partition
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.state import CutRefusedError, ServerState
from emberscale_trainer.table import SnapshotAbandonedError, TableStore
from emberscale_trainer.transport import ConnectionLostError, listen
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner
from emberscale_trainer.worker.servers import (
    BatchName,
    LeaseFencedError,
    ParameterServers,
    RequestRefusedError,
    RoutingStaleError,
)
from memory_limit import refused_beyond

DENSE = 3
SGD = OptimizerSpec(type=OptimizerType.SGD, learning_rate=1.0)
TABLES = [TableSpec(number, f"C{number}", number, 4, SGD, InitializerSpec(), seed=0) for number in range(2)]


def partition(epoch: int, dense: int = DENSE) -> Partition:
    return Partition(epoch, TableStore(TABLES), DenseSlice(np.zeros(dense, dtype=np.float32), SGD), AppliedBatches())


class Served:
    """A server on a Unix socket, and workers connected to it."""

    def __init__(self, folder: Path, index: int = 0) -> None:
        self.state = ServerState()
        self.listener, self.address = listen(f"unix://{folder}/ps-{index}.sock")
        DataPlane(self.listener, self.state, "secret").start()
        self.opened: list[ParameterServers] = []

    def routing(self, epoch: int = 1) -> RoutingTable:
        return RoutingTable(epoch, (PsAddress(0, "i", self.address, ""),), spread_evenly(1))

    def connect(self, worker: int = 0, epoch: int = 1, token: str = "secret", dense: int = DENSE) -> ParameterServers:
        servers = ParameterServers(self.routing(epoch), token, worker, dense)
        self.opened.append(servers)
        return servers

    def plan(self, ids: list[list[int]]) -> KeyPlan:
        return KeyPlanner(self.routing(), TABLES).plan(np.array(ids, dtype=np.int64))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    served.state.adopt(partition(1), None)
    yield served
    for servers in served.opened:
        servers.close()
    served.listener.close()


def batch(number: int, token: int = 1, shard: int = 0) -> BatchName:
    return BatchName(epoch=0, number=number, shard=shard, token=token)


def ones(plan: KeyPlan) -> NDArray[np.float32]:
    return np.ones(plan.values, dtype=np.float32)


DENSE_ONES = np.ones(DENSE, dtype=np.float32)


def test_a_push_changes_what_the_next_pull_sees(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2], [1, 3]])
    before = servers.pull(plan, batch(0), read_only=False)
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    after = servers.pull(plan, batch(1), read_only=False)
    np.testing.assert_allclose(after.rows, before.rows - 1, rtol=1e-6)
    np.testing.assert_array_equal(after.dense, before.dense - 1)


def test_a_repeated_push_changes_nothing(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    once = servers.pull(plan, batch(1), read_only=False)
    servers.push(plan, batch(0, token=2), ones(plan), DENSE_ONES)
    twice = servers.pull(plan, batch(1), read_only=False)
    np.testing.assert_array_equal(twice.rows, once.rows)
    assert served.state.totals.repeated == 1


def test_a_push_under_an_older_lease_of_the_shard_is_fenced(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    servers.push(plan, batch(0, token=7), ones(plan), DENSE_ONES)
    with pytest.raises(LeaseFencedError):
        servers.push(plan, batch(1, token=6), ones(plan), DENSE_ONES)
    servers.push(plan, batch(9, token=6, shard=9), ones(plan), DENSE_ONES)


def test_another_routing_epoch_is_told_to_refresh(served: Served) -> None:
    plan = served.plan([[1, 2]])
    with pytest.raises(RoutingStaleError):
        served.connect(epoch=2).pull(plan, batch(0), read_only=False)
    served.state.leave()
    with pytest.raises(RoutingStaleError):
        served.connect().pull(plan, batch(0), read_only=False)


def test_only_a_push_makes_rows(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    for read_only in (True, False):
        servers.pull(plan, batch(0), read_only=read_only)
        assert served.state.rows() == {"C0": 0, "C1": 0}
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    assert served.state.rows() == {"C0": 1, "C1": 1}


def test_without_the_token_nothing_is_served(served: Served) -> None:
    with pytest.raises((RequestRefusedError, ConnectionLostError)):
        served.connect(token="guess")


def test_a_request_that_does_not_fit_the_model_is_refused_and_changes_nothing(served: Served) -> None:
    servers = served.connect(dense=DENSE + 1)
    plan = served.plan([[1, 2]])
    with pytest.raises(RequestRefusedError, match="gradients"):
        servers.push(plan, batch(0), ones(plan), np.ones(DENSE + 1, dtype=np.float32))
    assert served.state.totals.pushes == 0


@pytest.mark.parametrize("spoilt", ["rows", "dense"])
def test_a_push_with_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(served: Served, spoilt: str) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    rows, dense = ones(plan), DENSE_ONES.copy()
    (rows if spoilt == "rows" else dense)[1] = np.nan
    with pytest.raises(RequestRefusedError, match=f"of the {spoilt}.* is nan"):
        servers.push(plan, batch(0), rows, dense)
    assert served.state.rows() == {"C0": 0, "C1": 0}
    served.connect().push(plan, batch(0), ones(plan), DENSE_ONES)
    assert served.state.totals.pushes == 1


def many(served: Served) -> KeyPlan:
    """So many new rows that their segments take some 13 MB."""
    return served.plan([[key, key] for key in range(200_000)])


def test_a_push_for_which_there_is_no_memory_can_be_sent_again(served: Served) -> None:
    plan = many(served)
    servers, gradients = served.connect(), ones(plan)
    header = Header(Kind.PUSH, routing_epoch=1, batch=0, epoch=0, shard=0, token=1, worker=0)
    counts, keys = plan.counts[0], plan.keys[0]
    with refused_beyond(6 << 20), pytest.raises(MemoryError):
        served.state.push(header, counts, keys, gradients, DENSE_ONES)
    assert served.state.rows() == {"C0": 0, "C1": 0}
    before = servers.pull(plan, batch(0), read_only=True)
    assert served.state.push(header, counts, keys, gradients, DENSE_ONES) is Status.OK
    after = servers.pull(plan, batch(0), read_only=True)
    np.testing.assert_allclose(after.rows, before.rows - 1, rtol=1e-6)
    np.testing.assert_array_equal(after.dense, before.dense - 1)


HALF_A_PUSH = """
import numpy as np
from emberscale_api.wire import Header, Kind
from emberscale_trainer.server.state import ServerState
from memory_limit import refused_beyond
from test_state import DENSE_ONES, partition

counts, keys = np.array([400_000, 0], np.uint32), np.arange(400_000)
gradients = np.ones(1_600_000, np.float32)
held, state = partition(1), ServerState()
held.tables.reserve(counts, keys, gradients)
state.adopt(held, None)
print("pushing", flush=True)
with refused_beyond(0):  # of the memory for the index, a reserve knows nothing
    state.push(Header(Kind.PUSH, routing_epoch=1), counts, keys, gradients, DENSE_ONES)
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


def test_a_cut_waits_for_what_others_have_applied_and_holds_everything_else(served: Served) -> None:
    servers = [served.connect(worker) for worker in range(2)]
    plan = served.plan([[1, 2]])
    servers[0].push(plan, batch(0), ones(plan), DENSE_ONES)
    assert served.state.freeze(1, [(0, 0, 10)]) == [(0, 0, 1)]

    pushes = [
        threading.Thread(target=servers[worker].push, args=(plan, batch(number), ones(plan), DENSE_ONES))
        for worker, number in ((0, 1), (1, 2))
    ]
    for push in pushes:
        push.start()
    cut, _ = served.state.cut(1, [(0, 2, 3)], settle_seconds=30)
    for push in pushes:
        push.join(30)
    assert cut.applied.ranges(0) == [(0, 1), (2, 3)]
    np.testing.assert_array_equal(cut.dense["values"], [-2, -2, -2])
    assert served.state.totals.pushes == 3


def test_a_cut_whose_batches_do_not_come_is_refused_and_thawed(served: Served) -> None:
    served.state.freeze(1, [])
    with pytest.raises(CutRefusedError, match="did not come"):
        served.state.cut(1, [(0, 5, 6)], settle_seconds=0)
    served.state.thaw(1)
    servers = served.connect()
    plan = served.plan([[1, 2]])
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    with pytest.raises(CutRefusedError, match="not prepared"):
        served.state.cut(1, [], settle_seconds=0)


def test_a_held_push_is_told_to_refresh_when_the_server_is_reassigned(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    served.state.freeze(1, [])
    outcome: list[Exception] = []

    def push() -> None:
        try:
            servers.push(plan, batch(0), ones(plan), DENSE_ONES)
        except RoutingStaleError as error:
            outcome.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    served.state.leave()
    served.state.adopt(partition(2), None)
    thread.join(30)
    assert len(outcome) == 1
    assert served.state.totals.pushes == 0


def test_with_no_staleness_the_next_pull_waits_for_the_push(served: Served) -> None:
    served.state.adopt(partition(1), StalenessBound(0))
    pulls, pushes = served.connect(0), served.connect(0)
    plan = served.plan([[1, 2]])
    first = pulls.pull(plan, batch(0), read_only=False)
    second: list[NDArray[np.float32]] = []
    waiting = threading.Thread(target=lambda: second.append(pulls.pull(plan, batch(1), read_only=False).rows))
    waiting.start()
    pushes.push(plan, batch(0), ones(plan), DENSE_ONES)
    waiting.join(30)
    np.testing.assert_allclose(second[0], first.rows - 1, rtol=1e-6)


def test_with_no_staleness_a_pull_sees_the_push_before_it_on_every_server(served: Served, tmp_path: Path) -> None:
    other = Served(tmp_path, index=1)
    served.state.adopt(partition(1, dense=1), StalenessBound(0))
    other.state.adopt(partition(1, dense=2), None)
    addresses = tuple(PsAddress(index, "i", each.address, "") for index, each in enumerate((served, other)))
    routing = RoutingTable(1, addresses, spread_evenly(2))
    plan = KeyPlanner(routing, TABLES).plan(np.arange(40, dtype=np.int64).reshape(20, 2))
    workers = [(ParameterServers(routing, "secret", worker, DENSE),) * 2 for worker in range(3)]
    first = workers[0][0].pull(plan, batch(0), read_only=False)
    later: dict[int, NDArray[np.float32]] = {}

    def train(number: int) -> None:
        pulls, pushes = workers[number]
        later[number] = pulls.pull(plan, batch(number, shard=number), read_only=False).rows
        pushes.push(plan, batch(number, shard=number), ones(plan), DENSE_ONES)

    waiting = [threading.Thread(target=train, args=[number]) for number in (1, 2)]
    for thread in waiting:
        thread.start()
    workers[0][1].push(plan, batch(0), ones(plan), DENSE_ONES)
    for thread in waiting:
        thread.join(30)
    steps = sorted(float(np.round(first.rows - rows).max()) for rows in later.values())
    assert steps == [1, 2]
    assert all(np.ptp(np.round(first.rows - rows)) == 0 for rows in later.values())
    for pulls, _ in workers:
        pulls.close()
    other.listener.close()


def test_a_worker_that_dies_does_not_hold_the_others(served: Served) -> None:
    served.state.adopt(partition(1), StalenessBound(0))
    plan = served.plan([[1, 2]])
    dead, alive = served.connect(0), served.connect(1)
    dead.pull(plan, batch(0), read_only=False)
    answered = threading.Event()

    def pull() -> None:
        alive.pull(plan, batch(1), read_only=False)
        answered.set()

    threading.Thread(target=pull, daemon=True).start()
    dead.close()
    assert answered.wait(30)


def test_a_cut_that_holds_lets_no_push_through_until_the_server_is_assigned_anew(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    served.state.freeze(1, [])
    cut, _ = served.state.cut(1, [], settle_seconds=0, hold_seconds=60)
    outcome: list[Exception] = []

    def push() -> None:
        try:
            servers.push(plan, batch(1), ones(plan), DENSE_ONES)
        except RoutingStaleError as error:
            outcome.append(error)

    held = threading.Thread(target=push)
    held.start()
    held.join(0.3)
    assert held.is_alive()
    served.state.leave()
    held.join(30)
    assert len(outcome) == 1
    assert cut.applied.ranges(0) == [(0, 1)]
    assert served.state.totals.pushes == 1


def test_a_held_cut_that_is_thawed_goes_on(served: Served) -> None:
    servers = served.connect()
    plan = served.plan([[1, 2]])
    served.state.freeze(1, [])
    served.state.cut(1, [], settle_seconds=0, hold_seconds=60)
    served.state.thaw(1)
    servers.push(plan, batch(0), ones(plan), DENSE_ONES)
    assert served.state.totals.pushes == 1


def test_a_server_that_leaves_gives_up_the_checkpoint_that_it_writes(served: Served) -> None:
    served.connect().push(served.plan([[1, 2]]), batch(0), np.ones(8, np.float32), DENSE_ONES)
    served.state.freeze(1, [])
    snapshot, _ = served.state.cut(1, [], settle_seconds=0)
    served.state.leave()
    with pytest.raises(SnapshotAbandonedError):
        list(snapshot.tables.drain(0))
