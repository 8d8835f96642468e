"""One whole job: all processes, what they share, and the faults that strike them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulation.calls import CallError
from tests.simulation.faults import FOR_EVER, Fault, Kind
from tests.simulation.folder import Folder
from tests.simulation.master import Master
from tests.simulation.model import Model
from tests.simulation.network import Network, UnavailableError
from tests.simulation.operator import Operator, name_of
from tests.simulation.parameter_server import ParameterServer
from tests.simulation.scenario import GRACE_SECONDS, Scenario
from tests.simulation.storage import Storage
from tests.simulation.store import LOST_TAIL_SECONDS, Disk, Redis
from tests.simulation.worker import Worker
from tests.simulation.world import Process, Signal, SimulationError, Task, World

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_operator.machine import InstanceId

PATIENCE_SECONDS = 900.0
"""The time after the last fault within which the job must be Complete."""

_CALL_SECONDS = 10.0
_LATE_SECONDS = 30.0
"""How long after the network has calmed down messages may come late, and servers count as lost for it."""
_LAST_WRITE_SECONDS = 0.02
"""For this long, a replaced master may still write what it has just decided."""


class Cluster:
    """The world of one scenario. `run` raises SimulationError if a rule is broken."""

    def __init__(self, scenario: Scenario, traced: bool = False) -> None:
        self.scenario = scenario
        self.spec = self.manifest = scenario.spec()
        """The spec with the edits that people have made."""
        self.world = World(scenario.seed, traced)
        self.network = Network(self.world, scenario.slow, scenario.lossy)
        self.storage = Storage(self.world)
        self.disk = Disk(self.world)
        self.model = Model(self)
        self.folder = Folder(self)
        self.operator = Operator(self)
        self._dawdling = scenario.dawdling
        self._late_until = 0.0
        self._disturbed_until = 0.0
        self._awaiting = [fault for fault in scenario.faults if fault.during]
        self.compute_seconds = scenario.compute_seconds
        self.strays: list[Process] = []
        """Masters that run on unseen by the operator."""
        self._members: dict[str, ParameterServer | Worker] = {}
        self._servers: list[ParameterServer] = []

    def run(self) -> None:
        """Runs the job to its end."""
        for fault in self.scenario.faults:
            if not fault.during:
                self.world.at(fault.at, partial(self._strike, fault))
        for at, servers, workers in self.scenario.edits:
            self.world.at(at, partial(self._edit, servers, workers))
        for at, index in self.scenario.drains:
            self.world.at(at, partial(self._drain, index))
        self.world.at(self.scenario.quiet_after, self._calm)
        self.operator.spawn(self.operator.live())
        until = self.scenario.quiet_after + PATIENCE_SECONDS
        self.world.run(until)
        if self.operator.failure:
            raise SimulationError(f"the operator gave the job up: {self.operator.failure}")
        job = self.operator.final
        if job is None or job.outcome is None:
            raise SimulationError(f"the job is not Complete {PATIENCE_SECONDS:g} s after the last fault")
        torn = any(fault.kind is Kind.TEAR for fault in self.scenario.faults)
        if job.outcome.reason == "CheckpointDamaged" and torn and not self.model.checkpoints.newest_sound():
            return  # the storage damaged every checkpoint, and the job says so
        if job.outcome.phase is not JobPhase.COMPLETE:
            raise SimulationError(f"the job is {job.outcome.phase}: {job.outcome.reason}: {job.outcome.message}")
        self.model.ended(job)

    # Processes

    def start(self, key: InstanceId) -> Process:
        """Starts a process."""
        name = name_of(key)
        process: Process
        match key.role:
            case Role.REDIS:
                process = Redis(self.world, name, self.disk, self.model.masters)
            case Role.MASTER:
                process = master = Master(self, name)
                process.spawn(master.live())
            case _:
                kind = ParameterServer if key.role is Role.PS else Worker
                process = member = self._members[name] = kind(self, name, key.index, name)
                if isinstance(member, ParameterServer):
                    self._servers.append(member)
                self._members[member.address] = member  # like a pod's stable name, which passes to its successor
                process.after(self.world.random.uniform(0.1, 0.5), lambda: member.spawn(member.live()))
        process.trace("starts")
        return process

    def exited(self, process: Process, code: int) -> None:
        """Ends a process."""
        self._disturbed_until = max(self._disturbed_until, self.world.now)
        process.die()
        self.operator.note_exit(process, code)

    def member_of(self, process: ParameterServer | Worker) -> MemberId:
        """Returns the member id by which the master knows a process."""
        role = Role.PS if isinstance(process, ParameterServer) else Role.WORKER
        return MemberId(role, process.index, process.incarnation)

    def server_at(self, address: str) -> ParameterServer | None:
        """Returns the parameter server that has an address now."""
        found = self._members.get(address)
        return found if isinstance(found, ParameterServer) else None

    def server_of(self, incarnation: str) -> ParameterServer | None:
        """Returns the parameter server of an incarnation, dead or alive."""
        return self.server_at(incarnation)

    def servers(self) -> list[ParameterServer]:
        """Returns the parameter servers that are alive."""
        return [one for one in self._servers if one.alive]

    def call_master(self, caller: Process, ask: Callable[[Master], Task[Any]], wait: float = 0.0) -> Signal[Any]:
        """Calls the present master."""
        find = lambda: self.operator.process(Role.MASTER, 0)  # noqa: E731
        return self.network.call(caller, find, ask, wait + _CALL_SECONDS)

    def call_redis(self, caller: Process, ask: Callable[[Redis], Task[Any]]) -> Signal[Any]:
        """Calls Redis."""
        is_cut_off = isinstance(caller, Master) and self.world.now < caller.cut_off_until
        find = lambda: None if is_cut_off else self.operator.process(Role.REDIS, 0)  # noqa: E731
        return self.network.call(caller, find, ask, 5.0)

    def dawdle(self, master: Master) -> float:
        """Returns the seconds by which the master delays a call that it could make now."""
        random = self.world.random
        if master.is_parted:
            return random.uniform(0.0, 5.0)
        chance = 0.5 if self.world.now <= self._late_until else self._dawdling
        return random.uniform(5.0, 14.0) if random.random() < chance else 0.0

    def reaches(self, moment: str) -> None:
        """Strikes with the faults that await this moment, such as a phase of a move or a point of a restore."""
        striking = [fault for fault in self._awaiting if fault.during == moment]
        self._awaiting = [fault for fault in self._awaiting if fault.during != moment]
        for fault in striking:
            self.world.after(fault.at, partial(self._strike, fault))

    def is_calm(self, since: float) -> bool:
        """Whether no fault has had an effect since a time, and the network loses and delays nothing."""
        scenario = self.scenario
        unsteady = scenario.slow or scenario.lossy or scenario.dawdling
        return self._disturbed_until < since and not (unsteady and since <= scenario.quiet_after + _LATE_SECONDS)

    # People

    def _edit(self, servers: int, workers: int) -> None:
        self.world.trace("people", f"edit the manifest to {servers} PS and {workers} workers")
        self.manifest = self.manifest.resized(servers, workers)
        self.operator.look()

    def edit_back(self) -> None:
        """Reduces the servers to the available room, as people do when a job does not begin for lack of room."""
        self._edit(min(self.manifest.ps.replicas or 1, self.scenario.room), self.manifest.worker.replicas or 1)

    # Drains

    def _drain(self, index: int) -> None:
        server = self.operator.process(Role.PS, index)
        if isinstance(server, ParameterServer):
            server.trace("is asked to go")
            server.spawn(self._leave(server))
            self.world.after(GRACE_SECONDS, partial(self._evict, server))

    def _leave(self, server: ParameterServer) -> Task[None]:
        """Ends as a process that is told to end: only once the master says that it may."""
        while True:
            try:
                may_go = yield self.call_master(server, lambda master: master.drain(server.index, server.incarnation))
            except (UnavailableError, CallError):
                may_go = False
            if may_go:
                self.exited(server, 0)
                return
            yield server.sleep(0.3)

    def _evict(self, server: ParameterServer) -> None:
        if server.alive:
            self.exited(server, -9)

    # Faults

    def _calm(self) -> None:
        self.network.calm()
        self._dawdling = 0.0
        self._awaiting.clear()

    def _strike(self, fault: Fault) -> None:
        self.world.trace("FAULT", str(fault).strip())
        self._disturbed_until = max(self._disturbed_until, self.world.now + fault.seconds)
        target = self.operator.process(Role(fault.role), fault.index) if fault.role else None
        match fault.kind:
            case Kind.KILL if target is not None:
                self.exited(target, -9)
            case Kind.HANG if target is not None:
                self._hang(target, fault.seconds)
            case Kind.CUT if target is not None:
                self.network.break_streams(target)
            case Kind.PART:
                following = (fault.index + 1) % self.scenario.servers
                self.network.part(f"ps-{fault.index}", f"ps-{following}", fault.seconds)
            case Kind.SPLIT:
                for parted in self.operator.start_second_master():
                    parted.is_parted = True
                    self.world.after(_LAST_WRITE_SECONDS, partial(parted.cut_off, fault.seconds))
            case Kind.NO_MEMORY if isinstance(target, ParameterServer):
                target.failing_pushes += 1
            case Kind.LOST_TAIL | Kind.LOST_WRITES | Kind.LOST_STORE:
                self._lose_writes(fault.kind)
            case Kind.STORAGE_FAILS:
                self.storage.fail_for(fault.seconds)
            case Kind.STORAGE_HANGS:
                self.storage.hang_for(fault.seconds)
            case Kind.LATE_CALLS:
                self._late_until = self.world.now + fault.seconds
            case Kind.TEAR:
                self.storage.tear_next()

    def _lose_writes(self, kind: Kind) -> None:
        for role in (Role.REDIS, Role.MASTER) if kind is Kind.LOST_TAIL else (Role.REDIS,):
            for process in self.operator.all_of(role):
                self.exited(process, -9)
        if kind is Kind.LOST_STORE:
            self.disk.lose_everything()
        else:
            self.disk.lose_tail(self.world.random.uniform(0.0, LOST_TAIL_SECONDS))
        self.model.masters.store_lost()

    def _hang(self, process: Process, seconds: float) -> None:
        process.hang()
        if seconds < FOR_EVER:
            self.world.after(seconds, process.resume)


def simulate(scenario: Scenario, traced: bool = False) -> Cluster:
    """Runs a scenario to its end. Raises SimulationError, or what a core raises; its `cluster` then has the trace."""
    cluster = Cluster(scenario, traced)
    try:
        cluster.run()
    except Exception as error:
        error.__dict__["cluster"] = cluster
        raise
    return cluster
