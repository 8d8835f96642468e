"""`emberscale submit|status|logs|suspend|resume|delete`, and the Python client that they use, on a cluster."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from api_objects import find
from cluster import COMMAND, ENDLESS, EVALUATION_RECORDS, Job, Place, assert_exact_so_far, eventually, manifest, run
from emberscale import JobNotFoundError, TrainingJobClient
from emberscale_api.job import parse_manifest
from emberscale_api.job.status import JobPhase

pytestmark = pytest.mark.timeout(1500)


Command = Callable[..., str]


@pytest.fixture
def emberscale(place: Place) -> Command:
    """Runs the command line in the namespace, and returns its output."""
    return lambda *arguments: run(str(COMMAND), *arguments, "--namespace", place.namespace, timeout=900)


def file_of(document: dict[str, Any], folder: Path) -> str:
    """Writes a manifest to a file."""
    file = folder / "job.yaml"
    file.write_text(json.dumps(document))
    return str(file)


@pytest.mark.smoke
def test_the_command_line_takes_a_job_through_its_life(place: Place, tmp_path: Path, emberscale: Command) -> None:
    job = Job("typed", place.namespace)
    file = file_of(manifest("typed", place), tmp_path)
    assert "typed: submitted" in emberscale("submit", file, "--set", f"spec.training.epochs={ENDLESS}")
    job.wait_for_samples(1)
    assert '"role": "worker"' in emberscale("logs", "typed", "worker-0")
    assert "goes on" not in emberscale("suspend", "typed")
    job.wait_for_phase("Suspended")
    reached = job.samples()
    assert job.condition("Suspended")["status"] == "True"
    eventually(lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], "no pod is left running", 180)
    assert "Suspended (JobSuspended)" in emberscale("status", "typed")
    assert "typed: resumes" in emberscale("resume", "typed")
    job.until("it goes on", lambda status: status["phase"] == "Training", seconds=300)
    assert job.samples() >= reached > 0
    job.wait_for_samples(reached + 1)
    assert_exact_so_far(job, place)
    assert "typed: deleted" in emberscale("delete", "typed")
    eventually(lambda: find("trainingjob", "typed", place.namespace) is None, "the job is deleted", seconds=180)


def test_the_command_line_and_the_python_client_follow_a_job_to_its_end(place: Place, emberscale: Command) -> None:
    document = manifest("followed", place, data={"train": ["/shared/criteo/evaluation.tsv"]})
    client = TrainingJobClient(place.namespace)
    phases: list[JobPhase] = []
    assert client.submit(parse_manifest(document)) == "followed"
    with ThreadPoolExecutor(1) as beside:
        waits = beside.submit(client.wait, "followed", timeout=600, observer=lambda status: phases.append(status.phase))
        assert "Complete" in emberscale("status", "followed", "--watch")
        assert waits.result().phase is JobPhase.COMPLETE
    assert phases[-1] is JobPhase.COMPLETE
    assert phases[0] is not JobPhase.COMPLETE
    status = json.loads(emberscale("status", "followed", "--output", "json"))
    assert (status["phase"], status["progress"]["samples"]) == ("Complete", EVALUATION_RECORDS)
    assert client.list()["followed"].phase is JobPhase.COMPLETE
    reasons = [event.reason for event in client.events("followed")]
    assert reasons.index("CreatedMasterPod") < reasons.index("CompletedJob")
    assert '"phase": "Complete"' in emberscale("logs", "followed")
    assert any("Complete" in line for line in client.logs("followed"))
    eventually(lambda: '"event": "job_over"' in emberscale("logs", "followed", "worker-0"), "its worker ends", 180)
    client.delete("followed")
    with pytest.raises(JobNotFoundError, match="followed"):
        client.wait("followed", timeout=60)
