"""How all pictures look, and what they read from metrics.csv."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9722e", "#3a8f5c", "#8a8f98"
STYLE: dict[Any, Any] = {
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

_FEW_POINTS = 8

Series = list[tuple[float, float]]
"""(x, y) points."""


MetricRows = Sequence[dict[str, str]]
"""The rows of metrics.csv, by column."""


def read_metrics(metrics: Path) -> MetricRows:
    """All rows of metrics.csv."""
    with metrics.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def over_time(rows: MetricRows, column: str, unit: float = 1.0) -> Series:
    """A column against the seconds since the start, wherever it is known."""
    return [(float(row["seconds"]), float(row[column]) * unit) for row in rows if row[column]]


def over_samples(rows: MetricRows, column: str) -> Series:
    """One point for every number of samples seen; training that was rolled back goes back in the picture too.

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
    """What the evaluation after each epoch measured, where the epoch ended."""
    return [
        (expected_samples * one["epoch"] / epochs, one[name])
        for one in evaluations
        if one[name] is not None and math.isfinite(one[name])
    ]


def draw_curve(axes: Axes, points: Series, colour: str, label: str | None = None) -> None:
    """A line, with marks where it has so few points that there may be no line to see."""
    x, y = [x for x, _ in points], [y for _, y in points]
    marker = "o" if len(points) < _FEW_POINTS else None
    axes.plot(x, y, color=colour, linewidth=1.8, label=label, marker=marker, markersize=4)


def draw_held_out(axes: Axes, points: Series, colour: str) -> None:
    """Hollow diamonds, which no curve has."""
    if not points:
        return  # a line of nothing that is not clipped has no place, and the layout none for it
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
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
