"""metrics.png: a run at a glance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emberscale._reports.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    STYLE,
    THOUSANDS,
    MetricRows,
    Series,
    draw_curve,
    draw_held_out,
    held_out,
    over_samples,
    over_time,
    read_metrics,
)


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
        figure.suptitle(name, x=0.01, ha="left", fontsize=14, fontweight="bold")
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
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no batch was trained", ha="center", va="center", transform=axes.transAxes, color=GREY)
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
    """All pictures over time show the same time."""
    if rows:
        axes.set_xlim(0.0, max(float(rows[-1]["seconds"]), 1.0))


def _fill(axes: Axes, points: Series, colour: str) -> None:
    x, y = [x for x, _ in points], [y for _, y in points]
    axes.plot(x, y, color=colour, linewidth=2)
    axes.fill_between(x, y, color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
