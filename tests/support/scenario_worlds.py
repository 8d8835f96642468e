"""Worlds for a scenario's job: in memory, as pods of an in-memory API server, and as simulated processes.

All have the same controller, and a master that follows the scenario.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from emberscale_api.job import memory_bytes
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import JobPlan, JobStatus
from emberscale_api.job.status import JobPhase
from emberscale_api.shape import RoleShape
from emberscale_operator.controller import Backend, JobController, News, Observed
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.health import Tallies
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from emberscale_operator.local.backend import LocalBackend, StopRequests
from emberscale_operator.local.environment import JobEnvironment
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.process import Launch
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.local.requests import WatchedManifest
from emberscale_operator.machine import (
    Action,
    Create,
    Delete,
    ExitReason,
    Forget,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    JobIntent,
    JobStanding,
    Kill,
    MasterReport,
    PhaseNews,
    Policy,
    ReportExit,
    Resize,
    Resources,
    Scale,
    ShutDown,
    Suspend,
    WaitUntil,
)
from emberscale_operator.machine.restarts import Backoff
from emberscale_operator.master_link import MasterAddress
from memory_api import KEY, SETTINGS, START, MemoryApi, NoRedis
from training_jobs import job_body, training_job, training_spec

POLICY = Policy(Backoff(base=10.0, factor=2.0), backoff_limit=3, stop_grace=10.0, silence=15.0, start_silence=30.0)


@dataclass
class ScriptedMaster:
    """What the master reports over every link to it."""

    phase: JobPhase | None = None
    sizes: dict[Role, RoleShape] = field(default_factory=dict)
    end: PhaseNews | None = None
    silent: set[MemberId] = field(default_factory=set)
    drained: set[MemberId] = field(default_factory=set)
    unanswered_since: float | None = None
    asked: Scale | None = None
    asked_to_suspend: bool = False
    saved: bool = False
    now: float = 0.0


class ScriptedLink:
    """A link to the scripted master. A master that is told to end has ended by the next look at the link."""

    def __init__(self, master: ScriptedMaster, end: Callable[[], None]) -> None:
        self._master = master
        self._end = end

    @property
    def answers(self) -> bool:
        return self._master.phase is not None and self._master.unanswered_since is None

    @property
    def plan(self) -> JobPlan | None:
        if self._master.phase is None:
            return None
        return JobPlan(version=1, shapes=dict(self._master.sizes), phase=self._master.phase)

    @property
    def status(self) -> JobStatus | None:
        return None if self._master.phase is None else JobStatus(self._master.phase)

    def report(self) -> MasterReport:
        master = self._master
        if master.phase is None:
            return MasterReport(unanswered_since=master.unanswered_since)
        return MasterReport(
            sizes=dict(master.sizes),
            plan_heard=True,
            asked=master.asked,
            end=master.end,
            status=PhaseNews(master.phase, "Said"),
            silent=frozenset(master.silent),
            drained=frozenset(master.drained),
            answers=self.answers,
            heard_at=master.now if self.answers else master.unanswered_since,
            unanswered_since=master.unanswered_since,
            suspended=master.saved,
        )

    async def report_exit(self, instance: InstanceId, name: str, ended: InstanceExit) -> bool:
        return True

    def scale(self, wanted: Scale) -> None:
        self._master.asked = wanted

    def suspend(self) -> None:
        self._master.asked_to_suspend = True

    async def shut_down(self) -> None:
        self._end()

    async def close(self) -> None:
        pass


class World(Protocol):
    """A place in which the scenario's job runs. Members have names like `worker-0`."""

    def edit(self, **spec: Any) -> None:
        """Edits the manifest."""

    def suspend(self, wanted: bool) -> None:
        """Asks the job to rest, or to go on."""

    def end(self, member: str, reason: ExitReason) -> None:
        """Ends a member's process by itself."""

    def settle(self, now: float, room: bool) -> None:
        """Starts what was created, if nodes have `room` for it, and ends what was asked to end."""

    def name_of(self, member: str) -> str:
        """Returns the master's name for a member's present incarnation."""

    def instances(self) -> Sequence[Instance]:
        """Returns the instances as last observed."""


