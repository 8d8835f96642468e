"""Deadlines and quotas, and what is left of jobs that have ended or been deleted."""

from typing import Any

import pytest

from api_objects import find
from cluster import ENDLESS, EVALUATION_RECORDS, Place, assert_exact, eventually, kubectl, manifest, most_pods, submit
from faults import running
from installation import REDIS, SYSTEM

pytestmark = pytest.mark.timeout(900)


def short(name: str, place: Place, **policy: Any) -> dict[str, Any]:
    """A job over little data, with one server and one worker."""
    return manifest(name, place, data={"train": ["/shared/criteo/evaluation.tsv"]}, runPolicy=policy)


def states_in_redis() -> set[str]:
    """Returns the uids of the jobs that have state in Redis."""
    pod = running(REDIS)["metadata"]["name"]
    keys = kubectl("exec", "-n", SYSTEM, pod, "--", "redis-cli", "--scan", "--pattern", "emberscale:*:state")
    return {key.split(":")[1] for key in keys.split()}


def test_a_job_past_its_deadline_fails(place: Place) -> None:
    document = manifest("late", place, epochs=ENDLESS)
    document["spec"]["runPolicy"] = {"activeDeadline": "20s"}
    job = submit(document, place)
    eventually(lambda: job.phase() == "Failed" or None, "Failed", seconds=240)
    assert job.condition("Failed")["reason"] == "DeadlineExceeded"
    eventually(lambda: not [p for p in job.pods() if p["status"]["phase"] == "Running"], "nothing runs on", seconds=180)


def test_pods_stay_or_go_as_the_policy_says_and_the_job_goes_in_time(place: Place) -> None:
    documents = {
        "stays": short("stays", place, cleanPodPolicy="None"),
        "cleaned": short("cleaned", place, cleanPodPolicy="All"),
        "gone": short("gone", place, ttlAfterFinished="5s"),
    }
    jobs = {name: submit(document, place) for name, document in documents.items()}
    uid = jobs["gone"].read()["metadata"]["uid"]
    for name in ("stays", "cleaned"):
        jobs[name].wait_complete()
        assert_exact(jobs[name], place, EVALUATION_RECORDS)
    eventually(lambda: not jobs["cleaned"].pods(), "its pods are deleted", seconds=180)
    eventually(lambda: find("trainingjob", "gone", place.namespace) is None, "the job is deleted", seconds=180)
    eventually(lambda: not jobs["gone"].pods(), "its pods went with it", seconds=180)
    eventually(lambda: uid not in states_in_redis(), "its state in Redis went, too", seconds=180)
    left = jobs["stays"].pods()
    assert {pod["metadata"]["labels"]["emberscale.io/role"] for pod in left} == {"master", "ps", "worker"}
    assert not [pod for pod in left if pod["status"]["phase"] == "Running"]


@pytest.mark.alone
def test_a_namespace_is_deleted_at_once_with_its_jobs(installed: str, shared_folder: str) -> None:
    """Nothing of ours blocks the deletion, even while neither the operator nor Redis runs."""
    place = Place("short-lived", shared_folder)
    kubectl("create", "namespace", place.namespace)
    job = submit(manifest("orphan", place), place)
    job.wait_for_samples(1)
    deployments = ("deployment/emberscale-operator", "deployment/emberscale-redis")
    kubectl("scale", *deployments, "-n", SYSTEM, "--replicas=0")
    try:
        kubectl("delete", "namespace", place.namespace, "--wait=true", timeout=120)
    finally:
        kubectl("scale", *deployments, "-n", SYSTEM, "--replicas=1")
        for deployment in deployments:
            kubectl("rollout", "status", deployment, "-n", SYSTEM, "--timeout=120s", timeout=150)


def test_a_quota_is_named_and_healing_it_is_enough(place: Place) -> None:
    with most_pods(place, 2):
        job = submit(manifest("squeezed", place, epochs=ENDLESS), place)

        def said() -> bool:
            condition = job.condition("Progressing")
            return bool(condition and condition["status"] == "False" and condition["reason"] == "QuotaExceeded")

        eventually(lambda: said() or None, "the job says that a quota keeps it", seconds=180)
    job.wait_for_samples(1)
