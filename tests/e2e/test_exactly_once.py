"""Every sample once on every parameter server, whatever is killed.

Each run starts real processes and kills some of them with SIGKILL, for ten seconds or so. EMBERSCALE_KILL_SEEDS says
how many runs there are; the suite makes four, as tests/simulation kills the same cores under thousands of seeds.
"""

import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from local_jobs import ENDLESS, Job

SEEDS = range(int(os.environ.get("EMBERSCALE_KILL_SEEDS", "4")))


def reached(job: Job, samples: int) -> bool:
    return job.samples() >= samples


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_workers_and_master_killed_at_random_every_sample_is_applied_once(
    make_job: Callable[..., Job], seed: int
) -> None:
    choice = random.Random(seed)
    job = make_job({"training": {"seed": seed, "epochs": ENDLESS}})
    job.start()
    moments = sorted((choice.randrange(40_000), role) for role in ("master", "worker"))
    for samples, role in moments:
        assert job.wait_for(partial(reached, job, samples))
        assert job.kill(role, choice)
    assert job.trains_on()
    job.stop()
