"""Generates the jobs that arrive from a scenario and a seed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from emberscale_api.job.units import memory_bytes
from emberscale_api.shape import GIB, JobShape
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_simulator.ground_truth import Physics, TableGrowth, amdahl_seconds, batch_rate
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.scenario import (
    Bounds,
    ClusterSpec,
    GeneratedWorkload,
    LogNormal,
    RoundsWorkload,
    Scenario,
    SimulatedModel,
    TraceWorkload,
)
from emberscale_simulator.trace import TraceRow, read_trace

_USUAL_CORES = (1, 2, 4, 8, 16, 32)
_USUAL_MEMORY_GIB = (2, 4, 8, 16, 32, 64, 128, 256)
_DAY = 86_400.0


def make_jobs(scenario: Scenario, seed: int, folder: Path) -> list[SimulatedJob]:
    """Returns the jobs of a scenario by arrival; the same for the same seed. Trace paths are relative to `folder`."""
    random = np.random.default_rng([seed, 0])
    match scenario.workload:
        case RoundsWorkload() as rounds:
            return _rounds(scenario, rounds, random)
        case GeneratedWorkload() as generated:
            return _generated(scenario, generated, random)
        case TraceWorkload() as trace:
            return _traced(scenario, trace, folder, random)


def physics_of(model: SimulatedModel, cluster: ClusterSpec) -> Physics:
    """Returns the truth about a model on a cluster."""
    return Physics(
        batch_size=model.batch_size,
        worker_work=model.worker_work,
        worker_parallel=model.worker_parallel,
        ps_work=model.ps_work,
        ps_parallel=model.ps_parallel,
        batch_bytes=model.batch_bytes,
        request_seconds=model.request_seconds,
        fixed_seconds=model.fixed_seconds,
        worker_bandwidth=memory_bytes(cluster.worker_bandwidth),
        ps_bandwidth=memory_bytes(cluster.ps_bandwidth),
    )


def _plain_job(scenario: Scenario, name: str, job: str, owner: str, samples: int, request: JobShape) -> SimulatedJob:
    """Returns a job that is exactly the scenario's model `name`, at time 0."""
    model = scenario.models[name]
    return SimulatedJob(
        id=JobId(job),
        owner=owner,
        metadata=JobMetadata(
            architecture=model.architecture,
            batch_size=model.batch_size,
            dense_bytes=model.dense_bytes,
            embedding_dimension=model.embedding_dimension,
            tables=model.tables,
            total_samples=samples,
            name=name,
        ),
        physics=physics_of(model, scenario.cluster),
        growth=TableGrowth(
            base_bytes=memory_bytes(model.table_base),
            limit_bytes=memory_bytes(model.table_limit),
            scale_samples=model.table_scale_samples,
            exponent=model.table_exponent,
        ),
        row_bytes=model.row_bytes,
        worker_memory=memory_bytes(model.worker_memory),
        ps_base=memory_bytes(model.ps_base),
        arrival=0.0,
        request=request,
        bounds=_bounds(scenario.workload.bounds, scenario.cluster),
    )


def _rounds(scenario: Scenario, rounds: RoundsWorkload, random: np.random.Generator) -> list[SimulatedJob]:
    jobs = []
    asked = rounds.request
    for number in range(rounds.history_rounds + 1):
        for place, name in enumerate(rounds.models):
            request = JobShape(
                workers=int(random.integers(round(asked.workers.low), round(asked.workers.high) + 1)),
                ps=int(random.integers(round(asked.ps.low), round(asked.ps.high) + 1)),
                worker_cpu=float(random.choice(asked.worker_cpu)),
                ps_cpu=float(random.choice(asked.ps_cpu)),
                worker_memory=memory_bytes(asked.worker_memory),
                ps_memory=memory_bytes(asked.ps_memory),
            )
            samples = rounds.steps * scenario.models[name].batch_size
            job = _plain_job(scenario, name, f"{name}-{number}", "team", samples, request)
            arrival = number * rounds.round_interval + place * rounds.spacing
            jobs.append(replace(job, arrival=arrival, measured=number == rounds.history_rounds))
    return jobs


