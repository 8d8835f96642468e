"""A job that does not run yet: its warm start, and smaller versions of it for when the cluster is full."""

import math
from dataclasses import dataclass

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.model.fit import prior_fit
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.model.prior import Prior
from emberscale_brain.planner.candidates import Candidates, evaluate
from emberscale_brain.planner.grid import Horizon
from emberscale_brain.planner.room import Room, cut_to, fits
from emberscale_brain.planner.types import ClusterCapacity, ClusterView, JobView, PlannerSettings, ThroughputFit
from emberscale_brain.warm_start import WarmStart, within

SAMPLES_PER_CORE = 1000.0  # a second, if nothing is known
_SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.0)


def guessed_fit(samples_per_core: float) -> ThroughputFit:
    """Returns the model of a job without measurements: each worker core trains this many samples a second."""
    nothing = ((0.0,) * 6,) * 6
    return ThroughputFit((1 / samples_per_core, 0.0, 0.0, 0.0, 0.0, 0.0), nothing, 0.05, 0.0, 0, 0, prior_share=1.0)


@dataclass(frozen=True, slots=True)
class FirstShapes:
    """Candidates for a first shape: as much of the warm start as the cluster can hold, then ever smaller ones."""

    job: JobView
    start: WarmStart
    candidates: Candidates
    fit: ThroughputFit | None


def first_shapes(
    job: JobView,
    start: WarmStart,
    prior: Prior | None,
    cluster: ClusterView,
    free: ClusterCapacity,
    settings: PlannerSettings,
    samples_per_core: float,
) -> FirstShapes:
    """Returns the shapes that a job may start with; without a similar job's fit, each core trains `samples_per_core`.

    `free` is the room that no job has. If no past job is similar, the memory is a guess: if none of the shapes fits
    into `free`, the job is also offered one with less memory, rather than having to wait. There are no shapes for a job
    that would not fit into the empty cluster or the owner's unused quota.
    """
    constants = ModelConstants.of(job.metadata, cluster.network_bytes_per_second)
    fit = None if prior is None else prior_fit(prior)
    largest = cut_to(start.shape, job.bounds, cluster.capacity, keep_memory=False)
    unused = Room(cluster.capacity, cluster.quotas).left(job.owner)
    if largest is None or cut_to(start.shape, job.bounds, unused, keep_memory=False) is None:
        return FirstShapes(job, start, Candidates((), *[np.zeros(0)] * 7), fit)  # no candidates
    most = min(job.bounds.ps_memory[1], cluster.capacity.largest_node_memory)
    shapes = dict.fromkeys(_sized(largest, size, job, most) for size in _SIZES)
    if not start.similar and not any(fits(shape, free) for shape in shapes):
        left = cut_to(largest, job.bounds, free, keep_memory=False)
        shapes.update({} if left is None else {left: None})
    candidates = evaluate(
        tuple(shape for shape in shapes if fits(shape, cluster.capacity)),
        constants,
        fit or guessed_fit(samples_per_core),
        cluster.prices,
        Horizon(None, 0.0, 1.0, cluster.overheads),
        job.remaining_samples,
        settings.time_value_per_hour,
    )
    return FirstShapes(job, start, candidates, fit)


def _sized(shape: JobShape, size: float, job: JobView, most: float) -> JobShape:
    """Returns the shape with this share of its processes, and enough PS of at most `most` bytes for the same tables."""
    tables = shape.ps * shape.ps_memory
    ps = max(1, round(shape.ps * size), job.bounds.ps[0], min(shape.ps, math.ceil(tables / most)))
    scaled = JobShape(
        workers=max(1, round(shape.workers * size)),
        ps=ps,
        worker_cpu=shape.worker_cpu if size else job.bounds.worker_cpu[0],
        ps_cpu=shape.ps_cpu if size else job.bounds.ps_cpu[0],
        worker_memory=shape.worker_memory,
        ps_memory=round(tables / ps),
    )
    return within(scaled, job.bounds)
