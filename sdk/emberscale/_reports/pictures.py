"""Pictures of runs, comparisons and plans."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from emberscale._reports.comparison import FinishedRun
from emberscale_api.pictures import BLUE, GREEN, GREY, ORANGE, PALETTE, STYLE, headline, say_instead
from emberscale_api.rpc import brain_pb2 as pb

_FEW_POINTS = 8
_MOST_MARKS = 12
"""Held-out marks of one run that do not cover each other."""

Series = list[tuple[float, float]]
"""(x, y) points."""


MetricRows = Sequence[dict[str, str]]
"""The rows of metrics.csv, by column."""


def read_metrics(metrics: Path) -> MetricRows:
    """Returns all rows of metrics.csv."""
    with metrics.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def over_time(rows: MetricRows, column: str, unit: float = 1.0) -> Series:
    """A column against the seconds since the start, wherever it is known."""
    return [(float(row["seconds"]), float(row[column]) * unit) for row in rows if row[column]]


def over_samples(rows: MetricRows, column: str) -> Series:
    """Returns a column against the samples, one point for each number; a roll-back goes back in the picture, too.

    A fast run may learn all of its last figures after its last batch, so other phases than training count as well.
    """
    points: Series = []
    for row in rows:
        if row[column] and row["samples"] != "0":
            point = (float(row["samples"]), float(row[column]))
            if not points or points[-1][0] != point[0]:
                points.append(point)
    return points


def held_out(evaluations: Sequence[Mapping[str, Any]], expected_samples: float, epochs: int, name: str) -> Series:
    """Returns the result of each epoch's evaluation, at the sample where the epoch ended."""
    return [
        (expected_samples * one["epoch"] / epochs, one[name])
        for one in evaluations
        if one[name] is not None and math.isfinite(one[name])
    ]


def over_training_time(points: Series, rows: MetricRows) -> Series:
    """Returns held-out results, which stand at samples, at the seconds of training when these were first reached."""
    begun = _training_began(rows)
    reached = (
        (next((row for row in rows if float(row["samples"]) >= samples), None), value) for samples, value in points
    )
    return [(float(row["seconds"]) - begun, value) for row, value in reached if row is not None]


def draw_curve(axes: Axes, points: Series, colour: str, label: str | None = None) -> None:
    """Draws a line, with markers if it has too few points to be visible."""
    x, y = [x for x, _ in points], [y for _, y in points]
    marker = "o" if len(points) < _FEW_POINTS else None
    axes.plot(x, y, color=colour, linewidth=1.8, label=label, marker=marker, markersize=4)


def draw_held_out(axes: Axes, points: Series, colour: str) -> None:
    """Draws held-out results as hollow diamonds, which no curve has; of many, some on a dotted line through all."""
    if not points:
        return  # a line of nothing that is not clipped has no place, and the layout none for it
    if len(points) > _MOST_MARKS:
        axes.plot([x for x, _ in points], [y for _, y in points], ":", color=colour, linewidth=1.2)
    marked = points[:: -math.ceil(len(points) / _MOST_MARKS)]
    axes.plot(
        [x for x, _ in marked],
        [y for _, y in marked],
        "D",
        color=colour,
        markerfacecolor="white",
        markeredgewidth=1.6,
        markersize=6,
        clip_on=False,
        zorder=3,
    )


def _thousands(value: float, _: int | None = None) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"


THOUSANDS = FuncFormatter(_thousands)
"""`20k` and `1.5M` on an axis."""


_TITLES = {
    "loss": "Training loss (recent window), \u25c7 held out",
    "auc": "Training AUC (recent window), \u25c7 held out",
    "samples_per_second": "Throughput, samples/s",
}
_HELD_OUT = {"loss": "logloss", "auc": "auc"}


def draw_comparison(runs: Sequence[FinishedRun], labels: Sequence[str], picture: Path) -> None:
    """Draws a line per run: loss, AUC and throughput over samples, and below over the seconds since training began."""
    with mpl.rc_context(STYLE):
        comparison_figure(runs, labels).savefig(picture, dpi=130)


