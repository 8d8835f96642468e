"""The causes of pod failures are told apart: only failures of the job's own making count."""

import json
from typing import Any

import pytest

from cluster import (
    ENDLESS,
    RECORDS,
    Job,
    Place,
    apply,
    assert_exact,
    assert_exact_so_far,
    eventually,
    kubectl,
    manifest,
    submit,
)

pytestmark = pytest.mark.timeout(900)


def event(job: Job, reason: str) -> str:
    """Returns the message of an Event with this reason, or an empty string."""
    return next((found["message"] for found in job.events() if found["reason"] == reason), "")


@pytest.mark.smoke
def test_a_server_that_runs_out_of_memory_gets_more_and_the_job_completes(place: Place) -> None:
    """A server takes 65 MiB plus 190 for its rows; close to its limit, it would re-read its own files for minutes."""
    document = manifest("hungry", place, data={"train": ["/shared/criteo/train-00000.tsv"]})
    document["spec"]["model"] = {"embeddings": {"dimension": 256}}
    document["spec"]["ps"] |= {"resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "208Mi"}}}
    job = submit(document, place)
    status = job.wait_complete()
    assert "ran out of memory" in event(job, "OOMKilledPSPod")
    growth = event(job, "IncreasedPSMemory")
    assert growth.startswith("memory of ps pods goes from 208Mi to 312Mi: hungry-ps-0-1 was killed at its limit"), (
        growth
    )
    assert status["ps"]["memoryBytes"] == 312 << 20
    assert_exact(job, place, RECORDS // 2)


def test_an_evicted_worker_is_not_the_users_fault(place: Place) -> None:
    """With a backoffLimit of 0, a single counted failure would fail the job."""
    document = manifest("evicted", place, epochs=ENDLESS)
    document["spec"]["runPolicy"] = {"backoffLimit": 0}
    job = submit(document, place)
    job.wait_for_samples(1)
    pod = job.member("worker", 0)["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": place.namespace}}
    path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    assert "not counted" in job.until("it is lost", lambda _: event(job, "LostWorkerPod"), seconds=240)
    assert job.member("worker", 0)["metadata"]["name"] != pod
    job.wait_for_samples(job.samples() + 1)
    assert_exact_so_far(job, place)


def test_a_worker_that_fails_by_itself_again_and_again_fails_the_job(place: Place) -> None:
    document = manifest("broken", place)
    document["spec"]["runPolicy"] = {"backoffLimit": 1}
    worker = document["spec"]["worker"]
    worker["template"] = {**worker["template"], "env": [{"name": "PYTHONHOME", "value": "/nowhere"}]}
    job = submit(document, place)
    eventually(lambda: job.phase() == "Failed" or None, "Failed", seconds=180)
    condition = job.condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", "BackoffLimitExceeded")
    assert "backoffLimit" in event(job, "FailedWorkerPod")
    eventually(lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], "nothing runs on", seconds=180)


@pytest.mark.parametrize("missing", ["image", "claim", "secret", "variable"])
def test_what_a_worker_waits_for_is_named_and_heals(place: Place, missing: str) -> None:
    document = manifest("waits", place, data={"train": ["/shared/criteo/evaluation.tsv"]})
    worker = document["spec"]["worker"]
    worker["template"] = lacking(missing, worker["template"])
    job = submit(document, place)
    eventually(lambda: job.pods("worker") or None, "the worker's pod", seconds=180)

    def said() -> bool:
        condition = job.condition("Progressing") or {"status": "", "message": "", "reason": ""}
        word = "Image" if missing == "image" else "late"
        return condition["status"] == "False" and word in f"{condition['reason']} {condition['message']}"

    eventually(lambda: said() or None, "the job says what it waits for", seconds=180)
    mend(missing, job, place)
    try:
        job.wait_complete()
    finally:
        kubectl("delete", "pv", "emberscale-e2e-late", "--ignore-not-found", "--wait=false")


def lacking(missing: str, template: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's template that refers to something that does not exist."""
    match missing:
        case "image":
            return {**template, "image": "localhost/nowhere/emberscale:none"}
        case "variable":
            reference = {"secretKeyRef": {"name": "late", "key": "value"}}
            return {**template, "env": [{"name": "EXTRA", "valueFrom": reference}]}
    source = {"claim": {"persistentVolumeClaim": {"claimName": "late"}}, "secret": {"secret": {"secretName": "late"}}}
    return {
        **template,
        "volumes": [*template["volumes"], {"name": "late", **source[missing]}],
        "volumeMounts": [*template["volumeMounts"], {"name": "late", "mountPath": "/late"}],
    }


def mend(missing: str, job: Job, place: Place) -> None:
    """Creates what was missing; a missing image is removed from the manifest instead."""
    if missing == "image":
        patch = {"spec": {"worker": {"template": {"image": None}}}}
        kubectl("patch", "tj", job.name, "-n", place.namespace, "--type=merge", "-p", json.dumps(patch))
        return
    if missing in ("secret", "variable"):
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "stringData": {"value": "here"}}
        apply(secret, namespace=place.namespace)
        return
    of_both = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "capacity": {"storage": "1Mi"},
        "hostPath": {"path": f"{place.folder}/late", "type": "DirectoryOrCreate"},
        "claimRef": {"namespace": place.namespace, "name": "late"},
    }
    claim = {"resources": {"requests": {"storage": "1Mi"}}, "volumeName": "emberscale-e2e-late"}
    apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "emberscale-e2e-late"},
            "spec": of_both | volume,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "late", "namespace": place.namespace},
            "spec": of_both | claim,
        },
        namespace=place.namespace,
    )
    # A scheduler that saw the claim before it was bound looks again after a change to it, or else after five minutes.
    kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc/late", "-n", place.namespace, "--timeout=100s")
    kubectl("annotate", "pvc", "late", "-n", place.namespace, "bound=yes")
