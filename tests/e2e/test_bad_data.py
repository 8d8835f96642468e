"""Data and settings that cannot be trained on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from local_jobs import Job

# Whole jobs with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)


def with_bad_lines(dataset: Path, folder: Path, lines: int) -> Path:
    """A copy of the training data in which some lines are malformed: line 11, 21, ..."""
    original = sorted(dataset.glob("train-*.tsv"))[0].read_text().splitlines()[:20_000]
    for number in range(lines):
        original[10 * (number + 1)] = "not a record"
    file = folder / "bad.tsv"
    file.write_text("\n".join(original) + "\n")
    return file


def test_the_first_malformed_line_fails_the_job_by_file_and_line(
    make_job: Callable[..., Job], dataset: Path, tmp_path: Path
) -> None:
    file = with_bad_lines(dataset, tmp_path, 1)
    finished = make_job({"data": {"train": [str(file)]}}).run()
    assert finished.code == 1
    assert finished.summary["phase"] == "Failed"
    assert finished.summary["reason"] == "BadRecords"
    assert f"{file}:11:" in finished.summary["message"]


def test_as_many_malformed_lines_as_allowed_are_skipped_and_counted(
    make_job: Callable[..., Job], dataset: Path, tmp_path: Path
) -> None:
    file = with_bad_lines(dataset, tmp_path, 3)
    finished = make_job({"data": {"train": [str(file)], "maxBadRecords": 3}}).run()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert finished.summary["bad_records"] == 3


def test_a_loss_that_is_not_finite_fails_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job(
        {"optimizers": {"sparse": {"type": "SGD", "learningRate": 100}, "dense": {"type": "SGD", "learningRate": 100}}}
    )
    finished = job.run()
    assert finished.code == 1
    assert finished.summary["phase"] == "Failed"
    assert finished.summary["reason"] == "NonFiniteLoss"
