"""Jobs whose parameter servers hold parity of each other's rows: killing one loses no training."""

import json
import random
import signal
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from emberscale_api import metrics
from emberscale_api.rpc import master_pb2 as pb
from emberscale_trainer.server.lag import LagBound
from local_jobs import BATCH, ENDLESS, Job, emberscale_here

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)

NO_CHECKPOINTS = {"interval": "1h", "flash": {"mode": "Disabled"}}
"""A roll-back returns to the start."""


def with_parity(servers: int = 3, epochs: int = 4, parity: int = 1) -> dict[str, Any]:
    return {
        "ps": {"replicas": servers},
        "faultTolerance": {"strategy": "ErasureCoding", "parity": parity},
        "checkpoint": NO_CHECKPOINTS,
        "training": {"epochs": epochs},
    }


def is_protected(job: Job) -> bool:
    return job.samples() > 0 and job.status().protection.protected


def has_rebuilt(job: Job, servers: int) -> bool:
    return job.status().protection.rebuilds == servers


def has_its_rows_again(job: Job) -> bool:
    """Whether the one lost server has its rows again, by a rebuild or a roll-back."""
    status = job.status()
    return status.protection.rebuilds + status.recoveries == 1


def loses_a_server_with_gathered_pushes(job: Job, index: int) -> bool:
    """Kills a server if it has answered pushes that it has sent to no other server. Returns whether it did.

    The other servers stand still in between, so they cannot get these pushes after all.
    """
    addresses = {(one.member.role, one.member.index): one.metrics_address for one in job.status().members}
    others = [job.member("ps", other) for other in range(3) if other != index]
    victim = job.member("ps", index)
    try:
        for process in others:
            process.suspend()
        sent, answered = lag(addresses[pb.PS, index])
        if is_lost := sent == 0 and answered >= 4:  # batches that both workers have ended, not only the newest ones
            victim.kill()
    finally:
        for process in others:
            process.resume()
    return is_lost