class _Traced:
    """A backend that records what was decided, in any world."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.observe, self.recall, self.address_of, self.act = inner.observe, inner.recall, inner.address_of, inner.act
        self.standing = JobStanding()
        self.actions: list[Action] = []

    async def report(self, news: News, now: float) -> float:
        self.standing = news.decision.standing
        self.actions.extend(action for action in news.decision.actions if not isinstance(action, WaitUntil))
        return await self._inner.report(news, now)


class FakeWorld:
    """Instances are entries of a dictionary."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._spec = dict(spec)
        self._suspend = False
        self._instances: dict[InstanceId, Instance] = {}
        self._now = START

    async def observe(self, now: float) -> Observed:
        masters = [
            i.id for i in self._instances.values() if i.id.role is Role.MASTER and i.state is InstanceState.RUNNING
        ]
        job = JobIntent(training_spec(**self._spec), suspend=self._suspend, policy=POLICY)
        return Observed(job, tuple(self._instances.values()), max(masters, default=None))

    async def recall(self) -> tuple[JobStanding, JobPlan | None]:
        return JobStanding(), None

    async def address_of(self, master: InstanceId) -> MasterAddress:
        return MasterAddress("nowhere", "")

    async def report(self, news: News, now: float) -> float:
        return 30.0

    async def act(self, actions: Sequence[Action], now: float) -> float | None:
        for action in actions:
            match action:
                case Create(new, resources):
                    name = f"life-{new.incarnation}"
                    self._instances[new] = Instance(new, InstanceState.PENDING, resources, now, name=name)
                case Resize(old, resources):
                    self._instances[old] = replace(self._instances[old], resources=resources)
                case Delete(old):
                    self._instances[old] = replace(self._instances[old], state=InstanceState.TERMINATING)
                case Kill(old):
                    self._exit(old, ExitReason.KILLED, deleted=False)
                case Forget(old):
                    self._instances.pop(old, None)
        return None

    def edit(self, **spec: Any) -> None:
        self._spec |= spec

    def suspend(self, wanted: bool) -> None:
        self._suspend = wanted

    def end(self, member: str, reason: ExitReason) -> None:
        self._exit(_live(self.instances(), member).id, reason, deleted=False)

    def settle(self, now: float, room: bool) -> None:
        self._now = now
        for instance in list(self._instances.values()):
            if instance.state is InstanceState.PENDING:
                state = InstanceState.RUNNING if room else InstanceState.PENDING
                self._instances[instance.id] = replace(instance, state=state, started_at=now, unplaced=not room)
            elif instance.state is InstanceState.TERMINATING:
                self._exit(instance.id, ExitReason.COMPLETED, deleted=True)

    def name_of(self, member: str) -> str:
        return _live(self.instances(), member).name

    def instances(self) -> Sequence[Instance]:
        return tuple(self._instances.values())

    def _exit(self, of: InstanceId, reason: ExitReason, deleted: bool) -> None:
        ended = InstanceExit(reason, _CODES[reason], self._now, deleted)
        self._instances[of] = replace(self._instances[of], state=InstanceState.EXITED, exit=ended)


_CODES = {ExitReason.COMPLETED: 0, ExitReason.ERROR: 1, ExitReason.OOM_KILLED: -9, ExitReason.KILLED: -9}


