"""A parameter server dies, and only its rows go back to a checkpoint (CPR)."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from local_jobs import Job

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(900)


def checkpoints(job: Job) -> list[Path]:
    return sorted(path.parent for path in (job.run_folder / "checkpoints").glob("0*/manifest.json"))


def saves(job: Job) -> list[Path]:
    """Returns the saves of priority rows over the newest checkpoint."""
    newest = max((int(path.name) for path in checkpoints(job)), default=1 << 30)
    found = sorted(path.parent for path in (job.run_folder / "checkpoints").glob("priority-*/manifest.json"))
    return [path for path in found if int(path.name.rpartition("-")[2]) > newest]


def recovered(job: Job, times: int) -> bool:
    """Whether the job has recovered partially this many times."""
    return len(job.status().forgotten) == times


def test_a_lost_server_goes_back_alone(make_job: Callable[..., Job]) -> None:
    """The lost server is the one that orders staleness."""
    tolerance = {"strategy": "PartialRecovery", "targetPLS": 1.0}
    job = make_job(
        {
            "checkpoint": {"interval": "2s"},
            "training": {"epochs": 4},
            "faultTolerance": tolerance,
            "ps": {"replicas": 2},
        }
    )
    job.start()
    assert job.wait_for(lambda: checkpoints(job) and job.samples() > 5_000)
    before = job.status().generation
    job.member("ps", 0).kill()
    finished = job.finish()

    summary = finished.summary
    assert summary["phase"] == "Complete", finished.stderr
    assert summary["recoveries"] == 0, finished.stderr
    assert summary["restarts"]["ps"] == 1
    assert summary["samples"] == summary["expected_samples"]
    (forgotten,) = summary["forgotten"]
    assert forgotten["servers"] == [0]
    assert forgotten["share"] == pytest.approx(0.5)
    assert summary["pls"] == pytest.approx(forgotten["samples"] / summary["expected_samples"] / 2)
    assert "goes back" not in finished.stderr
    assert "forgotten on 50.0% of the rows" in finished.stderr

    audit = job.exact_audit()
    assert audit["once"] == summary["expected_samples"]
    assert audit["forgotten"] == forgotten["samples"]
    (share,) = audit["forgotten_shares"]
    assert share["checkpoint"] == forgotten["checkpoint"]
    manifest = json.loads((checkpoints(job)[-1] / "manifest.json").read_text())
    assert manifest["generation"] == before, "a roll-back would have begun another"


def test_a_lost_server_loads_priority_rows_too(make_job: Callable[..., Job]) -> None:
    """The lost server is not the one that orders staleness."""
    tolerance = {"strategy": "PartialRecovery", "targetPLS": 1.0, "priority": "MFU"}
    checkpoint = {"interval": "8s", "incremental": "Auto", "quantization": 8, "flash": {"mode": "Disabled"}}
    job = make_job(
        {"checkpoint": checkpoint, "training": {"epochs": 10_000}, "faultTolerance": tolerance, "ps": {"replicas": 2}}
    )
    job.start()
    for lost in range(1, 4):  # a checkpoint may come between the saves and the loss
        assert job.wait_for(lambda: saves(job))
        job.member("ps", 1).kill()
        assert job.wait_for(partial(recovered, job, lost))
        if job.status().forgotten[-1].priority_saves:
            break
    assert job.trains_on()
    finished = job.stop()

    assert finished.summary["recoveries"] == 0, finished.stderr
    forgotten = finished.summary["forgotten"][-1]
    assert forgotten["servers"] == [1]
    assert forgotten["priority_saves"] > 0
    assert f"{forgotten['checkpoint']} with {forgotten['priority_saves']} saves of priority rows" in finished.stderr
    assert job.audit()["forgotten_shares"][-1]["priority_saves"] == forgotten["priority_saves"]
    assert not saves(job), "the last checkpoint has all rows"
