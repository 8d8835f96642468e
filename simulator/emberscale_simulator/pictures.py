"""Draws a comparison: completion times, utilization, and the speed of single jobs over time."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from emberscale_api.pictures import PALETTE, STYLE, headline
from emberscale_simulator.results import Estimate, SchedulerSummary, SeedOutcome

_MOST_LINES = 4
_NARROWEST, _WIDEST = 1.5, 5.0
_LEGEND_COLUMNS = 4


def draw_comparison(
    name: str, summaries: Sequence[SchedulerSummary], outcomes: Sequence[SeedOutcome], folder: Path
) -> list[Path]:
    """Writes `jct.png`, `utilization.png` and, where timelines were kept, `throughput.png`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = {summary.scheduler: PALETTE[place % len(PALETTE)] for place, summary in enumerate(summaries)}
    pictures = []
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        headline(figure, name)
        _bars(left, [(s.scheduler, _minutes(s.jct)) for s in summaries], colours)
        bounded = any(math.isfinite(summary.jct.half_width) for summary in summaries)
        left.set_title("Mean job completion time" + (" (95% interval)" if bounded else ""))
        left.set_ylabel("minutes")
        _distributions(right, outcomes, colours)
        figure.legend(
            *right.get_legend_handles_labels(), loc="outside lower center", ncols=min(_LEGEND_COLUMNS, len(summaries))
        )
        pictures.append(_save(figure, folder / "jct.png"))

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        axes = figure.subplots(1, 3)
        headline(figure, name)
        for place, (title, key) in enumerate(
            (
                ("Workers' CPU utilization", "worker_cpu_utilization"),
                ("PS' CPU utilization", "ps_cpu_utilization"),
                ("Memory utilization", "memory_utilization"),
            )
        ):
            _bars(axes[place], [(s.scheduler, getattr(s, key)) for s in summaries], colours)
            axes[place].set_title(title)
            axes[place].set_ylim(0, 1)
        pictures.append(_save(figure, folder / "utilization.png"))

        first = [outcome for outcome in outcomes if outcome.seed == outcomes[0].seed]
        if any(job.timeline for outcome in first for job in outcome.jobs):
            pictures.append(_save(_throughput(name, first, colours), folder / "throughput.png"))
    return pictures


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=140)
    return path


def _minutes(estimate: Estimate) -> Estimate:
    return Estimate(estimate.mean / 60, estimate.half_width / 60)


def _bars(axes: Axes, bars: Sequence[tuple[str, Estimate]], colours: dict[str, str]) -> None:
    places = np.arange(len(bars))
    means = [0.0 if math.isnan(value.mean) else value.mean for _, value in bars]
    errors = [value.half_width if math.isfinite(value.half_width) else math.nan for _, value in bars]
    axes.bar(places, means, yerr=errors, capsize=4, color=[colours[label] for label, _ in bars])
    axes.set_xticks(places, [label for label, _ in bars], rotation=25, ha="right")


def _distributions(axes: Axes, outcomes: Sequence[SeedOutcome], colours: dict[str, str]) -> None:
    axes.set_title("Completion times of all jobs")
    for (scheduler, colour), width in zip(colours.items(), _widths(len(colours)), strict=True):
        times = np.sort([jct for o in outcomes if o.scheduler == scheduler for jct in o.completed_jcts]) / 60
        submitted = sum(len(outcome.jobs) for outcome in outcomes if outcome.scheduler == scheduler)
        if len(times):
            share = np.arange(1, len(times) + 1) / submitted
            axes.plot(times, share, label=scheduler, color=colour, linewidth=width)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("minutes")
    axes.set_ylabel("share of submitted jobs")
    axes.set_ylim(0, 1)


def _widths(count: int) -> list[float]:
    """Returns line widths in points, the first scheduler's the widest, so that a line on top of another hides none."""
    return [float(width) for width in np.linspace(_WIDEST if count > 1 else _NARROWEST, _NARROWEST, count)]


def _throughput(name: str, outcomes: Sequence[SeedOutcome], colours: dict[str, str]) -> Figure:
    jobs = [job.job for job in outcomes[0].jobs][:_MOST_LINES]
    figure = Figure(figsize=(11, 3 * len(jobs)), layout="constrained")
    headline(figure, name)
    subplots = figure.subplots(len(jobs), 1, squeeze=False)[:, 0]
    for axes, wanted in zip(subplots, jobs, strict=True):
        axes.set_title(f"{wanted}, seed {outcomes[0].seed}")
        for outcome, width in zip(outcomes, _widths(len(outcomes)), strict=True):
            job = next(job for job in outcome.jobs if job.job == wanted)
            if job.timeline:
                minutes = [(at - job.arrival) / 60 for at, _ in job.timeline]
                speeds = [speed for _, speed in job.timeline]
                axes.step(
                    minutes,
                    speeds,
                    where="post",
                    label=outcome.scheduler,
                    color=colours[outcome.scheduler],
                    linewidth=width,
                )
        axes.set_xlabel("minutes since submission")
        axes.set_ylabel("samples/s")
    figure.legend(
        *subplots[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(_LEGEND_COLUMNS, len(outcomes))
    )
    return figure
