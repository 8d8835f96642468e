"""How all pictures look, and what they read from metrics.csv."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """One point for every number of samples seen; training that was rolled back goes back in the picture too."""
    return [(float(row["samples"]), float(row[column])) for row in rows if row[column] and row["phase"] == "Training"]


def _thousands(value: float, _: int | None = None) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"


THOUSANDS = FuncFormatter(_thousands)
"""`20k` and `1.5M` on an axis."""
