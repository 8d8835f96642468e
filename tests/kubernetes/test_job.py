"""One job, from `kubectl apply` to Complete, as a user sees it."""

from typing import Any

import pytest

from cluster import (
    ENDLESS,
    RECORDS,
    Place,
    assert_exact,
    assert_exact_so_far,
    auc_of_local_run,
    eventually,
    kubectl,
    manifest,
    run,
    submit,
)
from installation import SYSTEM

pytestmark = pytest.mark.timeout(900)

EPOCHS = 3


@pytest.mark.smoke
def test_the_charts_own_test_passes(installed: str) -> None:
    run("helm", "test", installed, "-n", SYSTEM, "--timeout=120s", timeout=150)


@pytest.mark.smoke
def test_a_job_trains_every_sample_once_and_tells_so(place: Place) -> None:
    job = submit(manifest("whole", place, epochs=EPOCHS, replicas=2), place)
    table = [line.split() for line in kubectl("get", "tj", "whole", "-n", place.namespace).splitlines()]
    assert table[0] == ["NAME", "PHASE", "WORKERS", "PS", "SAMPLES/S", "PROGRESS", "ETA", "AGE"]
    for pod in eventually(lambda: pods if len(pods := job.pods()) >= 5 else None, "pods", seconds=180):
        assert_restricted(pod["spec"])

    status = job.wait_complete()

    assert status["progress"]["samples"] == status["progress"]["expectedSamples"] == EPOCHS * RECORDS
    assert status["progress"]["evaluations"][0]["auc"] > 0.68
    assert status["startTime"] < status["completionTime"]
    assert_exact(job, place, EPOCHS * RECORDS)
    complete = job.condition("Complete")
    assert complete["status"] == "True"
    assert complete["observedGeneration"] == job.read()["metadata"]["generation"]
    assert not job.condition("Failed") or job.condition("Failed")["status"] == "False"
    reasons = [event["reason"] for event in job.events()]
    for reason in ("CreatedMasterPod", "CreatedPSPod", "CreatedWorkerPod", "StartedTraining", "CompletedJob"):
        assert reason in reasons, reasons
    eventually(lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], "no pod runs on", seconds=180)
    assert "whole" in kubectl("get", "all", "-n", place.namespace)


def assert_restricted(spec: Any) -> None:
    """Checks that a job's pod has few rights, and no credentials for the cluster."""
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert not [mount for mount in container["volumeMounts"] if "serviceaccount" in mount["mountPath"]]


def test_the_model_is_as_good_as_that_of_a_local_run(place: Place) -> None:
    document = manifest("compared", place)
    trained = submit(document, place).wait_complete()["progress"]["evaluations"][-1]["auc"]
    local = auc_of_local_run(document, place)
    assert local > 0.68
    assert abs(trained - local) < 0.005, (trained, local)


@pytest.mark.smoke
def test_workers_can_be_scaled_with_kubectl_scale(place: Place) -> None:
    job = submit(manifest("scaled", place, epochs=ENDLESS), place)

    row = ("get", "tj", "scaled", "-n", place.namespace, "--no-headers")
    eventually(lambda: kubectl(*row).split()[2:4] == ["1/1", "1/1"], "all are ready", seconds=300)
    job.wait_for_samples(1)
    kubectl("scale", "tj/scaled", "-n", place.namespace, "--replicas=2")
    eventually(lambda: len(job.running("worker")) == 2 or None, "two workers", seconds=180)
    kubectl("scale", "tj/scaled", "-n", place.namespace, "--replicas=1")
    eventually(lambda: len(job.running("worker")) == 1 or None, "one worker", seconds=180)
    assert_exact_so_far(job, place)


def test_a_job_that_is_deleted_leaves_nothing_and_its_namesake_elsewhere_goes_on(place: Place, installed: str) -> None:
    other = Place(f"{place.namespace}-2"[:60], place.folder)
    kubectl("create", "namespace", other.namespace)
    try:
        first, second = (submit(manifest("same", where, epochs=ENDLESS), where) for where in (place, other))
        first.wait_for_samples(1)
        second.wait_for_samples(1)
        kubectl("delete", "tj", "same", "-n", place.namespace, "--wait=true", timeout=120)
        left = ("get", "pods,services,secrets,configmaps", "-n", place.namespace, "-l", first.selector, "-o", "name")
        eventually(lambda: not kubectl(*left) or None, "nothing of the job is left", seconds=240)
        second.wait_for_samples(second.samples() + 1)
        assert_exact_so_far(second, other)
    finally:
        kubectl("delete", "namespace", other.namespace, "--wait=false")


def test_a_job_that_is_applied_again_as_soon_as_it_is_deleted_gets_tokens_of_its_own(place: Place) -> None:
    """Servers of the deleted job end last; while they mount its Secrets, a node must not give these to new pods."""
    document = manifest("again", place, epochs=ENDLESS, replicas=2)
    job = submit(document, place)
    job.wait_for_samples(1)
    kubectl("delete", "tj", job.name, "-n", place.namespace, "--wait=false")
    submit(document, place)
    job.wait_for_samples(1)
    status = job.status()
    assert [status[role].get("restarts", 0) for role in ("master", "ps", "worker")] == [0, 0, 0], job.report()
    assert_exact_so_far(job, place)
