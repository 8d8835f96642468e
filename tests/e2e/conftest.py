"""Data and jobs for tests of the whole system."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from local_jobs import Finished, Job, emberscale_here, manifest_of

ROWS = 60_000


@pytest.fixture(autouse=True)
def _history_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the user's own job history, so that it does not influence how jobs start."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set, made once."""
    folder = tmp_path_factory.mktemp("data")
    made = emberscale_here("data", "synth", str(folder / "criteo"), "--rows", str(ROWS), "--seed", "7")
    assert made.returncode == 0, made.stderr
    return folder / "criteo"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Finished:
    """A run that is Complete, made once for all tests that only read it."""
    job = Job(tmp_path_factory.mktemp("trained"), manifest_of("trained", dataset, {}))
    finished = job.run()
    assert finished.code == 0, finished.stderr
    return finished


@pytest.fixture
def make_job(tmp_path: Path, dataset: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs over the data set, and ends their processes with the test."""
    jobs: list[Job] = []

    def make(spec: dict[str, Any] | None = None) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        job = Job(folder, manifest_of(f"job-{len(jobs)}", dataset, spec or {}))
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        if job.process is not None and job.process.poll() is None:
            leftovers = job.children()
            os.kill(job.process.pid, signal.SIGKILL)
            job.process.wait()
            psutil.wait_procs(leftovers, timeout=15)
