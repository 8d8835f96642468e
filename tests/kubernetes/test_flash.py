"""Flash checkpoints in the chart's own Redis on a real cluster: a server is killed, and Redis goes away."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from api_objects import get
from cluster import ENDLESS, Job, Place, assert_exact_so_far, eventually, kubectl, manifest, submit
from faults import ProcessKiller
from installation import FLASH_REDIS, RELEASE, SYSTEM
from prometheus_server import Prometheus, chart_monitors, flash_queries, prometheus_that_scrapes, scrape_configs

pytestmark = pytest.mark.timeout(1500)

ALERT = "EmberscaleFlashCheckpointsFail"


@pytest.fixture(scope="module")
def prometheus(installed: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    configs = scrape_configs(chart_monitors(), SYSTEM)
    with prometheus_that_scrapes(configs, tmp_path_factory.mktemp("prometheus")) as found:
        eventually(lambda: found.is_up() or None, "Prometheus is up", seconds=180)
        yield found


def flash_job(name: str, place: Place, servers: int) -> Job:
    """Submits a job with persistent checkpoints every hour and flash checkpoints every two seconds."""
    document = manifest(name, place, epochs=ENDLESS)
    document["spec"]["ps"]["replicas"] = servers
    document["spec"]["checkpoint"] |= {"interval": "1h", "flash": {"mode": "Enabled", "interval": "2s"}}
    return submit(document, place)


def taken(job: Job) -> bool:
    condition = job.condition("FlashCheckpoint")
    return condition is not None and condition["status"] == "True"


def told(job: Job, reason: str) -> str:
    """Returns the message of an Event with this reason, or an empty string."""
    return next((found["message"] for found in job.events() if found["reason"] == reason), "")


def test_a_killed_server_takes_the_job_back_to_its_flash_checkpoint(
    prometheus: Prometheus, place: Place, killer: ProcessKiller
) -> None:
    job = flash_job("flash", place, servers=2)
    job.until("a flash checkpoint", lambda _: taken(job) or None, seconds=240)
    for query in flash_queries():
        asked = query.of(place.namespace, job.name)
        eventually(partial(found_by, prometheus, asked), f"data for {asked}", seconds=180)
    killer.kill(job.member("ps", 0))
    job.until("it went back", lambda status: (status.get("progress") or {}).get("recoveries"), seconds=300)
    progress = job.status()["progress"]
    assert progress["recoveries"] == 1
    eventually(lambda: loaded(job) or None, "the servers have loaded it", seconds=240)
    job.wait_for_samples(job.samples() + 1)
    assert_exact_so_far(job, place)


def found_by(prometheus: Prometheus, query: str) -> list[Any] | None:
    return prometheus.ask(query) or None


def loaded(job: Job) -> bool:
    """Whether both servers have logged that they loaded rows from a flash checkpoint."""
    lines = [kubectl("logs", pod["metadata"]["name"], "-n", job.namespace).splitlines() for pod in job.running("ps")]
    return len(lines) == 2 and all(any("assigned" in line and "flash-" in line for line in part) for part in lines)


def test_a_redis_that_is_gone_costs_flash_checkpoints_only_and_both_are_told(
    prometheus: Prometheus, place: Place
) -> None:
    """On a busy machine a server may also fall silent, and its loss takes the job back."""
    job = flash_job("degraded", place, servers=1)
    job.until("a flash checkpoint", lambda _: taken(job) or None, seconds=240)
    scale_redis(0)
    try:
        eventually(lambda: told(job, "DegradedFlashCheckpoints") or None, "it is told", seconds=240)
        eventually(lambda: reason(job) == "FlashCheckpointFailed" or None, "the condition says so", seconds=120)
        state = eventually(lambda: prometheus.alert(ALERT, place.namespace, job.name), "the alert", seconds=180)
        assert state in ("pending", "firing")
        job.wait_for_samples(job.samples() + 2_000)
    finally:
        scale_redis(1)
    job.until("they are taken again", lambda _: told(job, "RestoredFlashCheckpoints") or None, seconds=240)
    eventually(lambda: taken(job) or None, "the condition says so", seconds=120)
    silenced = [event for event in job.events() if event["reason"] == "LostPSPod" and "(Silent)" in event["message"]]
    assert job.status()["progress"].get("recoveries", 0) <= len(silenced), job.report()


def reason(job: Job) -> str:
    """Returns the reason of the condition FlashCheckpoint."""
    condition = job.condition("FlashCheckpoint")
    return str(condition["reason"]) if condition is not None else ""


def scale_redis(replicas: int) -> None:
    name = f"{RELEASE}-flash-redis"
    kubectl("scale", "deployment", name, "-n", SYSTEM, f"--replicas={replicas}")

    def scaled() -> bool:
        return len(get("pods", namespace=SYSTEM, selector=FLASH_REDIS)) == replicas

    eventually(lambda: scaled() or None, f"{replicas} pods of {name}", seconds=240)
