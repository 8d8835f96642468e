"""Profiles of a real `emberscale run` that goes through many shapes while it trains.

The run is like a user's, with a brain, except for the planner, which goes through a list of shapes instead of choosing.
Fractions of cores are quotas of the kernel; if none can be set, nothing is measured. The job trains on existing rows,
with its final bound on staleness, since a model of shapes does not cover a job's first minutes.
"""

import json
import os
import random
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import yaml

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.settings import CapacitySettings
from emberscale_operator.local.brain import default_database
from emberscale_operator.local.cpu import find_cpu_quotas
from tour_planner import PROFILES, PROGRESS, SHAPES
from whole_run import EMBERSCALE, synthesise

BATCH = 512
MOST_CORES_SHARE = 0.8
"""The share of the cores for all members; the rest is for the master, its store and the brain."""
WARM_UP = JobShape(1, 1, 1.0, 0.5, 2 * GIB, 2 * GIB)
"""The first shape of a tour; its profiles are dropped, since rows are still being created."""


class NotMeasurableError(Exception):
    """This machine cannot take the requested measurement."""


def shapes_for(cores: int, count: int, seed: int) -> list[JobShape]:
    """Draws distinct shapes of 1 to 3 workers and PS with tenths of cores, each within its share of the cores."""
    choice = random.Random(seed)
    found: dict[JobShape, None] = {}
    while len(found) < count:
        workers, ps = choice.randint(1, 3), choice.randint(1, 3)
        worker_cpu, ps_cpu = choice.choice((0.2, 0.3, 0.4, 0.6, 0.8)), choice.choice((0.1, 0.2, 0.3, 0.4))
        if workers * worker_cpu + ps * ps_cpu <= MOST_CORES_SHARE * cores:
            found[JobShape(workers, ps, worker_cpu, ps_cpu, 2 * GIB, 2 * GIB)] = None
    return list(found)


def measure(
    shapes: Sequence[JobShape], profiles: int, interval: float, rows: int, hear: Callable[[str], None]
) -> tuple[list[JobProfile], ModelConstants]:
    """Trains through the shapes; returns undisturbed profiles, at least `profiles` per shape, and the constants.

    `interval` is the length of a profile in seconds. Raises NotMeasurableError.
    """
    if find_cpu_quotas() is None:
        raise NotMeasurableError("no quotas of CPU can be set here, so fractions of cores would be none")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress = folder / "progress"
        os.mkfifo(progress)
        environment = {
            **os.environ,
            "XDG_DATA_HOME": str(folder / "data"),
            "PYTHONPATH": str(_installed_planner(folder / "site")),
            SHAPES: json.dumps([astuple(shape) for shape in (WARM_UP, *shapes)]),
            PROFILES: str(profiles),
            PROGRESS: str(progress),
        }
        synthesise(folder / "data", rows)
        (folder / "job.yaml").write_text(yaml.safe_dump(_manifest(interval)))
        command = [EMBERSCALE, "run", "job.yaml", *_brain_settings()]
        with (folder / "run.log").open("w") as log:
            run = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            try:
                _await_tour(run, progress, (WARM_UP, *shapes), hear)
            finally:
                run.send_signal(signal.SIGINT)
                run.wait()
        if run.returncode not in (0, 128 + signal.SIGINT):
            raise NotMeasurableError(f"the run failed: {(folder / 'run.log').read_text()[-2000:]}")
        found, constants = _read(folder, default_database(environment))
    return [profile for profile in found if not profile.restarted and profile.shape in shapes], constants


def _await_tour(
    run: "subprocess.Popen[bytes]", progress: Path, shapes: Sequence[JobShape], hear: Callable[[str], None]
) -> None:
    """Waits until the last shape is measured or the run has ended."""
    ended, lines = os.pidfd_open(run.pid), os.open(progress, os.O_RDWR)  # also for writing: no writer is no end
    try:
        with selectors.DefaultSelector() as events, open(lines, closefd=False) as reader:
            events.register(ended, selectors.EVENT_READ)
            events.register(lines, selectors.EVENT_READ)
            done = 0
            while done < len(shapes) and all(key.fd == lines for key, _ in events.select()):
                done = int(reader.readline())
                hear(f"  {done} of {len(shapes)}: {shapes[done - 1].describe()}")
    finally:
        os.close(lines)
        os.close(ended)


def _read(folder: Path, database: Path) -> tuple[list[JobProfile], ModelConstants]:
    record = json.loads((folder / "runs" / "tour" / "run.json").read_text())
    store = HistoryStore.open(f"sqlite:///{database}")
    try:
        job = JobId(record["uid"])
        metadata = store.metadata(job)
        if metadata is None:
            raise NotMeasurableError("the run's brain did not get to know the job")
        return store.profiles(job, 10_000), ModelConstants.of(metadata, CapacitySettings().bandwidth())
    finally:
        store.close()


def _manifest(interval: float) -> dict[str, object]:
    open_role = {"minReplicas": 1, "maxReplicas": 3}
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "tour"},
        "spec": {
            "data": {"train": ["data/train-*.tsv"]},
            "training": {"batchSize": BATCH, "epochs": 10_000, "stalenessWarmup": 0},
            "scaling": {"profileInterval": interval, "cooldown": "0s"},
            "ps": open_role,
            "worker": open_role,
        },
    }


def _brain_settings() -> list[str]:
    settings = (
        "planner.name=tour",
        "planning.interval=1s",
        "planning.profilesPerJob=10000",
        "retention.profilesPerJob=10000",
        "cluster.cpu=100",
        "cluster.memory=1000Gi",
        "bounds.cpuStep=0.1",
    )
    return [part for setting in settings for part in ("--brain-set", setting)]


def _installed_planner(site: Path) -> Path:
    """Makes a folder for PYTHONPATH that installs the tour as a planner."""
    about = site / "tour_planner-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tour-planner\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[emberscale.planners]\ntour = tour_planner:TourPlanner\n")
    module = Path(__file__).with_name("tour_planner.py")
    (site / module.name).write_text(module.read_text())
    return site
