"""metrics.png: a run at a glance."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emberscale.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    STYLE,
    THOUSANDS,
    MetricRows,
    Series,
    over_samples,
    over_time,
    read_metrics,
)


def draw_metrics(metrics: Path, picture: Path, name: str) -> None:
    """Draws metrics.csv: throughput and memory over time, loss and AUC over samples."""
    rows = read_metrics(metrics)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2)
        figure.suptitle(name, x=0.01, ha="left", fontsize=14, fontweight="bold")
        _throughput(axes[0, 0], rows)
        _memory(axes[0, 1], rows)
        _curve(axes[1, 0], over_samples(rows, "loss"), "Training loss (recent window)", ORANGE)
        _curve(axes[1, 1], over_samples(rows, "auc"), "Training AUC (recent window)", GREEN)
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


def _curve(axes: Axes, points: Series, title: str, colour: str) -> None:
    axes.set_title(title)
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=2)
    if points:
        x, y = points[-1]
        axes.plot([x], [y], "o", color=colour, markersize=5)
        axes.annotate(f"{y:.4f}", (x, y), xytext=(-4, 8), textcoords="offset points", ha="right", color=colour)
    axes.margins(y=0.15)
    axes.set_xlabel("samples")
    axes.xaxis.set_major_formatter(THOUSANDS)


def _whole_run(axes: Axes, rows: MetricRows) -> None:
    """All pictures over time show the same time."""
    if rows:
        axes.set_xlim(0.0, max(float(rows[-1]["seconds"]), 1.0))


def _fill(axes: Axes, points: Series, colour: str) -> None:
    x, y = [x for x, _ in points], [y for _, y in points]
    axes.plot(x, y, color=colour, linewidth=2)
    axes.fill_between(x, y, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
