"""How long a plan of a whole cluster takes, and how that grows with the number of jobs.

Every job runs and has 40 profiles of 8 shapes; a full plan fits all models, forecasts memory, finds all fronts and
selects. For the second figure a tenth of the jobs bring new profiles and progress, the rest are as before. Fronts are
enumerated exactly, as the default planner does on the default bounds. One process, so one core. How soon `GetPlan` is
answered meanwhile, and what memory it takes, is asked of a brain as it is run (`brain_service.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from brain_service import answer_while_planning
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.model.predict import ModelConstants, shape_features
from emberscale_brain.planner.default import DefaultPlanner
from emberscale_brain.planner.types import (
    ClusterCapacity,
    ClusterView,
    JobId,
    JobMetadata,
    JobView,
    PlannerSettings,
    Quota,
)
from reporting import Ratio, arguments, report, say

NOW = 1e6
NETWORK = 1.25e9
SHAPES = 8
REPEATS = 5
FULL_SECONDS = 60.0
CHANGED_SECONDS = 10.0
MEMORY_BYTES = 1e9
ANSWER_SECONDS = 0.05


def job(number: int) -> JobView:
    """Draws a running job with its own coefficients, sizes and progress."""
    random = np.random.default_rng(number)
    metadata = JobMetadata(
        architecture="DLRM",
        batch_size=512,
        dense_bytes=4_000_000,
        embedding_dimension=416,
        tables=26,
        total_samples=10**9,
        name=f"job-{number}",
    )
    constants = ModelConstants.of(metadata, NETWORK)
    truth = np.array([0.4 / 512, 0.05, 2.0, 0.05 / (512 * 416), 0.005, 0.01]) * np.exp(random.normal(0, 0.5, 6))
    shapes = [
        JobShape(
            int(random.integers(1, 12)),
            int(random.integers(1, 8)),
            float(random.integers(1, 9)),
            float(random.integers(1, 9)),
            4 * GIB,
            16 * GIB,
        )
        for _ in range(SHAPES)
    ]
    remaining = int(np.exp(random.uniform(np.log(1e6), np.log(9e8))))
    profiles = tuple(
        profile(shape, truth, constants, NOW - 30 * (SHAPES * REPEATS - i), random, (10**9 - remaining) * (i + 1) / 40)
        for i, shape in enumerate(shape for shape in shapes for _ in range(REPEATS))
    )
    return JobView(JobId(f"job-{number}"), f"owner-{number % 20}", metadata, remaining, shapes[-1], profiles=profiles)


def profile(
    shape: JobShape,
    truth: np.ndarray[tuple[int], np.dtype[np.float64]],
    constants: ModelConstants,
    at: float,
    random: np.random.Generator,
    samples: float,
) -> JobProfile:
    """Returns a measurement with 5% noise; tables take 60 bytes per sample."""
    seconds = float(shape_features(constants, shape) @ truth) * float(np.exp(0.05 * random.standard_normal()))
    return JobProfile(
        time=at,
        shape=shape,
        batch_size=512,
        iteration_seconds=seconds,
        throughput=shape.workers * 512 / seconds,
        samples=int(samples),
        rows=int(samples / 4),
        ps_memory=GIB + int(samples * 60 / shape.ps),
        worker_memory=2 * GIB,
    )


def advanced(view: JobView, now: float) -> JobView:
    """Returns the job a minute later: with two more profiles, slower than the last one, and less left to do."""
    last = view.profiles[-1]
    fresh = tuple(
        replace(last, time=now - 30 * i, throughput=last.throughput * 0.8, samples=last.samples + 1000) for i in (1, 0)
    )
    return replace(view, profiles=(*view.profiles[2:], *fresh), remaining_samples=view.remaining_samples - 1000)


def measure(jobs: Sequence[JobView]) -> tuple[float, float, float]:
    """Measures the seconds of a full plan and of one after a tenth of the jobs changed; and CPU seconds of the first.

    The growth of cost is judged by CPU seconds, which other work on the machine does not lengthen.
    """
    capacity = ClusterCapacity(60.0 * len(jobs), 400 * GIB * len(jobs))
    quotas = {f"owner-{owner}": Quota(cpu=4.0 * len(jobs)) for owner in range(20)}
    planner = DefaultPlanner(PlannerSettings())
    begin, processor = time.perf_counter(), time.process_time()
    first = planner.plan(ClusterView(tuple(jobs), capacity, quotas=quotas), NOW)
    full, cost = time.perf_counter() - begin, time.process_time() - processor
    later = tuple(advanced(view, NOW + 60) if number % 10 == 0 else view for number, view in enumerate(jobs))
    begin = time.perf_counter()
    planner.plan(ClusterView(later, capacity, quotas=quotas), NOW + 60)
    changed = time.perf_counter() - begin
    used = sum(planned.shape.cpu for planned in first.values() if planned.shape is not None)
    say(
        f"{len(jobs):6} jobs: full plan {duration_text(full):>6} ({duration_text(cost / len(jobs))} a job), "
        f"a tenth changed {duration_text(changed):>6}; {used / capacity.cpu:.0%} of the cores planned"
    )
    return full, changed, cost


def draw(path: Path, sizes: Sequence[int], full: Sequence[float], changed: Sequence[float]) -> None:
    """Draws seconds over jobs."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    axis.loglog(sizes, full, "o-", label="full plan")
    axis.loglog(sizes, changed, "s-", label="a tenth changed")
    axis.loglog(sizes, [full[0] * size / sizes[0] for size in sizes], "k--", label="linear")
    axis.set(xlabel="jobs", ylabel="seconds")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Plans clusters of growing size."""
    options = arguments(__doc__).parse_args()
    sizes = [250, 1000] if options.quick else [1000, 3000, 10_000]
    full: list[float] = []
    changed: list[float] = []
    costs: list[float] = []
    for size in sizes:
        for figures, value in zip(
            (full, changed, costs), measure([job(number) for number in range(size)]), strict=True
        ):
            figures.append(value)
    answers = answer_while_planning([job(number) for number in range(1000)])
    slow = float(np.percentile(answers.latencies, 99))
    say(
        f"GetPlan while 1,000 jobs are planned: {len(answers.latencies)} requests in "
        f"{duration_text(answers.round_seconds)}, median {duration_text(float(np.median(answers.latencies)))}, "
        f"99% within {duration_text(slow)}, "
        f"slowest {duration_text(max(answers.latencies))}; service and planner {bytes_text(answers.memory)}"
    )
    thousand = sizes.index(1000)
    growth = (costs[-1] / sizes[-1]) / (costs[0] / sizes[0])
    ratios = {
        "full plan of 1,000 jobs, seconds": Ratio([(full[thousand], 1.0)], FULL_SECONDS, "max"),
        "plan of 1,000 jobs, a tenth changed, seconds": Ratio([(changed[thousand], 1.0)], CHANGED_SECONDS, "max"),
        "peak memory with 1,000 jobs, service and planner, bytes": Ratio([(answers.memory, 1.0)], MEMORY_BYTES, "max"),
        "GetPlan while 1,000 jobs are planned, 99th percentile, seconds": Ratio([(slow, 1.0)], ANSWER_SECONDS, "max"),
        f"cost a job at {sizes[-1]:,} over {sizes[0]:,} jobs": Ratio([(growth, 1.0)], 1.1, "max"),
    }
    if options.plot:
        draw(options.plot, sizes, full, changed)
    report("planner_scale", ratios, options.output)


if __name__ == "__main__":
    main()
