"""Completion times on simulated clusters: our planner's decisions against others', on the same mechanics.

The small cluster is DLRover-RM's of section 6.1, the trace three teams' jobs on a cluster that loses half of its nodes
for two hours, the week a part of DLRover-RM's production cluster of section 6.3. Pairs are (ours, the other's) for each
seed, over the jobs that completed under both; which share of all jobs did is said beside. The targets are what
DLRover-RM reports. `2 x 2` are mean completion times of decisions (ours, a baseline's) by mechanics (as built, stop and
restart). Our planner has the preferences that it comes with. Seeds are the judging ones of the scenario, which no
tuning has seen, or with `--tuning` the others.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from emberscale_api.readable import duration_text
from emberscale_simulator.experiment import run_experiment, summarize_experiment
from emberscale_simulator.pictures import draw_comparison
from emberscale_simulator.results import Estimate, SeedOutcome, estimate
from emberscale_simulator.scenario_file import load_scenario
from reporting import Ratio, arguments, report, say

SCENARIOS = Path(__file__).parents[1] / "deploy/examples/scenarios"
OURS, RESTART = "emberscale", "-restart"
Statistic = Callable[[Sequence[float]], float]
Measure = Callable[[SeedOutcome], float]


def mean(jcts: Sequence[float]) -> float:
    """Returns the mean completion time in seconds."""
    return float(np.mean(jcts))


def percentile(percent: float) -> Statistic:
    """Returns a function for a percentile of completion times."""
    return lambda jcts: float(np.percentile(jcts, percent))


def by_seed(outcomes: Sequence[SeedOutcome], name: str) -> dict[int, SeedOutcome]:
    """Returns a scheduler's outcomes, by seed."""
    return {outcome.seed: outcome for outcome in outcomes if outcome.scheduler == name}


def paired_jcts(first: SeedOutcome, second: SeedOutcome) -> tuple[list[float], list[float]]:
    """Returns the completion times of the jobs that completed under both, in the same order."""
    others = {job.job: job.jct for job in second.jobs}
    both = [
        (job.jct, other) for job in first.jobs if job.jct is not None and (other := others.get(job.job)) is not None
    ]
    return [own for own, _ in both], [other for _, other in both]


def pairs(outcomes: Sequence[SeedOutcome], ours: str, statistic: Statistic, other: str) -> list[tuple[float, float]]:
    """Returns (ours, the other's) for each seed, over the jobs that completed under both."""
    first, second = by_seed(outcomes, ours), by_seed(outcomes, other)
    both = [paired_jcts(first[seed], second[seed]) for seed in sorted(first)]
    return [(statistic(own), statistic(others)) for own, others in both if own]


def quantities(outcomes: Sequence[SeedOutcome], measure: Measure, other: str) -> list[tuple[float, float]]:
    """Returns (ours, the other's) for each seed, of a measure of all jobs."""
    first, second = by_seed(outcomes, OURS), by_seed(outcomes, other)
    return [(measure(first[seed]), measure(second[seed])) for seed in sorted(first)]


def core_hours(outcome: SeedOutcome) -> float:
    """Returns the core-hours of all jobs together."""
    return outcome.core_hours


def levels(outcomes: Sequence[SeedOutcome], measure: Measure) -> list[tuple[float, float]]:
    """Returns (ours, 1) for each seed."""
    return [(measure(outcome), 1.0) for outcome in outcomes if outcome.scheduler == OURS]


def interval(ratio: Ratio) -> Estimate:
    """Returns the mean quotient over seeds and its 95% interval."""
    return estimate([ours / other for ours, other in ratio.pairs])


def simulate(
    name: str, schedulers: Sequence[str], seeds: int, tuning: bool, pictures: Path | None, processes: int
) -> list[SeedOutcome]:
    """Simulates the first `seeds` seeds of a scenario."""
    scenario = load_scenario(SCENARIOS / f"{name}.yaml")
    began = time.monotonic()
    outcomes = run_experiment(
        scenario,
        schedulers,
        (scenario.seeds.tuning if tuning else scenario.seeds.judging).numbers[:seeds],
        SCENARIOS,
        processes,
        lambda outcome: say(
            f"  {name}: {outcome.scheduler}, seed {outcome.seed}, {duration_text(time.monotonic() - began)}"
        ),
    )
    summaries = summarize_experiment(outcomes, schedulers)
    for summary in summaries:
        say(
            f"{name:18} {summary.scheduler:18} "
            f"JCT {duration_text(summary.jct.mean):>7} +- {duration_text(summary.jct.half_width)}, "
            f"p50 {duration_text(summary.jct_p50.mean)}, p90 {duration_text(summary.jct_p90.mean)}, "
            f"completed {summary.completion_rate.mean:.2%}, CPU {summary.worker_cpu_utilization.mean:.1%} workers "
            f"{summary.ps_cpu_utilization.mean:.1%} PS, {summary.core_hours.mean:.0f} core-hours, "
            f"{summary.scalings.mean:.1f} scalings"
        )
    if pictures is not None:
        draw_comparison(name, summaries, outcomes, pictures / name)
    return outcomes


