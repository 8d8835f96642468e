"""A process that hangs without dying, for good, at a random moment: the job is Complete soon all the same.

EMBERSCALE_HANG_SEEDS says how many moments are tried for each kind of process, and for workers and servers of a job
that trains in rounds; the suite tries one. On a quiet machine
a job ends within a minute of the hang: EMBERSCALE_HANG_SECONDS=60 checks that.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from local_jobs import IMPATIENT, Job

SEEDS = range(int(os.environ.get("EMBERSCALE_HANG_SEEDS", "1")))
WITHIN_SECONDS = float(os.environ.get("EMBERSCALE_HANG_SECONDS", "540"))
"""What is left of the training takes as long as the machine lets it."""
ROWS_TRAINED = 54_000
"""In an epoch: of the 60,000 rows of the data set a tenth is held out."""

EPOCHS = 4
"""A process hangs within the first one: a job may train an epoch while the test looks for the process."""


def victims(job: Job, role: str) -> list[psutil.Process]:
    if role != "redis":
        return job.members(role)
    return [process for process in job.children() if process.name().startswith("redis-server")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("role", "rounds"),
    [("master", False), ("redis", False), ("worker", False), ("ps", False), ("worker", True), ("ps", True)],
)
def test_a_process_that_hangs_for_good_is_replaced(
    make_job: Callable[..., Job], role: str, rounds: bool, seed: int
) -> None:
    choice = random.Random(f"{role}-{seed}")
    spec: dict[str, Any] = {"training": {"seed": seed, "epochs": EPOCHS}, "sharding": IMPATIENT}
    if rounds:
        spec["hotEmbeddings"] = {"mode": "Enabled"}
        spec["training"]["stalenessWarmup"] = 0  # two workers have rounds from the start
    job = make_job(spec)
    job.start()
    moment = choice.randrange(ROWS_TRAINED)
    assert job.wait_for(lambda: job.samples() >= moment)
    choice.choice(victims(job, role)).send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert time.monotonic() - stopped_at < WITHIN_SECONDS
    assert (finished.summary["traffic"]["rounds"] > 0) is rounds
    audit = job.exact_audit()
    assert audit["once"] == finished.summary["expected_samples"] == finished.summary["samples"]