def comparison_figure(runs: Sequence[FinishedRun], labels: Sequence[str]) -> Figure:
    """The picture before it is written."""
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    axes = figure.subplots(2, len(_TITLES))
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        rows = read_metrics(run.paths.metrics) if run.paths.metrics.exists() else []
        colour = PALETTE[number % len(PALETTE)]
        for column, name in enumerate(_TITLES):
            draw_curve(axes[0, column], over_samples(rows, name), colour, label)
            draw_curve(axes[1, column], _since_training(rows, name), colour, label)
            if name in _HELD_OUT:
                results = _held_out(run, _HELD_OUT[name])
                draw_held_out(axes[0, column], results, colour)
                draw_held_out(axes[1, column], over_training_time(results, rows), colour)
    for column, (name, title) in enumerate(_TITLES.items()):
        axes[0, column].set_title(title)
        axes[0, column].set_xlabel("samples")
        axes[0, column].xaxis.set_major_formatter(THOUSANDS)
        axes[1, column].set_xlabel("seconds of training")
        for axis in axes[:, column]:
            axis.set_xlim(left=0)
            if name == "samples_per_second":
                axis.set_ylim(bottom=0)
                axis.yaxis.set_major_formatter(THOUSANDS)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=min(4, len(runs)))
    return figure


def _held_out(run: FinishedRun, name: str) -> Series:
    epochs = run.manifest["spec"]["training"]["epochs"]
    return held_out(run.summary.get("evaluations", ()), run.summary["expected_samples"], epochs, name)


def _since_training(rows: MetricRows, column: str) -> Series:
    """Returns a column since training began, as reading and indexing the data is not compared."""
    begun = _training_began(rows)
    news = [row for row, before in zip(rows, [None, *rows], strict=False) if _is_news(row, before)]
    return [(seconds - begun, value) for seconds, value in over_time(news, column)]


def _training_began(rows: MetricRows) -> float:
    return next((float(row["seconds"]) for row in rows if row["phase"] == "Training"), 0.0)


def _is_news(row: Mapping[str, str], before: Mapping[str, str] | None) -> bool:
    """Whether anything was trained since the previous row."""
    return row["samples"] != ("0" if before is None else before["samples"])


def draw_metrics(
    metrics: Path,
    picture: Path,
    name: str,
    evaluations: Sequence[Mapping[str, Any]] = (),
    expected_samples: int = 0,
    epochs: int = 1,
) -> None:
    """Draws metrics.csv: throughput and memory over time, loss and AUC over samples.

    `evaluations` are those of the summary, with the samples of all `epochs` together.
    """
    rows = read_metrics(metrics)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2)
        headline(figure, name)
        _throughput(axes[0, 0], rows)
        _memory(axes[0, 1], rows)
        for axis, column, measured, title, colour in (
            (axes[1, 0], "loss", "logloss", "Training loss (recent window)", ORANGE),
            (axes[1, 1], "auc", "auc", "Training AUC (recent window)", GREEN),
        ):
            points = held_out(evaluations, expected_samples, epochs, measured)
            _curve(axis, over_samples(rows, column), points, title, colour)
        figure.savefig(picture, dpi=140)


def _throughput(axes: Axes, rows: MetricRows) -> None:
    points = over_time(rows, "samples_per_second")
    axes.set_title("Throughput")
    _fill(axes, points, BLUE)
    _whole_run(axes, rows)
    axes.set_xlabel("seconds")
    axes.set_ylabel("samples/s")
    axes.yaxis.set_major_formatter(THOUSANDS)


def _memory(axes: Axes, rows: MetricRows) -> None:
    axes.set_title("Resident memory")
    colours = {"worker": BLUE, "ps": ORANGE, "master": GREEN, "redis": GREY}
    names = {"worker": "workers", "ps": "PS", "master": "master", "redis": "Redis"}
    layers = [over_time(rows, f"{role}_memory_bytes", 2**-30) for role in colours]
    if layers[0]:
        axes.stackplot(
            [x for x, _ in layers[0]],
            [[y for _, y in layer] for layer in layers],
            labels=[names[role] for role in colours],
            colors=list(colours.values()),
            alpha=0.85,
            linewidth=0,
        )
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=8, columnspacing=1.0, handlelength=1.0
        )
    _whole_run(axes, rows)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")