class KubernetesWorld:
    """Instances are pods."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._api = MemoryApi(job_body(**spec, runPolicy={"cleanPodPolicy": "All"}))
        api: Any = self._api  # the stub has every call that they make
        self.inner = KubernetesBackend(
            KEY,
            "job-uid",
            api,
            api,
            EventRecorder(api, "op-1"),
            PodWarnings(api),
            Tallies(CollectorRegistry()),
            SETTINGS,
            NoRedis(),
            POLICY,
        )

    def edit(self, **spec: Any) -> None:
        self._api.edit(**spec)

    def suspend(self, wanted: bool) -> None:
        self.edit(suspend=wanted)

    def end(self, member: str, reason: ExitReason) -> None:
        code = {ExitReason.COMPLETED: 0, ExitReason.ERROR: 1}.get(reason, 137)
        said = "OOMKilled" if reason is ExitReason.OOM_KILLED else "Error"
        self._api.end_pod(self._api.live_pod(member), code, said)
        self._api.sync()

    def settle(self, now: float, room: bool) -> None:
        self._api.now = now
        for pod in self._api.all_pods():
            if pod["status"]["phase"] == "Pending" and not room:
                pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
            elif pod["status"]["phase"] == "Pending":
                name = pod["spec"]["containers"][0]["name"]
                started = {"name": name, "state": {"running": {"startedAt": self._api._time()}}}
                pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [started]}
        self._api.sync()

    def name_of(self, member: str) -> str:
        return str(self._api.live_pod(member)["metadata"]["uid"])

    def instances(self) -> Sequence[Instance]:
        return tuple(view.instance for view in self.inner._views.values())


@dataclass
class _MadeUpProcess:
    """A process that ends at every signal, or when the scenario ends it."""

    pid: int = 1 << 30  # above all that the kernel gives: nobody's process
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.code = 0 if number is signal.SIGTERM else -number

    def wait(self, timeout: float) -> None:
        pass


class LocalWorld:
    """Instances are processes; only the kernel is simulated."""

    def __init__(self, spec: Mapping[str, Any], logs: Path) -> None:
        self._now = START
        self._made: dict[InstanceId, _MadeUpProcess] = {}
        self._stop = StopRequests()
        self._processes = JobProcesses(self._launch, logs)
        folder = RunFolder(logs.parent)
        folder.make()
        self._file = logs / "manifest.json"
        self._write(spec)
        self._manifest = WatchedManifest(self._file, training_spec(**spec))
        self._environment = JobEnvironment("ctr", "uid", "1", "", folder, "", logs, logs)
        self.inner = LocalBackend(
            self._manifest,
            POLICY,
            self._processes,
            self._environment,
            MasterAddress("nowhere", ""),
            None,
            self._stop,
            folder,
            lambda: False,
            lambda snapshot: None,
        )
        self._spec = dict(spec)

    def edit(self, **spec: Any) -> None:
        self._spec |= spec
        self._write(self._spec)

    def suspend(self, wanted: bool) -> None:
        self._stop.suspend = wanted

    def end(self, member: str, reason: ExitReason) -> None:
        instance = _live(self.instances(), member).id
        if reason is ExitReason.OOM_KILLED:
            self._processes._entries[instance].process.out_of_memory = True
        self._made[instance].code = _CODES[reason]

    def settle(self, now: float, room: bool) -> None:
        self._now = now

    def name_of(self, member: str) -> str:
        return _live(self.instances(), member).name

    def instances(self) -> Sequence[Instance]:
        return self._processes.observe(self._now)

    def _write(self, spec: Mapping[str, Any]) -> None:
        self._file.unlink(missing_ok=True)
        self._file.write_text(training_job(**spec).to_json(), encoding="utf-8")

    def _launch(self, instance: InstanceId, resources: Resources) -> Launch:
        process = self._made[instance] = _MadeUpProcess()
        return Launch((), {}, self._environment.incarnation(instance), lambda *_: process)


def _live(instances: Sequence[Instance], member: str) -> Instance:
    return max((i for i in instances if i.live and i.id.member == member), key=lambda instance: instance.id)


class Stage:
    """A scenario's job in one world. `do` carries out a command and returns its consequences, one per line."""

    def __init__(self, world: World, backend: Backend, asked: tuple[int, int]) -> None:
        self._world = world
        self._traced = _Traced(backend)
        self._master = ScriptedMaster()
        self._now = START
        self._controller = JobController(
            self._traced,
            lambda: self._now,
            lambda address, wake: ScriptedLink(self._master, self._end_master),  # type: ignore[arg-type,return-value]
        )
        self._phase = ""
        self._room = True
        self._master.asked = Scale(*asked)

    async def do(self, command: str, arguments: Sequence[str]) -> list[str]:
        """Carries out a command and all its immediate consequences; no time passes."""
        if command == "state":
            return self._state()
        self._change(command, arguments)
        return await self._follow()

    def _change(self, command: str, arguments: Sequence[str]) -> None:
        options = dict(argument.split("=") for argument in arguments if "=" in argument)
        match command, arguments:
            case "start", _:
                pass
            case "pass", [seconds]:
                self._now += float(seconds.removesuffix("s"))
            case "master", ["away"]:
                self._master.unanswered_since = self._now
            case "master", [phase]:
                self._master.phase, self._master.unanswered_since = JobPhase(phase), None
            case "plan", _:
                self._master.sizes = {Role(name): _shape(text) for name, text in options.items()}
            case (("room" | "no-room"), []):
                self._room = command == "room"
            case "end", [phase]:
                self._master.phase = JobPhase(phase)
                self._master.end = PhaseNews(JobPhase(phase), "Said")
            case "gives-up", [member]:
                self._master.silent = {self._member(member)}
            case "drained", [member]:
                self._master.drained = {self._member(member)}
            case "saved", []:
                self._master.saved = True
            case "edit", _:
                self._world.edit(**{name: {"replicas": int(number)} for name, number in options.items()})
            case "suspend", []:
                self._world.suspend(True)
            case "resume", []:
                self._world.suspend(False)
            case (("kill" | "fail" | "oom" | "complete"), [member]):
                reasons = {"kill": "KILLED", "fail": "ERROR", "oom": "OOM_KILLED", "complete": "COMPLETED"}
                self._world.end(member, ExitReason[reasons[command]])
                if member.startswith("master"):
                    self._master.phase = None
            case _:
                raise ValueError(f"no such command: {command} {' '.join(arguments)}")
        self._master.now = self._now

    async def _follow(self) -> list[str]:
        lines: list[str] = []
        for _ in range(12):
            self._world.settle(self._now, self._room)
            self._traced.actions.clear()
            await self._controller.step(self._now)
            for _ in range(3):
                await asyncio.sleep(0)  # lets background tasks finish
            if any(isinstance(action, Kill) and action.id.role is Role.MASTER for action in self._traced.actions):
                self._master.phase, self._master.unanswered_since = None, None
            for line in map(_in_words, self._traced.actions):
                if line not in lines:
                    lines.append(line)
            standing = self._traced.standing
            phase = f"{standing.phase}: {standing.reason}" if standing.reason else str(standing.phase)
            if phase != self._phase:
                self._phase = phase
                lines.append(phase)
        return lines

    def _member(self, member: str) -> MemberId:
        role, _, index = member.partition("-")
        return MemberId(Role(role), int(index), self._world.name_of(member))

    def _state(self) -> list[str]:
        instances = sorted(self._world.instances(), key=lambda instance: instance.id)
        return [
            str(self._traced.standing.phase),
            *(f"{instance.id.member}/{instance.id.incarnation} {instance.state}" for instance in instances),
        ]

    def _end_master(self) -> None:
        self._master.phase, self._master.end, self._master.saved = None, None, False
        self._world.end("master-0", ExitReason.COMPLETED)


