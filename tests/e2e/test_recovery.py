"""What survives the loss of a parameter server, an interruption, and damage to a checkpoint."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from emberscale_api.checkpoint import CheckpointManifest
from local_jobs import ENDLESS, Job

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)


def newest_checkpoint(job: Job) -> Path | None:
    complete = sorted((job.run_folder / "checkpoints").glob("*/manifest.json"))
    return complete[-1].parent if complete else None


def manifests(job: Job) -> list[CheckpointManifest]:
    """Returns the manifests of all complete checkpoints, oldest first."""
    paths = sorted((job.run_folder / "checkpoints").glob("*/manifest.json"))
    return [CheckpointManifest.from_json(path.read_text(), str(path)) for path in paths]


def test_a_job_goes_back_to_quantised_weights_and_ends_with_exact_ones(make_job: Callable[..., Job]) -> None:
    checkpoint = {"interval": "1s", "keep": 100, "quantization": 4}
    job = make_job({"checkpoint": checkpoint, "training": {"epochs": ENDLESS}})
    job.start()
    assert job.wait_for(lambda: any(one.applied for one in manifests(job)))
    assert job.kill("ps", random.Random(1))
    assert job.wait_for(lambda: job.status().recoveries)
    evaluated = len(job.status().evaluations)
    assert job.wait_for(lambda: len(job.status().evaluations) > evaluated)
    finished = job.stop()
    assert finished.summary["recoveries"] == 1
    assert finished.summary["restarts"]["ps"] == 1
    assert finished.summary["evaluations"][-1]["auc"] > 0.5
    *periodic, last = manifests(job)
    assert {one.weight_bits for one in periodic if one.applied} == {4}  # the first may precede all batches
    assert last.weight_bits == 0


def test_a_dead_parameter_server_takes_the_job_back_to_a_chain_of_checkpoints(make_job: Callable[..., Job]) -> None:
    job = make_job({"checkpoint": {"interval": "1s", "incremental": "Auto"}, "training": {"epochs": 8}})
    job.start()

    def builds_on_another() -> bool:
        newest = newest_checkpoint(job)
        return newest is not None and json.loads((newest / "manifest.json").read_text())["format_version"] == 2

    assert job.wait_for(builds_on_another)
    assert job.kill("ps", random.Random(1))
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert finished.summary["recoveries"] == 1
    assert finished.summary["samples"] == finished.summary["expected_samples"]
    job.exact_audit()
    last = newest_checkpoint(job)
    assert last is not None
    assert json.loads((last / "manifest.json").read_text())["format_version"] == 1
    assert (job.run_folder / "model" / "manifest.json").exists()


def test_an_interrupted_run_is_resumed_with_another_number_of_servers(make_job: Callable[..., Job]) -> None:
    job = make_job({"training": {"epochs": 2}})
    job.start()
    assert job.wait_for(lambda: job.samples() > 5_000)
    started = job.children()
    job.interrupt()
    interrupted = job.finish()
    assert interrupted.code == 130, interrupted.stderr
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    resumed = job.run("--resume", "--set", "spec.ps.replicas=3")
    assert resumed.summary["phase"] == "Complete", resumed.stderr
    assert resumed.summary["samples"] == resumed.summary["expected_samples"]
    assert job.exact_audit()["ps_count"] == 3


def test_a_run_that_was_cut_off_says_what_a_resume_goes_on_from_and_refuses_a_damaged_checkpoint_by_name(
    make_job: Callable[..., Job],
) -> None:
    """The resumed run trains again what came after the last checkpoint, and what only the damaged one had."""
    job = make_job({"checkpoint": {"interval": "1s", "keep": 3}, "training": {"epochs": ENDLESS}})
    job.start()
    assert job.wait_for(lambda: len(list((job.run_folder / "checkpoints").glob("*/manifest.json"))) >= 2)
    job.interrupt()
    job.interrupt()
    ended = job.finish()
    assert ended.code == 130
    assert ended.summary["phase"] in ("Interrupted", "Suspended"), ended.stderr
    audit = job.audit()
    assert ended.summary["checkpoint"] == audit["checkpoint"]
    assert ended.summary["checkpoint_samples"] == audit["once"] > 0

    damaged = newest_checkpoint(job)
    assert damaged is not None
    rows = max((damaged / "ps-0").glob("table-*.rows"), key=lambda file: file.stat().st_size)
    rows.write_bytes(rows.read_bytes()[:-7])
    job.start("--resume")
    assert job.trains_on()
    job.stop()
    refusals = [line for line in job.logs().splitlines() if damaged.name in line and rows.name in line]
    assert refusals
    assert all(json.loads(line)["level"] in ("error", "warning") for line in refusals)
