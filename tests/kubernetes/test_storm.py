"""Hundreds of TrainingJobs at once, on fake nodes: pods only seem to run, and no master ever answers the operator."""

import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kubernetes import client, config

from api_objects import get
from cluster import Place, eventually, kubectl, run, setting
from faults import running
from installation import OPERATOR
from operator_metrics import operator_samples, total, writes
from status_watch import contradictions

FAKE_NODES = "EMBERSCALE_E2E_FAKE_NODES"
NODES = 100
JOBS = int(setting("EMBERSCALE_STORM_JOBS", "100"))
LEASES_LOST_A_MINUTE = 1
"""On a busy machine a renewal may come too late. A defect would lose every lease, each some 20 s after the last."""
ROLES = ("master", "ps", "worker")

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone, pytest.mark.last]


def on_fake_nodes(name: str) -> dict[str, Any]:
    """Tolerates late heartbeats, so that a busy machine does not move pods off fake nodes."""
    taints = ("kwok.x-k8s.io/node", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    tolerations = [{"key": taint, "operator": "Exists"} for taint in taints]
    template = {"nodeSelector": {"type": "kwok"}, "tolerations": tolerations}
    limits = {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}
    spec = {"data": {"train": ["/nowhere/*.tsv"]}, "checkpoint": {"uri": "/nowhere"}}
    roles = {role: {**limits, "template": template} for role in ROLES}
    metadata = {"name": name}
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": metadata,
        "spec": {**spec, **roles},
    }


def restarts(pod: dict[str, Any]) -> tuple[str, int]:
    """Returns the pod's uid, and how often its container was restarted."""
    return pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]


def create_at_once(documents: list[dict[str, Any]], place: Place) -> None:
    """Creates the jobs in parallel, as fast as the API server accepts them; kubectl would send one after another."""
    configuration = client.Configuration()
    config.load_config(client_configuration=configuration)
    jobs = client.CustomObjectsApi(client.ApiClient(configuration))

    def create(document: dict[str, Any]) -> None:
        jobs.create_namespaced_custom_object("emberscale.io", "v1alpha1", place.namespace, "trainingjobs", document)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(create, documents))


@pytest.fixture
def fake_nodes(installed: str) -> None:
    if not setting(FAKE_NODES):
        pytest.skip(f"NOT RUN: {FAKE_NODES} is not set: there are no fake nodes")
    run(setting(FAKE_NODES), str(NODES), timeout=120)


def test_a_storm_of_jobs_gets_all_its_pods_and_then_is_left_in_peace(fake_nodes: None, place: Place) -> None:
    before = operator_samples()
    operator = running(OPERATOR)
    names = [f"storm-{number}" for number in range(JOBS)]
    started = time.monotonic()
    create_at_once([on_fake_nodes(name) for name in names], place)

    def all_run() -> bool:
        lines = kubectl("get", "pods", "-n", place.namespace, "--no-headers", "--field-selector=status.phase=Running")
        return len(lines.splitlines()) == JOBS * len(ROLES)

    eventually(lambda: all_run() or None, f"{JOBS * len(ROLES)} pods run", seconds=600, every=3)
    taken = time.monotonic() - started

    def settled() -> bool:
        pods = defaultdict(list)
        for pod in get("pods", namespace=place.namespace):
            pods[pod["metadata"]["labels"]["emberscale.io/job-name"]].append(pod)
        statuses = {job["metadata"]["name"]: job["status"] for job in get("trainingjobs", namespace=place.namespace)}
        if not all("does not answer" in statuses[name].get("message", "") for name in names):
            return False  # a fake node runs no master: each job says so once, after a while
        return not [text for name in names for text in contradictions(statuses[name], pods[name])]

    eventually(lambda: settled() or None, "every status is true of the pods", seconds=300, every=5)
    (uid, before_the_storm), (same, now) = restarts(operator), restarts(running(OPERATOR))
    assert uid == same
    minutes = (time.monotonic() - started) / 60
    assert now - before_the_storm <= 1 + LEASES_LOST_A_MINUTE * minutes
    after = operator_samples()

    pods = get("pods", namespace=place.namespace)
    slots = Counter((pod["metadata"]["labels"][f"emberscale.io/{key}"] for key in ("job-name", "role")) for pod in pods)
    of_jobs = Counter(pod["metadata"]["labels"]["emberscale.io/job-name"] for pod in pods)
    assert of_jobs == Counter(dict.fromkeys(names, len(ROLES))), slots
    told = Counter(
        (event["involvedObject"]["name"], event["reason"]) for event in get("events", namespace=place.namespace)
    )
    for name in names:
        for pod in ("MasterPod", "PSPod", "WorkerPod"):  # a pod may be lost and replaced if its fake node falls behind
            assert told[name, f"Created{pod}"] == 1 + told[name, f"Lost{pod}"], (name, pod)
    calls = total(after, "emberscale_operator_api_calls_total") - total(before, "emberscale_operator_api_calls_total")
    memory = total(after, "emberscale_memory_bytes")
    print(  # noqa: T201
        f"{JOBS} jobs: {len(pods)} pods run after {taken:.0f} s; {calls / JOBS:.1f} API calls a job; "
        f"operator {memory / (1 << 20):.0f} MiB"
    )
    assert total(after, "emberscale_operator_defects_total") == 0

    looked = total(after, "emberscale_operator_reconciliations_total")

    def looked_again() -> bool:
        return total(operator_samples(), "emberscale_operator_reconciliations_total") >= looked + 2 * JOBS

    quiet = operator_samples()
    eventually(lambda: looked_again() or None, "all jobs are looked at twice more", seconds=300, every=5)
    assert writes(operator_samples()) == writes(quiet)
    started = time.monotonic()
    kubectl("delete", "trainingjobs", "--all", "-n", place.namespace, "--wait=false", timeout=300)
    eventually(lambda: not get("pods", namespace=place.namespace), "all is gone", seconds=600, every=3)
    print(f"all gone after {time.monotonic() - started:.0f} s")  # noqa: T201
