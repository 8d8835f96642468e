"""A job and what the watches have delivered, such as an earlier job of its name."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from emberscale_operator.controller import Observed
from emberscale_operator.kubernetes.backend import KubernetesBackend
from emberscale_operator.kubernetes.events import EventRecorder, PodWarnings
from emberscale_operator.kubernetes.health import Tallies
from emberscale_operator.kubernetes.operator import WatchedCluster
from memory_api import KEY, SETTINGS, START, MemoryApi, NoRedis
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
