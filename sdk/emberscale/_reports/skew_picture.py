"""The picture of `emberscale data skew`: accesses over rows, and the benefit of each budget for hot rows."""

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from emberscale_api.job import memory_quantity
from emberscale_api.pictures import BLUE, GREEN, GREY, LIGHT_GREY, ORANGE, PALETTE, PURPLE, STYLE, subject

if TYPE_CHECKING:
    from emberscale_trainer.hot.skew import SkewReport

_NAMED_TABLES = len(PALETTE)


def draw_skew(report: "SkewReport", picture: Path) -> None:
    """Draws the report into a file, whose ending chooses the format. Raises OSError."""
    with mpl.rc_context(STYLE):
        skew_figure(report).savefig(picture, dpi=130)


def skew_figure(report: "SkewReport") -> Figure:
    """The picture before it is written."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    accesses, size, shares, wire = figure.subplots(2, 2).flat
    subject(
        figure,
        f"{report.records:,} records, {report.share:.1%} of them counted; batches of {report.batch_size:,}, "
        f"{report.workers} workers",
    )
    _accesses(accesses, report)
    _sizes(size, report)
    _shares(shares, report)
    _wire(wire, report)
    return figure


def _accesses(axes: Axes, report: "SkewReport") -> None:
    """Draws the accesses of each table by rank. Only the largest have a colour and a name: few can be told apart."""
    falling = sorted(report.tables, key=lambda table: -table.rows)
    for number, table in enumerate(falling):
        named = number < _NAMED_TABLES
        axes.loglog(
            [rank for rank, _ in table.curve],
            [count for _, count in table.curve],
            color=PALETTE[number] if named else LIGHT_GREY,
            linewidth=1.6 if named else 0.8,
            label=table.name if named else None,
            marker="o" if len(table.curve) == 1 else None,
            zorder=2 if named else 1,
        )
    axes.set_title("Accesses to each row, from the sample")
    axes.set_xlabel("rows by falling accesses")
    axes.set_ylabel("accesses in all records")
    axes.legend(fontsize=8, ncols=2)


def _places(axes: Axes, report: "SkewReport") -> list[int]:
    places = list(range(len(report.budgets)))
    axes.set_xticks(places, [memory_quantity(point.budget) for point in report.budgets])
    axes.set_xlabel("budget for hot rows")
    return places


def _sizes(axes: Axes, report: "SkewReport") -> None:
    places = _places(axes, report)
    points = report.budgets
    axes.errorbar(
        places,
        [point.estimated_rows for point in points],
        yerr=[point.estimated_half_width for point in points],
        color=BLUE,
        marker="o",
        capsize=4,
        label="estimated from chunks, 99.9% interval",
    )
    if all(point.exact is not None for point in points):
        counted = [point.exact.rows_at_threshold for point in points if point.exact is not None]
        axes.plot(places, counted, "D", color=ORANGE, markerfacecolor="white", label="counted in a full pass")
    axes.set_title("Rows above the threshold, in tables that are not hot as a whole")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _shares(axes: Axes, report: "SkewReport") -> None:
    places = _places(axes, report)
    points = report.budgets
    axes.plot(places, [point.access_share for point in points], color=BLUE, marker="o", label="accesses to hot rows")
    axes.plot(places, [point.hot_share for point in points], color=GREEN, marker="o", label="all-hot samples")
    if all(point.exact is not None for point in points):
        best = [point.exact.best_hot_share for point in points if point.exact is not None]
        axes.plot(places, best, "--", color=GREEN, label="all-hot samples, if all records were counted")
    axes.set_title("Share of accesses, and of samples")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(fontsize=8)


def _wire(axes: Axes, report: "SkewReport") -> None:
    places = _places(axes, report)
    width = 0.38
    for number, point in enumerate(report.budgets):
        traffic = point.traffic
        for place, parts in (
            (number - width / 2, (traffic.cold, 0.0, traffic.swapped_shared)),
            (number + width / 2, (traffic.cold, traffic.exchanged, traffic.swapped_copies)),
        ):
            bottom = 0.0
            for height, colour in zip(parts, (BLUE, ORANGE, PURPLE), strict=True):
                axes.bar(place, height, bottom=bottom, width=width * 0.92, color=colour)
                bottom += height
    for colour, label in ((BLUE, "cold batches"), (ORANGE, "steps between copies"), (PURPLE, "hot rows at swaps")):
        axes.bar(0, 0, color=colour, label=label)
    axes.axhline(report.row_bytes_per_sample, color=GREY, linestyle="--", label="without hot rows")
    axes.set_title("Bytes of rows a sample: one copy (left), one a worker (right)")
    axes.set_xlim(-0.6, places[-1] + 0.6)
    axes.margins(y=0.2)
    axes.legend(fontsize=8, ncols=2, loc="upper left")