def say_two_by_two(outcomes: Sequence[SeedOutcome], baseline: str) -> None:
    """Prints mean completion times of both decisions on both mechanics, and the effect of each factor alone."""
    for decisions in (OURS, baseline):
        row = [
            estimate([mean(one.completed_jcts) for one in by_seed(outcomes, decisions + mechanics).values()])
            for mechanics in ("", RESTART)
        ]
        cells = ", ".join(f"{duration_text(cell.mean)} +- {duration_text(cell.half_width)}" for cell in row)
        say(f"2 x 2: {decisions:12} as built, stop and restart: {cells}")
    for decisions in (OURS, baseline):
        gain = interval(Ratio(pairs(outcomes, decisions, mean, decisions + RESTART), 1.0, "max"))
        say(f"2 x 2: as built over restart, decisions of {decisions}: {gain.mean:.3f} +- {gain.half_width:.3f}")


def main() -> None:
    """Runs the scenarios and reports."""
    parser = arguments(__doc__ or "", plot=False)
    parser.add_argument("--plot", type=Path, help="a folder for pictures")
    parser.add_argument("--seeds", type=int, default=10, help="the week has half as many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--tuning", action="store_true", help="the seeds that tuning may look at")
    parser.add_argument("--only", choices=["small", "trace", "week"], help="one scenario")
    given = parser.parse_args()
    seeds = 4 if given.quick else max(2, given.seeds)
    ratios: dict[str, Ratio] = {}
    if given.only in (None, "small"):
        cold = OURS + "-cold"
        others = ("optimus", "optimus" + RESTART, "elastic-scheduler", "static", "well-tuned")
        small = simulate(
            "small-cluster", (OURS, cold, OURS + RESTART, *others), seeds, given.tuning, given.plot, given.processes
        )
        say_two_by_two(small, "optimus")
        ratios |= {
            "JCT over well-tuned": Ratio(pairs(small, OURS, mean, "well-tuned"), 1.014, "max"),
            "JCT over Elastic Scheduler": Ratio(pairs(small, OURS, mean, "elastic-scheduler"), 1 - 0.177, "max"),
            "JCT over Optimus": Ratio(pairs(small, OURS, mean, "optimus"), 1 - 0.285, "max"),
            "slowest of the three over Optimus": Ratio(pairs(small, OURS, max, "optimus"), 1.0, "max"),
            "core-hours over Optimus, small": Ratio(quantities(small, core_hours, "optimus"), 1.0, "max"),
            "JCT over Optimus without history": Ratio(pairs(small, cold, mean, "optimus"), 1 - 0.285, "max"),
        }
    if given.only in (None, "trace"):
        trace = simulate("trace", (OURS, "optimus", "static"), seeds, given.tuning, given.plot, given.processes)
        for other in ("optimus", "static"):
            for label, statistic in (("mean", mean), ("median", percentile(50)), ("p90", percentile(90))):
                ratios[f"{label} JCT over {other}, trace"] = Ratio(pairs(trace, OURS, statistic, other), 1.0, "max")
            label = f"core-hours over {other}, trace"
            ratios[label] = Ratio(quantities(trace, core_hours, other), 1.0, "max")
    if given.only in (None, "week"):
        compared = ("optimus", "static", "static" + RESTART)
        week = simulate(
            "production-week",
            (OURS, OURS + RESTART, *compared),
            max(2, seeds // 2),
            given.tuning,
            given.plot,
            given.processes,
        )
        say_two_by_two(week, "static")
        ratios |= {
            "mean JCT over static": Ratio(pairs(week, OURS, mean, "static"), 1.0, "max"),
            "median JCT over static": Ratio(pairs(week, OURS, percentile(50), "static"), 1 - 0.31, "max"),
            "p90 JCT over static": Ratio(pairs(week, OURS, percentile(90), "static"), 1 - 0.357, "max"),
            "mean JCT over Optimus, week": Ratio(pairs(week, OURS, mean, "optimus"), 1.0, "max"),
            "core-hours over static": Ratio(quantities(week, core_hours, "static"), 1.0, "max"),
            "worker CPU utilization": Ratio(levels(week, lambda o: o.worker_cpu_utilization), 0.40, "min"),
            "PS CPU utilization": Ratio(levels(week, lambda o: o.ps_cpu_utilization), 0.41, "min"),
        }
    for label, ratio in ratios.items():
        found = interval(ratio)
        say(f"{label:42} {found.mean:.4f}, 95% {found.interval[0]:.4f} to {found.interval[1]:.4f}")
    report("simulated_jct", ratios, given.output)


if __name__ == "__main__":
    main()
