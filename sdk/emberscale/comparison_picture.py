"""Runs over each other: what they learned and how fast, against samples and against time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from emberscale.charts import STYLE, THOUSANDS, MetricRows, Series, over_samples, over_time, read_metrics
from emberscale.comparison import FinishedRun

_COLOURS = ("#2f6db5", "#d9722e", "#3a8f5c", "#8456a6", "#b3393e", "#5b6472", "#c29a1f", "#2b9aa8")
_TITLES = {
    "loss": "Training loss (recent window)",
    "auc": "Training AUC (recent window), o held out",
    "samples_per_second": "Throughput, samples/s",
}


def draw_comparison(runs: Sequence[FinishedRun], labels: Sequence[str], picture: Path) -> None:
    """One line a run: loss, AUC and throughput over samples, and below over the seconds since training began."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 7.5), layout="constrained")
        axes = figure.subplots(2, len(_TITLES))
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            rows = read_metrics(run.paths.metrics) if run.paths.metrics.exists() else []
            colour = _COLOURS[number % len(_COLOURS)]
            for column, name in enumerate(_TITLES):
                _line(axes[0, column], over_samples(rows, name), colour, label)
                _line(axes[1, column], _since_training(rows, name), colour, label)
            _held_out(axes[0, list(_TITLES).index("auc")], run, colour)
        for column, (name, title) in enumerate(_TITLES.items()):
            axes[0, column].set_title(title)
            axes[0, column].set_xlabel("samples")
            axes[0, column].xaxis.set_major_formatter(THOUSANDS)
            axes[1, column].set_xlabel("seconds of training")
            if name == "samples_per_second":
                for axis in axes[:, column]:
                    axis.set_ylim(bottom=0)
                    axis.yaxis.set_major_formatter(THOUSANDS)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=min(4, len(runs)))
        figure.savefig(picture, dpi=130)


def _line(axes: Axes, points: Series, colour: str, label: str) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, linewidth=1.8, label=label)


def _held_out(axes: Axes, run: FinishedRun, colour: str) -> None:
    epochs = run.manifest["spec"]["training"]["epochs"]
    points = [
        (run.summary["expected_samples"] * (evaluation["epoch"] + 1) / epochs, evaluation["auc"])
        for evaluation in run.summary.get("evaluations", ())
        if evaluation["auc"] is not None
    ]
    axes.plot([x for x, _ in points], [y for _, y in points], "o", color=colour, markersize=6, clip_on=False)


def _since_training(rows: MetricRows, column: str) -> Series:
    """Reading and indexing the data is no part of what is compared."""
    training = [row for row in rows if row["phase"] == "Training"]
    points = over_time(training, column)
    begun = float(training[0]["seconds"]) if training else 0.0
    return [(seconds - begun, value) for seconds, value in points]