def lag(metrics_address: str) -> tuple[float, float]:
    """Returns how far a server's parity lags: items on their way, and pushes in and before them."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        values = {sample.name: sample.value for family in families for sample in family.samples}
    return values[metrics.PS_PARITY_LAG_ITEMS], values[metrics.PS_PARITY_LAG_PUSHES]


def test_servers_are_rebuilt_one_after_the_other_and_nothing_goes_back(make_job: Callable[..., Job]) -> None:
    """The first victim also orders the staleness of all servers; a drill kills the second."""
    job = make_job(with_parity(epochs=ENDLESS) | {"data": {"evaluation": []}})
    job.start()
    assert job.wait_for(lambda: is_protected(job) and job.samples() > 10_000)
    before = job.status()
    job.member("ps", 0).send_signal(signal.SIGKILL)
    assert job.wait_for(partial(has_rebuilt, job, 1))
    after = job.status()
    assert after.generation == before.generation
    assert after.routing_version > before.routing_version
    assert after.samples >= before.samples
    assert (after.protection.rebuilt, after.protection.bytes > 0) == ("ps-0", True)

    assert job.wait_for(lambda: is_protected(job))
    victim, others = job.member("ps", 1), [job.member("ps", 0), job.member("ps", 2)]
    drilled = emberscale_here("drill", str(job.run_folder), "--kill", "ps-1", "--before", "2", "--output", "json")
    assert drilled.returncode == 0, drilled.stderr
    told = json.loads(drilled.stdout)
    assert (told["rebuilt"], told["rolled_back"], told["repeated_samples"]) == (True, False, 0)
    assert told["rebuild_bytes"] > 0
    assert 0 < told["without_service_seconds"] <= max(told["unprotected_seconds"], told["regained_seconds"])
    assert [process.is_running() for process in (victim, *others)] == [False, True, True]

    assert job.wait_for(lambda: is_protected(job))
    assert job.kill("ps", random.Random(2))
    assert job.wait_for(partial(has_rebuilt, job, 3))
    assert job.trains_on(5_000)
    finished = job.stop()
    assert (finished.summary["recoveries"], finished.summary["rebuilds"]) == (0, 3)


def test_two_servers_killed_at_once_are_rebuilt_and_nothing_goes_back(make_job: Callable[..., Job]) -> None:
    job = make_job(with_parity(servers=4, parity=2))
    job.start()
    assert job.wait_for(lambda: is_protected(job) and job.samples() > 10_000)
    before = job.status()
    for process in [job.member("ps", 0), job.member("ps", 2)]:
        process.send_signal(signal.SIGKILL)
    assert job.wait_for(partial(has_rebuilt, job, 2))
    after = job.status()
    assert (after.generation, after.protection.rebuilt) == (before.generation, "ps-0 and ps-2")
    assert after.samples >= before.samples
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert (finished.summary["recoveries"], finished.summary["rebuilds"]) == (0, 2)
    assert finished.summary["samples"] == finished.summary["expected_samples"]
    job.exact_audit()


def test_the_others_adopt_the_rows_of_a_server_without_a_successor(make_job: Callable[..., Job]) -> None:
    job = make_job(with_parity(epochs=ENDLESS) | {"data": {"evaluation": []}, "sharding": {"leaseTimeout": "15s"}})
    job.start()
    assert job.wait_for(lambda: is_protected(job) and job.samples() > 10_000)
    before = job.status()
    starter = job.starter()
    starter.suspend()  # nobody starts processes, or notices that one has ended
    try:
        job.member("ps", 1).kill()
        assert job.wait_for(partial(has_rebuilt, job, 1))
        assert has_buckets(job) == [True, False, True]
        assert job.wait_for(lambda: is_protected(job))
        assert job.trains_on_since(before)
    finally:
        starter.resume()
    assert job.wait_for(lambda: has_buckets(job) == [True, True, True])
    assert job.wait_for(lambda: is_protected(job))
    assert job.status().generation == before.generation
    finished = job.stop()
    assert (finished.summary["recoveries"], finished.summary["rebuilds"]) == (0, 1)


def has_buckets(job: Job) -> list[bool]:
    """Returns whether each parameter server owns buckets."""
    owning = {one.member.index for one in job.status().members if one.member.role == pb.PS and one.buckets}
    return [index in owning for index in range(3)]


def test_parity_that_lags_forgets_the_latest_pushes_of_a_lost_server_and_the_books_say_which(
    make_job: Callable[..., Job],
) -> None:
    changes = with_parity(epochs=20)
    changes["faultTolerance"]["durability"] = "Async"
    job = make_job(changes)
    job.start()
    for lost in range(1, 4):  # between the look at its pushes and its end, a server may just start to send them
        assert job.wait_for(lambda: is_protected(job) and job.samples() > 10_000)
        before = job.status().samples
        assert job.wait_for(partial(loses_a_server_with_gathered_pushes, job, lost % 3))
        assert job.wait_for(partial(has_rebuilt, job, lost))
        assert job.status().samples >= before
        if job.status().forgotten:
            break
    finished = job.finish()
    summary = finished.summary
    assert summary["phase"] == "Complete", finished.stderr
    assert (summary["recoveries"], summary["rebuilds"]) == (0, lost)
    assert summary["samples"] == summary["expected_samples"]
    (forgotten,) = summary["forgotten"]
    assert (forgotten["servers"], forgotten["checkpoint"]) == ([lost % 3], "")
    assert 0 < forgotten["samples"] <= LagBound().pushes * BATCH
    assert summary["pls"] == pytest.approx(forgotten["samples"] * forgotten["share"] / summary["expected_samples"])
    assert "have forgotten their latest" in finished.stderr
    audit = job.exact_audit()
    assert (audit["once"], audit["forgotten"]) == (summary["expected_samples"], forgotten["samples"])


def test_a_master_that_dies_while_rows_are_rebuilt_is_followed_by_another(make_job: Callable[..., Job]) -> None:
    """Afterwards two servers die at once: one parity cannot rebuild them, and the job returns to its start."""
    job = make_job(with_parity(epochs=ENDLESS))
    job.start()
    assert job.wait_for(lambda: is_protected(job) and job.samples() > 10_000)
    (master,) = job.members("master")
    job.member("ps", 1).send_signal(signal.SIGKILL)
    master.send_signal(signal.SIGKILL)
    assert job.wait_for(lambda: not master.is_running() and job.members("master"))
    assert job.wait_for(lambda: has_its_rows_again(job) and is_protected(job))
    assert job.trains_on(5_000)

    before = job.status()
    for process in [job.member("ps", 0), job.member("ps", 2)]:
        process.send_signal(signal.SIGKILL)
    assert job.wait_for(lambda: job.status().recoveries == before.recoveries + 1)
    assert job.trains_on_since(job.status())
    finished = job.stop()
    assert finished.summary["recoveries"] == before.recoveries + 1
