"""Pictures: curves of fast runs, held-out values, labels that do not overlap, and words in the place of empty axes."""

import csv
from collections.abc import Mapping
from io import BytesIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from emberscale._profiling.job_profile import Roof, TimeBreakdown
from emberscale._profiling.picture import profile_figure
from emberscale._reports.comparison import FinishedRun
from emberscale._reports.pictures import (
    comparison_figure,
    draw_held_out,
    draw_metrics,
    held_out,
    over_samples,
    plan_figure,
    read_metrics,
)
from emberscale._run.metrics import COLUMNS
from emberscale._run.record import RunPaths
from emberscale_api.rpc import brain_pb2 as pb


def metrics(path: Path, *rows: tuple[str, int, float | str]) -> Path:
    """Writes a metrics.csv from rows of (phase, samples, loss)."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for second, (phase, samples, loss) in enumerate(rows):
            known: Mapping[str, object] = {"seconds": second, "phase": phase, "samples": samples, "loss": loss}
            writer.writerow(known.get(column, "") for column in COLUMNS)
    return path


def test_a_run_that_trains_between_two_looks_has_a_curve(tmp_path: Path) -> None:
    looked = metrics(
        tmp_path / "metrics.csv",
        ("Pending", 0, ""),
        ("Training", 0, ""),
        ("Training", 2000, 0.6),
        ("Evaluating", 4000, 0.5),
        ("Saving", 4000, 0.5),
        ("Complete", 4000, 0.5),
    )
    assert over_samples(read_metrics(looked), "loss") == [(2000.0, 0.6), (4000.0, 0.5)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", [[], [("Failed", 0, "")], [("Pending", 0, ""), ("Failed", 0, "")]])
def test_a_run_that_trained_nothing_has_a_picture_that_says_so(
    rows: list[tuple[str, int, str]], tmp_path: Path
) -> None:
    draw_metrics(metrics(tmp_path / "metrics.csv", *rows), tmp_path / "metrics.png", "toy")
    assert (tmp_path / "metrics.png").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [0.5, ""])
def test_a_run_without_evaluation_is_drawn_without_a_warning(tmp_path: Path, loss: float | str) -> None:
    looked = metrics(tmp_path / "metrics.csv", ("Pending", 0, ""), ("Training", 2000, loss), ("Failed", 3000, loss))
    draw_metrics(looked, tmp_path / "metrics.png", "toy")
    assert (tmp_path / "metrics.png").stat().st_size


def test_held_out_values_stand_where_their_epochs_end() -> None:
    evaluations: list[dict[str, Any]] = [
        {"epoch": 1, "auc": 0.7},
        {"epoch": 2, "auc": None},
        {"epoch": 3, "auc": float("nan")},
    ]
    assert held_out(evaluations, 9000, 3, "auc") == [(3000.0, 0.7)]


def drawn(line: Line2D) -> list[tuple[float, float]]:
    x, y = (np.asarray(values, float).tolist() for values in line.get_data())
    return list(zip(x, y, strict=True))


def test_few_of_many_held_out_values_are_marked_and_the_last_always() -> None:
    axes = Figure().subplots()
    points = [(float(number), 1 / number) for number in range(1, 61)]
    draw_held_out(axes, points, "black")
    line, marks = axes.lines
    assert drawn(line) == points
    assert len(drawn(marks)) == 12
    assert points[-1] in drawn(marks)
    axes = Figure().subplots()
    draw_held_out(axes, points[:12], "black")
    (marks,) = axes.lines
    assert len(drawn(marks)) == 12


def test_a_comparison_has_held_out_values_over_samples_and_over_time(tmp_path: Path) -> None:
    """Training began in the first second, and the epochs ended in the second and the fourth."""
    metrics(
        tmp_path / "metrics.csv",
        ("Pending", 0, ""),
        ("Training", 0, ""),
        ("Evaluating", 2000, 0.6),
        ("Training", 3000, 0.5),
        ("Evaluating", 4000, 0.4),
        ("Complete", 4000, 0.4),
    )
    evaluations = [{"epoch": epoch, "auc": 0.7, "logloss": 0.5} for epoch in (1, 2)]
    summary = {"evaluations": evaluations, "expected_samples": 4000}
    run = FinishedRun(RunPaths(tmp_path), "toy", {"spec": {"training": {"epochs": 2}}}, {}, summary)
    figure = comparison_figure([run], ["toy"])

    marks = [[x for line in axes.lines if line.get_marker() == "D" for x, _ in drawn(line)] for axes in figure.axes]
    assert marks == [[4000, 2000], [4000, 2000], [], [3, 1], [3, 1], []]


def profile(read: float, plan: float, wait: float, gather: float) -> TimeBreakdown:
    rest = 1 - wait - 0.04
    stages = {"read": read, "plan": plan, "pull": 0.1, "wait_read": 0.02, "wait_pull": 0.02, "wait": wait, "push": 0.03}
    return TimeBreakdown(
        name="a-job-whose-name-has-as-many-characters-as-are-allowed",
        samples=1000,
        batches=1,
        seconds=1.0,
        workers=2,
        servers=2,
        worker_stages={**stages, "compute": rest},
        server_stages={"gather": gather, "update": 0.04, "idle": 0.96 - gather},
        hold_seconds=0.0,
        received_bytes_per_sample=123_456,
        sent_bytes_per_sample=123_456,
        ids_per_key=4.0,
        cpu_seconds={"worker-0": 0.08, "ps-0": 0.02, "master-0": 0.01, "redis-0": 0.001},
        roof=Roof(40_000, 6e-6, 2),
    )


def overlapping(axes: Axes) -> list[tuple[str, str]]:
    """Returns the pairs of labels of a drawn figure that overlap."""
    labels = [text for text in axes.texts if text.get_text()]
    boxes = {text.get_text(): text.get_window_extent() for text in labels}
    return [(one, other) for one, other in combinations(boxes, 2) if boxes[one].overlaps(boxes[other])]


@pytest.mark.parametrize(
    "shares", [(0.11, 0.08, 0.2, 0.02), (0.08, 0.078, 0.076, 0.1), (0.01, 0.01, 0.9, 0.01), (0.4, 0.5, 0.08, 0.5)]
)
def test_the_labels_of_a_profile_stay_apart(shares: tuple[float, float, float, float]) -> None:
    figure = profile_figure(profile(*shares))
    figure.savefig(BytesIO())
    lanes = figure.axes[0]
    assert overlapping(lanes) == []
    shown = " ".join(text.get_text() for text in lanes.texts)
    assert all(stage in shown for stage in ("read", "plan", "wait_read", "gather", "idle"))


def test_a_plan_without_measurements_says_so_in_the_place_of_empty_axes() -> None:
    figure = plan_figure(pb.PlanExplanation())
    assert figure.axes
    for axes in figure.axes:
        assert not axes.axison
        assert any(text.get_text() for text in axes.texts)
