"""Four stages, each a thread: read the next batches, pull their rows, compute, push.

The pipeline survives a change of owners. When a connection breaks, the generation changes or a lease is lost, the
pipeline is torn down and `run` raises. The caller then builds another, which continues from the last committed batch.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from emberscale_api.rpc import master_pb2
from emberscale_trainer.data.source import Batch, BatchSource
from emberscale_trainer.worker.channel import Channel, ChannelClosedError
from emberscale_trainer.worker.compute import Gradients, ModelReplica
from emberscale_trainer.worker.keys import KeyPlan
from emberscale_trainer.worker.leases import LeaseBook
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.servers import BatchName, MakePlanner, ParameterServers, Pulled
from emberscale_trainer.worker.statistics import EvaluationTotals, Span, WorkerStatistics

NextTask = Callable[[Callable[[], bool]], master_pb2.Task]
"""Waits for the next TRAIN or EVALUATE task.

Raises JobOverError when none will come, and ChannelClosedError once the argument says that none is wanted any more.
"""


@dataclass(frozen=True)
class _Planned:
    task: master_pb2.Task
    batch: Batch
    plan: KeyPlan
    name: BatchName
    reading: Span


@dataclass(frozen=True)
class _Ready:
    """`plan` laid out what was pulled; it may be newer than the one that was read with the batch."""

    planned: _Planned
    plan: KeyPlan
    pulled: Pulled
    pulling: Span


@dataclass(frozen=True)
class _Computed:
    planned: _Planned
    plan: KeyPlan
    gradients: Gradients


class Pipeline:
    """One run over any number of leases, within one generation.

    `pulls` and `pushes` are two sets of connections to the same servers. `lease_finished` is called when the last batch
    of a lease is committed, and `before_compute` before each batch, in the thread that computes. `prefetch` batches are
    read ahead; rows are pulled for at most `pull_ahead` batches beyond the oldest whose push is not acknowledged: what
    is pulled earlier is staler when it is used.
    """

    def __init__(
        self,
        source: BatchSource,
        routes: Routes,
        make_planner: MakePlanner,
        replica: ModelReplica,
        pulls: ParameterServers,
        pushes: ParameterServers,
        leases: LeaseBook,
        statistics: WorkerStatistics,
        prefetch: int,
        pull_ahead: int,
        lease_finished: Callable[[], None],
        before_compute: Callable[[], None],
    ) -> None:
        self._source = source
        self._routes = routes
        self._make_planner = make_planner
        self._replica = replica
        self._pulls = pulls
        self._pushes = pushes
        self._leases = leases
        self._statistics = statistics
        self._lease_finished = lease_finished
        self._before_compute = before_compute
        self._planned: Channel[_Planned] = Channel(prefetch)
        self._unpushed: Channel[None] = Channel(pull_ahead + 1)
        self._ready: Channel[_Ready] = Channel(1)
        self._computed: Channel[_Computed] = Channel(1)
        self._evaluations: dict[int, EvaluationTotals] = {}
        self._failure: Exception | None = None
        self._failing = threading.Lock()

    def run(self, next_task: NextTask) -> NoReturn:
        """Works until a stage stops, and raises what stopped it first: JobOverError when all is done."""
        work: dict[str, Callable[[], None]] = {
            "read": lambda: self._read(next_task),
            "pull": self._pull,
            "push": self._push,
        }
        stages = [
            threading.Thread(target=self._stage, args=(stage,), name=name, daemon=True) for name, stage in work.items()
        ]
        for stage in stages:
            stage.start()
        self._stage(self._compute)
        for stage in stages:
            stage.join()
        raise self._failure or ChannelClosedError

    def abort(self, reason: Exception) -> None:
        """Tears the pipeline down from outside; `run` raises `reason`."""
        with self._failing:
            if self._failure is None:
                self._failure = reason
        for channel in (self._planned, self._unpushed, self._ready, self._computed):
            channel.abort()
        self._routes.close()
        self._pulls.close()
        self._pushes.close()

    def _stage(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ChannelClosedError:
            pass  # another stage has failed and said why
        except Exception as error:  # noqa: BLE001 - it is raised again by `run`, in the thread that waits
            self.abort(error)

    def _read(self, next_task: NextTask) -> None:
        routing = self._routes.table
        planner = self._make_planner(routing)
        while True:
            task = next_task(lambda: self._failure is not None)
            split = master_pb2.TRAINING_DATA if task.kind == master_pb2.TRAIN else master_pb2.EVALUATION_DATA
            batches = self._source.batches(split, task.epoch, task.start, task.stop)
            while True:
                began = time.perf_counter()
                with self._statistics.stage("read"):
                    batch = next(batches, None)
                if batch is None:
                    break
                with self._statistics.stage("plan"):
                    if self._routes.table is not routing:
                        routing = self._routes.table
                        planner = self._make_planner(routing)
                    plan = planner.plan(batch.ids, batch.lists)
                if task.kind == master_pb2.TRAIN:
                    self._statistics.planned(plan.lookups, plan.distinct)
                if batch.bad_records:
                    self._statistics.skipped(
                        [
                            master_pb2.BadRecord(file=record.file, line=record.line, problem=record.problem)
                            for record in batch.bad_records
                        ]
                    )
                name = BatchName(task.epoch, batch.number, task.shard, task.token)
                self._planned.put(_Planned(task, batch, plan, name, (began, time.perf_counter())))

    def _pull(self) -> None:
        while True:
            planned = self._planned.get()
            self._unpushed.put(None)
            began = time.perf_counter()
            with self._statistics.stage("pull"):
                read_only = planned.task.kind == master_pb2.EVALUATE
                plan, pulled = self._pulls.pull(planned.plan, planned.batch, planned.name, read_only)
            self._statistics.moved(*self._pulls.take_traffic())
            self._ready.put(_Ready(planned, plan, pulled, (began, time.perf_counter())))

    def _compute(self) -> None:
        while True:
            began = time.perf_counter()
            ready = self._ready.get()
            planned = ready.planned
            self._statistics.waited(began, planned.reading, ready.pulling)
            self._before_compute()
            with self._statistics.stage("compute"):
                if planned.task.kind == master_pb2.EVALUATE:
                    self._evaluate(ready)
                    self._unpushed.get()
                    continue
                gradients, predictions = self._replica.train(planned.batch, ready.plan, ready.pulled)
                self._statistics.trained(
                    predictions.probabilities,
                    planned.batch.labels,
                    predictions.loss_sum,
                    planned.batch.truncated_records,
                )
            self._computed.put(_Computed(planned, ready.plan, gradients))

    def _evaluate(self, ready: _Ready) -> None:
        task, batch = ready.planned.task, ready.planned.batch
        predictions = self._replica.evaluate(batch, ready.plan, ready.pulled)
        totals = self._evaluations.setdefault(task.token, EvaluationTotals())
        totals.add(predictions.probabilities, batch.labels, predictions.loss_sum)
        if batch.stop == task.stop:
            self._leases.finish(
                master_pb2.TaskResult(token=task.token, evaluation=self._evaluations.pop(task.token).to_proto())
            )

    def _push(self) -> None:
        while True:
            computed = self._computed.get()
            planned, gradients = computed.planned, computed.gradients
            with self._statistics.stage("push"):
                self._pushes.push(computed.plan, planned.batch, planned.name, gradients.rows, gradients.dense)
            self._unpushed.get()
            self._statistics.moved(*self._pushes.take_traffic())
            if self._leases.commit(planned.task.token, planned.batch.stop):
                self._lease_finished()
