"""A job and what the watches have delivered, such as an earlier job of its name."""

import copy
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from emberscale_operator.controller import Observed
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.health import Tallies
from emberscale_operator.kubernetes.job import read_job
from emberscale_operator.kubernetes.operator import WatchedCluster, _needed, _needed_of_job
from emberscale_operator.kubernetes.pod_state import view_pod
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from memory_api import KEY, SETTINGS, START, MemoryApi, NoRedis, Operator
from training_jobs import job_body


def named(uid: str) -> dict[str, Any]:
    body = job_body()
    body["metadata"]["uid"] = uid
    return body


@pytest.mark.parametrize("order", [("old", "new"), ("new", "old")])
async def test_a_job_exists_beside_one_of_its_name_whose_end_was_not_delivered_yet(order: tuple[str, str]) -> None:
    cluster, api = WatchedCluster(), MemoryApi(named("new"))
    cluster.attach({KEY: [named(uid) for uid in order]}, {})
    client: Any = api  # the stub has every call that they make
    backends = [
        KubernetesBackend(
            KEY,
            uid,
            cluster,
            client,
            EventRecorder(client, "op-1"),
            PodWarnings(client),
            Tallies(CollectorRegistry()),
            SETTINGS,
            NoRedis(),
        )
        for uid in ("new", "unknown")
    ]
    assert isinstance(await backends[0].observe(START), Observed)
    assert await backends[1].observe(START) is None


@pytest.mark.parametrize("ready", ["True", "False"])
async def test_what_is_kept_of_a_pod_says_all_that_the_operator_reads(ready: str) -> None:
    api = MemoryApi(job_body())
    await Operator(api).settle()
    server = copy.deepcopy(api.live_pod("ps-0"))
    server["metadata"] |= {"deletionTimestamp": "2026-01-01T00:03:00Z", "deletionGracePeriodSeconds": 120}
    server["spec"]["nodeName"] = "node-1"
    server["status"] |= {"conditions": [{"type": "Ready", "status": ready}]}
    for seconds in (60.0, 120.0, 180.0, 240.0):
        assert view_pod(_needed(server), START + seconds) == view_pod(server, START + seconds)


async def test_what_others_wrote_on_an_object_takes_no_memory() -> None:
    """Annotations may have 256 KiB, and managed fields of many small values more than these."""
    api = MemoryApi(job_body())
    await Operator(api).settle()
    pod, job = copy.deepcopy(api.live_pod("ps-0")), copy.deepcopy(api.body)
    for body in (pod, job):
        for much in ("annotations", "labels"):
            body["metadata"][much] = {**body["metadata"].get(much, {}), "theirs": "x" * (1 << 18)}
        body["metadata"]["managedFields"] = [{"fieldsV1": {f"f:{number}": {} for number in range(1 << 14)}}]
    assert len(json.dumps(_needed(pod))) < 8192
    assert view_pod(_needed(pod), START) == view_pod(pod, START)
    assert len(json.dumps(_needed_of_job(job))) < 8192
    assert read_job(_needed_of_job(job)) == read_job(job)
    assert _needed_of_job(job)["status"] == job["status"]
