"""Any sequence of events of a whole job, against parameter servers and workers as plain sets.

Two rules must hold: the ledger never claims a batch that a server lacks, and from any state, the job can be brought to
its end with every batch of every epoch applied on every server.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pydantic import TypeAdapter
from tests.jobmaster.pure import EVALUATION, TRAINING, WORKER, Pure
from tests.jobmaster.small_job import BATCH

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import EvaluationResult, JobPhase
from emberscale_jobmaster import lifecycle, ranges, takeover, tasks
from emberscale_jobmaster.figures import committed_samples
from emberscale_jobmaster.operations import CheckpointPurpose
from emberscale_jobmaster.ranges import Applied, on_all
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, Task

RARELY = st.integers(0, 9)
RECORDS, EVALUATED, EPOCHS = 115, 25, 2
BATCHES = -(-RECORDS // BATCH)
state_json = TypeAdapter(JobState)

Holding = dict[int, set[int]]


@dataclass
class Worker:
    """A process that may have been given up long ago and still goes on."""

    member: MemberId
    generation: int
    tasks: dict[int, tuple[Task, int]] = field(default_factory=dict)
    """By token: the task, and the batch that is pushed next."""


@dataclass
class Saved:
    """A complete checkpoint."""

    applied: Holding
    evaluations: tuple[EvaluationResult, ...]


def as_ranges(holding: Holding) -> Applied:
    return {epoch: ranges.normalised((batch, batch + 1) for batch in batches) for epoch, batches in holding.items()}


class JobMachine(RuleBasedStateMachine):
    """Workers push to both servers or to one, commit, die, come back; servers die; the master is restarted."""

    @initialize()
    def start(self) -> None:
        self.pure = Pure(
            training={"epochs": EPOCHS},
            evaluation=EVALUATED,
            checkpoint={"uri": "/somewhere"},
            runPolicy={"backoffLimit": 10_000},
        )
        self.servers: list[Holding] = [{}, {}]
        self.saved: Saved | None = None
        self.names = 0
        self.workers: list[Worker] = []
        self.largest_token = 0
        self.pure.register(Role.WORKER, 0, WORKER.incarnation)
        self.pure.prepare_with(Discovered((TRAINING,), (EVALUATION,)), Indexed(RECORDS), Indexed(EVALUATED))
        for index in range(2):
            self._new_server(index)
        self._assign()
        for index in range(2):
            self._join(index)

    def _name(self) -> str:
        self.names += 1
        return f"incarnation-{self.names}"

    def _new_server(self, index: int) -> None:
        self.pure.register(Role.PS, index, self._name())
        self.servers[index] = {}

    def _assign(self) -> None:
        source = self.saved
        held = source.applied if source is not None else {}
        self.servers = [{epoch: set(batches) for epoch, batches in held.items()} for _ in self.servers]
        self.pure.assign(
            applied=on_all([as_ranges(server) for server in self.servers]),
            evaluations=source.evaluations if source is not None else (),
        )

    def _push(self, worker: Worker, epoch: int, batch: int, servers: list[Holding]) -> bool:
        if worker.generation != self.pure.state.routing.table.generation:
            return False
        for server in servers:
            server.setdefault(epoch, set()).add(batch)
        return True

    def _pick(self, data: Any) -> Worker:
        worker: Worker = data.draw(st.sampled_from(self.workers))
        return worker

    @rule(index=st.integers(0, 2))
    def a_worker_is_started(self, index: int) -> None:
        self._join(index)

    def _join(self, index: int) -> None:
        member = self.pure.register(Role.WORKER, index, self._name())
        self.workers.append(Worker(member, self.pure.state.routing.table.generation))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), batches=st.integers(1, 5))
    def a_worker_asks_for_work(self, data: Any, batches: int) -> None:
        worker = self._pick(data)
        if worker.member.incarnation in self.pure.state.members.slot(Role.WORKER, worker.member.index).past:
            return
        task = self.pure.acquire(worker.member, batches)
        if task is not None:
            assert task.token > self.largest_token
            self.largest_token = task.token
            worker.generation = self.pure.state.routing.table.generation
            worker.tasks[task.token] = (task, task.start // BATCH)

    @precondition(lambda self: any(worker.tasks for worker in self.workers))
    @rule(data=st.data(), batches=st.integers(1, 4), partly=st.booleans(), commits=st.booleans())
    def a_worker_pushes(self, data: Any, batches: int, partly: bool, commits: bool) -> None:
        """Pushes some batches to every server, and perhaps one more to the first server only."""
        worker = data.draw(st.sampled_from([worker for worker in self.workers if worker.tasks]))
        token = data.draw(st.sampled_from(sorted(worker.tasks)))
        for _ in range(batches):
            if token in worker.tasks:
                self._push_one(worker, token, commits)
        if partly and token in worker.tasks:
            task, batch = worker.tasks[token]
            if task.stage is Stage.TRAIN:
                self._push(worker, task.epoch, batch, self.servers[:1])

    def _push_one(self, worker: Worker, token: int, commits: bool) -> None:
        task, batch = worker.tasks[token]
        if task.stage is Stage.EVALUATE:
            self._report(worker, token, Tally(samples=task.stop - task.start))
            return
        if not self._push(worker, task.epoch, batch, self.servers):
            worker.tasks.clear()
            return
        worker.tasks[token] = (task, batch + 1)
        position = min((batch + 1) * BATCH, task.stop)
        if position == task.stop:
            self._report(worker, token, None)
        elif commits:
            state, dropped = tasks.report_progress(self.pure.state, self.pure.spec, worker.member, {token: position})
            self.pure.apply(state)
            for token in dropped:
                del worker.tasks[token]

    def _report(self, worker: Worker, token: int, finding: Finding) -> None:
        self.pure.apply(tasks.finish(self.pure.state, self.pure.spec, worker.member, token, finding))
        del worker.tasks[token]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), reported=st.booleans(), chance=RARELY)
    def a_worker_is_given_up(self, data: Any, reported: bool, chance: int) -> None:
        """Rightly or not: it may go on pushing."""
        if chance > 5:
            return
        member, state, spec = self._pick(data).member, self.pure.state, self.pure.spec
        if reported:
            self.pure.apply(lifecycle.on_exit(state, spec, member, 137, "Killed"))
        elif state.members.slot(Role.WORKER, member.index).process is not None:
            self.pure.apply(lifecycle.expire_leases(state, [lease.token for lease in state.ledger.held_by(member)]))

    @precondition(lambda self: not self.pure.state.over)
    @rule(index=st.integers(0, 1), chance=RARELY)
    def a_server_is_replaced(self, index: int, chance: int) -> None:
        if chance != 5:
            return
        self._new_server(index)
        assert not self.pure.state.routing.ready
        self._assign()

    @precondition(lambda self: self.pure.state.routing.ready and not self.pure.state.over)
    @rule(master_dies=st.booleans())
    def a_checkpoint_is_taken(self, master_dies: bool) -> None:
        """A barrier settles batches that only one server has, whatever the ledger says of them."""
        for epoch in {epoch for server in self.servers for epoch in server}:
            anywhere = set.union(*(server.get(epoch, set()) for server in self.servers))
            for server in self.servers:
                server.setdefault(epoch, set()).update(anywhere)
        state = self.pure.state
        held = {epoch: set(batches) for epoch, batches in self.servers[0].items() if batches}
        self.saved = Saved(held, state.evaluations)
        if master_dies:
            self.the_master_is_restarted()
        if state.stage is Stage.SAVE:
            self.pure.checkpointed(CheckpointPurpose.FINAL)

    @rule()
    def the_master_is_restarted(self) -> None:
        state = state_json.validate_json(state_json.dump_json(self.pure.state))
        assert repr(state) == repr(self.pure.state)
        self.pure.apply(takeover.on_takeover(state, self.pure.spec, wall=5.0))

    @invariant()
    def the_books_claim_only_what_every_server_has(self) -> None:
        state = self.pure.state
        if state.stage is not Stage.TRAIN or not state.routing.ready:
            return
        done = {batch for start, stop in state.ledger.done for batch in range(start, stop)}
        for server in self.servers:
            assert done <= server.get(state.epoch, set())
            for epoch in range(state.epoch):
                assert server[epoch] == set(range(BATCHES))

    @invariant()
    def every_batch_is_in_one_place(self) -> None:
        self.pure.state.ledger.check()

    @invariant()
    def phases_come_in_order(self) -> None:
        order = [JobPhase.TRAINING, JobPhase.EVALUATING, JobPhase.SAVING, JobPhase.COMPLETE]
        for before, after in zip(self.pure.phases, self.pure.phases[1:], strict=False):
            backwards = before in order and after in order and order.index(after) < order.index(before)
            assert not backwards or (before, after) == (JobPhase.EVALUATING, JobPhase.TRAINING)
            assert before is not JobPhase.COMPLETE

    def teardown(self) -> None:
        if not hasattr(self, "pure"):
            return
        pure = self.pure
        last = pure.register(Role.WORKER, 0, self._name())
        pure.apply(lifecycle.expire_leases(pure.state, list(pure.state.ledger.leases)))
        for _ in range(1000):
            if pure.state.stage is Stage.SAVE or pure.state.over:
                break
            task = pure.acquire(last)
            assert task is not None
            if task.stage is Stage.TRAIN:
                for batch in range(task.start // BATCH, -(-task.stop // BATCH)):
                    for server in self.servers:
                        server.setdefault(task.epoch, set()).add(batch)
            finding = Tally(samples=1) if task.stage is Stage.EVALUATE else None
            pure.apply(tasks.finish(pure.state, pure.spec, last, task.token, finding))
        assert pure.state.stage is Stage.SAVE
        assert self.servers == [{epoch: set(range(BATCHES)) for epoch in range(EPOCHS)}] * 2
        assert [result.epoch for result in pure.state.evaluations] == list(range(1, EPOCHS + 1))
        assert committed_samples(pure.state, pure.spec) == EPOCHS * RECORDS


TestJob = JobMachine.TestCase
TestJob.settings = settings(max_examples=40, stateful_step_count=50)
