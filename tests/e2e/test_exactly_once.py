"""Every sample once on every parameter server, whatever is killed.

Each run starts real processes and kills some of them with SIGKILL, so this takes minutes.
"""

import random
from collections.abc import Callable
from functools import partial

import pytest

from local_jobs import Job

SEEDS = range(20)


def reached(job: Job, samples: int) -> bool:
    return job.samples() >= samples


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_workers_and_master_killed_at_random_every_sample_is_applied_once(
    make_job: Callable[..., Job], seed: int
) -> None:
    choice = random.Random(seed)
    job = make_job({"training": {"seed": seed}})
    job.start()
    moments = sorted((choice.randrange(40_000), role) for role in ("master", "worker"))
    for samples, role in moments:
        job.wait_for(partial(reached, job, samples))
        job.kill(role, choice)
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert finished.code == 0
    audit = job.audit()
    assert (audit["missing"], audit["repeated"], audit["contradictions"]) == (0, 0, [])
    assert audit["once"] == finished.summary["expected_samples"] == finished.summary["samples"]
