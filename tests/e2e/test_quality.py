"""Compares what a job learns with plain PyTorch on the same rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from emberscale_api.job import parse_manifest
from local_jobs import Job, emberscale_here
from plain_torch import train

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)


def test_held_out_auc_is_that_of_plain_pytorch(make_job: Callable[..., Job], tmp_path: Path) -> None:
    # The optimizers and widths of the example job; smaller batches, since there are fewer rows.
    made = emberscale_here("data", "synth", str(tmp_path / "data"), "--rows", "200000", "--seed", "7")
    assert made.returncode == 0, made.stderr
    paths = {"train": [str(tmp_path / "data/train-*.tsv")], "evaluation": [str(tmp_path / "data/evaluation.tsv")]}
    job = make_job({"data": paths, "training": {"batchSize": 512}})
    finished = job.run()
    assert finished.code == 0, finished.stderr
    reference = train(parse_manifest(job.manifest))
    assert reference.auc > 0.6, "the data is too hard for the comparison to mean anything"
    assert abs(finished.summary["auc"] - reference.auc) < 0.003
    assert abs(finished.summary["logloss"] - reference.logloss) < 0.01


def test_one_synchronous_worker_gives_the_same_tables_twice(make_job: Callable[..., Job]) -> None:
    tables = []
    for _ in range(2):
        job = make_job({"training": {"maxStaleness": 0}, "ps": {"replicas": 1}, "worker": {"replicas": 1}})
        finished = job.run()
        assert finished.code == 0, finished.stderr
        folder = job.run_folder / "model" / "ps-0"
        tables.append({file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".rows", ".npy")})
    assert len(tables[0]) > 26
    assert tables[0] == tables[1]