def _shape(text: str) -> RoleShape:
    """Reads a number, and the memory of each after a colon: `2:5Gi`."""
    number, _, memory = text.partition(":")
    return RoleShape(int(number), memory_bytes=memory_bytes(memory) if memory else None)


def _in_words(action: Action) -> str:
    def name(instance: InstanceId) -> str:
        return f"{instance.member}/{instance.incarnation}"

    match action:
        case Create(instance) | Resize(instance) | Delete(instance) | Forget(instance) | ShutDown(instance):
            return f"{type(action).__name__.lower()} {name(instance)}"
        case Kill(instance, why):
            return f"kill {name(instance)}: {why}"
        case ReportExit(instance, ended):
            return f"report {name(instance)} {'Deleted' if ended.deleted else ended.reason}"
        case Scale(ps, workers):
            return f"tell master-0 ps={ps} worker={workers}"
        case Suspend():
            return "suspend"
    return type(action).__name__


def stage(backend: str, options: Mapping[str, int], logs: Path) -> Stage:
    """Returns the stage of a scenario whose job has this many PS and workers."""
    spec = {role: {"replicas": number} for role, number in options.items()}
    asked = (options["ps"], options["worker"])
    if backend == "fake":
        fake = FakeWorld(spec)
        return Stage(fake, fake, asked)
    world = KubernetesWorld(spec) if backend == "kubernetes" else LocalWorld(spec, logs)
    return Stage(world, world.inner, asked)
