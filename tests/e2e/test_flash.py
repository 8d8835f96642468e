"""Flash checkpoints of whole jobs: what a lost parameter server costs, and a Redis that hangs, dies or is too small."""

import random
import re
import signal
from collections.abc import Callable

import psutil

from local_jobs import ENDLESS, Job, emberscale_here

SPEC = {"checkpoint": {"interval": "1h", "flash": {"interval": "1s"}}, "training": {"epochs": ENDLESS}}


def flash_checkpoints(job: Job) -> list[str]:
    """The ids of all complete flash checkpoints so far."""
    log = job.run_folder / "logs" / "master-0.log"
    text = log.read_text() if log.exists() else ""
    return [
        match[0]
        for line in text.splitlines()
        if "checkpoint_complete" in line and (match := re.search(r"flash-\d+", line))
    ]


def restored_from(job: Job) -> list[str]:
    """Returns what each load of a parameter server restored: a flash checkpoint's id, or an empty string."""
    found = []
    for log in sorted((job.run_folder / "logs").glob("ps-*.log")):
        for line in log.read_text().splitlines():
            if '"assigned"' in line or " assigned" in line:
                match = re.search(r"flash-\d+", line)
                found.append(match[0] if match else "")
    return found


def flash_redis(job: Job) -> psutil.Process:
    [found] = [
        process
        for process in job.children()
        if process.name().startswith("redis-server") and any("flash" in word for word in process.cmdline())
    ]
    return found


def assert_recovers(job: Job, times: int = 1) -> None:
    """Waits until the job has recovered this many times in all, and trains on."""
    assert job.wait_for(lambda: job.status().recoveries == times)
    assert job.trains_on_since(job.status())


def test_a_redis_that_hangs_holds_up_nothing_and_dead_servers_take_the_job_back_to_what_it_has(
    make_job: Callable[..., Job],
) -> None:
    """The first death takes the job back to a flash checkpoint; the second, with an empty Redis, to the next tier."""
    job = make_job(SPEC)
    job.start()
    assert job.wait_for(lambda: flash_checkpoints(job))
    hung = flash_redis(job)
    hung.send_signal(signal.SIGSTOP)
    before, samples = len(flash_checkpoints(job)), job.samples()
    assert job.wait_for(
        lambda: (
            "no new flash checkpoint" in (job.run_folder / "logs" / "master-0.log").read_text()
            or "does not answer" in (job.run_folder / "logs" / "master-0.log").read_text()
        )
    )
    assert job.samples() > samples
    hung.send_signal(signal.SIGCONT)
    assert job.wait_for(lambda: len(flash_checkpoints(job)) > before)

    assert job.kill("ps", random.Random(1))
    assert_recovers(job)
    assert any(restored_from(job))

    flash_redis(job).kill()
    assert job.kill("ps", random.Random(1))
    assert_recovers(job, times=2)
    assert job.stop().summary["recoveries"] == 2


def test_rows_that_are_too_large_cost_only_the_flash_checkpoint(make_job: Callable[..., Job]) -> None:
    job = make_job({**SPEC, "checkpoint": {"interval": "1h", "flash": {"interval": "1s", "maxBytes": "64Ki"}}})
    job.start()
    assert job.wait_for(lambda: "spec.checkpoint.flash.maxBytes gives each server" in job.logs())
    assert job.trains_on()
    job.stop()
    assert flash_checkpoints(job) == []


def test_both_tiers_and_moves_together_lose_and_repeat_nothing(make_job: Callable[..., Job]) -> None:
    checkpoint = {"interval": "2s", "flash": {"interval": "1s"}}
    job = make_job({"checkpoint": checkpoint, "training": {"epochs": ENDLESS}, "ps": {"replicas": 1}})
    job.start()
    for servers in (3, 2):
        seen = len(flash_checkpoints(job))
        assert job.wait_for(lambda: len(flash_checkpoints(job)) > seen)  # noqa: B023
        scaled = emberscale_here("scale", str(job.run_folder), f"ps={servers}")
        assert scaled.returncode == 0, scaled.stderr
        assert job.wait_for(lambda: len(job.members("ps")) == servers)  # noqa: B023
    seen = len(flash_checkpoints(job))
    assert job.wait_for(lambda: len(flash_checkpoints(job)) > seen)
    assert job.kill("ps", random.Random(3))
    assert_recovers(job)
    assert job.stop().summary["recoveries"] == 1
