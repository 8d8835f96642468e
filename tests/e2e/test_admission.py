"""A job that admits only frequent ids, scaled and with a parameter server killed in the middle."""

import random
from collections.abc import Callable
from typing import Any

from local_jobs import ENDLESS, Finished, Job, emberscale_here

EMBEDDINGS = {"admission": {"minCount": 3}, "eviction": {"maxRows": 2048, "ttlBatches": 2000}}


def rows(summary: dict[str, Any]) -> int:
    return sum(summary["rows"].values())


def test_a_fraction_of_the_rows_trains_exactly_through_a_move_and_a_kill(
    make_job: Callable[..., Job], trained: Finished
) -> None:
    training, checkpoint = {"epochs": ENDLESS}, {"interval": "2s"}
    job = make_job({"model": {"embeddings": EMBEDDINGS}, "training": training, "checkpoint": checkpoint})
    job.start()
    assert job.wait_for(lambda: job.samples() > 30_000)
    assert emberscale_here("scale", str(job.run_folder), "ps=3").returncode == 0
    assert job.wait_for(lambda: '"event": "moved"' in job.logs()), "until then, the new server has no rows to lose"
    assert job.trains_on()
    assert job.kill("ps", random.Random(1))
    assert job.wait_for(lambda: job.status().recoveries)
    assert job.trains_on()
    summary = job.stop().summary
    assert rows(summary) < 0.5 * rows(trained.summary)
    assert max(summary["rows"].values()) <= 1.5 * 2048
    counts = summary["admission"].values()
    assert sum(table["admitted"] for table in counts) > 0
    assert sum(table["evicted"] for table in counts) > 0
