"""metrics.png: a run at a glance."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

_BLUE, _ORANGE, _GREEN, _GREY = "#2f6db5", "#d9722e", "#3a8f5c", "#8a8f98"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b5bac2",
    "axes.grid": True,
    "grid.color": "#e6e8ec",
    "axes.axisbelow": True,
    "legend.frameon": False,
}

Series = list[tuple[float, float]]
"""(x, y) points."""


def draw_metrics(metrics: Path, picture: Path, name: str) -> None:
    """Draws metrics.csv: throughput and memory over time, loss and AUC over samples."""
    with metrics.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2)
        figure.suptitle(name, x=0.01, ha="left", fontsize=14, fontweight="bold")
        _throughput(axes[0, 0], rows)
        _memory(axes[0, 1], rows)
        _curve(axes[1, 0], _over_samples(rows, "loss"), "Training loss (recent window)", _ORANGE)
        _curve(axes[1, 1], _over_samples(rows, "auc"), "Training AUC (recent window)", _GREEN)
        figure.savefig(picture, dpi=140)


def _throughput(axes: Axes, rows: Sequence[dict[str, str]]) -> None:
    points = _over_time(rows, "samples_per_second", 1.0)
    axes.set_title("Throughput")
    _fill(axes, points, _BLUE)
    _whole_run(axes, rows)
    axes.set_xlabel("seconds")
    axes.set_ylabel("samples/s")
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))


def _memory(axes: Axes, rows: Sequence[dict[str, str]]) -> None:
    axes.set_title("Resident memory")
    colours = {"worker": _BLUE, "ps": _ORANGE, "master": _GREEN, "redis": _GREY}
    names = {"worker": "workers", "ps": "PS", "master": "master", "redis": "Redis"}
    layers = [_over_time(rows, f"{role}_memory_bytes", 2**-30) for role in colours]
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


def _curve(axes: Axes, points: Series, title: str, colour: str) -> None:
    axes.set_title(title)
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=2)
    if points:
        x, y = points[-1]
        axes.plot([x], [y], "o", color=colour, markersize=5)
        axes.annotate(f"{y:.4f}", (x, y), xytext=(-4, 8), textcoords="offset points", ha="right", color=colour)
    axes.margins(y=0.15)
    axes.set_xlabel("samples")
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))


def _whole_run(axes: Axes, rows: Sequence[dict[str, str]]) -> None:
    """All pictures over time show the same time."""
    if rows:
        axes.set_xlim(0.0, max(float(rows[-1]["seconds"]), 1.0))


def _fill(axes: Axes, points: Series, colour: str) -> None:
    x, y = [x for x, _ in points], [y for _, y in points]
    axes.plot(x, y, color=colour, linewidth=2)
    axes.fill_between(x, y, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)


def _over_time(rows: Sequence[dict[str, str]], column: str, unit: float) -> Series:
    return [(float(row["seconds"]), float(row[column]) * unit) for row in rows if row[column]]


def _over_samples(rows: Sequence[dict[str, str]], column: str) -> Series:
    """One point for every number of samples seen; training that was rolled back goes back in the picture too."""
    points: Series = []
    for row in rows:
        if row[column] and row["phase"] == "Training":
            points.append((float(row["samples"]), float(row[column])))
    return points


def _thousands(value: float, _: int | None = None) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"