def _traced(scenario: Scenario, trace: TraceWorkload, folder: Path, random: np.random.Generator) -> list[SimulatedJob]:
    rows = read_trace(folder / trace.path, frozenset(scenario.models))
    if trace.variation is not None:
        rows = _redrawn(rows, trace.variation, random)
    return [
        replace(
            _plain_job(scenario, row.model, row.job_id, row.owner, row.total_samples, row.request),
            arrival=row.submitted_seconds,
        )
        for row in rows
    ]


def _redrawn(rows: Sequence[TraceRow], spread: float, random: np.random.Generator) -> list[TraceRow]:
    """Draws as many jobs as the trace has, each modelled on one of its jobs, at gaps drawn from its gaps."""
    gaps = np.diff([0.0, *(row.submitted_seconds for row in rows)])
    count = len(rows)
    chosen = random.integers(count, size=count)
    arrivals = np.cumsum(random.choice(gaps, count) * np.exp(random.normal(0.0, spread, count)))
    sizes = np.exp(random.normal(0.0, spread, count))
    return [
        replace(
            rows[row],
            job_id=f"{rows[row].job_id}-{number}",
            submitted_seconds=float(arrival),
            total_samples=max(1, round(rows[row].total_samples * float(size))),
        )
        for number, (row, arrival, size) in enumerate(zip(chosen, arrivals, sizes, strict=True))
    ]


def _generated(scenario: Scenario, workload: GeneratedWorkload, random: np.random.Generator) -> list[SimulatedJob]:
    families = [_family(scenario, workload, number, random) for number in range(workload.families)]
    shares = 1.0 / np.arange(1, workload.families + 1) ** workload.popularity
    chosen = random.choice(workload.families, size=workload.jobs, p=shares / shares.sum())
    arrivals = _arrivals(workload, random)
    runs = np.exp(random.normal(0.0, workload.run_spread, workload.jobs))
    jobs = []
    for number, (family, arrival, run) in enumerate(zip(chosen, arrivals, runs, strict=True)):
        template = families[family]
        samples = max(1, round(template.metadata.total_samples * float(run)))
        jobs.append(
            replace(
                template,
                id=JobId(f"{template.id}-{number:05d}"),
                metadata=replace(template.metadata, total_samples=samples),
                arrival=arrival,
            )
        )
    return jobs


def _arrivals(workload: GeneratedWorkload, random: np.random.Generator) -> list[float]:
    """Draws the times of a Poisson process with a daily swing, given that `jobs` of them fall into the period."""
    times: list[float] = []
    while len(times) < workload.jobs:
        time = float(random.uniform(0, workload.period))
        phase = 2 * math.pi * (time / _DAY - workload.peak_hour / 24)
        if random.uniform(0, 1 + workload.daily_swing) < 1 + workload.daily_swing * math.cos(phase):
            times.append(time)
    return sorted(times)


def _family(scenario: Scenario, workload: GeneratedWorkload, number: int, random: np.random.Generator) -> SimulatedJob:
    """Draws a family: the template of its jobs."""
    weights = np.array([share.weight for share in workload.models])
    name = workload.models[int(random.choice(len(weights), p=weights / weights.sum()))].model

    def factor(spread: float) -> float:
        return float(np.exp(random.normal(0.0, spread)))

    dense, sparse = factor(workload.family_spread), factor(workload.family_spread)
    base = physics_of(scenario.models[name], scenario.cluster)
    physics = replace(
        base,
        worker_work=base.worker_work * dense * factor(workload.hidden_spread),
        ps_work=base.ps_work * sparse * factor(workload.hidden_spread),
        batch_bytes=base.batch_bytes * sparse * factor(workload.hidden_spread),
    )
    cores = workload.reference_cpu
    workers = max(1, round(_draw(workload.reference_workers, random)))
    ps = _ps_for_load(physics, workers, cores, workload.reference_ps_load)
    duration = _draw(workload.duration, random)
    samples = max(1, round(batch_rate(physics, workers, ps, cores, cores) * physics.batch_size * duration))
    job = _plain_job(
        scenario,
        name,
        f"{name}-f{number}",
        f"owner-{int(random.integers(workload.owners))}",
        samples,
        JobShape(1, 1, 1, 1, GIB, GIB),
    )
    growth = replace(job.growth, limit_bytes=job.growth.limit_bytes * sparse * factor(workload.table_spread))
    metadata = replace(
        job.metadata,
        dense_bytes=max(1, round(job.metadata.dense_bytes * dense)),
        embedding_dimension=max(1, round(job.metadata.embedding_dimension * sparse)),
        name=f"{name}-{_word(number)}",
    )
    job = replace(job, physics=physics, growth=growth, metadata=metadata)
    return replace(job, request=_request(scenario, workload, job, workers, ps, random))


