"""A job starts from a checkpoint of another job: on new data, or at the point that the other job had reached."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from emberscale_api.checkpoint import CheckpointManifest
from local_jobs import ENDLESS, Job, emberscale

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(900)


def newest(job: Job) -> CheckpointManifest | None:
    complete = sorted((job.run_folder / "checkpoints").glob("*/manifest.json"))
    return CheckpointManifest.from_json(complete[-1].read_text(), str(complete[-1])) if complete else None


def halves(dataset: Path, folder: Path) -> list[str]:
    """The training data as two files."""
    (file,) = [path for path in dataset.glob("*") if "train" in path.name]
    lines = file.read_text().splitlines(keepends=True)
    parts = [folder / "january.tsv", folder / "february.tsv"]
    for part, some in zip(parts, (lines[::2], lines[1::2]), strict=True):
        part.write_text("".join(some))
    return [str(part) for part in parts]


def test_new_files_are_trained_on_top_of_another_jobs_model(
    make_job: Callable[..., Job], dataset: Path, tmp_path: Path
) -> None:
    january, february = halves(dataset, tmp_path)
    first = make_job({"data": {"train": [january]}})
    begun = first.run()
    assert begun.code == 0, begun.stderr

    second = make_job({"data": {"train": [january, february]}, "checkpoint": {"interval": "1s"}})
    (second.folder / "job.yaml").write_text(yaml.safe_dump(second.manifest))
    restored = emberscale(
        *("checkpoints", "restore", str(first.run_folder), "job.yaml", "--continuation", "Append"),
        *("--workdir", "run", "--output", "json"),
        cwd=second.folder,
    )
    assert restored.returncode == 0, restored.stderr
    summary = json.loads(restored.stdout)
    records = len(Path(february).read_text().splitlines())
    assert summary["samples"] == summary["expected_samples"] == records
    assert summary["auc"] > begun.summary["auc"], "the second half of the data adds to what the first has taught"
    at = f"{first.run_folder.resolve()}/checkpoints/{begun.summary['checkpoint']}"
    assert summary["origin"]["checkpoint"] == at
    assert f"from {at} of job" in restored.stderr

    audit = second.exact_audit()
    assert audit["once"] == records
    assert audit["origin"]["samples"] == begun.summary["samples"]
    last = newest(second)
    assert last is not None
    assert [file.uri for file in last.training_files] == [february]


def test_a_lost_server_takes_the_job_back_to_where_it_started(make_job: Callable[..., Job]) -> None:
    """The job starts from a quantised chain of another number of servers, and has no checkpoint of its own yet.

    The first job's command is killed; none of its processes outlives it.
    """
    chained = {"interval": "1s", "incremental": "Consecutive", "quantization": 8, "keep": 100}
    first = make_job({"checkpoint": chained, "training": {"epochs": ENDLESS}})
    first.start()

    def is_quantised_chain() -> Any:
        found = newest(first)
        return found is not None and found.builds_on and found.weight_bits

    assert first.wait_for(is_quantised_chain)
    member = first.process
    assert member is not None
    started = first.children()
    assert len(started) >= 6
    member.kill()
    member.wait()
    assert not psutil.wait_procs(started, timeout=60)[1]
    source = newest(first)
    assert source is not None
    epochs = source.epoch + 3

    initial = {"uri": str(first.run_folder / "checkpoints"), "id": source.id}
    second = make_job(
        {
            "data": {"continuation": "Resume"},
            "training": {"epochs": epochs},
            "checkpoint": {"interval": "1h", "initialFrom": initial},
            "ps": {"replicas": 3},
        }
    )
    second.start()
    assert second.wait_for(lambda: second.samples() > source.applied_samples)
    assert newest(second) is None
    assert second.kill("ps", random.Random(1))
    finished = second.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert finished.summary["recoveries"] == 1
    assert finished.summary["samples"] == finished.summary["expected_samples"]
    assert finished.summary["origin"]["samples"] == source.applied_samples
    second.exact_audit()
