"""Whole jobs for benchmarks, started as a user starts them."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

EMBERSCALE = str(Path(sys.executable).with_name("emberscale"))
PATIENCE_SECONDS = 240.0
LOOK_SECONDS = 0.02
SYNTHETIC_SEED = 1

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sparse": {"type": "RowWiseAdagrad", "learningRate": 0.02},
    "dense": {"type": "Adagrad", "learningRate": 0.01},
}
"""The optimizers of the example job."""


def manifest(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a TrainingJob."""
    metadata = {"name": name}
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": metadata,
        "spec": {"optimizers": OPTIMIZERS, **spec},
    }


def synthesise(folder: Path, rows: int, *options: str) -> None:
    """Writes a synthetic data set."""
    command = [EMBERSCALE, "data", "synth", str(folder), "--rows", str(rows), "--seed", str(SYNTHETIC_SEED), *options]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)


def run(
    job: Mapping[str, Any],
    emberscale: Sequence[str] = (EMBERSCALE,),
    environment: Mapping[str, str] | None = None,
    look: Callable[[Path], None] = lambda folder: None,
) -> dict[str, Any]:
    """Returns the summary of a run by the `emberscale` command of this or of another checkout.

    `look` is called with the folder of the run, which is removed afterwards. Raises RuntimeError with the command's
    errors unless the job is Complete.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(yaml.safe_dump(dict(job)))
        command = [*emberscale, "run", str(file), "--workdir", f"{folder}/run", "--output", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        look(Path(folder, "run"))
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def processes_of(run: int) -> Iterator[tuple[psutil.Process, str]]:
    """Yields the live processes of a run, by its process id, and their command lines, such as `emberscale-ps 0`."""
    for process in psutil.Process(run).children(recursive=True):
        title = ""
        with suppress(psutil.Error):  # it may end meanwhile
            title = " ".join(process.cmdline()).strip()
        if title:
            yield process, title


class RunningJob:
    """A job under way in a folder; `emberscale` is the command that runs it."""

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        emberscale: Sequence[str] = (EMBERSCALE,),
    ) -> None:
        self.root = folder / "run"
        self._file = folder / "job.yaml"
        self._file.write_text(yaml.safe_dump(dict(job)))
        self._environment = environment
        self._emberscale = emberscale
        self._process = self._started()

    def _started(self, *options: str) -> subprocess.Popen[bytes]:
        command = [*self._emberscale, "run", str(self._file), "--workdir", str(self.root), *options]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def latest(self) -> tuple[float, int, int]:
        """Returns the newest row of the metrics: seconds, samples, rows."""
        metrics = self.root / "metrics.csv"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) < 2:
            return 0.0, 0, 0
        row = dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))
        return float(row["seconds"]), int(row["samples"]), int(row["rows"] or 0)

    def members(self, role: str) -> list[psutil.Process]:
        """Returns the live processes of a role, such as `ps`."""
        return [
            process for process, title in processes_of(self._process.pid) if title.startswith(f"emberscale-{role} ")
        ]

    def wait(
        self, condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS, *, every: float = LOOK_SECONDS
    ) -> bool:
        """Waits for the condition; returns whether it holds in time. Raises RuntimeError if the job ends.

        `every` is the pause in seconds between two looks, which take the job's CPU time if they ask its processes.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            if self._process.poll() is not None:
                raise RuntimeError(f"the job has ended: see {self.root}/logs")
            time.sleep(every)
        return True

    def expect(self, condition: Callable[[], bool], *, every: float = LOOK_SECONDS) -> None:
        """Waits as `wait` does. Raises RuntimeError if the condition does not hold within PATIENCE_SECONDS."""
        if not self.wait(condition, every=every):
            raise RuntimeError(f"the job does not get on: see {self.root}/logs")

    def master_log(self) -> list[str]:
        """Returns the lines of the master's log."""
        return (self.root / "logs" / "master-0.log").read_text().splitlines()

    def end(self) -> None:
        """Ends the job and all its processes."""
        self._process.kill()
        self._process.wait()
