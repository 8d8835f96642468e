"""Whole pipelines on their own servers: what is trained in rounds, and what happens to rounds that do not fit."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from emberscale_api.dataset import Split
from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec, OptimizerType, resolve_model
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch, BatchSource
from emberscale_trainer.membership import JobOverError
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.staleness import StalenessBound
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import DensePieces, NonFiniteGradientError, TableStore
from emberscale_trainer.transport import listen
from emberscale_trainer.worker import keys
from emberscale_trainer.worker.compute import ModelReplica, NonFiniteLossError
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.leases import LeaseBook, ShardLease
from emberscale_trainer.worker.local_rows import LocalRows
from emberscale_trainer.worker.pace import Stretch
from emberscale_trainer.worker.pipeline import Pipeline
from emberscale_trainer.worker.rounds import RoundLengths
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.servers import BatchName, Identity, ParameterServers, Pulled
from emberscale_trainer.worker.statistics import WorkerStatistics
from in_process import InProcessTraining
from master_stand_in import even_table, spread_evenly
from training_jobs import training_job

RECORDS = 16
IDS = 60
ADAGRAD = {"type": "Adagrad", "learningRate": 0.1}
JOB = training_job(
    data={
        "train": ["x"],
        "format": "Parquet",
        "columns": {
            "label": "clicked",
            "dense": ["price"],
            "categorical": ["user", "item"],
            "lists": [{"name": "history"}],
        },
    },
    model={"architecture": "WideAndDeep", "embeddings": {"dimension": 4}},
    optimizers={"sparse": {**ADAGRAD, "type": "RowWiseAdagrad"}, "dense": ADAGRAD},
)


def batch(number: int) -> Batch:
    """Makes a batch; every fifth has no valid record, every third no id in its lists."""
    generator = np.random.default_rng(number)
    records = 0 if number % 5 == 4 else RECORDS
    lengths = generator.integers(0, 4, records) if number % 3 else np.zeros(records, np.int64)
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = generator.integers(0, IDS, (records, 2))
    return Batch(
        number=number,
        start=number * RECORDS,
        stop=(number + 1) * RECORDS,
        labels=(ids[:, 0] % 3 == 0).astype(np.float32),
        dense=generator.normal(size=(records, 1)).astype(np.float32),
        ids=ids,
        lists=(IdLists(generator.integers(0, IDS, edges[-1]), edges),),
        bad_records=(),
        truncated_records=0,
    )


class Source:
    def batches_in(self, start: int, stop: int) -> int:
        return (stop - start) // RECORDS

    def batches(self, split: int, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        for first in range(start, stop, RECORDS):
            yield batch(first // RECORDS)


class StandingRoutes:
    def __init__(self, table: RoutingTable) -> None:
        self.table = table

    def close(self) -> None:
        pass


class Cluster:
    """Parameter servers on Unix sockets; the first bounds staleness."""

    def __init__(self, folder: Path, bound: int, servers: int = 2) -> None:
        spec = JOB.spec
        initial = flat_copy(build_model(spec.model, resolve_model(spec), spec.training.seed)).numpy()
        self.states = [ServerState() for _ in range(servers)]
        self._listeners = []
        addresses = []
        for index, state in enumerate(self.states):
            listener, address = listen(f"unix://{folder}/{index}.sock")
            DataPlane(listener, state, "secret", f"ps-{index}").start()
            self._listeners.append(listener)
            addresses.append(PsAddress(index, f"ps-{index}", address, ""))
        self.table = RoutingTable(
            1, 1, tuple(addresses), spread_evenly(BUCKETS, servers), spread_evenly(DENSE_PIECES, servers)
        )
        self.stores = []
        for index, state in enumerate(self.states):
            wanted = Assignment(1, 1, "")
            state.assign(wanted)
            self.stores.append(TableStore(resolve_model(spec).tables, DensePieces.of(initial, spec.optimizers.dense)))
            first = StalenessBound(bound) if index == 0 else None
            owned = Ownership.of(self.table, index)
            assert state.adopt(wanted, self.stores[-1], owned, AppliedBatches(), first)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    begun: list[Cluster] = []

    def begin(bound: int) -> Cluster:
        begun.append(Cluster(tmp_path, bound))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


class Pushes(ParameterServers):
    """A clock that each push advances: by a second for a single batch, by `slowness` for each batch of a round."""

    now = 0.0
    slowness = 0.5

    def push(self, plan: Any, one: Any, name: BatchName, *arrays: Any) -> None:
        super().push(plan, one, name, *arrays)
        self.now += name.batches * (self.slowness if name.is_round else 1)


class Worker:
    """A worker with its own index and its own round lengths.

    Its clock is the real one or, with `slowness`, runs as if a batch of a round took that many times as long as a
    single batch.
    """

    def __init__(self, cluster: Cluster, index: int, lengths: RoundLengths, slowness: float | None = None) -> None:
        self.cluster = cluster
        self.slowness = slowness
        self.index = index
        self.lengths = lengths
        self.statistics = WorkerStatistics()

    def train(self, leases: list[tuple[int, int]], pull_ahead: int = 1) -> None:
        """Trains leases of batches [first, stop); returns when all are committed."""
        routes = cast(Routes, StandingRoutes(self.cluster.table))
        replica, dense = ModelReplica(JOB), JOB.spec.optimizers.dense
        identity = Identity("secret", self.index, 100 + self.index)
        book, todo = LeaseBook(), list(leases)

        def make_planner(routing: RoutingTable, in_rounds: bool) -> KeyPlanner:
            return KeyPlanner(routing, replica.tables, replica.parameters, dense.type if in_rounds else None)

        def next_task(unwanted: Callable[[], bool]) -> ShardLease:
            while not todo:
                if unwanted() or not book.held():
                    raise JobOverError("done")
                book.wait_for_finished(0.05)
                book.take_finished()
            first, stop = todo.pop(0)
            token, start = 1000 * self.index + len(leases) - len(todo), first * RECORDS
            lease = ShardLease(token, Split.TRAINING, 0, start, stop * RECORDS, shard=start)
            book.hold(lease)
            return lease

        pulls = ParameterServers(routes, identity, make_planner, replica.layout)
        pushes = Pushes(routes, identity, make_planner, replica.layout)
        pushes.slowness = self.slowness or 1
        pipeline = Pipeline(
            cast(BatchSource, Source()),
            routes,
            make_planner,
            replica,
            pulls,
            pushes,
            book,
            self.statistics,
            2,
            pull_ahead,
            lease_finished=lambda: None,
            before_compute=lambda: None,
            lengths=self.lengths,
            make_local=lambda: LocalRows(replica.tables, dense, replica.parameters),
            clock=time.perf_counter if self.slowness is None else lambda: pushes.now,
        )
        try:
            pipeline.run(next_task)
        except JobOverError:
            pass
        finally:
            pulls.close()
            pushes.close()


def lengths(mode: HotEmbeddingsMode = HotEmbeddingsMode.ENABLED) -> RoundLengths:
    return RoundLengths(HotEmbeddingsSpec(mode=mode), 60)


class Measured(RoundLengths):
    """Lengths in the mode `Auto`; the speed of single batches is known from the start."""

    def __init__(self) -> None:
        super().__init__(HotEmbeddingsSpec(mode=HotEmbeddingsMode.AUTO), 60)
        for _ in range(6):
            self.measured(Stretch(False, 0, 16, 16 * RECORDS, 1.0, (1, 1)))


class Eight(RoundLengths):
    """Rounds of eight batches from the first one on."""

    @property
    def length(self) -> int:
        """The number of batches of the next round."""
        return 8


class Alternating(RoundLengths):
    """Trains every second lease in rounds."""

    def begin_lease(self, token: int) -> bool:
        return token % 2 == 0 and super().begin_lease(token)


def predictions(stores: list[TableStore]) -> Any:
    training = InProcessTraining(JOB, len(stores))
    training.stores = stores
    return training.predict(batch(100_000))


def alone(batches: int) -> Any:
    training = InProcessTraining(JOB)
    for number in range(batches):
        training.train(batch(number))
    return predictions(training.stores)


@pytest.mark.parametrize("pull_ahead", [0, 1, 8])
@pytest.mark.parametrize("bound", [0, 4, 64])
def test_a_worker_alone_learns_in_rounds_what_it_learns_batch_by_batch(
    cluster: Callable[[int], Cluster], bound: int, pull_ahead: int
) -> None:
    servers = cluster(bound)
    worker = Worker(servers, 0, lengths())
    worker.train([(0, 7), (7, 30), (30, 64)], pull_ahead)
    assert worker.statistics.total_batches == 64
    assert all(state.core.applied.ranges(0) == [(0, 64)] for state in servers.states)
    np.testing.assert_allclose(predictions(servers.stores), alone(64), rtol=2e-3, atol=1e-4)


def test_a_lease_is_one_round_wherever_its_shard_starts(cluster: Callable[[int], Cluster]) -> None:
    worker = Worker(cluster(64), 0, Eight(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED), 60))
    worker.train([(0, 5), (5, 13), (13, 21)])
    traffic = worker.statistics.total_traffic
    assert (traffic.rounds, traffic.round_batches) == (3, 21)


def test_rounds_and_single_batches_take_turns(cluster: Callable[[int], Cluster]) -> None:
    servers = cluster(0)
    worker = Worker(servers, 0, Alternating(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED), 60))
    worker.train([(first, first + 5) for first in range(0, 60, 5)])
    assert all(state.core.applied.ranges(0) == [(0, 60)] for state in servers.states)
    np.testing.assert_allclose(predictions(servers.stores), alone(60), rtol=2e-3, atol=1e-4)


def test_auto_estimates_in_the_first_lease_and_begins_rounds_in_the_next_where_they_pay(
    cluster: Callable[[int], Cluster],
) -> None:
    servers = cluster(0)
    worker = Worker(servers, 0, Measured())
    with capture_logs() as logs:
        worker.train([(0, 20), (20, 40)])
    (estimate,) = [one for one in logs if one["event"] == "rounds_estimated"]
    assert estimate["batches"] == 16
    assert estimate["pays"]
    assert estimate["bytes"] < estimate["single_bytes"] / 2
    assert worker.statistics.total_traffic.round_batches == 20
    np.testing.assert_allclose(predictions(servers.stores), alone(40), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(("slowness", "reason"), [(2.0, "SpeedDoesNotPay"), (0.5, "SpeedPays")])
def test_auto_keeps_rounds_where_they_are_as_fast(
    cluster: Callable[[int], Cluster], slowness: float, reason: str
) -> None:
    servers = cluster(0)
    worker = Worker(servers, 0, lengths(HotEmbeddingsMode.AUTO), slowness)
    worker.train([(first, first + 40) for first in range(0, 40 * 24, 40)])
    told = worker.lengths.decision
    assert told is not None
    assert (told.active, told.reason) == (reason == "SpeedPays", reason), told.message
    (ratio,) = re.findall(r"\(([\d.]+)x", told.message)
    assert float(ratio) == pytest.approx(1 / slowness, rel=0.05)
    assert worker.statistics.total_traffic.round_batches
    assert all(state.core.applied.ranges(0) == [(0, 40 * 24)] for state in servers.states)


def test_auto_estimates_again_soon_after_a_short_lease(cluster: Callable[[int], Cluster]) -> None:
    servers = cluster(0)
    worker = Worker(servers, 0, Measured())
    with capture_logs() as logs:
        worker.train([(0, 2), (2, 22), (22, 42), (42, 62)])
    estimates = [(one["batches"], one["pays"]) for one in logs if one["event"] == "rounds_estimated"]
    assert estimates == [(2, False), (16, True)]
    assert worker.statistics.total_traffic.round_batches == 20


def test_auto_plans_rounds_beyond_a_frame_for_one_estimate_only(
    cluster: Callable[[int], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MAX_PAYLOAD_BYTES", 8_600)
    worker = Worker(cluster(0), 0, lengths(HotEmbeddingsMode.AUTO))
    worker.train([(0, 20), (20, 40)])
    assert worker.lengths.longest(16) == 1
    assert not worker.statistics.total_traffic.rounds


def test_auto_says_that_the_budget_is_too_small_and_trains_batch_by_batch(cluster: Callable[[int], Cluster]) -> None:
    servers = cluster(0)
    small = RoundLengths(HotEmbeddingsSpec(mode=HotEmbeddingsMode.AUTO, budget="1Ki"), 60)
    worker = Worker(servers, 0, small)
    worker.train([(0, 20), (20, 40)])
    told = small.decision
    assert told is not None
    assert (told.active, told.reason) == (False, "BudgetTooSmall")
    assert told.message.endswith("of memory, and hotEmbeddings.budget is 1 KiB")
    assert not worker.statistics.total_traffic.rounds
    assert all(state.core.applied.ranges(0) == [(0, 40)] for state in servers.states)


@pytest.mark.parametrize("bound", [0, 1, 4, 20])
def test_workers_of_rounds_and_of_batches_all_come_to_the_end(cluster: Callable[[int], Cluster], bound: int) -> None:
    servers = cluster(bound)
    workers = [
        Worker(servers, 0, lengths()),
        Worker(servers, 1, lengths()),
        Worker(servers, 2, lengths(HotEmbeddingsMode.DISABLED)),
        Worker(servers, 3, Alternating(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED), 60)),
    ]
    shards = [(first, first + 10) for first in range(0, 400, 10)]
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(worker.train, shards[worker.index :: 4]) for worker in workers]
        for one in running:
            one.result(60)
    assert all(state.core.applied.ranges(0) == [(0, 400)] for state in servers.states)


@pytest.mark.parametrize("limit", [14_600, 8_600])
def test_a_round_beyond_a_frame_is_cut_down_to_single_batches_if_need_be(
    cluster: Callable[[int], Cluster], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = cluster(0)
    monkeypatch.setattr(keys, "MAX_PAYLOAD_BYTES", limit)
    worker = Worker(servers, 0, lengths())
    worker.train([(0, 30), (30, 64)])
    assert all(state.core.applied.ranges(0) == [(0, 64)] for state in servers.states)
    np.testing.assert_allclose(predictions(servers.stores), alone(64), rtol=2e-3, atol=1e-4)


def test_a_gradient_that_is_not_finite_in_the_last_record_of_a_round_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, replica = batch(1), ModelReplica(JOB)
    of_embeddings = np.zeros((RECORDS, replica.layout.width), np.float32)
    of_embeddings[-1, -1] = np.nan
    monkeypatch.setattr(replica, "_pulled_back", lambda *_: (of_embeddings, None))
    plan = KeyPlanner(even_table(1), replica.tables, replica.parameters, OptimizerType.ADAGRAD).plan(one.ids, one.lists)
    local = LocalRows(replica.tables, JOB.spec.optimizers.dense, replica.parameters)
    local.begin(plan, np.zeros(plan.values, np.float32), np.zeros(plan.dense_values, np.float32))
    with pytest.raises(NonFiniteGradientError, match="embeddings of batch 1"):
        replica.train_locally(one, plan, local)


def test_a_loss_that_is_not_finite_is_noticed_in_an_evaluation() -> None:
    """The master would refuse such a sum, and the worker would end, restart, and reach the same batch again."""
    one, replica = batch(1), ModelReplica(JOB)
    plan = KeyPlanner(even_table(1), replica.tables, replica.parameters, OptimizerType.ADAGRAD).plan(one.ids, one.lists)
    pulled = Pulled(np.zeros(plan.values, np.float32), np.zeros(plan.dense_values, np.float32))
    assert np.isfinite(replica.evaluate(one, plan, pulled).loss_sum)
    unbounded = replace(one, dense=np.full_like(one.dense, np.inf))
    with pytest.raises(NonFiniteLossError, match="the loss of batch 1 of an evaluation is nan: scale dense"):
        replica.evaluate(unbounded, plan, pulled)
