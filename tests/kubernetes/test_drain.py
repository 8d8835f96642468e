"""Nodes are drained during training: rows leave parameter servers before the eviction, and nothing rolls back."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from api_objects import get
from cluster import COMMAND, ENDLESS, Job, Place, assert_exact_so_far, eventually, kubectl, manifest, run, submit

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def nodes(installed: str) -> Iterator[list[str]]:
    """Two nodes; nothing new gets to any other meanwhile."""
    names = sorted(node["metadata"]["name"] for node in get("nodes"))
    assert len(names) >= 2, "a rolling drain takes two nodes"
    for name in names[2:]:
        kubectl("cordon", name)
    yield names[:2]
    for name in names:
        kubectl("uncordon", name)


def drain(node: str, job: Job) -> None:
    """Drains a node as a person would, but evicts only the job: the installation's volumes are bound to the node."""
    only = f"--pod-selector={job.selector}"
    kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=400s", only, timeout=420)


def nodes_of(job: Job) -> set[str]:
    return {pod["spec"].get("nodeName") for pod in job.pods() if pod["status"]["phase"] == "Running"}


def told(job: Job) -> Counter[str]:
    return Counter(event["reason"] for event in job.events())


def settled(job: Job) -> bool | None:
    """Whether all members run, and every drained server has a successor with its share of the rows."""
    runs = all(len(job.running(role)) == 2 for role in ("ps", "worker"))
    reasons = told(job)
    return (runs and reasons["DrainedServer"] == reasons["ReplacedServer"]) or None


def patient(name: str, place: Place, replicas: int) -> dict[str, Any]:
    """A job whose servers' memory limit gives each of them seven minutes to leave, enough even on a busy machine."""
    document = manifest(name, place, epochs=ENDLESS, replicas=replicas)
    resources = document["spec"]["ps"]["resources"]
    document["spec"]["ps"]["resources"] = {**resources, "limits": {"cpu": "1", "memory": "40Gi"}}
    return document


def test_another_server_stands_in_for_the_only_one(place: Place) -> None:
    job = submit(patient("alone", place, replicas=1), place)
    job.wait_for_samples(2_000)
    assert "gives its rows away" in run(str(COMMAND), "drain", "alone", "ps-0", "--namespace", place.namespace)
    job.until("it has a successor", lambda _: told(job)["ReplacedServer"] or None, seconds=420)
    eventually(lambda: len(job.pods("ps")) == 1 or None, "only that is left", seconds=240)
    reasons = told(job)
    assert (reasons["PlannedDrain"], reasons["DrainedServer"], reasons["ReplacedServer"]) == (1, 1, 1)
    job.wait_for_samples(job.samples() + 1)
    assert job.status()["progress"].get("recoveries", 0) == 0
    assert_exact_so_far(job, place)


def test_every_node_is_drained_in_turn_and_nothing_rolls_back(nodes: list[str], place: Place) -> None:
    job = submit(patient("drained", place, replicas=2), place)
    job.wait_for_samples(2_000)
    servers = 0
    for here, elsewhere in (nodes[::-1], nodes):
        servers += sum(pod["spec"]["nodeName"] == here for pod in job.running("ps"))
        drain(here, job)
        eventually(lambda here=here: here not in nodes_of(job) or None, "no pod is left", seconds=180)  # type: ignore[misc]
        job.until("its servers have successors", lambda _: settled(job), seconds=240)
        assert nodes_of(job) == {elsewhere}
        kubectl("uncordon", here)
    assert servers >= 2
    reasons = told(job)
    assert (reasons["PlannedDrain"], reasons["DrainedServer"], reasons["ReplacedServer"]) == (servers,) * 3
    job.wait_for_samples(job.samples() + 1)
    assert job.status()["progress"].get("recoveries", 0) == 0
    assert_exact_so_far(job, place)
