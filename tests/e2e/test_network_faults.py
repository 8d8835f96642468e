"""A job over a network with delay, loss, low bandwidth or partitions: training goes on or resumes, samples are exact.

Each process of the job runs in its own network namespace. The suite imposes the faults of `SHORT`;
EMBERSCALE_NETWORK_FAULTS=all imposes all, with partitions between any two roles.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import virtual_network
from certificates import certificate_folder
from emberscale_api.environment import TLS_FOLDER
from local_jobs import ENDLESS, Job, emberscale_here
from virtual_network import Fault, Network, open_network, open_redis

PARTITION_SECONDS = 30.0
ANY = "*"
NEAR: Fault = (ANY, ANY, {"delay": 0.002, "rate": 16e6})
"""A healthy network, slow enough for a small job to outlast a fault on any machine."""
PARTITIONS = {
    "worker-ps": ("worker-0", "ps-1"),
    "worker-first-ps": ("worker-0", "ps-0"),
    "master-ps": ("master", "ps-1"),
    "master-worker": ("master", "worker-0"),
    "master-redis": ("master", "redis"),
    "any-redis": (ANY, "redis"),
    "ps-any": ("ps-1", ANY),
}
WEATHER: dict[str, dict[str, float | bool]] = {
    "delay": {"delay": 0.2},
    "loss": {"delay": 0.002, "loss": 0.05},
    "bandwidth": {"delay": 0.002, "rate": 2e6},
}
ALL = os.environ.get("EMBERSCALE_NETWORK_FAULTS") == "all"

pytestmark = pytest.mark.skipif(bool(virtual_network.missing()), reason=virtual_network.missing())


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with open_network(tmp_path) as opened:
        opened.impose(NEAR)
        yield opened


@pytest.fixture
def start(tmp_path: Path, network: Network, make_job: Callable[..., Job]) -> Iterator[Callable[..., Job]]:
    """Starts a job in that network, and returns once it trains."""
    with ExitStack() as cleanup:

        def begin(spec: dict[str, Any]) -> Job:
            url = cleanup.enter_context(open_redis(network, tmp_path))
            job = make_job({"runPolicy": {"backoffLimit": 100}, **spec})
            program = [sys.executable, virtual_network.__file__, str(network.file)]
            job.program = tuple(network.command("master", *program))
            job.start("--redis", url)
            assert job.wait_for(lambda: job.samples() > 0), job.finish().stderr
            return job

        yield begin


@pytest.mark.timeout(1200)
def test_training_begins_and_goes_on_in_bad_weather(
    start: Callable[..., Job], network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_FOLDER, str(certificate_folder(tmp_path / "tls")))
    network.impose((ANY, ANY, WEATHER["delay"]))
    job = start({"training": {"epochs": ENDLESS}, "sharding": {"leaseTimeout": "10s"}})
    for fault in WEATHER.values():
        network.impose((ANY, ANY, fault))
        assert job.trains_on(1_500)
    network.impose(NEAR)
    summary = job.stop().summary
    assert summary["recoveries"] == 0
    assert set(summary["restarts"].values()) == {0}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("between", PARTITIONS if ALL else ["worker-ps"])
def test_a_partition_heals_without_loss(start: Callable[..., Job], network: Network, between: str) -> None:
    job = start({"training": {"epochs": ENDLESS}})
    assert job.trains_on(5_000)
    network.impose((*PARTITIONS[between], {"cut": True}), NEAR)
    time.sleep(PARTITION_SECONDS)  # the fault itself
    network.impose(NEAR)
    assert job.trains_on(5_000)
    summary = job.stop().summary
    if "redis" in between:
        assert summary["recoveries"] == 0, "the master heard its members all the time"


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not ALL, reason="EMBERSCALE_NETWORK_FAULTS=all runs it")
@pytest.mark.parametrize("between", ["master-ps", "master-worker"])
def test_a_partition_shorter_than_a_lease_costs_no_process(
    start: Callable[..., Job], network: Network, between: str
) -> None:
    job = start({"training": {"epochs": ENDLESS}, "sharding": {"leaseTimeout": "90s"}})
    assert job.trains_on(5_000)
    network.impose((*PARTITIONS[between], {"cut": True}), NEAR)
    time.sleep(PARTITION_SECONDS)  # the fault itself
    network.impose(NEAR)
    assert job.trains_on(5_000)
    summary = job.stop().summary
    assert summary["recoveries"] == 0
    assert set(summary["restarts"].values()) == {0}


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not ALL, reason="EMBERSCALE_NETWORK_FAULTS=all runs it")
def test_a_move_between_servers_that_are_parted_is_made_later(start: Callable[..., Job], network: Network) -> None:
    job = start({"training": {"epochs": 10}})
    assert job.trains_on(5_000)
    network.impose(("ps-1", "ps-2", {"cut": True}), ("ps-0", "ps-2", {"cut": True}), NEAR)
    assert emberscale_here("scale", str(job.run_folder), "ps=3").returncode == 0
    assert job.wait_for(lambda: len(job.members("ps")) == 3)
    time.sleep(PARTITION_SECONDS)  # the fault itself
    network.impose(NEAR)
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert job.exact_audit()["ps_count"] == 3