def _ps_for_load(physics: Physics, workers: int, cores: float, load: float) -> int:
    """Returns the fewest PS that are at most this busy; 256 if more are needed."""
    for ps in range(1, 257):
        busy = batch_rate(physics, workers, ps, cores, cores) * amdahl_seconds(
            physics.ps_work / ps, physics.ps_parallel, cores
        )
        if busy <= load:
            return ps
    return 256


def _request(
    scenario: Scenario,
    workload: GeneratedWorkload,
    job: SimulatedJob,
    workers: int,
    ps: int,
    random: np.random.Generator,
) -> JobShape:
    """Returns the owner's request: the family's reference shape, mis-sized and rounded to usual numbers."""
    sizing, bounds = workload.sizing, job.bounds
    asked_workers = min(bounds.workers[1], max(1, round(workers * _draw(sizing.workers, random))))
    asked_ps = min(bounds.ps[1], max(1, round(ps * _draw(sizing.ps, random))))
    ps_memory = job.largest_ps(job.metadata.total_samples, asked_ps, scenario.ps_memory_skew)
    if random.uniform() < sizing.memory_shortage.probability:
        short = sizing.memory_shortage.factor
        ps_memory_gib = ps_memory / GIB * float(random.uniform(short.low, short.high))
    else:
        ps_memory_gib = _usual_memory(ps_memory * _ample(sizing.memory, random))
    return JobShape(
        workers=asked_workers,
        ps=asked_ps,
        worker_cpu=min(bounds.worker_cpu[1], _usual_cores(workload.reference_cpu * _draw(sizing.worker_cpu, random))),
        ps_cpu=min(bounds.ps_cpu[1], _usual_cores(workload.reference_cpu * _draw(sizing.ps_cpu, random))),
        worker_memory=round(_usual_memory(job.worker_memory * _ample(sizing.memory, random)) * GIB),
        ps_memory=min(bounds.ps_memory[1], round(ps_memory_gib * GIB)),
    )


def _usual_cores(cores: float) -> float:
    """Returns the nearest number of cores that people usually type, by its logarithm."""
    return float(min(_USUAL_CORES, key=lambda usual: abs(math.log(usual / cores))))


def _usual_memory(size_bytes: float) -> float:
    """Returns the smallest number of GiB that people usually type and that is enough, or the largest."""
    gib = size_bytes / GIB
    return float(next((usual for usual in _USUAL_MEMORY_GIB if usual >= gib), _USUAL_MEMORY_GIB[-1]))


def _draw(law: LogNormal, random: np.random.Generator) -> float:
    return law.median * float(np.exp(random.normal(0.0, law.spread)))


def _word(number: int) -> str:
    """Returns a made-up word for a family: names distinguish families by words, and runs of a family by numbers."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number * 7 + 5, 26)
        letters += chr(ord("a") + letter)
    return letters


def _ample(law: LogNormal, random: np.random.Generator) -> float:
    """Draws a factor on memory that leaves at least a fifth of headroom: shortages are drawn separately."""
    return max(1.2, _draw(law, random))


def _bounds(bounds: Bounds, cluster: ClusterSpec) -> ShapeBounds:
    node_memory = memory_bytes(cluster.node_memory)
    return ShapeBounds(
        workers=(1, bounds.max_workers),
        ps=(1, bounds.max_ps),
        worker_cpu=(1.0, min(bounds.max_cpu, cluster.node_cpu)),
        ps_cpu=(1.0, min(bounds.max_cpu, cluster.node_cpu)),
        worker_memory=(GIB, min(memory_bytes(bounds.max_worker_memory), node_memory)),
        ps_memory=(GIB, min(memory_bytes(bounds.max_ps_memory), node_memory)),
    )
