"""A parameter server dies, and its rows alone go back to a checkpoint (CPR)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from local_jobs import Job

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(900)


def checkpoints(job: Job) -> list[Path]:
    return sorted(path.parent for path in (job.run_folder / "checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize("lost", [0, 1], ids=["that orders staleness", "that does not"])
def test_a_lost_server_goes_back_alone(make_job: Callable[..., Job], lost: int) -> None:
    partial = {"strategy": "PartialRecovery", "targetPLS": 1.0}
    job = make_job(
        {"checkpoint": {"interval": "2s"}, "training": {"epochs": 6}, "faultTolerance": partial, "ps": {"replicas": 2}}
    )
    job.start()
    assert job.wait_for(lambda: checkpoints(job) and job.samples() > 5_000)
    before = job.status().generation
    job.member("ps", lost).kill()
    finished = job.finish()

    summary = finished.summary
    assert summary["phase"] == "Complete", finished.stderr
    assert summary["recoveries"] == 0, finished.stderr
    assert summary["restarts"]["ps"] == 1
    assert summary["samples"] == summary["expected_samples"]
    (forgotten,) = summary["forgotten"]
    assert forgotten["servers"] == [lost]
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
