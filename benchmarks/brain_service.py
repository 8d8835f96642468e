"""How soon a brain answers `GetPlan` while it plans for many jobs, and its memory; for `planner_scale.py`.

The brain is `python -m emberscale_brain` with a database that already holds the jobs and their profiles, so that its
first round plans them all. Until the plans of that round are in force and written, masters ask for plans and report
profiles at the rates of that many jobs. A request's time counts from when it was due, which includes the time that it
waits behind others.
"""

import gc
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from emberscale_api.metrics import BRAIN_BACKLOG_CHANGES, BRAIN_PLANNING_SECONDS
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.codec import message_of
from emberscale_api.rpc.token import open_channel
from emberscale_api.shape import GIB
from emberscale_brain.history.changes import JobSubmitted, ProfileReported
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobView

TOKEN = "benchmark"
ASK_SECONDS, REPORT_SECONDS = 10.0, 30.0
"""The seconds between two requests of a job's master for its plan, and between two profiles."""
START_SECONDS = 120.0


@dataclass(frozen=True)
class Answers:
    """Seconds of every `GetPlan` and of the concurrent round of planning, and the peak bytes of service and planner."""

    latencies: tuple[float, ...]
    round_seconds: float
    memory: float


def answer_while_planning(jobs: Sequence[JobView]) -> Answers:
    """Starts a brain that knows these jobs, and asks it for plans during its first round."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'brain.db'}"
        _remember(url, jobs)
        began = time.monotonic()
        with _brain(folder, url, jobs) as (pid, address, metrics):
            gc.disable()  # a collection would walk all jobs of this process, and add to the latencies
            latencies = _ask(address, metrics, jobs)
            gc.enable()
            seconds = time.monotonic() - began
            tasks = Path(f"/proc/{pid}/task").iterdir()
            children = [child for task in tasks for child in (task / "children").read_text().split()]
            return Answers(tuple(latencies), seconds, sum(_peak_bytes(one) for one in (str(pid), *children)))


def _remember(url: str, jobs: Sequence[JobView]) -> None:
    """Writes the jobs as an earlier brain would have; their last profiles are recent."""
    store, shift = HistoryStore.open(url), time.time() - max(job.profiles[-1].time for job in jobs) - 1
    store.migrate()
    for job in jobs:
        submitted = JobSubmitted(job.id, job.owner, job.metadata, job.bounds, time.time() - 3600, job.current)
        store.write(
            [
                submitted,
                *(
                    ProfileReported(job.id, number + 1, replace(profile, time=profile.time + shift))
                    for number, profile in enumerate(job.profiles)
                ),
            ]
        )
    store.close()


@contextmanager
def _brain(folder: Path, url: str, jobs: Sequence[JobView]) -> Iterator[tuple[int, str, str]]:
    """Runs a brain; yields its process id, its address, and the URL of its metrics."""
    token, log = folder / "token", folder / "log"
    token.write_text(TOKEN)
    address, metrics = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    settings = (
        f"listen={address}",
        f"metrics={metrics}",
        f"tokenFile={token}",
        f"database={url}",
        f"cluster.cpu={60 * len(jobs)}",
        f"cluster.memory={400 * len(jobs)}Gi",
        "planning.timeout=10m",
    )
    command = [sys.executable, "-m", "emberscale_brain", *(part for one in settings for part in ("--set", one))]
    with log.open("w") as file, subprocess.Popen(command, stderr=file, stdout=file) as process:
        try:
            yield process.pid, address, f"http://{metrics}/metrics"
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _ask(address: str, metrics: str, jobs: Sequence[JobView]) -> list[float]:
    """Sends requests until the first round of planning has ended; returns the seconds of each `GetPlan`."""
    latencies: list[float] = []
    with (
        open_channel(address, TOKEN) as channel,
        ThreadPoolExecutor(16) as askers,
        ThreadPoolExecutor(32) as reporters,  # separate, since the answer to a report waits for the disk
        ThreadPoolExecutor(1) as watcher,
    ):
        stub = BrainStub(channel)
        # as masters, which are already connected
        stub.GetPlan(pb.GetPlanRequest(job_uid=jobs[0].id), timeout=START_SECONDS, wait_for_ready=True)
        planned = watcher.submit(_await_round, metrics)

        def ask(number: int, due: float) -> None:
            stub.GetPlan(pb.GetPlanRequest(job_uid=jobs[number % len(jobs)].id), timeout=30)
            latencies.append(time.monotonic() - due)

        def report(number: int) -> None:
            stub.ReportProfile(_report(jobs[number % len(jobs)], number), timeout=30)

        every, asks_a_report = ASK_SECONDS / len(jobs), round(REPORT_SECONDS / ASK_SECONDS)
        due, number = time.monotonic(), 0
        while not planned.done():
            time.sleep(max(0.0, due - time.monotonic()))
            askers.submit(ask, number, due)
            if number % asks_a_report == 0:
                reporters.submit(report, number // asks_a_report)
            due, number = due + every, number + 1
        planned.result()
    return latencies


def _report(job: JobView, number: int) -> pb.ReportProfileRequest:
    """Returns a report of a job that trains as fast as before."""
    last = job.profiles[-1]
    profile = pb.Profile(
        sequence=1000 + number,
        time=time.time(),
        shape=message_of(pb.Shape, last.shape),
        batch_size=last.batch_size,
        iteration_seconds=last.iteration_seconds,
        throughput=last.throughput,
        samples=last.samples + number,
        rows=last.rows,
        ps_memory=last.ps_memory,
        worker_memory=2 * GIB,
    )
    return pb.ReportProfileRequest(job_uid=job.id, profiles=[profile])


def _await_round(metrics: str) -> None:
    """Waits until a round of planning is counted and no change waits for the database."""
    while True:
        with urllib.request.urlopen(metrics) as answer:
            lines = answer.read().decode().splitlines()
        values = {
            name: float(value) for name, value in (line.split() for line in lines if " " in line and line[0] != "#")
        }
        if values[f"{BRAIN_PLANNING_SECONDS}_count"] >= 1 and not values[BRAIN_BACKLOG_CHANGES]:
            return
        time.sleep(0.5)


def _peak_bytes(pid: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in status if line.startswith("VmHWM"))) * 1024
