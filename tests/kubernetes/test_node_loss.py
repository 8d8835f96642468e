"""A node with a parameter server and a worker is lost: for a while, behind a broken link, or for good."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    NODE_FAULT,
    Job,
    Place,
    assert_exact_so_far,
    eventually,
    kubectl,
    manifest,
    run,
    setting,
    submit,
)
from faults import ProcessKiller
from installation import helm_install
from status_watch import watched_status

CUT_SECONDS = 30
"""Longer than a lease, and shorter than Kubernetes waits before it evicts the pods of a lost node."""

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone, pytest.mark.last]


def fault(what: str) -> None:
    run(setting(NODE_FAULT), "2", what)


@pytest.fixture(scope="module")
def nodes(installed: str) -> Iterator[tuple[str, str]]:
    """The node that stays, on which operator and Redis run, and the node that is lost."""
    if not setting(NODE_FAULT):
        pytest.skip(f"NOT RUN: {NODE_FAULT} is not set: nothing can cut off a node")
    names = sorted(node["metadata"]["name"] for node in get("nodes"))
    assert len(names) >= 2, "the loss of a node takes two nodes"
    selector = "nodeSelector.kubernetes\\.io/hostname"
    helm_install("--set", f"operator.{selector}={names[0]}", "--set", f"redis.{selector}={names[0]}")
    yield names[0], names[1]
    helm_install()


def split_over(nodes: tuple[str, str], name: str, place: Place) -> dict[str, Any]:
    """A job whose master runs on the node that stays; its servers and workers prefer separate nodes."""
    document = manifest(name, place, epochs=ENDLESS, replicas=2)
    spec = document["spec"]
    spec["sharding"]["leaseTimeout"] = "10s"
    spec["master"]["template"] = {**spec["master"]["template"], "nodeSelector": {"kubernetes.io/hostname": nodes[0]}}
    for role in ("ps", "worker"):
        labels = {"emberscale.io/job-name": name, "emberscale.io/role": role}
        term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        anti = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        spec[role]["template"] = {**spec[role]["template"], "affinity": anti}
    return document


def on(node: str, job: Job) -> list[Any]:
    return [pod for pod in job.pods() if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"]


def started(nodes: tuple[str, str], name: str, place: Place) -> tuple[Job, list[Any]]:
    """Returns a job that trains, and its pods on the node that is lost."""
    job = submit(split_over(nodes, name, place), place)
    job.wait_for_samples(1)
    there = on(nodes[1], job)
    roles = {pod["metadata"]["labels"]["emberscale.io/role"] for pod in there}
    assert roles == {"ps", "worker"}, roles
    return job, there


def replaced(job: Job, there: list[Any]) -> bool:
    """Whether other pods run in place of these pods."""
    old = {pod["metadata"]["uid"] for pod in there}
    members = {member.get("uid") for member in job.status().get("members", ()) if member.get("state") == "Running"}
    return not members & old and len(job.running("ps")) == 2 and len(job.running("worker")) == 2


def test_a_node_that_is_cut_off_and_comes_back_does_no_harm(
    nodes: tuple[str, str], place: Place, killer: ProcessKiller
) -> None:
    job, there = started(nodes, "cut", place)
    with watched_status(place.namespace) as watch:
        fault("cut")
        time.sleep(CUT_SECONDS)  # the length of the outage is part of the test
        fault("heal")
        eventually("the node is back", lambda: _ready(nodes[1]) or None, seconds=240)
        job.wait_for_samples(job.samples() + 1)
        now = {pod["metadata"]["uid"] for pod in job.pods()}
        assert_exact_so_far(job, place)
    assert watch.duplicates == set()
    for pod in (pod for pod in there if pod["metadata"]["uid"] not in now):
        eventually(f"{pod['metadata']['name']} ends", lambda pod=pod: not killer.processes(pod) or None, seconds=180)  # type: ignore[misc]


def test_incarnations_that_were_replaced_while_they_were_cut_off_are_fenced(
    nodes: tuple[str, str], place: Place, killer: ProcessKiller
) -> None:
    """The link stays broken until successors have taken over; only then are the old incarnations heard again."""
    job, there = started(nodes, "fenced", place)
    fault("cut")
    with watched_status(place.namespace) as watch:
        eventually("others have taken their places", lambda: replaced(job, there) or None, seconds=240)
        fault("heal")
        eventually("the node is back", lambda: _ready(nodes[1]) or None, seconds=240)
        job.wait_for_samples(job.samples() + 1)
        assert_exact_so_far(job, place)
    assert watch.duplicates == set()
    for pod in there:
        eventually(f"{pod['metadata']['name']} ends", lambda pod=pod: not killer.processes(pod) or None, seconds=180)  # type: ignore[misc]
    reasons = {event["reason"] for event in job.events()}
    assert {"LostPSPod", "LostWorkerPod"} <= reasons, reasons
    status = job.status()
    assert "BackoffLimitExceeded" not in str(status)


def test_a_node_that_crashes_takes_nothing_with_it(nodes: tuple[str, str], place: Place) -> None:
    job, there = started(nodes, "crashed", place)
    fault("crash")
    try:
        with watched_status(place.namespace) as watch:
            eventually("others have taken their places", lambda: replaced(job, there) or None, seconds=240)
            job.wait_for_samples(job.samples() + 1)
            assert_exact_so_far(job, place)
        assert watch.duplicates == set()
        lost = [event for event in job.events() if event["reason"] in ("LostPSPod", "LostWorkerPod")]
        assert {event["reason"] for event in lost} == {"LostPSPod", "LostWorkerPod"}
        assert all("not counted" in event["message"] for event in lost)
        ended = {pod["metadata"]["uid"] for pod in there}
        eventually(
            "the lost pods are gone",
            lambda: not [pod for pod in job.pods() if pod["metadata"]["uid"] in ended],
            seconds=180,
        )
    finally:
        kubectl("delete", "node", nodes[1], "--wait=false")


def _ready(node: str) -> bool:
    conditions = get("node", node)["status"]["conditions"]
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
