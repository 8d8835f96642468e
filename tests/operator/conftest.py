"""Shared by the tests with real processes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberscale_api.job import TrainingJob
from emberscale_api.job.roles import Role
from emberscale_operator.local.process import Launch
from emberscale_operator.local.processes import JobProcesses
from emberscale_operator.machine import InstanceId, Resources
from training_jobs import training_job

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def make_backend(tmp_path: Path) -> Iterator[Callable[..., JobProcesses]]:
    """Makes backends whose instances all run one piece of Python, and ends their processes with the test."""
    backends: list[JobProcesses] = []

    def make(code: str, stop_grace: float = 10.0) -> JobProcesses:
        def launch(instance: InstanceId, resources: Resources) -> Launch:
            return Launch((sys.executable, "-S", "-c", code), {}, f"life-{instance.incarnation}")

        backend = JobProcesses(launch, tmp_path, stop_grace)
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.kill_all()


@pytest.fixture
def job() -> TrainingJob:
    """A small manifest; its data is never read."""
    return training_job(
        ps={"replicas": 2},
        worker={"replicas": 2, "resources": {"limits": {"cpu": 1, "memory": "256Mi"}}},
        runPolicy={"backoffLimit": 1},
    )


@pytest.fixture
def stand_ins() -> dict[Role, tuple[str, ...]]:
    """Commands that speak the real protocol and train nothing."""
    return {role: (sys.executable, str(STAND_IN), str(role)) for role in (Role.MASTER, Role.PS, Role.WORKER)}
