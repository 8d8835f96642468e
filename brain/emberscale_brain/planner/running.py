"""Assesses a running job: its fit, front and bills, and the shapes that it may be offered."""

import zlib
from dataclasses import dataclass, replace

import numpy as np

from emberscale_api.readable import bytes_text
from emberscale_api.shape import JobShape, memory_reserve
from emberscale_brain.model.predict import ModelConstants, throughput
from emberscale_brain.model.window import shape_key
from emberscale_brain.planner.candidates import Candidates, evaluate, front_shapes, worker_only_shapes
from emberscale_brain.planner.front import MOST_SHAPES, Front, exact_front, nsga2_front
from emberscale_brain.planner.grid import Horizon, Ints, JobProblem, ShapeGrid, shape_grid
from emberscale_brain.planner.job_model import JobModel
from emberscale_brain.planner.types import (
    ClusterView,
    JobView,
    MemoryForecast,
    PlannerSettings,
    ScalingOverheads,
    ThroughputFit,
)
from emberscale_brain.planner.waiting import SAMPLES_PER_CORE, guessed_fit

_FRONT_SHAPES = 32
_WORKER_ONLY_SHAPES = 12
_CHANGES = 2.0  # a change of shape may take this many times the median
_COPIED_BYTES = 3e7  # a second, for each server that gives rows away: the rate of a busy machine in benchmarks/oom.py
_LEAST_MEASUREMENTS = 2
"""Fewer measurements tell nothing about growth. Reports of rows and of samples are up to a heartbeat apart, which
distorts the first measurement. Between two measurements, the same training adds to both."""
_SAME_PREDICTIONS = 0.02  # a front is kept while a new fit predicts its points within this


