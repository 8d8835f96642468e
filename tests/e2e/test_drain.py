"""A parameter server that is told to end gives its rows away first: nothing rolls back, and nothing counts twice."""

from collections.abc import Callable

import psutil
import pytest

from local_jobs import ENDLESS, Job, emberscale_here


def wait_for_successor(job: Job, gone: psutil.Process, servers: int) -> None:
    """Waits until the successor has its share of the rows."""
    assert job.wait_for(lambda: not gone.is_running() and len(job.members("ps")) == servers)
    assert job.wait_for(lambda: last_step(job) == "ReplacedServer")
    assert job.trains_on()


def last_step(job: Job) -> str:
    steps = job.status().sizing.steps
    return steps[-1].reason if steps else ""


def drain_by_command(job: Job) -> None:
    before = job.members("ps")

    def begun() -> bool:
        """Whether the drain has begun. It is refused while the server's predecessor is being replaced."""
        told = emberscale_here("drain", str(job.run_folder), "ps-0")
        assert told.returncode == 0 or "no rows now" in told.stderr or "nobody can take over" in told.stderr
        return "ps-0 gives its rows away and is replaced" in told.stdout

    assert job.wait_for(begun)
    assert job.wait_for(lambda: sum(process.is_running() for process in before) == len(before) - 1)
    wait_for_successor(job, next(process for process in before if not process.is_running()), len(before))


@pytest.mark.timeout(1200)
def test_each_server_is_told_to_end_in_turn_and_nothing_rolls_back(make_job: Callable[..., Job]) -> None:
    job = make_job({"training": {"epochs": ENDLESS}, "ps": {"replicas": 2}, "worker": {"replicas": 1}})
    job.start()
    assert job.wait_for(lambda: job.samples() > 5_000)
    oldest = min(job.members("ps"), key=lambda process: process.create_time())
    oldest.terminate()
    wait_for_successor(job, oldest, 2)
    drain_by_command(job)
    finished = job.stop()
    assert finished.summary["recoveries"] == 0, finished.stderr
    assert finished.summary["restarts"]["ps"] == 0
    assert finished.stderr.count("has no rows left and may end") == 2
    assert finished.stderr.count("has its share of the rows") == 2
    assert job.audit()["ps_count"] == 2


@pytest.mark.timeout(1200)
def test_another_server_stands_in_for_the_only_one(make_job: Callable[..., Job]) -> None:
    job = make_job({"training": {"epochs": ENDLESS}, "ps": {"replicas": 1}, "worker": {"replicas": 1}})
    job.start()
    assert job.wait_for(lambda: job.samples() > 5_000)
    drain_by_command(job)
    finished = job.stop()
    assert finished.summary["recoveries"] == 0, finished.stderr
    assert finished.summary["restarts"]["ps"] == 0
    assert "to its stand-in ps-1" in finished.stderr
    assert finished.stderr.count("has its share of the rows") == 1
    assert job.audit()["ps_count"] == 1
