"""Four stages, each a thread: read the next batches, pull their rows, compute, push.

The pipeline survives a change of owners. When a connection breaks, the generation changes or a lease is lost, the
pipeline is torn down and `run` raises. The caller then builds another, which continues from the last committed batch.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NoReturn

from emberscale_trainer.data.source import Batch, BatchSource
from emberscale_trainer.worker.channel import Channel, ChannelClosedError
from emberscale_trainer.worker.compute import Gradients, ModelReplica, Predictions
from emberscale_trainer.worker.keys import KeyPlan, RequestTooLargeError
from emberscale_trainer.worker.leases import FinishedTask, LeaseBook, ShardLease
from emberscale_trainer.worker.local_rows import LocalChanges, LocalRows
from emberscale_trainer.worker.pace import Stretch, StretchTimer
from emberscale_trainer.worker.rounds import Round, RoundFigures, RoundLengths
from emberscale_trainer.worker.routes import Routes
from emberscale_trainer.worker.servers import BatchName, MakePlanner, ParameterServers, Planners, Pulled, PullLaterError
from emberscale_trainer.worker.statistics import EvaluationTotals, Span, WorkerStatistics
from emberscale_trainer.worker.trial import RoundTrial
from emberscale_trainer.worker.turns import RoundTurns

NextTask = Callable[[Callable[[], bool]], ShardLease]
"""Waits for the next lease.