def _curve(axes: Axes, points: Series, evaluated: Series, title: str, colour: str) -> None:
    axes.set_title(f"{title}, \u25c7 held out" if evaluated else title)
    if not points and not evaluated:
        say_instead(axes, "no batch was trained")
        return
    draw_curve(axes, points, colour)
    draw_held_out(axes, evaluated, colour)
    if points:
        _value(axes, points[-1], colour, above=not evaluated or points[-1][1] >= evaluated[-1][1])
    if evaluated:
        _value(axes, evaluated[-1], colour, above=not points or evaluated[-1][1] > points[-1][1])
    axes.margins(y=0.2)
    axes.set_xlim(left=0)
    axes.set_xlabel("samples")
    axes.xaxis.set_major_formatter(THOUSANDS)


def _value(axes: Axes, point: tuple[float, float], colour: str, above: bool) -> None:
    axes.annotate(
        f"{point[1]:.4f}",
        point,
        xytext=(4, 9 if above else -17),
        textcoords="offset points",
        ha="right",
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )


def _whole_run(axes: Axes, rows: MetricRows) -> None:
    """Gives all plots over time the same range."""
    if rows:
        axes.set_xlim(0.0, max(float(rows[-1]["seconds"]), 1.0))


def _fill(axes: Axes, points: Series, colour: str) -> None:
    x, y = [x for x, _ in points], [y for _, y in points]
    axes.plot(x, y, color=colour, linewidth=2)
    axes.fill_between(x, y, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)


def draw_plan(explanation: pb.PlanExplanation, picture: Path) -> None:
    """Predicted against measured throughput, and the Pareto front with the present and the chosen shape."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}):
        plan_figure(explanation).savefig(picture, dpi=140)


def plan_figure(explanation: pb.PlanExplanation) -> Figure:
    """The picture before it is written."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    fit, front = figure.subplots(1, 2)
    _draw_fit(fit, explanation)
    _draw_front(front, explanation)
    return figure


def _draw_fit(axes: Axes, explanation: pb.PlanExplanation) -> None:
    axes.set(title="What the model says of what was measured", xlabel="measured samples/s")
    axes.set_ylabel("predicted samples/s")
    if not explanation.measured:
        say_instead(axes, "nothing is measured yet:\nthe shapes are those of similar jobs")
        return
    shapes: dict[str, tuple[list[float], list[float]]] = {}
    for point in explanation.measured:
        shape = point.profile.shape
        name = f"{shape.workers} x {shape.worker_cpu:g}, {shape.ps} PS x {shape.ps_cpu:g}"
        measured, predicted = shapes.setdefault(name, ([], []))
        measured.append(point.profile.throughput)
        predicted.append(point.predicted)
    colours = mpl.colormaps["tab10"]
    for number, (name, (measured, predicted)) in enumerate(shapes.items()):
        axes.scatter(measured, predicted, color=colours(number % 10), alpha=0.6, label=name)
    top = 1.05 * max(max(max(measured), max(predicted)) for measured, predicted in shapes.values())
    axes.plot([0, top], [0, top], color=GREY, linewidth=1, zorder=0)
    axes.set(xlim=(0, top), ylim=(0, top))
    if len(shapes) <= 10:
        axes.legend(frameon=False, fontsize="small", title="workers x cores")


def _draw_front(axes: Axes, explanation: pb.PlanExplanation) -> None:
    axes.set(title="The cheapest shape for each throughput", xlabel="cost per hour", ylabel="predicted samples/s")
    points = explanation.front
    if not points and not explanation.HasField("present") and not explanation.HasField("chosen"):
        say_instead(axes, "no shapes were compared:\nwithout a measurement there is no model of the job")
        return
    if points:
        cost, speed = [point.cost_per_hour for point in points], [point.throughput for point in points]
        doubt = [1.645 * point.uncertainty for point in points]
        low = [one * max(0.0, 1 - share) for one, share in zip(speed, doubt, strict=True)]
        high = [one * (1 + share) for one, share in zip(speed, doubt, strict=True)]
        axes.fill_between(cost, low, high, color=BLUE, alpha=0.15, linewidth=0, label="90% interval")
        axes.plot(cost, speed, ".-", color=BLUE)
    for name, colour, size in (("present", ORANGE, 90), ("chosen", GREEN, 40)):
        if explanation.HasField(name):  # type: ignore[arg-type]  # the stubs want a literal
            point = getattr(explanation, name)
            axes.scatter([point.cost_per_hour], [point.throughput], color=colour, s=size, label=name, zorder=3)
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right")
