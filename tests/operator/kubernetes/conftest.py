"""A job and its settings, for tests that need no cluster."""

import pytest

from emberscale_operator.kubernetes.job import Job, read_job
from emberscale_operator.kubernetes.settings import Settings
from training_jobs import job_body


@pytest.fixture
def settings() -> Settings:
    return Settings(image="emberscale:1", redis_url="redis://:secret@redis:6379/0", namespace="ops", identity="op-1")


@pytest.fixture
def job() -> Job:
    return read_job(
        job_body(
            ps={"replicas": 2, "resources": {"limits": {"cpu": 1, "memory": "1Gi"}, "requests": {"memory": "512Mi"}}},
            worker={"replicas": 3},
        )
    )