@dataclass(frozen=True, slots=True)
class Assessment:
    """A running job as the selection sees it.

    Row 0 of `candidates` is the present shape, with more memory if it `grows`; `front_rows` are points of the front.
    `offered` are the rows that may be selected: the `target` and cheaper ones. A job that must keep its shape has no
    other row, and `problem` says why.
    """

    job: JobView
    present: JobShape
    fit: ThroughputFit | None
    candidates: Candidates
    front_rows: int
    offered: Ints
    target: int
    keeps: bool
    grows: bool
    memory: MemoryForecast | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Assessor:
    """Assesses running jobs; its fields are the same for all jobs of a round of planning."""

    cluster: ClusterView
    settings: PlannerSettings

    def assess(self, job: JobView, present: JobShape, model: JobModel, limits: tuple[float, float]) -> Assessment:
        """Finds the job's candidates within `limits`, the cores and bytes that it may have."""
        forecast = None if model.memory is None else model.memory.forecast(present)
        if model.fit is None:
            return self._stays(job, present, model, forecast, limits, "there is no usable measurement yet")
        constants = self._constants(job)
        gross = throughput(constants, model.fit, present)[0]
        seconds = max(job.remaining_samples / gross, 1.0)
        worker_memory = model.worker_memory_need(present)
        need = model.ps_memory_need(present)
        grid = shape_grid(job.bounds, self.cluster.capacity, worker_memory, need)
        if grid is None:
            return self._stays(
                job,
                present,
                model,
                forecast,
                limits,
                f"no number of PS within {job.bounds.ps} holds the tables, which need "
                f"{bytes_text(need.shared)}, within the bounds and nodes: raise the bounds of ps or ps_memory",
            )
        grows = self._runs_out_of_memory(job, present, model, forecast, gross)
        stay = _with_memory_for(present, model) if grows else present
        overheads = self.cluster.overheads
        problem = JobProblem(
            grid,
            constants,
            model.fit,
            self.cluster.prices,
            Horizon(present, gross, _coarse(seconds), overheads),
            *limits,
        )
        front = self._front(job, model, problem)
        on_front = (
            front_shapes(front, problem, job.remaining_samples, self.settings.time_value_per_hour, _FRONT_SHAPES)
            if len(front)
            else ()
        )
        on_front = tuple(shape for shape in on_front if shape_key(shape) != shape_key(stay))
        holds = grid.ps[0] <= stay.ps <= grid.ps[-1]
        # only the counts and cores of the present shape must be within the bounds: it may have outgrown their memory
        within = job.bounds.contains(stay.with_memory(job.bounds.worker_memory[0], job.bounds.ps_memory[0]))
        aside = worker_only_shapes(problem, stay, _WORKER_ONLY_SHAPES) if within and holds else ()
        aside = tuple(shape for shape in aside if shape.cpu <= limits[0] and shape.memory <= limits[1])
        candidates = evaluate(
            (stay, *on_front, *aside),
            constants,
            model.fit,
            self.cluster.prices,
            Horizon(present, gross, seconds, overheads),
            job.remaining_samples,
            self.settings.time_value_per_hour,
        )
        most_memory = min(job.bounds.ps_memory[1], self.cluster.capacity.largest_node_memory)
        keeps = within and (not grows or stay.ps_memory <= most_memory)
        keeps = keeps or len(candidates) == 1
        is_measured = model.profiles_of(present) > 0
        target = self._target(candidates, keeps, is_measured)
        return Assessment(
            job,
            present,
            model.fit,
            candidates,
            len(on_front),
            _offered(candidates, target, keeps),
            target,
            keeps,
            grows,
            forecast,
        )

    def _constants(self, job: JobView) -> ModelConstants:
        return ModelConstants.of(job.metadata, self.cluster.network_bytes_per_second)

    def _stays(
        self,
        job: JobView,
        present: JobShape,
        model: JobModel,
        forecast: MemoryForecast | None,
        limits: tuple[float, float],
        problem: str,
    ) -> Assessment:
        """Offers only the present shape; if its memory would run out, with more memory or more PS."""
        constants = self._constants(job)
        known = model.fit or guessed_fit(SAMPLES_PER_CORE)
        gross = throughput(constants, known, present)[0]
        grown = self._grown(job, present, model, limits)
        grows = self._runs_out_of_memory(job, present, model, forecast, gross) and grown != present
        horizon = Horizon(present, gross, 1.0, self.cluster.overheads)
        candidates = evaluate(
            (grown if grows else present,),
            constants,
            known,
            self.cluster.prices,
            horizon,
            job.remaining_samples,
            self.settings.time_value_per_hour,
        )
        return Assessment(
            job, present, model.fit, candidates, 0, np.zeros(1, dtype=np.int64), 0, True, grows, forecast, problem
        )

    def _grown(self, job: JobView, present: JobShape, model: JobModel, limits: tuple[float, float]) -> JobShape:
        """Returns the present shape with memory for the rest of the job, within bounds and nodes, but never with less.

        If a PS cannot have enough memory, the shape gets more PS: as few as suffice, or as many as possible.
        """
        node = self.cluster.capacity.largest_node_memory
        most_worker, most_ps = min(job.bounds.worker_memory[1], node), min(job.bounds.ps_memory[1], node)
        need = model.ps_memory_need(present)
        counts = np.arange(present.ps, max(present.ps, job.bounds.ps[1]) + 1)
        grown = present
        for count, bytes_each in zip(counts.tolist(), need.each(counts).tolist(), strict=True):
            shape = replace(present, ps=count).with_memory(
                max(present.worker_memory, int(min(model.worker_memory_need(present), most_worker))),
                max(present.ps_memory, int(min(bytes_each, most_ps))),
            )
            if count == present.ps or (shape.cpu <= limits[0] and shape.memory <= limits[1]):
                grown = shape
            if bytes_each <= max(most_ps, present.ps_memory):
                break
        return grown

    def _runs_out_of_memory(
        self, job: JobView, present: JobShape, model: JobModel, forecast: MemoryForecast | None, gross: float
    ) -> bool:
        """Whether the PS may reach their limit before a change of shape that begins later would be done."""
        if forecast is None or forecast.oom_band is None:
            return False
        lead = self.settings.memory_lead_seconds
        if lead is None:
            last = job.profiles[-1] if job.profiles else None
            if last is not None and last.ps_memory > present.ps_memory - memory_reserve(present.ps_memory):
                return True
            lead = lead_seconds(job, present, model, self.cluster.overheads, self.settings.planning_seconds)
        if len(model.track.points) < _LEAST_MEASUREMENTS:
            return False
        seen = job.metadata.total_samples - job.remaining_samples
        return (forecast.oom_band[0] - seen) / gross <= lead

    def _target(self, candidates: Candidates, keeps: bool, is_measured: bool) -> int:
        """Returns the row with the smallest bill, or the present row unless another saves the minimum gain."""
        if keeps and not is_measured:
            return 0
        bill = candidates.bill if keeps else np.concatenate([[np.inf], candidates.bill[1:]])
        best = int(np.argmin(bill))
        if keeps and bill[best] > bill[0] * (1 - self.settings.minimum_gain):
            return 0
        return best

    def _front(self, job: JobView, model: JobModel, problem: JobProblem) -> Front:
        """Returns the front; reuses the last one while only the last digits of the fit have changed."""
        grid = problem.grid
        key = (
            job.bounds,
            problem.prices,
            problem.horizon.current,
            problem.horizon.seconds,
            problem.horizon.overheads,
            problem.cpu_limit if problem.cpu_limit < _most_cpu(grid) else np.inf,
            problem.memory_limit if problem.memory_limit < _most_memory(grid) else np.inf,
            grid.worker_memory,
            tuple(np.round(np.log(grid.ps_memory) / 0.05).tolist()),
        )
        if model.front is not None and model.front_key == key and _same_predictions(model, problem):
            return _reevaluated(model.front, problem)
        if grid.size <= MOST_SHAPES:
            model.front = exact_front(problem)
        else:
            seed = (self.settings.seed + zlib.crc32(job.id.encode())) % (1 << 31)
            model.front, model.population = nsga2_front(problem, seed, model.population)
        model.front_key, model.front_fit = key, problem.fit
        return model.front


