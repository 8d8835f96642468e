"""Data and jobs for tests of the whole."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from local_jobs import BATCH, Finished, Job, emberscale, merge

ROWS = 60_000


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set, made once."""
    folder = tmp_path_factory.mktemp("data")
    made = emberscale("data", "synth", str(folder / "criteo"), "--rows", str(ROWS), "--seed", "7", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder / "criteo"


def manifest_of(name: str, dataset: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """A job over the data set, small but whole."""
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": merge(
            {
                "data": {
                    "train": [str(dataset / "train-*.tsv")],
                    "evaluation": [str(dataset / "evaluation.tsv")],
                    "shuffling": {"blockRecords": 4096},
                },
                "training": {"batchSize": BATCH},
                "sharding": {"minBatches": 2, "maxBatches": 16, "leaseTimeout": "4s", "heartbeatInterval": "200ms"},
                "ps": {"replicas": 2},
                "worker": {"replicas": 2},
                "checkpoint": {"interval": "3s"},
            },
            spec,
        ),
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Finished:
    """A run that is Complete, made once for all tests that only read it."""
    job = Job(tmp_path_factory.mktemp("trained"), manifest_of("trained", dataset, {}))
    finished = job.run()
    assert finished.code == 0, finished.stderr
    return finished


@pytest.fixture
def make_job(tmp_path: Path, dataset: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs over the data set; what they start is ended with the test."""
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