Raises JobOverError when no lease will come, and ChannelClosedError once the argument says that none is wanted.
"""


@dataclass(frozen=True)
class _Planned:
    """A round, or a single batch as the only one of its round.

    The lease was `granted` at this time, by the pipeline's clock; infinite: evaluation came right before it.
    """

    lease: ShardLease
    granted: float
    round: Round
    plan: KeyPlan
    name: BatchName
    reading: Span


@dataclass(frozen=True)
class _Ready:
    """`plan` laid out what was pulled; it may be newer than the one that was read with the batch.

    `pushed` counts the rounds that were pushed before the pull, and are in what it got.
    """

    planned: _Planned
    plan: KeyPlan
    pulled: Pulled
    pulling: Span
    pushed: int


@dataclass(frozen=True)
class _Computed:
    planned: _Planned
    plan: KeyPlan
    pushes: Gradients | LocalChanges


class Pipeline:
    """One run over any number of leases, within one generation.

    `pulls` and `pushes` are two sets of connections to the same servers. `lease_finished` is called when the last batch
    of a lease is committed, and `before_compute` before each batch, in the thread that computes. `prefetch` batches are
    read ahead; rows are pulled for at most `pull_ahead` batches beyond the oldest whose push is not acknowledged: what
    is pulled earlier is staler when it is used. `clock` is that of the speeds which `lengths` compares.

    A round takes the path of a batch. Its pull comes entirely before or entirely after the push of the previous round.
    If it comes before, the changes of that round are added to the pulled rows, so a lone worker trains rounds as if
    each batch saw all previous ones.
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
        lengths: RoundLengths,
        make_local: Callable[[], LocalRows],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._source = source
        self._routes = routes
        self._planners = Planners(make_planner)  # only the thread that reads uses them
        self._replica = replica
        self._pulls = pulls
        self._pushes = pushes
        self._leases = leases
        self._statistics = statistics
        self._lease_finished = lease_finished
        self._before_compute = before_compute
        self._lengths = lengths
        self._make_local = make_local
        self._clock = clock
        self._timer = StretchTimer(clock)
        self._local: LocalRows | None = None
        self._planned: Channel[_Planned] = Channel(prefetch)
        self._most_unpushed = pull_ahead + 1
        self._unpushed: Channel[None] = Channel(self._most_unpushed)
        self._turns = RoundTurns()
        self._ready: Channel[_Ready] = Channel(1)
        self._computed: Channel[_Computed] = Channel(1)
        self._evaluations: dict[int, EvaluationTotals] = {}
        self._failure: Exception | None = None
        self._failing = threading.Lock()

    def run(self, next_task: NextTask) -> NoReturn:
        """Works until a stage stops, and raises the first cause: JobOverError when all work is done."""
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
        self._turns.abort()
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
        evaluated = False
        while True:
            lease = next_task(lambda: self._failure is not None)
            granted, evaluated = math.inf if evaluated else self._clock(), not lease.trains
            batches = self._source.batches(lease.split, lease.epoch, lease.start, lease.stop)
            first_of_shard = self._source.batches_in(0, lease.shard)
            in_rounds = lease.trains and self._lengths.begin_lease(lease.token)
            trial = RoundTrial(self._lengths) if lease.trains and self._lengths.wants_estimate else None
            while True:
                began = time.perf_counter()
                with self._statistics.stage("read"):
                    one = _next_round(batches, self._lengths.length if in_rounds else 1, first_of_shard)
                if one is None:
                    if trial is not None:
                        with self._statistics.stage("plan"):
                            trial.end(lambda one: self._plan(one, True))
                    break
                self._statistics.skipped([record for batch in one.batches for record in batch.bad_records])
                for part, plan, is_round in self._plans(one, in_rounds):
                    if lease.trains:
                        self._statistics.planned(plan.lookups, plan.distinct)
                    if trial is not None:
                        trial.add(part, plan)
                    number, count = part.batches[0].number, len(part.batches)
                    name = BatchName(lease.epoch, number, lease.shard, lease.token, count, is_round)
                    self._planned.put(_Planned(lease, granted, part, plan, name, (began, time.perf_counter())))
                    began = time.perf_counter()

    def _plans(self, one: Round, in_rounds: bool) -> Iterator[tuple[Round, KeyPlan, bool]]:
        """Plans a round: in halves if it is beyond a frame, or as a batch without state; says of each if it is a round.

        Raises RequestTooLargeError for a batch without state.
        """
        try:
            with self._statistics.stage("plan"):
                plan = self._plan(one, in_rounds)
        except RequestTooLargeError:
            if not in_rounds:
                raise
            half = len(one.batches) // 2
            self._lengths.exceeds_frame(len(one.batches))
            parts = [Round.of(batches) for batches in (one.batches[:half], one.batches[half:])] if half else [one]
            for part in parts:
                yield from self._plans(part, half > 0)
        else:
            yield one, plan, in_rounds

    def _plan(self, one: Round, in_rounds: bool) -> KeyPlan:
        return self._planners.of(self._routes.table, in_rounds).plan(one.ids, one.lists)

    def _pull(self) -> None:
        in_rounds = False
        while True:
            planned = self._planned.get()
            if planned.lease.trains and planned.name.is_round is not in_rounds:
                in_rounds = planned.name.is_round
                self._await_pushes()
            self._unpushed.put(None)
            began = time.perf_counter()
            with self._statistics.stage("pull"):
                plan, pulled, pushed = self._pulled(planned)
            self._lengths.limit(pulled.round_limit)
            self._statistics.moved(*self._pulls.take_traffic())
            self._ready.put(_Ready(planned, plan, pulled, (began, time.perf_counter()), pushed))

    def _await_pushes(self) -> None:
        """Waits until all pulled rows are pushed: only rounds account for unpushed changes of other rounds."""
        for _ in range(self._most_unpushed):
            self._unpushed.put(None)
        for _ in range(self._most_unpushed):
            self._unpushed.get()

    def _pulled(self, planned: _Planned) -> tuple[KeyPlan, Pulled, int]:
        read_only = not planned.lease.trains
        if not planned.name.is_round:
            return *self._pulls.pull(planned.plan, planned.round, planned.name, read_only), 0
        while True:
            try:
                with self._turns.pull() as pushed:
                    return *self._pulls.pull(planned.plan, planned.round, planned.name, read_only), pushed
            except PullLaterError:
                self._turns.await_push(pushed)

    def _compute(self) -> None:
        while True:
            began = time.perf_counter()
            ready = self._ready.get()
            planned = ready.planned
            self._statistics.waited(began, planned.reading, ready.pulling)
            self._before_compute()
            with self._statistics.stage("compute"):
                if not planned.lease.trains:
                    self._evaluate(ready)
                    self._unpushed.get()
                    continue
                pushes = self._train_round(ready) if planned.name.is_round else self._train_batch(ready)
            self._computed.put(_Computed(planned, ready.plan, pushes))

    def _train_batch(self, ready: _Ready) -> Gradients:
        batch = ready.planned.round.batches[0]
        gradients, predictions = self._replica.train(batch, ready.plan, ready.pulled)
        self._trained(batch, predictions)
        return gradients

    def _train_round(self, ready: _Ready) -> LocalChanges:
        """Trains the batches of a round one after another; returns their changes to rows and weights."""
        one, lease = ready.planned.round, ready.planned.lease
        local = self._local = self._local or self._make_local()
        began = time.perf_counter()
        local.begin(ready.plan, ready.pulled.rows, ready.pulled.dense, self._turns.unseen(ready.pushed))
        for batch, (first, stop) in zip(one.batches, pairwise(one.edges), strict=True):
            self._trained(batch, self._replica.train_locally(batch, ready.plan.of_records(first, stop), local))
        changes = local.changes()
        self._turns.trained(changes)
        figures = RoundFigures(
            len(one.batches),
            ready.plan.exchange_bytes,
            local.single_bytes,
            ready.plan.distinct,
            ready.plan.values,
            local.single_rows,
            time.perf_counter() - began,
            self._source.batches_in(lease.start, lease.stop),
        )
        self._lengths.trained(figures)
        self._statistics.round_trained(figures)
        return changes

    def _trained(self, batch: Batch, predictions: Predictions) -> None:
        self._statistics.trained(predictions.probabilities, batch.labels, predictions.loss_sum, batch.truncated_records)

    def _evaluate(self, ready: _Ready) -> None:
        lease, batch = ready.planned.lease, ready.planned.round.batches[0]
        predictions = self._replica.evaluate(batch, ready.plan, ready.pulled)
        totals = self._evaluations.setdefault(lease.token, EvaluationTotals())
        totals.add(predictions.probabilities, batch.labels, predictions.loss_sum)
        if batch.stop == lease.stop:
            self._leases.finish(FinishedTask(lease.token, evaluation=self._evaluations.pop(lease.token)))

    def _push(self) -> None:
        while True:
            computed = self._computed.get()
            planned, pushes = computed.planned, computed.pushes
            with self._statistics.stage("push"), self._turns.push() if planned.name.is_round else nullcontext():
                self._pushes.push(computed.plan, planned.round, planned.name, pushes.rows, pushes.dense)
            self._unpushed.get()
            self._statistics.moved(*self._pushes.take_traffic())
            if self._leases.commit(planned.lease.token, planned.round.stop):
                self._lease_finished()
            self._time(planned)

    def _time(self, planned: _Planned) -> None:
        """Measures the speed since the previous commit."""
        one, in_rounds, token = planned.round, planned.name.is_round, planned.lease.token
        table = self._routes.table
        routing = table.generation, table.version
        seconds = self._timer.commit(token, planned.granted, in_rounds, routing)
        if seconds is not None:
            self._lengths.measured(Stretch(in_rounds, token, len(one.batches), one.edges[-1], seconds, routing))


def _next_round(batches: Iterator[Batch], length: int, first_of_shard: int) -> Round | None:
    """Returns the next batches up to a multiple of `length` in their shard, so that two workers cut a shard alike."""
    first = next(batches, None)
    if first is None:
        return None
    return Round.of([first, *islice(batches, length - 1 - (first.number - first_of_shard) % length)])
