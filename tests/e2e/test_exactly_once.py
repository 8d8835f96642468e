"""Every sample counts once on every parameter server, whichever processes are killed.

Each run lasts about ten seconds and kills real processes with SIGKILL. EMBERSCALE_KILL_SEEDS sets the number of runs;
every second one trains in rounds. The suite makes only one run of each kind, since tests/simulation kills the same
cores under thousands of seeds.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from local_jobs import ENDLESS, Job

SEEDS = range(int(os.environ.get("EMBERSCALE_KILL_SEEDS", "2")))


def reached(job: Job, samples: int) -> bool:
    return job.samples() >= samples


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_workers_and_master_killed_at_random_every_sample_is_applied_once(
    make_job: Callable[..., Job], seed: int
) -> None:
    choice = random.Random(seed)
    spec: dict[str, Any] = {"training": {"seed": seed, "epochs": ENDLESS}}
    if seed % 2:
        spec["hotEmbeddings"] = {"mode": "Enabled"}
        spec["training"]["stalenessWarmup"] = 0  # two workers have rounds from the start
    job = make_job(spec)
    job.start()
    moments = sorted((choice.randrange(40_000), role) for role in ("master", "worker"))
    for samples, role in moments:
        assert job.wait_for(partial(reached, job, samples))
        assert job.kill(role, choice)
    assert job.trains_on()
    job.stop()
