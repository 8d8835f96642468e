"""A whole job in this thread: a master that is driven by what its members do, and by a clock."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tests.jobmaster.driven_master import DrivenMaster
from tests.jobmaster.server_double import ServerDouble
from tests.jobmaster.small_job import BATCH

from emberscale_api.dataset import DataFile, Split
from emberscale_api.job import MOST_PARITY, FaultToleranceStrategy
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.routing import ParityTrouble
from emberscale_api.shape import RoleShape
from emberscale_jobmaster.events import (
    Advised,
    Exited,
    HeartbeatReceived,
    IntervalAdvised,
    Registered,
    SuspensionWanted,
    TaskFinished,
    TaskWanted,
    TimePassed,
)
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.reports import ServerReport, WorkReport
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.state import Stage
from emberscale_jobmaster.tasks import Discovered, Finding, Indexed, Task

TICK = 0.25

ALL = frozenset({0, 1, 2})
"""The parameter servers of a job that has three."""


@dataclass
class Driven(DrivenMaster):
    """One job, whose data are `files` with `records`, and `evaluation` records in a file of their own.

    With `forgets_anew`, the servers run a version that takes the batches of another job's checkpoint for applied;
    without `adopts_rows`, one in which only a successor can have the rows of a lost server. With `rebuilds_on_demand`,
    they serve rebuilt rows that have yet to arrive.

    * `workers`: the workers by index; `tasks`: what each works on; `committed`: how far it is, by the task's token.
    * `factors`: how many times longer a second of work takes a member, by slot; `worked` and `spent`: the seconds of
      work of each process, and what they took.
    * `troubles`: what servers report about their parity, by index.
    * `missing`: how many rows of a server have yet to arrive, by index.
    """

    records: int = 500
    evaluation: int = 0
    files: tuple[str, ...] = ("/data/day_0",)
    forgets_anew: bool = False
    adopts_rows: bool = True
    rebuilds_on_demand: bool = False

    def __post_init__(self) -> None:
        self.workers: dict[int, MemberId] = {}
        self.tasks: dict[MemberId, Task] = {}
        self.committed: dict[int, int] = {}
        self.names = 0
        self.factors: dict[str, float] = {}
        self.troubles: dict[int, ParityTrouble] = {}
        self.missing: dict[int, int] = {}
        self.worked: Counter[str] = Counter()
        self.spent: dict[str, float] = {}
        super().__post_init__()

    # Time

    def pass_time(self, seconds: float, tick: float = TICK) -> None:
        """Lets time pass, in which members that are not quiet send heartbeats.

        If nothing happens for very long, `tick` may be longer than the second between heartbeats.
        """
        between = max(1, round(1 / tick))
        for number in range(1, round(seconds / tick) + 1):
            self.now += tick
            self.tell(TimePassed(now=self.now))
            if number % between == 0:
                self.beat()

    def beat(self) -> None:
        """Every member that is not quiet sends a heartbeat."""
        for server in self.ps.values():
            numbers: dict[str, Any] = {"generation": server.generation, "version": server.version}
            if self._speaks(server.member):
                served = self._served(server.member)
                self.tell(HeartbeatReceived(now=self.now, member=server.member, served=served, **numbers))
            elif self._is_unknown(server.member):
                process = self._process(server.member)
                self.tell(Registered(now=self.now, member=server.member, process=process, **numbers))
        for worker in self.workers.values():
            if self._speaks(worker):
                task = self.tasks.get(worker)
                leases = {task.token: self.committed[task.token]} if task is not None else {}
                self._work(worker)
                number = self.worked[worker.incarnation]
                work = WorkReport(10, 1.0, (), (), {"compute": self.spent[worker.incarnation]})
                self.tell(HeartbeatReceived(now=self.now, member=worker, leases=leases, sequence=number, work=work))

    def _work(self, member: MemberId) -> None:
        """Counts a second of work: ten samples or a batch, which takes longer by the factor of a slow member."""
        name = member.incarnation
        self.worked[name] += 1
        self.spent[name] = self.spent.get(name, 0.0) + 0.01 * self.factors.get(member.slot, 1.0)

    def _served(self, member: MemberId) -> ServerReport:
        self._work(member)
        name = member.incarnation
        protected = self.ps[member.index].version if self.ps[member.index].parity and not self.missing else 0
        trouble = self.troubles.get(member.index)
        return ServerReport(
            {},
            0,
            self.worked[name],
            0,
            {"push": self.spent[name]},
            protected_version=protected,
            parity_trouble=trouble,
            missing_rows=self.missing.get(member.index, 0),
        )

    def _speaks(self, member: MemberId) -> bool:
        slot = self.job.members.slot(member.role, member.index)
        known = slot.process is not None and slot.process.incarnation == member.incarnation
        return known and member.slot not in self.quiet

    def _is_unknown(self, member: MemberId) -> bool:
        slot = self.job.members.slot(member.role, member.index)
        known = slot.process is not None and slot.process.incarnation == member.incarnation
        return not known and member.incarnation not in slot.past and member.slot not in self.quiet

    # Members

    def join(self, role: Role, index: int, most_parity: int = MOST_PARITY, *, knows_async: bool = True) -> MemberId:
        """A process joins; a server with `most_parity` 0, or that does not know `Async`, runs an earlier version."""
        self.names += 1
        member = MemberId(role, index, f"{role.value}-{index}-{self.names}")
        self.quiet.discard(member.slot)
        if role is Role.PS:
            self.ps[index] = ServerDouble(member, self.storage, self.lost, self.forgets_anew)
        else:
            self.workers[index] = member
        process = replace(self._process(member), most_parity=most_parity, knows_async_parity=knows_async)
        self.tell(Registered(now=self.now, member=member, process=process))
        return member

    def _process(self, member: MemberId) -> Process:
        return Process(
            member.incarnation,
            f"tcp://{member.slot}",
            f"{member.slot}:1",
            "",
            most_parity=MOST_PARITY,
            knows_async_parity=True,
            adopts_rows=self.adopts_rows,
            rebuilds_on_demand=self.rebuilds_on_demand,
        )

    def start(self) -> None:
        """All servers and a worker join, and the worker prepares the data."""
        for index in range(self.servers):
            self.join(Role.PS, index)
        self.prepare()

    def prepare(self) -> None:
        """A worker joins, and prepares the data as far as it may."""
        worker = self.join(Role.WORKER, 0)
        found = tuple(DataFile(file, 1000) for file in self.files)
        others = (DataFile("/data/test", 500),) if self.evaluation else ()
        self._finish(worker, self._ask(worker), Discovered(found, others))
        while self.job.stage is Stage.INDEX and not self.job.over:
            task = self._ask(worker)
            evaluates = task.split is Split.EVALUATION
            self._finish(worker, task, Indexed(self.evaluation if evaluates else self.records))

    def plan(self, servers: int, workers: int = 2) -> None:
        """The brain plans another number of servers, or of workers."""
        sizes = RoleShapes(RoleShape(servers, 1.0, 1 << 30), RoleShape(workers, 1.0, 1 << 30))
        advice = Advice(self.job.scaling.plan_version + 1, "GrowMemory", sizes, "tables grow")
        self.tell(Advised(now=self.now, advice=advice, wall=1e9))

    def suspend(self) -> None:
        self.tell(SuspensionWanted(now=self.now))

    def kill(self, role: Role, index: int) -> None:
        member = self.ps[index].member if role is Role.PS else self.workers[index]
        if role is Role.PS:
            self.lost[index] = self.ps[index].applied
        self.quiet.add(member.slot)
        self.tell(Exited(now=self.now, member=member, exit_code=137, reason="Killed"))

    def all_die(self) -> None:
        """Ends every process at once; a new master begins alone with the durable state."""
        for member in (*(server.member for server in self.ps.values()), *self.workers.values()):
            self.quiet.add(member.slot)
        self.tasks.clear()
        self._take_over(self.saves[-1], alone=True)

    # Training

    def train(self, batches: int, worker: int = 0) -> None:
        """A worker trains this many batches, each on every server."""
        member = self.workers[worker]
        for _ in range(batches):
            task = self.tasks.get(member) or self.take(member)
            batch = self.committed[task.token] // BATCH
            for routed in self.job.routing.table.servers:
                self.ps[routed.index].apply(batch, task.epoch)
            self.committed[task.token] = min((batch + 1) * BATCH, task.stop)
            if self.committed[task.token] == task.stop:
                del self.tasks[member]
                self._finish(member, task, None)
            else:
                self.tell(
                    HeartbeatReceived(now=self.now, member=member, leases={task.token: self.committed[task.token]})
                )

    def train_for(self, seconds: float, every: float = 5.0) -> None:
        """Lets time pass, in which a worker trains a batch every few seconds."""
        end = self.now + seconds
        while end - self.now >= TICK:
            self.train(1)
            self.pass_time(min(every, end - self.now))

    def train_all(self) -> None:
        while self.job.stage is Stage.TRAIN:
            self.train(1)

    def take(self, member: MemberId) -> Task:
        """A worker gets a lease, and begins to work on it."""
        task = self._ask(member)
        self.tasks[member] = task
        self.committed[task.token] = task.start
        return task

    def _ask(self, member: MemberId) -> Task:
        task = self.tell(TaskWanted(now=self.now, member=member))
        assert task is not None, f"no task for {member.slot}"
        return task

    def _finish(self, member: MemberId, task: Task, finding: Finding) -> None:
        self.tell(TaskFinished(now=self.now, member=member, token=task.token, finding=finding))


def protected(
    servers: int = 3,
    interval: float = 1000.0,
    parity: int = 1,
    durability: str = "Sync",
    *,
    adopts_rows: bool = True,
    rebuilds_on_demand: bool = False,
    sizes_open: bool = False,
) -> Driven:
    """A job that has trained a little, and whose servers hold parity of each other."""
    driven = Driven(
        servers=servers,
        interval=interval,
        parity=parity,
        durability=durability,
        adopts_rows=adopts_rows,
        rebuilds_on_demand=rebuilds_on_demand,
        sizes_open=sizes_open,
    )
    driven.start()
    driven.train(4)
    driven.pass_time(1)
    assert driven.job.parity_group.protected == frozenset(range(servers))
    return driven


def advise(driven: Driven, strategy: FaultToleranceStrategy) -> None:
    driven.tell(IntervalAdvised(now=driven.now, seconds=1000.0, strategy=strategy))
