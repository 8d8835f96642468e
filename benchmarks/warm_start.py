"""How near a job's first shape is to its last, and how much sooner it gets there than from a cold start.

DLRover-RM section 6.2 looks at a month of a user's jobs: with the warm start (Algorithm 1) the first configuration is
within 92% (workers) and 85% (PS) of the final one, and getting there takes 26% less time than "adjusting resources from
zero". Here a month of recurring jobs of `deploy/examples/scenarios/production-week.yaml` is simulated twice a seed, on
the same jobs: with history, and without (the planner's cold start). Cores of a role count: `accuracy` of a job is the
smaller over the larger of its first and last cores. Its `scaling time` is from its start until both roles first have
cores within 10% of the last ones. Jobs of the first week, which have little history, make history only.
"""

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import yaml
from matplotlib.figure import Figure

from emberscale_api.pictures import BLUE, GREY, ORANGE
from emberscale_api.readable import duration_text
from emberscale_api.shape import JobShape
from emberscale_simulator.experiment import run_experiment
from emberscale_simulator.results import JobOutcome, SeedOutcome
from emberscale_simulator.scenario_file import load_scenario
from reporting import Ratio, arguments, report, say

SCENARIO = Path(__file__).parents[1] / "deploy/examples/scenarios/production-week.yaml"
WARM, COLD = "emberscale", "cold"
WEEK = 7 * 86_400.0
NEAR = 0.1

Cores = Callable[[JobShape], float]


def worker_cores(shape: JobShape) -> float:
    """Returns the cores of all workers."""
    return shape.workers * shape.worker_cpu


def ps_cores(shape: JobShape) -> float:
    """Returns the cores of all PS."""
    return shape.ps * shape.ps_cpu


def scenario_file(folder: Path, jobs: int) -> Path:
    """Writes a scenario of a month with this many jobs, on a cluster with room for them, and both ways to start."""
    document = yaml.safe_load(SCENARIO.read_text())
    share = jobs / document["workload"]["jobs"]
    document["horizon"] = "35d"
    document["cluster"]["nodes"] = max(40, round(document["cluster"]["nodes"] * share))
    document["workload"] |= {
        "jobs": jobs,
        "period": "30d",
        "families": max(8, round(document["workload"]["families"] * share)),
        "owners": max(2, round(document["workload"]["owners"] * share)),
    }
    (ours,) = (scheduler for scheduler in document["schedulers"] if scheduler["name"] == WARM)
    document["schedulers"] = [ours, {**ours, "name": COLD, "useHistory": False}]
    path = folder / "month.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def with_history(outcome: SeedOutcome) -> dict[str, JobOutcome]:
    """Returns the completed jobs that were submitted after the first week, by name."""
    return {
        job.job: job
        for job in outcome.jobs
        if job.jct is not None and job.arrival >= WEEK and job.first_shape and job.final_shape
    }


def accuracy(job: JobOutcome, cores: Cores) -> float:
    """Returns the smaller over the larger of a role's first and last cores, 0 to 1."""
    if job.first_shape is None or job.final_shape is None:
        return math.nan
    first, last = cores(job.first_shape), cores(job.final_shape)
    return min(first, last) / max(first, last)


def scaling_seconds(job: JobOutcome) -> float:
    """Returns the seconds from the job's start until both roles first have about their final cores."""
    (began, _), (_, last) = job.shapes[0], job.shapes[-1]
    return next(
        at - began
        for at, shape in job.shapes
        if all(abs(cores(shape) / cores(last) - 1) <= NEAR for cores in (worker_cores, ps_cores))
    )


def draw(path: Path, warm: Sequence[JobOutcome], cold: Sequence[JobOutcome]) -> None:
    """Draws first against last cores of both roles, after DLRover-RM figure 9, and the scaling times."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, (name, cores) in zip(axes, (("workers", worker_cores), ("PS", ps_cores)), strict=False):
        for label, jobs, colour in (("cold start", cold, ORANGE), ("warm start", warm, BLUE)):
            shapes = [(job.first_shape, job.final_shape) for job in jobs]
            points = [(cores(first), cores(last)) for first, last in shapes if first and last]
            axis.scatter(*zip(*points, strict=True), s=8, alpha=0.5, color=colour, label=label)
        limits = [1, max(axis.get_xlim()[1], axis.get_ylim()[1])]
        axis.plot(limits, limits, color=GREY, linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="cores at first", ylabel="cores in the end", title=name)
        axis.legend(frameon=False)
    for label, jobs, colour in (("cold start", cold, ORANGE), ("warm start", warm, BLUE)):
        minutes = sorted(scaling_seconds(job) / 60 for job in jobs)
        share = [(index + 1) / len(minutes) for index in range(len(minutes))]
        axes[2].plot(minutes, share, color=colour, label=label)
    axes[2].set(xlabel="minutes from the start to the last shape", ylabel="share of jobs", title="scaling time")
    axes[2].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Simulates both ways to start and reports."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    jobs, seeds = (60, 2) if given.quick else (240, max(5, given.seeds))
    with tempfile.TemporaryDirectory() as folder:
        path = scenario_file(Path(folder), jobs)
        outcomes = run_experiment(
            load_scenario(path),
            (WARM, COLD),
            load_scenario(path).seeds.judging.numbers[:seeds],
            path.parent,
            os.cpu_count() or 1,
            lambda outcome: say(f"  {outcome.scheduler}, seed {outcome.seed}"),
        )
    by_name = {
        name: {outcome.seed: with_history(outcome) for outcome in outcomes if outcome.scheduler == name}
        for name in (WARM, COLD)
    }
    pairs: dict[str, list[tuple[float, float]]] = {"workers": [], "ps": [], "time": []}
    for seed in by_name[WARM]:
        warm, cold = by_name[WARM][seed], by_name[COLD][seed]
        both = sorted(warm.keys() & cold.keys())
        for role, cores in (("workers", worker_cores), ("ps", ps_cores)):
            near = [mean(accuracy(jobs[job], cores) for job in both) for jobs in (warm, cold)]
            say(f"seed {seed}: first {role} {near[0]:.1%} of the last with a warm start, {near[1]:.1%} with a cold one")
            pairs[role].append((near[0], 1.0))
        seconds = [mean(scaling_seconds(jobs[job]) for job in both) for jobs in (warm, cold)]
        changes = [mean(jobs[job].scalings for job in both) for jobs in (warm, cold)]
        say(
            f"seed {seed}: {len(both)} jobs, scaling takes {duration_text(seconds[0])} instead of "
            f"{duration_text(seconds[1])}, {changes[0]:.1f} changes instead of {changes[1]:.1f}"
        )
        pairs["time"].append((seconds[0], seconds[1]))
    if given.plot:
        draw(
            given.plot,
            [job for jobs in by_name[WARM].values() for job in jobs.values()],
            [job for jobs in by_name[COLD].values() for job in jobs.values()],
        )
    report(
        "warm_start",
        {
            "first workers over last": Ratio(pairs["workers"], 0.92, "min"),
            "first PS over last": Ratio(pairs["ps"], 0.85, "min"),
            "scaling time over cold start": Ratio(pairs["time"], 1 - 0.26, "max"),
        },
        given.output,
    )


if __name__ == "__main__":
    main()
