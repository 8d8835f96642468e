"""A job that does not run yet: its warm start, and smaller versions of it for when the cluster is full."""

import math
from dataclasses import dataclass

import numpy as np

from emberscale_brain.model.features import ModelConstants
from emberscale_brain.model.fit import prior_fit
from emberscale_brain.model.prior import Prior
from emberscale_brain.planner.candidates import Candidates, evaluate
from emberscale_brain.planner.grid import Horizon
from emberscale_brain.planner.types import ClusterView, JobShape, JobView, PlannerSettings, ThroughputFit
from emberscale_brain.warm_start.start import WarmStart, within

_SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.0)


def guessed_fit(samples_per_core: float) -> ThroughputFit:
    """The model of a job of which nothing is known: each worker core trains this many samples a second."""
    nothing = ((0.0,) * 5,) * 5
    return ThroughputFit((1 / samples_per_core, 0.0, 0.0, 0.0, 0.0), nothing, 0.05, 0.0, 0, 0, prior_share=1.0)


@dataclass(frozen=True, slots=True)
class FirstShapes:
    """Candidates for a first shape, the warm start first, then ever smaller ones."""

    job: JobView
    start: WarmStart
    candidates: Candidates
    fit: ThroughputFit | None


def first_shapes(
    job: JobView,
    start: WarmStart,
    prior: Prior | None,
    cluster: ClusterView,
    settings: PlannerSettings,
    samples_per_core: float,
) -> FirstShapes:
    """What the job may start with; where no similar job has a fit, each core is taken to train `samples_per_core`."""
    shapes: dict[JobShape, None] = {}
    for size in _SIZES:
        shapes[_sized(start.shape, size, job)] = None
    capacity = cluster.capacity
    fitting = tuple(
        shape
        for shape in shapes
        if max(shape.worker_cpu, shape.ps_cpu) <= capacity.largest_node_cpu
        and max(shape.worker_memory, shape.ps_memory) <= capacity.largest_node_memory
    )
    constants = ModelConstants.of(job.metadata, cluster.network_bytes_per_second)
    fit = None if prior is None else prior_fit(prior)
    if not fitting:
        return FirstShapes(job, start, _none(), fit)
    candidates = evaluate(
        fitting,
        constants,
        fit or guessed_fit(samples_per_core),
        cluster.prices,
        Horizon(None, 0.0, 1.0, cluster.overheads),
        job.remaining_samples,
        settings.time_value_per_hour,
    )
    return FirstShapes(job, start, candidates, fit)


def _sized(shape: JobShape, size: float, job: JobView) -> JobShape:
    """The shape with this share of its processes; fewer PS hold the same tables, so there are enough for them."""
    tables = shape.ps * shape.ps_memory
    ps = max(1, round(shape.ps * size), job.bounds.ps[0], min(shape.ps, math.ceil(tables / job.bounds.ps_memory[1])))
    scaled = JobShape(
        workers=max(1, round(shape.workers * size)),
        ps=ps,
        worker_cpu=shape.worker_cpu if size else job.bounds.worker_cpu[0],
        ps_cpu=shape.ps_cpu if size else job.bounds.ps_cpu[0],
        worker_memory=shape.worker_memory,
        ps_memory=round(tables / ps),
    )
    return within(scaled, job.bounds)


def _none() -> Candidates:
    nothing = np.zeros(0)
    return Candidates((), nothing, nothing, nothing, nothing, nothing, nothing, nothing)