def lead_seconds(
    job: JobView, present: JobShape, model: JobModel, overheads: ScalingOverheads, planning_seconds: float
) -> float:
    """Returns how many seconds before memory may run out a change must begin to be done in time.

    The brain notices the growth by the second measurement and plan from now. Then servers start, which takes as long as
    in the past, and each server gives its rows away.
    """
    times = [profile.time for profile in job.profiles[-2:]]
    noticed = 2 * (planning_seconds + (times[1] - times[0] if len(times) == 2 else planning_seconds))
    held = model.memory.split.per_unit * model.memory.growth.last_value / present.ps if model.memory else 0.0
    return noticed + _CHANGES * (overheads.ps_start_seconds + overheads.ps_pause_seconds) + held / _COPIED_BYTES


def _with_memory_for(present: JobShape, model: JobModel) -> JobShape:
    """Returns the present shape with the memory that the rest of the job needs, if that is more."""
    need = model.ps_memory_need(present)
    return present.with_memory(
        max(model.worker_memory_need(present), present.worker_memory),
        max(int(need.each(np.array([present.ps]))[0]), present.ps_memory),
    )


def _coarse(seconds: float) -> float:
    """Rounds to a power of two, so that one front serves until the rest of the job has halved."""
    return float(2 ** np.round(np.log2(seconds)))


def _most_cpu(grid: ShapeGrid) -> float:
    return float(grid.workers[-1] * grid.worker_cpu[-1] + grid.ps[-1] * grid.ps_cpu[-1])


def _most_memory(grid: ShapeGrid) -> float:
    return float(grid.workers[-1] * grid.worker_memory + (grid.ps * grid.ps_memory).max())


def _same_predictions(model: JobModel, problem: JobProblem) -> bool:
    if model.front is None or model.front_fit is None or not len(model.front):
        return False
    if model.front_fit is problem.fit:
        return True
    then = replace(problem, fit=model.front_fit).gross(*model.front.choices.T)
    return bool(np.abs(np.log(problem.gross(*model.front.choices.T) / then)).max() < _SAME_PREDICTIONS)


def _reevaluated(front: Front, problem: JobProblem) -> Front:
    """Evaluates the shapes of a front again, with the present fit and memory."""
    w, p, cpu_w, cpu_p = (np.ascontiguousarray(column) for column in front.choices.T)
    index = np.searchsorted(problem.grid.ps, p)
    cost, net = problem.evaluate(w.astype(np.int64), index, cpu_w, cpu_p)
    kept = np.flatnonzero(np.isfinite(cost) & (net > 0))
    order = kept[np.argsort(net[kept], kind="stable")]
    return Front(problem.grid, front.choices[order], cost[order], net[order])


def _offered(candidates: Candidates, target: int, keeps: bool) -> Ints:
    offered = candidates.cost <= candidates.cost[target] * (1 + 1e-9)
    offered &= candidates.net > 0
    offered[0] &= keeps
    offered[target] = True
    return np.flatnonzero(offered)
