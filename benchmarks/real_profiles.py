"""Profiles of one real `emberscale run` that is led through many shapes while it trains.

The run is as a person's would be, with the brain beside it, but for the planner, which goes through a list of shapes
instead of choosing. Fractions of cores are quotas of the kernel; where none can be set nothing is measured.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import yaml

from emberscale_brain.history.store import HistoryStore
from emberscale_brain.model.features import ModelConstants
from emberscale_brain.planner.types import GIB, JobId, JobProfile, JobShape
from emberscale_brain.service.settings import CapacitySettings
from emberscale_operator.local.brain import default_database
from emberscale_operator.local.cpu_quota import find_cpu_quotas
from tour_planner import PROFILES, SHAPES

BATCH = 512
MOST_CORES_SHARE = 0.8
"""What all members may have of the machine; the rest is for the master, its store and the brain."""
_EMBERSCALE = str(Path(sys.executable).with_name("emberscale"))
_POLL_SECONDS = 1.0


class NotMeasurableError(Exception):
    """This machine cannot measure what is asked for."""


def shapes_for(cores: int, count: int, seed: int) -> list[JobShape]:
    """Different shapes of 1 to 3 workers and PS, with tenths of cores, that fit on so many cores together."""
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
    """Trains through the shapes, and returns the undisturbed profiles, `profiles` a shape or more, and the constants.

    `interval` is the length of a profile in seconds. Raises NotMeasurableError.
    """
    if find_cpu_quotas() is None:
        raise NotMeasurableError("no quotas of CPU can be set here, so fractions of cores would be none")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            "XDG_DATA_HOME": str(folder / "data"),
            "PYTHONPATH": str(_installed_planner(folder / "site")),
            SHAPES: json.dumps([astuple(shape) for shape in shapes]),
            PROFILES: str(profiles),
        }
        subprocess.run(
            [_EMBERSCALE, "data", "synth", "data", "--rows", str(rows), "--seed", "1"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (folder / "job.yaml").write_text(yaml.safe_dump(_manifest(interval)))
        with (folder / "run.log").open("w") as log:
            run = subprocess.Popen(
                [_EMBERSCALE, "run", "job.yaml", *_brain_settings()],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
            try:
                _await_tour(run, default_database(environment), shapes, profiles, hear)
            finally:
                run.send_signal(signal.SIGINT)
                run.wait()
        if run.returncode not in (0, 128 + signal.SIGINT):
            raise NotMeasurableError(f"the run failed: {(folder / 'run.log').read_text()[-2000:]}")
        found, constants = _read(default_database(environment))
        return [profile for profile in found if not profile.restarted], constants


def _await_tour(
    run: "subprocess.Popen[bytes]",
    database: Path,
    shapes: Sequence[JobShape],
    profiles: int,
    hear: Callable[[str], None],
) -> None:
    reached = 0
    while run.poll() is None:
        time.sleep(_POLL_SECONDS)
        if not (database.exists() and (run_file := database.parents[2] / "runs" / "tour" / "run.json").exists()):
            continue
        measured = [profile for profile in _read(database, run_file)[0] if not profile.restarted]
        counts = [sum(profile.shape == shape for profile in measured) for shape in shapes]
        done = sum(count >= profiles for count in counts)
        if done > reached:
            reached = done
            last = next(shape for shape, count in zip(reversed(shapes), reversed(counts), strict=True) if count)
            hear(f"  {done} of {len(shapes)} shapes measured, the last {last.describe()}")
        if done == len(shapes):
            return


def _read(database: Path, run_file: Path | None = None) -> tuple[list[JobProfile], ModelConstants]:
    record = json.loads((run_file or database.parents[2] / "runs" / "tour" / "run.json").read_text())
    store = HistoryStore.open(f"sqlite:///{database}")
    try:
        job = JobId(record["uid"])
        metadata = store.metadata(job)
        if metadata is None:
            return [], ModelConstants(BATCH, 1, 1, 1)
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
            "training": {"batchSize": BATCH, "epochs": 10_000},
            "sharding": {"heartbeatInterval": "200ms"},
            "scaling": {"profileInterval": f"{interval:g}s", "cooldown": "0s"},
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
    """A folder for PYTHONPATH in which the tour is a planner."""
    about = site / "tour_planner-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tour-planner\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[emberscale.planners]\ntour = tour_planner:TourPlanner\n")
    module = Path(__file__).with_name("tour_planner.py")
    (site / module.name).write_text(module.read_text())
    return site
