"""Completion times on simulated clusters: ours against well-tuned, Elastic Scheduler, Optimus and static requests.

The small cluster is DLRover-RM's of section 6.1, the month its production cluster of section 6.3. Pairs are (ours, the
other's) for each seed; utilization is paired with 1. The scenario files say where every number of the ground truth
comes from. Jobs that failed have no completion time, so `completion rate` stands beside the times: a scheduler that
loses its slow jobs would look fast without it.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from emberscale_simulator.experiment import run_experiment, summarize_experiment
from emberscale_simulator.pictures import draw_comparison
from emberscale_simulator.results import Estimate, SeedOutcome, estimate
from emberscale_simulator.scenario_file import load_scenario
from reporting import Ratio, arguments, report, say

SCENARIOS = Path(__file__).parents[1] / "deploy/examples/scenarios"
OURS = "emberscale"
Measure = Callable[[SeedOutcome], float]


def mean_jct(outcome: SeedOutcome) -> float:
    """Mean completion time of a seed, seconds."""
    return float(np.mean(outcome.completed_jcts))


def percentile_jct(percent: float) -> Measure:
    """A percentile of a seed's completion times."""
    return lambda outcome: float(np.percentile(outcome.completed_jcts, percent))


def pairs(outcomes: Sequence[SeedOutcome], other: str, measure: Measure) -> list[tuple[float, float]]:
    """(ours, the other's) for each seed."""
    ours, theirs = (
        {outcome.seed: measure(outcome) for outcome in outcomes if outcome.scheduler == name} for name in (OURS, other)
    )
    return [(ours[seed], theirs[seed]) for seed in sorted(ours)]


def levels(outcomes: Sequence[SeedOutcome], measure: Measure) -> list[tuple[float, float]]:
    """(ours, 1) for each seed."""
    return [(measure(outcome), 1.0) for outcome in outcomes if outcome.scheduler == OURS]


def interval(ratio: Ratio) -> Estimate:
    """The mean quotient over seeds and its 95% interval."""
    return estimate([ours / other for ours, other in ratio.pairs])


def simulate(name: str, schedulers: Sequence[str], seeds: int, pictures: Path | None) -> list[SeedOutcome]:
    """All seeds of a scenario."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    began = time.monotonic()
    outcomes = run_experiment(
        scenario,
        schedulers,
        range(seeds),
        SCENARIOS,
        os.cpu_count() or 1,
        lambda outcome: say(f"  {name}: {outcome.scheduler}, seed {outcome.seed}, {time.monotonic() - began:.0f} s"),
    )
    summaries = summarize_experiment(outcomes, schedulers)
    for summary in summaries:
        say(
            f"{name:18} {summary.scheduler:18} "
            f"JCT {summary.jct.mean / 60:7.1f} min +- {summary.jct.half_width / 60:.1f}, "
            f"completed {summary.completion_rate.mean:.1%}, CPU {summary.worker_cpu_utilization.mean:.1%} workers "
            f"{summary.ps_cpu_utilization.mean:.1%} PS, {summary.scalings.mean:.1f} scalings"
        )
    if pictures is not None:
        draw_comparison(name, summaries, outcomes, pictures / name)
    return outcomes


def main() -> None:
    """Runs both scenarios and reports."""
    parser = arguments(__doc__ or "", plot=False)
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--seeds", type=int, default=10, help="of the small cluster; the month has a third of them")
    parser.add_argument("--only", choices=["small", "month"], help="one scenario")
    given = parser.parse_args()
    ratios: dict[str, Ratio] = {}
    if given.only != "month":
        names = (OURS, "well-tuned", "elastic-scheduler", "optimus", "optimus-free")
        small = simulate("small-cluster", names, max(2, given.seeds), given.plot)
        ratios |= {
            "JCT over well-tuned": Ratio(pairs(small, "well-tuned", mean_jct), 1.014, "max"),
            "JCT over Elastic Scheduler": Ratio(pairs(small, "elastic-scheduler", mean_jct), 1 - 0.177, "max"),
            "JCT over Optimus": Ratio(pairs(small, "optimus", mean_jct), 1 - 0.285, "max"),
        }
        # no target: Optimus as published restarts a job at every change; this bounds how much of the gap that is
        free = interval(Ratio(pairs(small, "optimus-free", mean_jct), 1.0, "max"))
        say(f"JCT over an Optimus whose changes are free: {free.mean:.4f} +- {free.half_width:.4f}")
    if given.only != "small":
        # --quick takes the week: the same world, a quarter of its jobs
        scenario = "production-week" if given.quick else "production-month"
        month = simulate(scenario, (OURS, "static"), max(2, given.seeds // 3), given.plot)
        ratios |= {
            "median JCT over static": Ratio(pairs(month, "static", percentile_jct(50)), 1 - 0.31, "max"),
            "p90 JCT over static": Ratio(pairs(month, "static", percentile_jct(90)), 1 - 0.357, "max"),
            "worker CPU utilization": Ratio(levels(month, lambda o: o.worker_cpu_utilization), 0.40, "min"),
            "PS CPU utilization": Ratio(levels(month, lambda o: o.ps_cpu_utilization), 0.41, "min"),
            "completion rate over static": Ratio(pairs(month, "static", lambda o: o.completion_rate), 1.0, "min"),
        }
    for label, ratio in ratios.items():
        mean = interval(ratio)
        say(f"{label:42} {mean.mean:.4f}, 95% {mean.interval[0]:.4f} to {mean.interval[1]:.4f}")
    report("simulated_jct", ratios, given.output)


if __name__ == "__main__":
    main()
