"""How good the planner's two approximations are: NSGA-II against exact fronts, greedy against the optimum.

Jobs have coefficients about the paper's (log-normal, a factor of about 2 either way), tables of 4 to 400 GiB and mostly
a shape that they have already. Clusters have up to 12 of them, capacity for a part of what they could use, quotas for
some owners, and half of the jobs running. `planner/selection.py` says which objective greedy and optimum share.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from emberscale_api.readable import duration_text
from emberscale_api.shape import GIB, JobShape
from emberscale_brain.memory import PsMemoryNeed
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.candidates import dimensions
from emberscale_brain.planner.front import Front, SearchEffort, exact_front, nsga2_front
from emberscale_brain.planner.grid import Horizon, JobProblem, shape_grid
from emberscale_brain.planner.selection import Options, SelectionTable, select, weighted_value
from emberscale_brain.planner.types import ClusterCapacity, Prices, Quota, ScalingOverheads, ShapeBounds, ThroughputFit
from references import hypervolume_ratio, select_optimally
from reporting import Ratio, arguments, report, say

UNITS = ModelConstants(batch_size=1, dense_bytes=1, embedding_dimension=1, network_bytes_per_second=1)
FRONT_TARGET = 0.99
SELECTION_TARGET = 0.97


def job(seed: int) -> JobProblem:
    """Draws a job with 131,072 shapes on the default bounds; fewer if its tables need many PS."""
    random = np.random.default_rng(seed)
    a, b, c, d, e, f = (np.array([3.48, 2.36, 0.68, 2.45, 2.45, 0.6]) * np.exp(random.normal(0, 0.8, 6))).tolist()
    fit = ThroughputFit((a, b, c, d, e, f), ((0.0,) * 6,) * 6, 0.05, 0.05, 10, 10)
    tables = float(np.exp(random.uniform(np.log(4), np.log(400)))) * GIB
    grid = shape_grid(ShapeBounds(), ClusterCapacity(1e6, 1 << 60), 8 * GIB, PsMemoryNeed(GIB, tables))
    if grid is None:
        raise RuntimeError("the default bounds hold all of these tables")
    fresh = JobProblem(grid, UNITS, fit, Prices(), Horizon(None, 0.0, 1.0, ScalingOverheads()))
    if random.random() < 0.3:
        return fresh
    counts = int(random.integers(1, 33)), int(random.integers(1, 17))
    present = JobShape(*counts, float(random.integers(1, 17)), float(random.integers(1, 17)), 8 * GIB, 64 * GIB)
    now = float(fresh.gross(*dimensions((present,)))[0])
    seconds = float(np.exp(random.uniform(np.log(300), np.log(1e5))))
    return replace(fresh, horizon=Horizon(present, now, seconds, ScalingOverheads()))


def drifted(problem: JobProblem, seed: int) -> JobProblem:
    """Returns the job after more profiles: each coefficient has moved by about 10%."""
    factors = np.exp(np.random.default_rng(seed).normal(0, 0.1, 6))
    a, b, c, d, e, f = (np.array(problem.fit.coefficients) * factors).tolist()
    return replace(problem, fit=replace(problem.fit, coefficients=(a, b, c, d, e, f)))


def compare_fronts(jobs: int) -> tuple[list[float], list[float], list[float], dict[str, float], tuple[Front, Front]]:
    """Returns hypervolume ratios from scratch, from the last population, of the start alone; mean seconds; one pair."""
    cold, warm, start, seconds = [], [], [], {"exact": 0.0, "cold": 0.0, "warm": 0.0}
    shown = None
    for seed in range(jobs):
        problem = job(seed)
        moved = drifted(problem, seed)
        begin = time.perf_counter()
        exact = exact_front(problem)
        seconds["exact"] += time.perf_counter() - begin
        begin = time.perf_counter()
        found, population = nsga2_front(problem, seed)
        seconds["cold"] += time.perf_counter() - begin
        cold.append(hypervolume_ratio(found, exact))
        begin = time.perf_counter()
        again, _ = nsga2_front(moved, seed, population)
        seconds["warm"] += time.perf_counter() - begin
        warm.append(hypervolume_ratio(again, exact_front(moved)))
        only_start, _ = nsga2_front(problem, seed, effort=SearchEffort(cold_generations=1))
        start.append(hypervolume_ratio(only_start, exact))
        shown = shown or (found, exact)
    if shown is None:
        raise ValueError("at least one job")
    return cold, warm, start, {name: total / jobs for name, total in seconds.items()}, shown


def cluster(seed: int, rho: float) -> tuple[list[Options], ClusterCapacity, dict[str, Quota]]:
    """Draws a cluster of 2 to 12 jobs, each with 32 points of its exact front."""
    random = np.random.default_rng(seed)
    jobs = []
    for number in range(int(random.integers(2, 13))):
        front = exact_front(job(1000 * (seed + 1) + number))
        rows = front.spread(32)
        shapes = [front.shape(int(row)) for row in rows]
        cpu = np.array([shape.cpu for shape in shapes])
        memory = np.array([shape.memory for shape in shapes], dtype=np.float64)
        remaining = float(np.exp(random.uniform(np.log(1e2), np.log(1e5))))
        throughput = front.throughput[rows]
        value = weighted_value(throughput, throughput, remaining, rho, 1.0)
        jobs.append(Options(f"owner{random.integers(3)}", bool(random.random() < 0.5), cpu, memory, value))
    least = np.array([sum(float(job.cpu.min()) for job in jobs), sum(float(job.memory.min()) for job in jobs)])
    most = np.array([sum(float(job.cpu.max()) for job in jobs), sum(float(job.memory.max()) for job in jobs)])
    share = random.uniform(0.15, 0.8)
    cpu_limit, memory_limit = least + share * (most - least) * np.array([1.0, random.uniform(0.3, 1.5)])
    quotas = {
        f"owner{owner}": Quota(cpu_limit * random.uniform(0.3, 0.8), memory_limit * random.uniform(0.3, 0.9))
        for owner in range(3)
        if random.random() < 0.5
    }
    return jobs, ClusterCapacity(float(cpu_limit), int(memory_limit)), quotas


def compare_selections(clusters: int, rho: float) -> tuple[list[tuple[float, float]], int, float, float]:
    """Returns (greedy, optimum) per cluster, the number of crowded clusters, and the mean seconds of each.

    In a crowded cluster, not all running jobs fit, and the objective is negative: a job that must run and does not
    costs more than all others gain. Crowded clusters are compared by the number of running jobs that go on.
    """
    pairs, crowded, greedy_seconds, optimal_seconds = [], 0, 0.0, 0.0
    for seed in range(clusters):
        jobs, capacity, quotas = cluster(seed, rho)
        table = SelectionTable.of(jobs, capacity, quotas)
        begin = time.perf_counter()
        greedy = select(jobs, capacity, quotas)
        middle = time.perf_counter()
        optimal = select_optimally(jobs, capacity, quotas)
        optimal_seconds += time.perf_counter() - middle
        greedy_seconds += middle - begin
        ours, best = (
            table.total(np.array([0 if index is None else index + 1 for index in chosen]))
            for chosen in (greedy, optimal)
        )
        if best > 0:
            pairs.append((ours, best))
        else:
            crowded += 1
            run = [
                sum(1 for one, index in zip(jobs, chosen, strict=True) if one.must and index is not None)
                for chosen in (greedy, optimal)
            ]
            pairs.append((float(run[0]), float(run[1])))
    return pairs, crowded, greedy_seconds / clusters, optimal_seconds / clusters


def draw(path: Path, found: Front, exact: Front, cold: list[float]) -> None:
    """Draws one job's two fronts, and the hypervolume ratios of all."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(exact.cost, exact.throughput, drawstyle="steps-post", label=f"exact ({len(exact)} points)")
    left.plot(found.cost, found.throughput, "r.", markersize=4, label=f"NSGA-II ({len(found)} points)")
    left.set(xlabel="cost per hour", ylabel="net throughput")
    left.legend()
    right.hist(cold, bins=30)
    right.axvline(FRONT_TARGET, color="k", linestyle="--", label="target")
    right.set(xlabel="hypervolume of NSGA-II over that of the exact front", ylabel="jobs")
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Runs both comparisons; reports medians and the worst, since the claim is about every job and cluster."""
    options = arguments(__doc__).parse_args()
    count = 15 if options.quick else 100
    cold, warm, start, seconds, shown = compare_fronts(count)
    say(
        f"fronts of {count} jobs: NSGA-II from scratch {min(cold):.4f} at the worst job, median {np.median(cold):.4f}; "
        f"from the last population {min(warm):.4f}, {np.median(warm):.4f}; its starting points alone {min(start):.4f}, "
        f"{np.median(start):.4f}"
    )
    say(
        f"mean time of a front: exact {duration_text(seconds['exact'])}, NSGA-II {duration_text(seconds['cold'])}, "
        f"from the last population {duration_text(seconds['warm'])}; the default planner enumerates grids of this size"
    )
    ratios = {
        "NSGA-II hypervolume": Ratio([(value, 1.0) for value in cold], FRONT_TARGET, "min"),
        "NSGA-II hypervolume, worst job": Ratio([(min(cold), 1.0)], FRONT_TARGET, "min"),
        "NSGA-II hypervolume, warm, worst job": Ratio([(min(warm), 1.0)], FRONT_TARGET, "min"),
    }
    for rho in (2.5, 1.0, 0.0):
        pairs, crowded, greedy_seconds, optimal_seconds = compare_selections(count, rho)
        worst = min(pairs, key=lambda pair: pair[0] / pair[1])
        ratios[f"greedy over optimum, rho {rho:g}"] = Ratio(pairs, SELECTION_TARGET, "min")
        ratios[f"greedy over optimum, rho {rho:g}, worst cluster"] = Ratio([worst], SELECTION_TARGET, "min")
        say(
            f"selection in {count} clusters, rho {rho:g}: worst {worst[0] / worst[1]:.4f}; running jobs do not all fit "
            f"in {crowded}; greedy {duration_text(greedy_seconds)}, optimum {duration_text(optimal_seconds)}"
        )
    if options.plot:
        draw(options.plot, *shown, cold)
    report("planner_quality", ratios, options.output)


if __name__ == "__main__":
    main()
