"""Nodes are lost with what runs on them: for a while, behind a broken link, or for good, one or two at once."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    NODE_FAULT,
    RECORDS,
    Job,
    Place,
    assert_exact,
    assert_exact_so_far,
    auc_of_local_run,
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

FOUR_NODES = 4
OF_LONG_EPOCH = 32
"""The batch size with which an unhurried job trains an epoch for some six minutes."""

HOSTNAME = "kubernetes.io/hostname"

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone, pytest.mark.last]


def fault(what: str, *numbers: int) -> None:
    """Does the same to nodes, counted from 1, at the same moment."""
    with ThreadPoolExecutor(len(numbers)) as together:
        list(together.map(lambda number: run(setting(NODE_FAULT), str(number), what), numbers))


@contextmanager
def crashed(nodes: Sequence[str], *numbers: int) -> Iterator[None]:
    """Crashes nodes for good; afterwards they are forgotten, and their pods with them."""
    fault("crash", *numbers)
    try:
        yield
    finally:
        kubectl("delete", "node", *(nodes[number - 1] for number in numbers), "--wait=false")


@pytest.fixture(scope="module")
def nodes(installed: str) -> Iterator[list[str]]:
    """All nodes; the first one stays, and the operator and Redis run on it."""
    if not setting(NODE_FAULT):
        pytest.skip(f"NOT RUN: {NODE_FAULT} is not set: nothing can cut off a node")
    names = sorted(node["metadata"]["name"] for node in get("nodes"))
    assert len(names) >= 2, "the loss of a node takes two nodes"
    selector = "nodeSelector.kubernetes\\.io/hostname"
    helm_install("--set", f"operator.{selector}={names[0]}", "--set", f"redis.{selector}={names[0]}")
    yield names
    helm_install()


def endangered(nodes: Sequence[str], name: str, place: Place, lease: str = "10s", **spec: Any) -> dict[str, Any]:
    """A job whose master runs on the node that stays, and gives up members that are silent for the lease timeout."""
    document = manifest(name, place, epochs=ENDLESS, replicas=2, **spec)
    document["spec"]["sharding"]["leaseTimeout"] = lease
    keep_on(nodes[0], document, "master")
    return document


def keep_on(node: str, document: dict[str, Any], role: str) -> None:
    part = document["spec"][role]
    part["template"] = {**part["template"], "nodeSelector": {HOSTNAME: node}}


def split_over(nodes: Sequence[str], name: str, place: Place, **spec: Any) -> dict[str, Any]:
    """A job whose servers and workers run on the first two nodes, and prefer separate ones."""
    document = endangered(nodes, name, place, **spec)
    either = [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": list(nodes[:2])}]}]
    for role in ("ps", "worker"):
        part = document["spec"][role]
        labels = {"emberscale.io/job-name": name, "emberscale.io/role": role}
        term = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": labels}}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        affinity = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": either}},
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred},
        }
        part["template"] = {**part["template"], "affinity": affinity}
    return document


def with_parity(parity: int) -> dict[str, Any]:
    """The parts of a job that keeps parity, and that nothing but a roll-back takes out of the phase Training.

    A live server on a busy machine must not count as lost, too, so its lease timeout is the suite's.
    """
    tolerance = {"strategy": "ErasureCoding", "parity": parity}
    return {"lease": "60s", "faultTolerance": tolerance, "data": {"train": ["/shared/criteo/train-*.tsv"]}}


def on(node: str, job: Job) -> list[Any]:
    return [pod for pod in job.pods() if pod["spec"].get("nodeName") == node and pod["status"]["phase"] == "Running"]


def started(nodes: Sequence[str], name: str, place: Place, **spec: Any) -> tuple[Job, list[Any]]:
    """Returns a job that trains, and its pods on the second node, each a server or a worker."""
    job = submit(split_over(nodes, name, place, **spec), place)
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


@pytest.mark.timeout(1800)
def test_two_nodes_of_four_crash_at_once_and_training_goes_on(nodes: list[str], place: Place) -> None:
    """Comes first: the other tests need no more than the nodes that are left."""
    if len(nodes) < FOUR_NODES:
        pytest.skip(f"NOT RUN: the cluster has {len(nodes)} nodes; EMBERSCALE_E2E_NODES=4 starts one of four")
    document = endangered(nodes, "spread", place, **with_parity(2))
    document["spec"]["training"] = {"batchSize": OF_LONG_EPOCH, "epochs": 1}
    document["spec"]["data"]["evaluation"] = ["/shared/criteo/evaluation.tsv"]
    document["spec"]["ps"]["replicas"] = FOUR_NODES
    document["spec"]["worker"]["replicas"] = 1
    keep_on(nodes[0], document, "worker")
    job = submit(document, place)
    job.until("all rows are protected", lambda _: protected(job), seconds=300)
    job.wait_for_samples(1)
    assert {pod["spec"]["nodeName"] for pod in job.running("ps")} == set(nodes[:FOUR_NODES])
    before = rebuilds(job.status())
    with watched_status(place.namespace) as watch, crashed(nodes, 3, 4):
        trains_on_with_rebuilt(job, before + 2)
        job.until("all rows are protected again", lambda _: protected(job), seconds=300)
        assert watch.phases == {"Training"}
        assert {pod["spec"]["nodeName"] for pod in job.running("ps")} == set(nodes[:2])
        trained = job.wait_complete()["progress"]["evaluations"][-1]["auc"]
        assert_exact(job, place, RECORDS)
    assert watch.duplicates == set()
    assert trained == pytest.approx(auc_of_local_run(document, place), abs=0.003)


def protected(job: Job) -> bool | None:
    return ((condition := job.condition("Protected")) is not None and condition["status"] == "True") or None


def rebuilds(status: Any) -> int:
    return int((status["progress"].get("rebuilds") or {}).get("count", 0))


def trains_on_with_rebuilt(job: Job, servers: int) -> None:
    """Waits until so many servers have been rebuilt and the job trains on; it must not have gone back."""

    def are_rebuilt(status: Any) -> bool:
        assert status["progress"].get("recoveries", 0) == 0, job.report()
        return rebuilds(status) >= servers

    job.until(f"{servers} servers are rebuilt", are_rebuilt, seconds=300)
    job.wait_for_samples(job.samples() + 1)
    assert {"Degraded", "Recovered"} <= {event["reason"] for event in job.events()}


def test_a_node_that_is_cut_off_and_comes_back_does_no_harm(
    nodes: list[str], place: Place, killer: ProcessKiller
) -> None:
    job, there = started(nodes, "cut", place)
    with watched_status(place.namespace) as watch:
        fault("cut", 2)
        time.sleep(CUT_SECONDS)  # the length of the outage is part of the test
        fault("heal", 2)
        eventually(lambda: _ready(nodes[1]) or None, "the node is back", seconds=240)
        job.wait_for_samples(job.samples() + 1)
        now = {pod["metadata"]["uid"] for pod in job.pods()}
        assert_exact_so_far(job, place)
    assert watch.duplicates == set()
    for pod in (pod for pod in there if pod["metadata"]["uid"] not in now):
        eventually(lambda pod=pod: not killer.processes(pod) or None, f"{pod['metadata']['name']} ends", seconds=180)  # type: ignore[misc]


def test_incarnations_that_were_replaced_while_they_were_cut_off_are_fenced(
    nodes: list[str], place: Place, killer: ProcessKiller
) -> None:
    """The link stays broken until successors have taken over; only then are the old incarnations heard again."""
    job, there = started(nodes, "fenced", place)
    fault("cut", 2)
    with watched_status(place.namespace) as watch:
        eventually(lambda: replaced(job, there) or None, "others have taken their places", seconds=240)
        fault("heal", 2)
        eventually(lambda: _ready(nodes[1]) or None, "the node is back", seconds=240)
        job.wait_for_samples(job.samples() + 1)
        assert_exact_so_far(job, place)
    assert watch.duplicates == set()
    for pod in there:
        eventually(lambda pod=pod: not killer.processes(pod) or None, f"{pod['metadata']['name']} ends", seconds=180)  # type: ignore[misc]
    reasons = {event["reason"] for event in job.events()}
    assert {"LostPSPod", "LostWorkerPod"} <= reasons, reasons
    status = job.status()
    assert "BackoffLimitExceeded" not in str(status)


def test_a_node_that_crashes_takes_nothing_with_it(nodes: list[str], place: Place) -> None:
    job, there = started(nodes, "crashed", place, **with_parity(1))
    job.until("all rows are protected", lambda _: protected(job), seconds=300)
    before = rebuilds(job.status())
    with watched_status(place.namespace) as watch, crashed(nodes, 2):
        eventually(lambda: replaced(job, there) or None, "others have taken their places", seconds=240)
        trains_on_with_rebuilt(job, before + 1)
        assert watch.phases == {"Training"}
        assert_exact_so_far(job, place)
        lost = [event for event in job.events() if event["reason"] in ("LostPSPod", "LostWorkerPod")]
        assert {event["reason"] for event in lost} == {"LostPSPod", "LostWorkerPod"}
        assert all("not counted" in event["message"] for event in lost)
        ended = {pod["metadata"]["uid"] for pod in there}
        eventually(
            lambda: not [pod for pod in job.pods() if pod["metadata"]["uid"] in ended],
            "the lost pods are gone",
            seconds=180,
        )
    assert watch.duplicates == set()


def _ready(node: str) -> bool:
    conditions = get("node", node)["status"]["conditions"]
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
