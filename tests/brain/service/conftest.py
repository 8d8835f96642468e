import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue

import pytest

from brain_process import BrainProcess
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.history.changes import Change
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.service.brain import Brain
from emberscale_brain.service.instruments import SteadyClock
from emberscale_brain.service.settings import load_settings

DEFAULTS = ("cluster.cpu=100", "planner.name=growing", "planning.interval=0.2", "planning.adoption=0")
# Bounds that leave only the number of workers free, so that a cold start has at least 12 cores.
SMALLEST = pb.Shape(workers=2, ps=1, worker_cpu=4, ps_cpu=4, worker_memory=4 << 30, ps_memory=8 << 30)
LARGEST = pb.Shape(workers=20, ps=1, worker_cpu=4, ps_cpu=4, worker_memory=4 << 30, ps_memory=8 << 30)
FAKE_PLANNERS = '''
import os, threading
from dataclasses import replace
from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import Explanation, PlanAction, PlannedShape, ThroughputFit

class Growing:
    """One worker more than the job has, at each look."""

    def __init__(self, settings):
        pass

    def grown(self, job):
        if not job.profiles or job.fixed:
            return job.current
        return replace(job.current, workers=job.current.workers + 1)

    def plan(self, cluster, now):
        print("a planner that prints")
        fit = ThroughputFit((1e-6, 0.0, 0.0, 0.0, 0.1, 0.0), ((0.0,) * 6,) * 6, 0.05, 0.02, 3, 1)
        return {
            job.id: PlannedShape(
                self.grown(job),
                PlanAction.SCALE, f"{len(job.profiles)} profiles", Explanation(fit=fit),
            )
            for job in cluster.jobs if job.current is not None
        }

class Raising(Growing):
    """Raises while a file says so."""

    def plan(self, cluster, now):
        if os.path.exists(os.environ["FAKE_TROUBLE"]):
            raise ZeroDivisionError("no such luck")
        return super().plan(cluster, now)

class Stalling(Growing):
    def plan(self, cluster, now):
        if os.path.exists(os.environ["FAKE_TROUBLE"]):
            threading.Event().wait()
        return super().plan(cluster, now)

class Greedy(Growing):
    def plan(self, cluster, now):
        return {job.id: PlannedShape(replace(job.current, workers=1000), PlanAction.SCALE, "all mine")
                for job in cluster.jobs if job.current is not None}

class Content(Growing):
    """Three workers are enough."""

    def plan(self, cluster, now):
        return {
            job.id: PlannedShape(
                replace(job.current, workers=3),
                PlanAction.KEEP if job.current.workers == 3 else PlanAction.SCALE, f"{len(job.profiles)} profiles",
            )
            for job in cluster.jobs if job.profiles
        }

class Babbling(Growing):
    def plan(self, cluster, now):
        return {job.id: PlannedShape(job.current, PlanAction.KEEP, chr(0xd800)) for job in cluster.jobs}

class Leaving(Growing):
    def plan(self, cluster, now):
        raise SystemExit(3)

class Sulking:
    def __init__(self, settings):
        pass
'''
ENTRY_POINTS = """[emberscale.planners]
growing = fake_planners:Growing
raising = fake_planners:Raising
stalling = fake_planners:Stalling
greedy = fake_planners:Greedy
content = fake_planners:Content
babbling = fake_planners:Babbling
leaving = fake_planners:Leaving
sulking = fake_planners:Sulking
missing = fake_planners:NotThere
"""


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; misbehaving planners misbehave while it exists."""
    path = tmp_path / "trouble"
    monkeypatch.setenv("FAKE_TROUBLE", str(path))
    return path


@pytest.fixture
def fake_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Path) -> Path:
    """Installs a distribution with planners, for this process and its children."""
    folder = tmp_path / "site"
    metadata = folder / "fake_planners-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "fake_planners.py").write_text(FAKE_PLANNERS)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-planners\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


@pytest.fixture
def open_brain(tmp_path: Path, fake_planners: Path) -> Iterator[Callable[..., Brain]]:
    """Opens a brain in this process, with `path=value` settings; it plans when the test says `plan_once`."""
    opened: list[Brain] = []

    def open_it(
        *overrides: str, clock: SteadyClock | None = None, enter: Callable[[Brain], None] = Brain.open
    ) -> Brain:
        settings = load_settings(None, [f"database=sqlite:///{tmp_path / 'brain.db'}", *DEFAULTS, *overrides])
        brain = Brain(settings, HistoryStore.open(settings.database, exclusive=settings.planning.take_over), clock)
        enter(brain)
        opened.append(brain)
        return brain

    yield open_it
    for brain in opened:
        brain.stop()


@pytest.fixture
def start_brain(open_brain: Callable[..., Brain]) -> Callable[..., Brain]:
    """Starts a brain in this process, which also plans by itself."""
    return partial(open_brain, enter=Brain.start)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Queue[None]:
    """Gets an item whenever a brain of this process has played a round of planning."""
    played: Queue[None] = Queue()
    plan_once = Brain.plan_once

    def plan_and_say_so(brain: Brain) -> None:
        plan_once(brain)
        played.put(None)

    monkeypatch.setattr(Brain, "plan_once", plan_and_say_so)
    return played


@pytest.fixture
def run_brain(tmp_path: Path, fake_planners: Path) -> Iterator[Callable[..., BrainProcess]]:
    """Runs a brain as its own process, with `path=value` settings."""
    token = tmp_path / "token"
    token.write_text("a-token")
    running: list[BrainProcess] = []

    def run(*overrides: str) -> BrainProcess:
        database = f"database=sqlite:///{tmp_path / 'brain.db'}"
        brain = BrainProcess(token, tmp_path / f"brain-{len(running)}.log", [database, *DEFAULTS, *overrides])
        running.append(brain)
        return brain

    yield run
    for brain in running:
        brain.stop()


@pytest.fixture(scope="session")
def submission() -> Callable[..., pb.SubmitJobRequest]:
    def make(job: str = "job-1", **changes: object) -> pb.SubmitJobRequest:
        request = pb.SubmitJobRequest(
            job_uid=job,
            owner="ann",
            limits=pb.ShapeLimits(least=SMALLEST, most=LARGEST),
            description=pb.JobDescription(
                architecture="DLRM",
                batch_size=512,
                dense_bytes=10**6,
                embedding_dimension=416,
                tables=26,
                total_samples=10**9,
                name="ads-2026-01-01",
            ),
        )
        request.MergeFrom(pb.SubmitJobRequest(**changes))  # type: ignore[arg-type]  # fields by keyword
        return request

    return make


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def hanging_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A database whose writes hang until the event is set; a test asks for it after what it is to outlive."""
    goes_on = threading.Event()
    write = HistoryStore.write

    def hang(self: HistoryStore, changes: Sequence[Change]) -> None:
        goes_on.wait()
        write(self, changes)

    monkeypatch.setattr(HistoryStore, "write", hang)
    yield goes_on
    goes_on.set()
