"""`scaling: Auto` from a bad start on a real cluster, against the best static shape of the same cost.

The job leaves all sizes open. The brain is told of one similar job, which ended with one worker and one parameter
server with a tenth of the cores together. The job starts with that shape, and then follows the brain's plans, at most
five. The last planned shape counts, unless it is a trial, which the next plan ends. Afterwards the job is edited to
fixed shapes with as many cores in total, a grid of numbers of processes and shares of the cores. In the end, the
planned shape and the best of these take turns.

A speed is the workers' own count of samples over a window at a steady shape. Each window also says how much of their
limits the processes used, and how much of the machine was idle: if there was nothing left, the machine was the limit.

It needs a cluster: `tests/kubernetes/cluster.sh --run benchmarks/auto_scaling.py`.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from auto_scaling_job import CORES, NAMESPACE, AutoJob, Shape, Window, install
from emberscale_api.pictures import BLUE, GREY, ORANGE
from emberscale_api.readable import rate_text
from eventually import NotInTimeError
from reporting import Ratio, arguments, report, say

TARGET = 0.95
MOST_PLANS = 5
TRIAL = "Explore"
WORKERS, SERVERS, PS_SHARES = (1, 2, 3), (1, 2), (0.2, 0.24, 0.28, 0.35)
SETTLE_SECONDS, WINDOW_SECONDS = 25.0, 20.0
"""The first seconds at a shape say little: after a worker has left, another one waited for up to half of the time."""
MOST_WINDOWS = 5
"""The most attempts to measure one shape."""
BETWEEN_PLANS_SECONDS = 10.0
"""The brain may plan again half a minute after a change, so a window after each plan begins sooner."""


def follow_plans(job: AutoJob, quiet: float) -> list[Window]:
    """Measures until the job has had its plans, or none for `quiet` seconds; returns all windows."""
    windows: list[Window] = []
    plans, since = -1, time.monotonic()
    while plans < MOST_PLANS or not windows or windows[-1].plans < MOST_PLANS:
        job.await_shape()
        if job.plans() != plans:
            plans, since = job.plans(), time.monotonic()
            say(f"  {plans} plans: {job.plan().get('message', '')}")
            time.sleep(BETWEEN_PLANS_SECONDS)
        window = job.measure(WINDOW_SECONDS)
        if window is not None and window.plans <= MOST_PLANS:
            windows.append(window)
            say(f"  {window.plans} plans, {window.shape!s:32} {window}")
        if plans > MOST_PLANS or time.monotonic() - since > quiet:
            break
    return windows


def static_shapes(cores: float, workers: Sequence[int], shares: Sequence[float]) -> list[Shape]:
    """Returns the grid of shapes with these cores in total, in an order in which few processes start."""
    shapes = []
    for ps in SERVERS:
        for count in sorted(workers, reverse=True):
            for share in shares:
                ps_cpu = round(cores * share / ps, 3)
                shapes.append(Shape(count, ps, round((cores - ps * ps_cpu) / count, 3), ps_cpu))
    return shapes


def at(job: AutoJob, shape: Shape) -> Window:
    """Measures a fixed shape. Raises NotInTimeError if no window succeeds."""
    job.fix(shape)
    time.sleep(SETTLE_SECONDS)
    for _ in range(MOST_WINDOWS):
        window = job.measure(WINDOW_SECONDS)
        if window is not None:
            say(f"  static {shape!s:32} {window}")
            return window
        job.await_shape(shape)
    raise NotInTimeError(
        f"{shape}: none of {MOST_WINDOWS} windows could be measured: the shape changed meanwhile, or a process did not "
        f"answer; see the pods in the namespace {NAMESPACE}"
    )


def draw(path: Path, planned: Sequence[Window], static: Sequence[Window], ratio: Ratio) -> None:
    """Draws the speed after each plan against those of the static shapes."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot([w.plans for w in planned], [w.samples_per_second for w in planned], "o", color=BLUE, label="Auto")
    for place, window in enumerate(sorted(static, key=lambda one: -one.samples_per_second)):
        label = "static shapes of the same cores" if place == 0 else None
        axis.axhline(window.samples_per_second, color=ORANGE if place == 0 else GREY, linewidth=0.8, label=label)
    axis.set(xlabel="plans followed", ylabel="samples/s", ylim=(0, None))
    axis.set_xticks(range(1 + max(w.plans for w in planned)))
    axis.set_title(f"Auto from a bad start: {ratio.median:.0%} of the best static shape ({len(ratio.pairs)} turns)")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs the job through its plans and the static shapes, and reports the ratio."""
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    job = AutoJob(install())
    try:
        planned = follow_plans(job, 120 if options.quick else 240)
        chosen = [window for window in planned if window.reason != TRIAL][-1].shape
        for reason, message in job.told():
            say(f"  {reason}: {message}")
        counts, shares = (WORKERS[:2], PS_SHARES[1:3]) if options.quick else (WORKERS, PS_SHARES)
        static = [at(job, shape) for shape in static_shapes(chosen.cpu, counts, shares)]
        best = max(static, key=lambda window: window.samples_per_second).shape
        turns = [(at(job, chosen), at(job, best)) for _ in range(2 if options.quick else 4)]
    finally:
        job.end()
    first = statistics.median(w.samples_per_second for w in planned if w.plans == planned[0].plans)
    say(
        f"first measured {planned[0].shape}: {rate_text(first)}; planned {chosen}; best static {best}; of {CORES} cores"
    )
    pairs = [(ours.samples_per_second, theirs.samples_per_second) for ours, theirs in turns]
    ratio = Ratio(pairs, TARGET, "min")
    if options.plot:
        draw(options.plot, planned, static, ratio)
    report("auto_scaling", {f"Auto after {planned[-1].plans} plans / best static shape": ratio}, options.output)


if __name__ == "__main__":
    main()
