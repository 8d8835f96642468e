"""The master's machine in this thread, with doubles of what it asks: parameter servers and storage.

Everything that the machine asks for is done at once, in order, unless a fault says otherwise.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter
from tests.jobmaster.server_double import ServerDouble
from tests.jobmaster.small_job import job
from tests.jobmaster.storage_double import INITIAL, Holding, StorageDouble

from emberscale_jobmaster import takeover
from emberscale_jobmaster.effects import (
    CallServer,
    DeleteCheckpoint,
    Effect,
    FindCheckpoint,
    Granted,
    Moved,
    PruneCheckpoints,
    StartedUp,
    WriteManifest,
)
from emberscale_jobmaster.events import Event, Prepared, ServerAnswered, ServerFailed, TakenOver
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.tasks import Task

_state_json = TypeAdapter(JobState)


@dataclass
class Fault:
    """What happens to a call: it fails with `code`, is never answered (`hangs`), or a batch slips in after it.

    `lapses`: the server lets go of its barrier before the call.
    `problem`: the server reports what it keeps trying, and answers the next call only when the test says so.
    `damaged_file`: the file that is the reason for a refusal.
    """

    code: str = ""
    hangs: bool = False
    lapses: bool = False
    batch: int | None = None
    problem: str = ""
    damaged_file: str = ""
    times: int = 1


@dataclass
class DrivenMaster:
    """The master of one job, with its clock, `now`. `strategy` and `durability` are for `parity`.

    * `ps`: the servers that there are; `quiet`: the slots of members that neither answer nor send heartbeats.
    * `faults`: of calls, by name and index of the server; `called`: how often each was made.
    * `lost`: what servers had applied when they died, by index.
    * `unanswered`: what hangs.
    * `saves`: the durable states; a new master begins with the last of them.
    """

    servers: int = 2
    interval: float = 1000.0
    lease_timeout: float = 15.0
    sizes_open: bool = False
    flash_interval: float | None = None
    target_pls: float = 0.0
    priority: str = "None"
    incremental: str = "Full"
    quantization: str = "None"
    write_bandwidth: str | None = None
    parity: int = 0
    strategy: str = "ErasureCoding"
    durability: str = "Sync"
    continuation: str = "Fresh"
    now: float = 0.0
    storage: StorageDouble = field(default_factory=StorageDouble)

    def __post_init__(self) -> None:
        self.manifest = job(
            data={"continuation": self.continuation},
            ps={"replicas": None, "minReplicas": self.servers} if self.sizes_open else {"replicas": self.servers},
            worker={"replicas": None, "minReplicas": 2} if self.sizes_open else {"replicas": 2},
            sharding={"minBatches": 1, "maxBatches": 4, "leaseTimeout": self.lease_timeout, "heartbeatInterval": 1},
            checkpoint={
                "uri": "/checkpoints",
                "interval": self.interval,
                "keep": 2,
                "incremental": self.incremental,
                "quantization": self.quantization,
                "writeBandwidth": self.write_bandwidth,
                "flash": {"interval": self.flash_interval},
                "initialFrom": None if self.storage.initial is None else {"uri": INITIAL},
            },
            faultTolerance=self._tolerance,
        )
        self.spec = self.manifest.spec
        self.ps: dict[int, ServerDouble] = {}
        self.lost: dict[int, Holding] = {}
        self.quiet: set[str] = set()
        self.faults: dict[tuple[str, int], Fault] = {}
        self.called: Counter[tuple[str, int]] = Counter()
        self.unanswered: list[Effect] = []
        self.start_ups: list[StartedUp] = []
        self.moved: list[Moved] = []
        self.saves: deque[JobState] = deque(maxlen=50)
        self.state = MasterState(takeover.initial(wall=0.0))
        self.tell(TakenOver(now=self.now, wall=1000.0, has_flash_store=self._has_flash))

    @property
    def _tolerance(self) -> dict[str, Any]:
        if self.parity:
            return {"strategy": self.strategy, "parity": self.parity, "durability": self.durability}
        partial = {"strategy": "PartialRecovery", "targetPLS": self.target_pls, "priority": self.priority}
        return partial if self.target_pls else {}

    @property
    def _has_flash(self) -> bool:
        return self.flash_interval is not None

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.state.job

    def tell(self, event: Event) -> Task | None:
        """Steps the machine, and carries out everything that it asks for and everything that follows from that."""
        todo: deque[Event] = deque([event])
        task = None
        while todo:
            self.state, effects = step(self.state, todo.popleft(), self.spec)
            self.saves.append(self.state.job)
            for effect in effects:
                if isinstance(effect, Granted):
                    task = effect.task
                elif (answer := self._carry_out(effect)) is not None:
                    todo.append(answer)
        return task

    def master_dies(self, lost_writes: int = 0) -> None:
        """Starts a new master from the durable state, without the last `lost_writes` writes."""
        self._take_over(self.saves[-1 - lost_writes], alone=False)

    def _take_over(self, saved: JobState, *, alone: bool) -> None:
        self.state = MasterState(_read_back(saved))
        wall = 2000.0 + self.now
        self.tell(TakenOver(now=self.now, wall=wall, alone=alone, has_flash_store=self._has_flash))

    def answer(self, call: CallServer) -> None:
        """Answers a call that hung."""
        if (event := self._call(call)) is not None:
            self.tell(event)

    def answer_all(self) -> None:
        """Answers all calls that hung. All must be calls to servers."""
        for call in self.unanswered:
            assert isinstance(call, CallServer)
            self.answer(call)

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case CallServer():
                return self._call(effect)
            case FindCheckpoint() | WriteManifest() | PruneCheckpoints():
                if self.storage.behaviour == "hangs":
                    self.unanswered.append(effect)
                    return None
                return self.storage.answer(effect, self.now, self.manifest)
            case DeleteCheckpoint(checkpoint=identifier, gone=gone):
                self.storage.delete(identifier, gone)
            case StartedUp():
                self.start_ups.append(effect)
            case Moved():
                self.moved.append(effect)
        return None

    def _call(self, call: CallServer) -> Event | None:
        index, name = call.server.index, type(call.request).__name__.removesuffix("Call")
        server = self.ps[index]
        self.called[name, index] += 1
        where: dict[str, Any] = {"now": self.now, "operation": call.operation, "serial": call.serial, "server": index}
        fault = self._fault(name, index)
        if server.member.incarnation != call.server.incarnation or server.member.slot in self.quiet:
            if server.member.incarnation == call.server.incarnation and fault.code == "":
                self.unanswered.append(call)
                return None
            return ServerFailed(code="UNAVAILABLE", problem="connection refused", **where)
        if fault.hangs:
            self.unanswered.append(call)
            return None
        if fault.code:
            return ServerFailed(code=fault.code, problem=f"{name} failed", damaged_file=fault.damaged_file, **where)
        if fault.problem:
            self.faults[name, index] = Fault(hangs=True)
            return ServerAnswered(answer=Prepared(done=False, problem=fault.problem), **where)
        if fault.lapses:
            server.let_go()
        answer = server.answer(call.request)
        if fault.batch is not None:
            server.apply(fault.batch)
        if call.serial == 0 or answer is None:
            return None
        if isinstance(answer, str):
            return ServerFailed(code="FAILED_PRECONDITION", problem=answer, **where)
        return ServerAnswered(answer=answer, **where)

    def _fault(self, name: str, index: int) -> Fault:
        fault = self.faults.get((name, index))
        if fault is None:
            return Fault()
        left = replace(fault, times=fault.times - 1)
        if left.times:
            self.faults[name, index] = left
        else:
            del self.faults[name, index]
        return fault


def _read_back(saved: JobState) -> JobState:
    """Returns the state as a new master finds it. Only states that are read go through JSON, since most never are."""
    return _state_json.validate_json(_state_json.dump_json(saved))
