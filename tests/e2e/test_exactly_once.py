"""Every sample once on every parameter server, whatever is killed.

Each run starts real processes and kills some of them with SIGKILL, for ten seconds or so. EMBERSCALE_KILL_SEEDS says
how many runs there are; every other one trains in rounds. The suite makes one of each kind, as tests/simulation kills
the same cores under thousands of seeds.
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
