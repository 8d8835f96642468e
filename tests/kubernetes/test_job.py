"""One job, from `kubectl apply` to Complete, as a person sees it."""

import pytest

from cluster import (
    RECORDS,
    CommandFailedError,
    Place,
    assert_exact,
    auc_of_local_run,
    eventually,
    kubectl,
    manifest,
    run,
    submit,
)
from installation import SYSTEM

pytestmark = pytest.mark.timeout(900)

EPOCHS = 8
"""So that a job whose state is looked at goes on until it was seen, on a busy machine too."""


@pytest.mark.smoke
def test_the_charts_own_test_passes(installed: str) -> None:
    run("helm", "test", installed, "-n", SYSTEM, "--timeout=120s", timeout=150)


@pytest.mark.smoke
def test_a_job_trains_every_sample_once_and_tells_so(place: Place) -> None:
    job = submit(manifest("whole", place, epochs=EPOCHS), place)
    eventually("five pods", lambda: len(job.pods()) >= 5 or None, seconds=60)

    def table() -> list[list[str]]:
        return [line.split() for line in kubectl("get", "tj", "whole", "-n", place.namespace).splitlines()]

    assert table()[0] == ["NAME", "PHASE", "WORKERS", "PS", "SAMPLES/S", "PROGRESS", "ETA", "AGE"]
    eventually("all are ready", lambda: table()[1][2:4] == ["2/2", "2/2"], seconds=120, every=0.2)

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
    eventually("no pod runs on", lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], seconds=60)
    assert "whole" in kubectl("get", "all", "-n", place.namespace)


def test_the_model_is_as_good_as_that_of_a_local_run(place: Place) -> None:
    document = manifest("compared", place)
    trained = submit(document, place).wait_complete()["progress"]["evaluations"][-1]["auc"]
    local = auc_of_local_run(document, place)
    assert local > 0.68
    assert abs(trained - local) < 0.005, (trained, local)


def test_training_pods_are_restricted_and_hold_no_credentials(place: Place) -> None:
    job = submit(manifest("restricted", place), place)
    pods = eventually("pods", lambda: pods if len(pods := job.pods()) >= 5 else None, seconds=60)
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert not [mount for mount in container["volumeMounts"] if "serviceaccount" in mount["mountPath"]]


def test_deleting_a_job_leaves_nothing_of_it(place: Place) -> None:
    job = submit(manifest("deleted", place), place)
    job.wait_for_samples(1)
    kubectl("delete", "tj", "deleted", "-n", place.namespace, "--wait=true", timeout=120)
    kinds = "pods,services,secrets,configmaps"
    eventually(
        "nothing of the job is left",
        lambda: not kubectl("get", kinds, "-n", place.namespace, "-l", job.selector, "-o", "name") or None,
        seconds=90,
    )


@pytest.mark.smoke
def test_a_job_that_is_suspended_goes_on_from_there(place: Place) -> None:
    job = submit(manifest("paused", place, epochs=8), place)
    job.wait_for_samples(5000)
    kubectl("patch", "tj", "paused", "-n", place.namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    eventually("Suspended", lambda: job.phase() == "Suspended" or None, seconds=120)
    reached = job.samples()
    eventually("no pod is left running", lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], 60)
    condition = job.condition("Suspended")
    assert condition["status"] == "True"
    kubectl("patch", "tj", "paused", "-n", place.namespace, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    status = job.wait_complete()
    assert 0 < reached < 8 * RECORDS
    assert status["progress"]["samples"] == 8 * RECORDS
    assert_exact(job, place, 8 * RECORDS)


@pytest.mark.smoke
def test_workers_can_be_scaled_with_kubectl_scale(place: Place) -> None:
    job = submit(manifest("scaled", place, epochs=12), place)
    job.wait_for_samples(1)
    kubectl("scale", "tj/scaled", "-n", place.namespace, "--replicas=3")
    eventually("three workers", lambda: len(job.running("worker")) == 3 or None, seconds=90)
    kubectl("scale", "tj/scaled", "-n", place.namespace, "--replicas=1")
    eventually("one worker", lambda: len(job.running("worker")) == 1 or None, seconds=90)
    job.wait_complete()
    assert_exact(job, place, 12 * RECORDS)


def test_jobs_of_one_name_in_two_namespaces_do_not_touch_each_other(place: Place, installed: str) -> None:
    other = Place(f"{place.namespace}-2"[:60], place.folder)
    kubectl("create", "namespace", other.namespace)
    try:
        first, second = (submit(manifest("same", where), where) for where in (place, other))
        first.wait_for_samples(1)
        second.wait_for_samples(1)
        kubectl("delete", "tj", "same", "-n", place.namespace, "--wait=true", timeout=120)
        second.wait_complete()
        assert_exact(second, other)
    finally:
        kubectl("delete", "namespace", other.namespace, "--wait=true", timeout=180)


@pytest.mark.alone
@pytest.mark.first
def test_the_operator_has_met_nothing_unexpected(installed: str) -> None:
    """Of all jobs that have run together until now: what runs alone starts the operator anew."""
    service = f"/api/v1/namespaces/{SYSTEM}/services/emberscale-operator:9090/proxy/metrics"
    metrics = kubectl("get", "--raw", service)
    assert "emberscale_operator_defects_total 0.0" in metrics
    assert "# TYPE emberscale_job_phase gauge" in metrics


def test_a_manifest_that_cannot_change_is_refused_with_the_reason(place: Place) -> None:
    job = submit(manifest("fixed", place), place)
    patch = '{"spec":{"training":{"batchSize":512}}}'
    with pytest.raises(CommandFailedError, match="cannot change once the job is created"):
        kubectl("patch", "tj", job.name, "-n", place.namespace, "--type=merge", "-p", patch)
