"""A process hangs for good at a random moment, without dying: the job soon goes on.

EMBERSCALE_HANG_SEEDS sets the number of moments tried for each kind of process, and for workers and servers of a job
that trains in rounds; the suite tries one. On a quiet machine a job goes on within a minute of the hang:
EMBERSCALE_HANG_SECONDS=60 checks that.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest

from local_jobs import ENDLESS, IMPATIENT, Job

SEEDS = range(int(os.environ.get("EMBERSCALE_HANG_SEEDS", "1")))
WITHIN_SECONDS = float(os.environ.get("EMBERSCALE_HANG_SECONDS", "540"))
"""Generous by default: a busy machine slows everything down."""
ROWS_TRAINED = 54_000
"""Of an epoch: a tenth of the data set's 60,000 rows is held out."""


def victims(job: Job, role: str) -> list[psutil.Process]:
    if role != "redis":
        return job.members(role)
    return [process for process in job.children() if process.name().startswith("redis-server")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("roles", "rounds"),
    [(("master", "redis"), False), (("worker", "ps"), False), (("worker", "ps"), True)],
    ids=["master and redis", "members", "members in rounds"],
)
def test_a_process_that_hangs_for_good_is_replaced(
    make_job: Callable[..., Job], roles: tuple[str, ...], rounds: bool, seed: int
) -> None:
    choice = random.Random(f"{roles}-{seed}")
    spec: dict[str, Any] = {"training": {"seed": seed, "epochs": ENDLESS}, "sharding": IMPATIENT}
    if rounds:
        spec["hotEmbeddings"] = {"mode": "Enabled"}
        spec["training"]["stalenessWarmup"] = 0  # two workers have rounds from the start
    job = make_job(spec)
    job.start()
    assert job.wait_for(lambda: job.samples() > 0)
    for role in roles:
        assert job.trains_on(choice.randrange(ROWS_TRAINED // len(roles)))
        victim = choice.choice(victims(job, role))
        victim.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        assert job.wait_for(partial(is_gone, victim), timeout=WITHIN_SECONDS)
        assert job.trains_on(5_000)
        assert time.monotonic() - stopped_at < WITHIN_SECONDS
    finished = job.stop()
    assert (finished.summary["traffic"]["rounds"] > 0) is rounds


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running()
