"""Changes of a running job's shape: rows move while training goes on, and a change that cannot be made is undone."""

import json
from typing import Any

import pytest

from cluster import COMMAND, ENDLESS, Job, Place, assert_exact_so_far, eventually, kubectl, manifest, run, submit

pytestmark = pytest.mark.timeout(900)

MOVE = ["PlannedScaling", "StartedMembers", "CopiedRows", "HeldPushes", "SwitchedServers"]
NOWHERE = {"nodeSelector": {"no-node": "has-this"}}


def training(name: str, place: Place, servers: int, scaling: dict[str, str]) -> Job:
    """Starts a job that trains until it is stopped; returns once it has trained a little."""
    document = manifest(name, place, epochs=ENDLESS)
    document["spec"]["ps"]["replicas"] = servers
    document["spec"]["scaling"] = scaling
    job = submit(document, place)
    job.wait_for_samples(2_000)
    return job


def patch(job: Job, **spec: Any) -> None:
    document = json.dumps({"spec": spec})
    kubectl("patch", "tj", job.name, "-n", job.namespace, "--type=merge", "-p", document)


def reasons(job: Job) -> list[str]:
    return [event["reason"] for event in job.events()]


def told(job: Job, reason: str, times: int = 1) -> bool | None:
    """Whether this many Events have this reason; None, for `eventually`, if not."""
    return reasons(job).count(reason) >= times or None


def gave_up(job: Job) -> Any:
    """Returns the condition of a change that was given up; None if there is none."""
    condition = job.condition("Scaling")
    return condition if condition is not None and condition["reason"] == "GaveUpScaling" else None


def uids(job: Job) -> set[str]:
    return {pod["metadata"]["uid"] for role in ("master", "ps", "worker") for pod in job.running(role)}


def assert_untroubled(job: Job, place: Place, servers: int) -> None:
    """The job trains on with this many servers, was never suspended or restored, and has lost and repeated nothing."""
    job.wait_for_samples(job.samples() + 1)
    status = job.status()
    assert status["appliedPs"] == servers
    assert status["progress"].get("recoveries", 0) == 0
    assert "SuspendedJob" not in reasons(job)
    assert reasons(job).count("RestoringRows") <= 1
    assert_exact_so_far(job, place)


def test_the_number_of_servers_changes_without_a_stop(place: Place) -> None:
    job = training("reshaped", place, 2, {})
    before = uids(job)
    scaled = run(str(COMMAND), "scale", job.name, "ps=3", "-n", place.namespace)
    assert "PS 2 -> 3" in scaled
    job.until("rows on three servers", lambda _: told(job, "SwitchedServers"), seconds=180)
    job.member("ps", 2)  # the kubelet reports it as running shortly after it has rows
    assert len(job.running("ps")) == 3
    assert before <= uids(job)
    assert [reason for reason in reasons(job) if reason in MOVE] == MOVE
    patch(job, ps={"replicas": 1}, worker={"replicas": 2})
    job.until("rows on one server", lambda _: told(job, "SwitchedServers", 2), seconds=180)
    eventually(lambda: told(job, "EndedMembers"), "the others ended", seconds=180)
    eventually(lambda: len(job.running("ps")) == 1 or None, "one server", seconds=180)
    eventually(lambda: job.condition("Scaling")["status"] == "False" or None, "no change", seconds=180)
    assert_untroubled(job, place, servers=1)


def test_servers_that_cannot_be_scheduled_are_given_up_and_training_goes_on(place: Place) -> None:
    job = training("unplaced", place, 1, {"timeout": "15s"})
    patch(job, ps={"replicas": 2, "template": NOWHERE})
    eventually(lambda: told(job, "GaveUpScaling"), "given up", seconds=240)
    condition = eventually(lambda: gave_up(job), "said", seconds=180)
    assert condition["status"] == "False"
    assert "ps-1 did not join within 15s: ps-1: Unschedulable: " in condition["message"]
    assert "node" in condition["message"]
    eventually(lambda: job.status()["ps"]["wanted"] == 1 or None, "one server is wanted", seconds=180)
    assert_untroubled(job, place, servers=1)
