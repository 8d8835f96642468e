"""Each way in which a pod fails is told apart: what is the job's own doing counts, what others did does not."""

import json

import pytest

from cluster import Job, Place, assert_exact, eventually, kubectl, manifest, submit

pytestmark = pytest.mark.timeout(900)


def event(job: Job, reason: str) -> str:
    """What an Event says; empty where there is none."""
    return next((found["message"] for found in job.events() if found["reason"] == reason), "")


@pytest.mark.smoke
def test_a_server_that_runs_out_of_memory_gets_more_and_the_job_completes(place: Place) -> None:
    document = manifest("hungry", place)
    document["spec"]["model"] = {"embeddings": {"dimension": 256}}
    document["spec"]["ps"] |= {"replicas": 1, "resources": {"requests": {"cpu": "50m"}, "limits": {"memory": "352Mi"}}}
    job = submit(document, place)
    status = job.wait_complete(600)
    assert "ran out of memory" in event(job, "OOMKilledPSPod")
    growth = event(job, "IncreasedPSMemory")
    assert growth.startswith("memory of ps pods goes from 352Mi to 528Mi: hungry-ps-0-1 was killed at its limit"), (
        growth
    )
    assert status["ps"]["memoryBytes"] >= 528 << 20
    assert_exact(job, place)


def test_an_evicted_worker_is_not_the_users_fault(place: Place) -> None:
    document = manifest("evicted", place)
    document["spec"]["runPolicy"] = {"backoffLimit": 0}
    document["spec"]["training"]["epochs"] = 2
    job = submit(document, place)
    job.wait_for_samples(1)
    pod = job.running("worker")[0]["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": place.namespace}}
    path = f"/api/v1/namespaces/{place.namespace}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    job.wait_complete()
    assert "not counted" in event(job, "LostWorkerPod")


def test_a_worker_that_fails_by_itself_again_and_again_fails_the_job(place: Place) -> None:
    document = manifest("broken", place)
    document["spec"]["runPolicy"] = {"backoffLimit": 1}
    worker = document["spec"]["worker"]
    worker["template"] = {**worker["template"], "env": [{"name": "PYTHONHOME", "value": "/nowhere"}]}
    job = submit(document, place)
    eventually("Failed", lambda: job.phase() == "Failed" or None, seconds=180)
    condition = job.condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", "BackoffLimitExceeded")
    assert "backoffLimit" in event(job, "FailedWorkerPod")
    eventually("nothing runs on", lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], seconds=60)


@pytest.mark.parametrize("missing", ["image", "claim"])
def test_what_a_worker_waits_for_is_named_and_heals(place: Place, missing: str) -> None:
    document = manifest("waits", place)
    worker = document["spec"]["worker"]
    if missing == "image":
        worker["template"] = {**worker["template"], "image": "localhost/nowhere/emberscale:none"}
    else:
        volumes = [*worker["template"]["volumes"], {"name": "late", "persistentVolumeClaim": {"claimName": "late"}}]
        mounts = [*worker["template"]["volumeMounts"], {"name": "late", "mountPath": "/late"}]
        worker["template"] = {**worker["template"], "volumes": volumes, "volumeMounts": mounts}
    job = submit(document, place)

    def said() -> str:
        condition = job.condition("Progressing") or {"status": "", "message": "", "reason": ""}
        text = f"{condition['reason']} {condition['message']}"
        words = ("Image", "ErrImage") if missing == "image" else ("late",)
        return text if condition["status"] == "False" and any(word in text for word in words) else ""

    eventually("the job says what it waits for", said, seconds=40)
    if missing == "image":
        patch = {"spec": {"worker": {"template": {"image": None}}}}
        kubectl("patch", "tj", job.name, "-n", place.namespace, "--type=merge", "-p", json.dumps(patch))
    else:
        late = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"late-{place.namespace}"[:60]},
            "spec": {
                "capacity": {"storage": "1Mi"},
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": f"{place.folder}/late", "type": "DirectoryOrCreate"},
                "claimRef": {"namespace": place.namespace, "name": "late"},
                "storageClassName": "",
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "late", "namespace": place.namespace},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": "1Mi"}},
                "storageClassName": "",
                "volumeName": late["metadata"]["name"],  # type: ignore[index]
            },
        }
        for part in (late, claim):
            kubectl("apply", "-f", "-", stdin=json.dumps(part))
    job.wait_complete()
    if missing == "claim":
        kubectl("delete", "pv", f"late-{place.namespace}"[:60], "--wait=false")
