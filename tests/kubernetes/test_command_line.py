"""`emberscale submit|status|logs|suspend|resume|delete`, and the Python client beneath them, on a cluster."""

import json
from pathlib import Path

import pytest

from cluster import COMMAND, RECORDS, Job, Place, assert_exact, eventually, find, manifest, run
from emberscale import JobNotFoundError, TrainingJobClient
from emberscale_api.job import parse_manifest
from emberscale_api.job.status import JobPhase

pytestmark = pytest.mark.timeout(1500)


EPOCHS = 4
"""So that the job is suspended before it ends."""


@pytest.mark.smoke
def test_the_command_line_takes_a_job_through_its_life(place: Place, tmp_path: Path) -> None:
    """With one worker, which trains on all of it: of two, one may come when the other has done the work."""
    document = manifest("typed", place)
    document["spec"]["worker"]["replicas"] = 1
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(document))
    job = Job("typed", place.namespace)

    def emberscale(*arguments: str) -> str:
        return run(str(COMMAND), *arguments, "--namespace", place.namespace, timeout=900)

    assert "typed: submitted" in emberscale("submit", str(file), "--set", f"spec.training.epochs={EPOCHS}")
    job.wait_for_samples(1)
    assert '"role": "worker"' in emberscale("logs", "typed", "worker-0")
    assert "goes on" not in emberscale("suspend", "typed")
    job.wait_for_phase("Suspended")
    assert 0 < job.samples() < EPOCHS * RECORDS
    assert job.condition("Suspended")["status"] == "True"
    eventually("no pod is left running", lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], 180)
    assert "Suspended (JobSuspended)" in emberscale("status", "typed")
    assert "typed: the job continues" in emberscale("resume", "typed")
    assert "Complete" in emberscale("status", "typed", "--watch")
    status = json.loads(emberscale("status", "typed", "--output", "json"))
    assert (status["phase"], status["progress"]["samples"]) == ("Complete", EPOCHS * RECORDS)
    assert '"phase": "Complete"' in emberscale("logs", "typed")
    eventually("its worker has ended", lambda: '"event": "job_over"' in emberscale("logs", "typed", "worker-0"), 180)
    assert_exact(job, place, EPOCHS * RECORDS)
    assert "typed: deleted" in emberscale("delete", "typed")
    eventually("the job is deleted", lambda: find("trainingjob", "typed", place.namespace) is None, seconds=180)


def test_the_python_client_follows_a_job_to_its_end(place: Place) -> None:
    document = manifest("called", place)
    document["spec"]["data"] = {"train": ["/shared/criteo/evaluation.tsv"]}
    client = TrainingJobClient(place.namespace)
    phases: list[JobPhase] = []
    assert client.submit(parse_manifest(document)) == "called"
    ended = client.wait("called", timeout=300, observer=lambda status: phases.append(status.phase))
    assert ended.phase is JobPhase.COMPLETE
    assert phases[-1] is JobPhase.COMPLETE
    assert JobPhase.TRAINING in phases
    assert client.list()["called"].phase is JobPhase.COMPLETE
    reasons = [event.reason for event in client.events("called")]
    assert reasons.index("CreatedMasterPod") < reasons.index("CompletedJob")
    assert any("Complete" in line for line in client.logs("called"))
    client.delete("called")
    with pytest.raises(JobNotFoundError, match="called"):
        client.wait("called", timeout=60)
