"""Reports of benchmarks: readable text and a picture, or one JSON object as the last thing on stdout."""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from cycler import cycler

from emberscale_api.pictures import PALETTE, STYLE

# pictures of benchmarks look as those of the product do
mpl.rcParams.update({**STYLE, "axes.prop_cycle": cycler(color=PALETTE)})


@dataclass(frozen=True, slots=True)
class Ratio:
    """Pairs of (ours, reference); their median quotient must be at least ("min") or at most ("max") the target."""

    pairs: Sequence[tuple[float, float]]
    target: float
    direction: Literal["min", "max"]

    @property
    def median(self) -> float:
        """The median of ours / reference."""
        return statistics.median(ours / reference for ours, reference in self.pairs)

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.median >= self.target if self.direction == "min" else self.median <= self.target


def arguments(description: str, plot: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; the targets are the same")
    if plot:
        parser.add_argument("--plot", type=Path, help="where to write a picture (PNG)")
    return parser


def say(text: str) -> None:
    """Prints progress and readable results to stderr; stdout stays free for JSON."""
    print(text, file=sys.stderr, flush=True)


def report(name: str, ratios: Mapping[str, Ratio], output: str) -> None:
    """Prints the ratios as text or, last on stdout, as JSON."""
    if output == "json":
        document = {
            "name": name,
            "ratios": {
                label: {
                    "median": ratio.median,
                    "target": ratio.target,
                    "direction": ratio.direction,
                    "pairs": [list(pair) for pair in ratio.pairs],
                }
                for label, ratio in ratios.items()
            },
        }
        print(json.dumps(document))
        return
    for label, ratio in ratios.items():
        sign = ">=" if ratio.direction == "min" else "<="
        verdict = "met" if ratio.met else "MISSED"
        print(f"{label:48} {ratio.median:10.4f}  {sign} {ratio.target:<8g} {verdict}  ({len(ratio.pairs)} pairs)")


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean; NaN for a single value, of which nothing is known."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
