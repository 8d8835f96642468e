"""Runs over each other: what they learned and how fast, against samples and against time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from emberscale._reports.charts import (
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
from emberscale._reports.comparison import FinishedRun

_COLOURS = ("#2f6db5", "#d9722e", "#3a8f5c", "#8456a6", "#b3393e", "#5b6472", "#c29a1f", "#2b9aa8")
_TITLES = {
    "loss": "Training loss (recent window), \u25c7 held out",
    "auc": "Training AUC (recent window), \u25c7 held out",
    "samples_per_second": "Throughput, samples/s",
}
_HELD_OUT = {"loss": "logloss", "auc": "auc"}


def draw_comparison(runs: Sequence[FinishedRun], labels: Sequence[str], picture: Path) -> None:
    """One line a run: loss, AUC and throughput over samples, and below over the seconds since training began."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(14, 7.5), layout="constrained")
        axes = figure.subplots(2, len(_TITLES))
        for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
            rows = read_metrics(run.paths.metrics) if run.paths.metrics.exists() else []
            colour = _COLOURS[number % len(_COLOURS)]
            for column, name in enumerate(_TITLES):
                draw_curve(axes[0, column], over_samples(rows, name), colour, label)
                draw_curve(axes[1, column], _since_training(rows, name), colour, label)
                if name in _HELD_OUT:
                    draw_held_out(axes[0, column], _held_out(run, _HELD_OUT[name]), colour)
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
        figure.savefig(picture, dpi=130)


def _held_out(run: FinishedRun, name: str) -> Series:
    epochs = run.manifest["spec"]["training"]["epochs"]
    return held_out(run.summary.get("evaluations", ()), run.summary["expected_samples"], epochs, name)


def _since_training(rows: MetricRows, column: str) -> Series:
    """Reading and indexing the data is no part of what is compared."""
    begun = next((float(row["seconds"]) for row in rows if row["phase"] == "Training"), 0.0)
    news = [row for row, before in zip(rows, [None, *rows], strict=False) if _is_news(row, before)]
    return [(seconds - begun, value) for seconds, value in over_time(news, column)]


def _is_news(row: Mapping[str, str], before: Mapping[str, str] | None) -> bool:
    """Whether anything was trained since the row before."""
    return row["samples"] != ("0" if before is None else before["samples"])
