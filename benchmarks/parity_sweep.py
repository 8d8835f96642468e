"""What parity of parameter servers (PS) costs over one property of the job, as ECRM draws its overhead (section 4.3).

Pairs as in `parity.py`, at each value of what `--over` names. The picture has the CPU time of a sample with parity over
that without, beside the paper's numbers, and the microseconds of which it is the ratio.

* `dimension`: figure 4.5 has 128 (Criteo-Original) and 256 (Criteo-2S-2D, which also has twice the entries).
* `servers`: the paper has k of 2 and 4, both on 5 servers, and of 10 on twice as many. Here k is the number of servers
  less the parity, so with a greater k each server also has fewer rows.
* `workers`: figure 4.8 has 5 to 25 workers on 5 servers.
* `batch-size`, `parity`: always 2048 and 1 in the paper.
* `skew`: always that of Criteo Terabyte in the paper. Here it is the exponent of the power law of all ids.

The paper's numbers are not of the same measurement. They say how much longer training takes, where servers have cores
to spare, workers compute on GPU, and momentum keeps a float of state for each weight (row-wise Adagrad here: for each
row).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from emberscale_api.pictures import BLUE, GREEN, GREY, ORANGE, headline
from parity import ROLES, TARGET, WITH, WITHOUT, Runs, Setting, compare, parse, parser_of, totals
from reporting import Ratio, report

ORIGINAL = "ECRM, section 4.3: Criteo-Original, k = 4"
LARGEST = "ECRM, figure 4.5: Criteo-2S-2D, k = 4"


@dataclass(frozen=True)
class Published:
    """A number of the paper.

    `ratio` is training time with parity over that without, at a `value` of the axis; `source` says where it stands.
    """

    value: float
    ratio: float
    source: str


@dataclass(frozen=True)
class Variation:
    """The values that one `field` of a Setting takes, and what the paper says of them.

    `label` names the axis, which is logarithmic unless values are few or include 0. `values` are the usual ones.
    """

    field: str
    label: str
    values: tuple[float, ...]
    published: tuple[Published, ...] = ()
    is_logarithmic: bool = True

    def settings(self, base: Setting, values: tuple[float, ...] = ()) -> dict[float, Setting]:
        """Returns the setting for each of these values, or else of the usual ones."""
        changes: dict[float, dict[str, Any]] = {value: {self.field: value} for value in values or self.values}
        return {value: replace(base, **change) for value, change in changes.items()}


VARIATIONS = {
    "dimension": Variation(
        "dimension",
        "embedding dimension",
        (16, 32, 64, 128, 256),
        (Published(128, 1.026, ORIGINAL), Published(256, 1.042, LARGEST)),
    ),
    "servers": Variation(
        "servers",
        "parameter servers (k + 1)",
        (2, 3, 5, 11),
        (
            Published(3, 1.04, "ECRM, figure 4.5: Criteo-2S-2D, k = 2 and 4"),
            Published(5, 1.042, "ECRM, figure 4.5: Criteo-2S-2D, k = 2 and 4"),
            Published(11, 1.005, "ECRM, section 4.3: Criteo-Original scaled up, k = 10"),
        ),
    ),
    "workers": Variation(
        "workers",
        "workers",
        (1, 2, 5, 10),
        tuple(
            Published(workers, ratio, "ECRM, figure 4.8: 5 servers")
            for workers, ratio in ((5, 1.014), (15, 1.027), (25, 1.075))
        ),
    ),
    "batch-size": Variation(
        "batch_size", "batch size", (512, 1024, 2048, 4096, 8192), (Published(2048, 1.026, ORIGINAL),)
    ),
    "parity": Variation("parity", "parity (r)", (1, 2), (Published(1, 1.026, ORIGINAL),), is_logarithmic=False),
    "skew": Variation("skew", "exponent of the ids' power law", (0.0, 0.6, 0.9, 1.2, 1.5), is_logarithmic=False),
}


def draw(path: Path, variation: Variation, measured: Mapping[float, Runs]) -> None:
    """Draws the overhead over the values, and the CPU time that it is of."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    overhead, costs = figure.subplots(1, 2)
    _draw_overhead(overhead, variation, measured)
    _draw_costs(costs, measured)
    ticks = sorted({*measured, *(one.value for one in variation.published)})
    for axis, values in ((overhead, ticks), (costs, sorted(measured))):
        if variation.is_logarithmic:
            axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(variation.label)
    headline(figure, f"The cost of parity over {variation.label}")
    figure.savefig(path, dpi=120)


def _draw_overhead(axis: Axes, variation: Variation, measured: Mapping[float, Runs]) -> None:
    ratios = {value: [ours / without for ours, without in totals(runs)] for value, runs in measured.items()}
    medians = [median(found) for found in ratios.values()]
    axis.plot(list(ratios), medians, "o-", color=BLUE, label="here, median of the pairs")
    for value, found in ratios.items():
        axis.plot([value] * len(found), found, ".", color=BLUE, alpha=0.5)
    for source, marker in zip(dict.fromkeys(one.source for one in variation.published), "DsX", strict=False):
        points = [(one.value, one.ratio) for one in variation.published if one.source == source]
        axis.plot(*zip(*points, strict=True), marker, color=ORANGE, label=f"{source} (training time)")
    axis.axhline(TARGET, color=GREY, linestyle="--", label=f"target: {TARGET:g}")
    axis.axhline(1.0, color=GREY, linewidth=1)
    axis.set_ylim(bottom=min(1.0, *(min(found) for found in ratios.values())) - 0.02)
    axis.set_title("CPU time of a sample, with parity / without")
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.14), fontsize="small")


def _draw_costs(axis: Axes, measured: Mapping[float, Runs]) -> None:
    for role, color in zip(ROLES, (BLUE, GREEN), strict=True):
        for contender, line, fill in ((WITH, "o-", color), (WITHOUT, "o:", "white")):
            heights = [median(used[role] for used in runs[contender]) for runs in measured.values()]
            axis.plot(list(measured), heights, line, color=color, mfc=fill, label=f"{role}, {contender}")
    axis.set_ylim(bottom=0)
    axis.set_title("microseconds of CPU a sample, medians")
    axis.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2, fontsize="small")


def number(text: str) -> float:
    """Parses a value; counts stay integers."""
    return float(text) if "." in text else int(text)


def main() -> None:
    """Measures and reports."""
    parser = parser_of(__doc__)
    parser.add_argument("--over", choices=list(VARIATIONS), required=True, help="what to vary")
    parser.add_argument("--values", type=number, nargs="+", default=[], help="instead of the usual ones")
    options, base = parse(parser)
    variation = VARIATIONS[options.over]
    settings = variation.settings(base, tuple(sorted(options.values)))
    labels = {value: f"{options.over} {value:g}" for value in settings}
    found = compare({settings[value]: f"{label}, " for value, label in labels.items()}, options)
    measured = {value: found[setting] for value, setting in settings.items()}
    if options.plot:
        draw(options.plot, variation, measured)
    ratios = {f"CPU with parity / without, {labels[value]}": totals(runs) for value, runs in measured.items()}
    report("parity_sweep", {label: Ratio(pairs, TARGET, "max") for label, pairs in ratios.items()}, options.output)


if __name__ == "__main__":
    main()
