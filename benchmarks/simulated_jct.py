"""Completion times on simulated clusters: our planner's decisions against others', on the same mechanics.

The small cluster is DLRover-RM's of section 6.1, the trace three teams' jobs on a cluster that loses half of its nodes
for two hours, the week a part of DLRover-RM's production cluster of section 6.3. Pairs are
(ours, the other's) for each seed, over all jobs that completed; the targets are what DLRover-RM reports. `2 x 2` are
mean completion times of decisions (ours, a baseline's) by mechanics (as built, stop and restart). Seeds are the judging
ones of the scenario, which no tuning has seen, or with `--tuning` the others.
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
OURS, RESTART = "emberscale", "-restart"
Measure = Callable[[SeedOutcome], float]


def mean_jct(outcome: SeedOutcome) -> float:
    """Mean completion time of a seed, seconds."""
    return float(np.mean(outcome.completed_jcts))


def percentile_jct(percent: float) -> Measure:
    """A percentile of a seed's completion times."""
    return lambda outcome: float(np.percentile(outcome.completed_jcts, percent))


def pairs(outcomes: Sequence[SeedOutcome], ours: str, measure: Measure, other: str) -> list[tuple[float, float]]:
    """(ours, the other's) for each seed."""
    first, second = (
        {outcome.seed: measure(outcome) for outcome in outcomes if outcome.scheduler == name} for name in (ours, other)
    )
    return [(first[seed], second[seed]) for seed in sorted(first)]


def levels(outcomes: Sequence[SeedOutcome], measure: Measure) -> list[tuple[float, float]]:
    """(ours, 1) for each seed."""
    return [(measure(outcome), 1.0) for outcome in outcomes if outcome.scheduler == OURS]


def interval(ratio: Ratio) -> Estimate:
    """The mean quotient over seeds and its 95% interval."""
    return estimate([ours / other for ours, other in ratio.pairs])


def simulate(
    name: str, schedulers: Sequence[str], seeds: int, tuning: bool, pictures: Path | None
) -> list[SeedOutcome]:
    """The first seeds of a scenario."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    began = time.monotonic()
    outcomes = run_experiment(
        scenario,
        schedulers,
        (scenario.seeds.tuning if tuning else scenario.seeds.judging).numbers[:seeds],
        SCENARIOS,
        os.cpu_count() or 1,
        lambda outcome: say(f"  {name}: {outcome.scheduler}, seed {outcome.seed}, {time.monotonic() - began:.0f} s"),
    )
    summaries = summarize_experiment(outcomes, schedulers)
    for summary in summaries:
        say(
            f"{name:18} {summary.scheduler:18} "
            f"JCT {summary.jct.mean / 60:7.1f} min +- {summary.jct.half_width / 60:.1f}, "
            f"p50 {summary.jct_p50.mean / 60:.1f}, p90 {summary.jct_p90.mean / 60:.1f}, "
            f"completed {summary.completion_rate.mean:.1%}, CPU {summary.worker_cpu_utilization.mean:.1%} workers "
            f"{summary.ps_cpu_utilization.mean:.1%} PS, {summary.core_hours.mean:.0f} core-hours, "
            f"{summary.scalings.mean:.1f} scalings"
        )
    if pictures is not None:
        draw_comparison(name, summaries, outcomes, pictures / name)
    return outcomes


def say_two_by_two(outcomes: Sequence[SeedOutcome], baseline: str) -> None:
    """Mean completion times of both decisions on both mechanics, and what each factor does alone."""
    for decisions in (OURS, baseline):
        row = [
            estimate([mean_jct(outcome) / 60 for outcome in outcomes if outcome.scheduler == decisions + mechanics])
            for mechanics in ("", RESTART)
        ]
        cells = ", ".join(f"{cell.mean:.1f} min +- {cell.half_width:.1f}" for cell in row)
        say(f"2 x 2: {decisions:12} as built, stop and restart: {cells}")
    for decisions in (OURS, baseline):
        gain = interval(Ratio(pairs(outcomes, decisions, mean_jct, decisions + RESTART), 1.0, "max"))
        say(f"2 x 2: as built over restart, decisions of {decisions}: {gain.mean:.3f} +- {gain.half_width:.3f}")


def main() -> None:
    """Runs both scenarios and reports."""
    parser = arguments(__doc__ or "", plot=False)
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--seeds", type=int, default=10, help="the week has half as many")
    parser.add_argument("--tuning", action="store_true", help="the seeds that tuning may look at")
    parser.add_argument("--only", choices=["small", "trace", "week"], help="one scenario")
    given = parser.parse_args()
    seeds = 4 if given.quick else max(2, given.seeds)
    ratios: dict[str, Ratio] = {}
    if given.only in (None, "small"):
        cold = OURS + "-cold"
        others = ("optimus", "optimus" + RESTART, "elastic-scheduler", "static", "well-tuned")
        small = simulate("small-cluster", (OURS, cold, OURS + RESTART, *others), seeds, given.tuning, given.plot)
        say_two_by_two(small, "optimus")
        ratios |= {
            "JCT over well-tuned": Ratio(pairs(small, OURS, mean_jct, "well-tuned"), 1.014, "max"),
            "JCT over Elastic Scheduler": Ratio(pairs(small, OURS, mean_jct, "elastic-scheduler"), 1 - 0.177, "max"),
            "JCT over Optimus": Ratio(pairs(small, OURS, mean_jct, "optimus"), 1 - 0.285, "max"),
            "p90 JCT over Optimus": Ratio(pairs(small, OURS, percentile_jct(90), "optimus"), 1.0, "max"),
            "JCT over Optimus without history": Ratio(pairs(small, cold, mean_jct, "optimus"), 1 - 0.285, "max"),
        }
    if given.only in (None, "trace"):
        trace = simulate("trace", (OURS, "optimus", "static"), seeds, given.tuning, given.plot)
        for other in ("optimus", "static"):
            for label, measure in (("mean", mean_jct), ("median", percentile_jct(50)), ("p90", percentile_jct(90))):
                ratios[f"{label} JCT over {other}, trace"] = Ratio(pairs(trace, OURS, measure, other), 1.0, "max")
    if given.only in (None, "week"):
        compared = ("optimus", "static", "static" + RESTART)
        week = simulate(
            "production-week", (OURS, OURS + RESTART, *compared), max(2, seeds // 2), given.tuning, given.plot
        )
        say_two_by_two(week, "static")
        ratios |= {
            "mean JCT over static": Ratio(pairs(week, OURS, mean_jct, "static"), 1.0, "max"),
            "median JCT over static": Ratio(pairs(week, OURS, percentile_jct(50), "static"), 1 - 0.31, "max"),
            "p90 JCT over static": Ratio(pairs(week, OURS, percentile_jct(90), "static"), 1 - 0.357, "max"),
            "mean JCT over Optimus, week": Ratio(pairs(week, OURS, mean_jct, "optimus"), 1.0, "max"),
            "core-hours over static": Ratio(pairs(week, OURS, lambda o: o.core_hours, "static"), 1.0, "max"),
            "worker CPU utilization": Ratio(levels(week, lambda o: o.worker_cpu_utilization), 0.40, "min"),
            "PS CPU utilization": Ratio(levels(week, lambda o: o.ps_cpu_utilization), 0.41, "min"),
        }
    for label, ratio in ratios.items():
        mean = interval(ratio)
        say(f"{label:42} {mean.mean:.4f}, 95% {mean.interval[0]:.4f} to {mean.interval[1]:.4f}")
    report("simulated_jct", ratios, given.output)


if __name__ == "__main__":
    main()
