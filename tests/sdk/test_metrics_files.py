"""metrics.csv and its picture."""

import csv
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from emberscale._reports.pictures import draw_metrics
from emberscale._run.metrics import COLUMNS, MetricsRecorder
from emberscale_api.job.running import JobStatus
from emberscale_api.job.status import JobPhase
from emberscale_operator.local.snapshot import RunView


def snapshot(seconds: float, phase: JobPhase = JobPhase.TRAINING, **fields: Any) -> RunView:
    return RunView(seconds, JobStatus(phase, rows={"C1": 3, "C2": 4}, **fields), (), {}, (), False)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_half_a_second_apart(tmp_path: Path) -> None:
    with MetricsRecorder(tmp_path / "metrics.csv", offset=0.0) as recorder:
        for tick in range(21):
            recorder.record(snapshot(tick / 10, samples=tick))
    assert [row["samples"] for row in rows(tmp_path / "metrics.csv")] == ["0", "5", "10", "15", "20"]


def test_another_phase_has_a_row_at_once(tmp_path: Path) -> None:
    with MetricsRecorder(tmp_path / "metrics.csv", offset=0.0) as recorder:
        recorder.record(snapshot(1.0))
        recorder.record(snapshot(1.1, JobPhase.COMPLETE))
    assert [row["phase"] for row in rows(tmp_path / "metrics.csv")] == ["Training", "Complete"]


def test_a_resumed_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    for offset in (0.0, 60.0):
        with MetricsRecorder(tmp_path / "metrics.csv", offset) as recorder:
            recorder.record(snapshot(1.0))
    assert [row["seconds"] for row in rows(tmp_path / "metrics.csv")] == ["1.00", "61.00"]


def test_a_row_can_be_read_while_the_job_runs(tmp_path: Path) -> None:
    with MetricsRecorder(tmp_path / "metrics.csv", 0.0) as recorder:
        recorder.record(snapshot(1.0, samples=7))
        assert rows(tmp_path / "metrics.csv")[0]["samples"] == "7"


def test_what_is_not_known_is_empty(tmp_path: Path) -> None:
    with MetricsRecorder(tmp_path / "metrics.csv", 0.0) as recorder:
        recorder.record(RunView(0.1, None, (), {}, (), False))
        recorder.record(snapshot(1.0, JobPhase.PREPARING))
        recorder.record(snapshot(2.0, samples=5, loss=float("nan"), auc=0.5))
    first, second = rows(tmp_path / "metrics.csv")
    assert (first["loss"], first["auc"], first["samples_per_second"], first["rows"]) == ("", "", "", "7")
    assert (second["loss"], second["auc"]) == ("", "0.500000")


@pytest.mark.parametrize("trained", [0, 1, 50])
def test_the_picture_is_drawn_however_far_the_job_got(tmp_path: Path, trained: int) -> None:
    metrics = tmp_path / "metrics.csv"
    with metrics.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for second in range(trained):
            writer.writerow([second, "Training", 0, second * 1000, 50_000, 0.5, 0.7, 10, 1e8, 2e8, 3e8, 1e7])
    draw_metrics(metrics, tmp_path / "metrics.png", "toy")
    height, width, _ = matplotlib.image.imread(tmp_path / "metrics.png").shape
    assert width > height > 500
