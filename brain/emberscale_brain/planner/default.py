"""The default planner: DLRover-RM section 4.3, from profiles to shapes for all jobs.

For each running job: fit the model, forecast the memory, find the Pareto front, find the shape with the smallest bill.
For each waiting job: a warm start. Then weighted greedy selection for all jobs together under capacity and quotas. A
job that keeps its shape may try a small change that is expected to teach more than it costs.

Fronts are enumerated exactly up to `MOST_SHAPES` shapes: in `benchmarks/planner_quality.py` that is faster than NSGA-II
and never worse. NSGA-II searches larger grids.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from emberscale_api.shape import JobShape
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.planner.candidates import (
    DOUBT_PRICE,
    DWELL_SECONDS,
    Candidates,
    Experiment,
    best_experiment,
    evaluate,
    neighbours,
)
from emberscale_brain.planner.explain import explain_experiment, explain_quarantined, explain_running, explain_waiting
from emberscale_brain.planner.grid import Floats, Horizon
from emberscale_brain.planner.job_model import JobModel, expected_rows, prior_of
from emberscale_brain.planner.room import Room
from emberscale_brain.planner.running import Assessment, Assessor
from emberscale_brain.planner.selection import Options, select, weighted_value
from emberscale_brain.planner.types import ClusterView, JobId, JobView, PlannedShape, PlannerSettings
from emberscale_brain.planner.waiting import SAMPLES_PER_CORE, FirstShapes, first_shapes
from emberscale_brain.warm_start import HistoryIndex, NewJob, WarmStart, warm_start

_PROFILES_BEFORE_EXPERIMENTS = 3
A = TypeVar("A", Assessment, FirstShapes)


class DefaultPlanner:
    """Keeps each job's window of profiles, fit and front between rounds. The same calls give the same plans."""

    def __init__(self, settings: PlannerSettings | None = None) -> None:
        self._settings = settings or PlannerSettings()
        self._models: dict[JobId, JobModel] = {}
        self._starts: dict[JobId, WarmStart] = {}

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """Returns shapes for all jobs except fixed ones, which count against the capacity."""
        index = HistoryIndex(cluster.history)
        moving = [job for job in cluster.jobs if not job.fixed]
        self._forget({job.id for job in cluster.jobs})
        room = Room(cluster.capacity, cluster.quotas)
        for job in cluster.jobs:
            if job.fixed:
                room.take(job.owner, job.current)
        plans: dict[JobId, PlannedShape] = {}
        running, waiting = self._assess(cluster, moving, room, index, now, plans)
        for job in moving:
            if job.id in plans:  # in quarantine
                room.take(job.owner, job.current)
        chosen = self._select(cluster, running, waiting, room)
        for assessment, row in zip(running, chosen[: len(running)], strict=True):
            plans[assessment.job.id] = self._plan_running(cluster, assessment, row, room)
        for first, row in zip(waiting, chosen[len(running) :], strict=True):
            plans[first.job.id] = explain_waiting(first, row)
        return {job.id: plans[job.id] for job in moving}

    def _forget(self, alive: set[JobId]) -> None:
        for known in (self._models, self._starts):
            for gone in known.keys() - alive:
                del known[gone]

    def _start(self, job: JobView, index: HistoryIndex) -> WarmStart:
        if job.id not in self._starts:
            new = NewJob(job.owner, job.metadata)
            self._starts[job.id] = warm_start(
                new, job.bounds, index, self._settings.neighbours, self._settings.smoothing
            )
        return self._starts[job.id]

    def _assess(
        self,
        cluster: ClusterView,
        jobs: Sequence[JobView],
        room: Room,
        index: HistoryIndex,
        now: float,
        quarantined: dict[JobId, PlannedShape],
    ) -> tuple[list[Assessment], list[FirstShapes]]:
        """Returns running and waiting jobs; puts jobs whose numbers cannot be computed into `quarantined`."""
        assessor = Assessor(cluster, self._settings)

        def assess(job: JobView, present: JobShape) -> Assessment:
            model = self._model(cluster, job, index)
            model.observe(job, ModelConstants.of(job.metadata, cluster.network_bytes_per_second), now)
            return _finite(assessor.assess(job, present, model, room.limits(job.owner)))

        running: list[Assessment] = []
        for job in jobs:
            present = job.current
            if present is not None:
                with self._quarantine(job, quarantined):
                    running.append(assess(job, present))
        per_core = [float(a.candidates.gross[0]) / a.present.cpu for a in running if a.fit is not None]
        guess = float(np.median(per_core)) if per_core else SAMPLES_PER_CORE
        waiting = []
        free = Room(cluster.capacity, cluster.quotas)
        for job in cluster.jobs:
            free.take(job.owner, job.current)
        for job in jobs:
            if job.current is None:
                with self._quarantine(job, quarantined):
                    start = self._start(job, index)
                    constants = ModelConstants.of(job.metadata, cluster.network_bytes_per_second)
                    prior = prior_of(start.past, start.similar, constants)
                    room_left = free.left(job.owner)
                    waiting.append(_finite(first_shapes(job, start, prior, cluster, room_left, self._settings, guess)))
        return running, waiting

    @contextmanager
    def _quarantine(self, job: JobView, quarantined: dict[JobId, PlannedShape]) -> Iterator[None]:
        """Forgets a job whose numbers cannot be computed, so that it keeps its shape and all others are planned."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # one job's numbers must not stop all planning
            quarantined[job.id] = explain_quarantined(job, error)
            self._models.pop(job.id, None)
            self._starts.pop(job.id, None)

    def _model(self, cluster: ClusterView, job: JobView, index: HistoryIndex) -> JobModel:
        if job.id not in self._models:
            start = self._start(job, index)
            constants = ModelConstants.of(job.metadata, cluster.network_bytes_per_second)
            self._models[job.id] = JobModel(
                prior_of(start.past, start.similar, constants), expected_rows(start.past, start.similar, job.metadata)
            )
        return self._models[job.id]

    def _select(
        self, cluster: ClusterView, running: list[Assessment], waiting: list[FirstShapes], room: Room
    ) -> list[int | None]:
        """Returns the selected row of each job's candidates, None for no shape; takes the shapes from `room`."""
        offers = [
            *(self._offer(a) for a in running),
            *(_options(w.job, w.candidates, self._value(w.job, w.candidates), must=False) for w in waiting),
        ]
        picks = select(offers, *room.rest({job.owner for job in cluster.jobs}))
        rows = [
            *(None if pick is None else int(a.offered[pick]) for a, pick in zip(running, picks, strict=False)),
            *picks[len(running) :],
        ]
        for job, candidates, row in zip(
            [*(a.job for a in running), *(w.job for w in waiting)],
            [*(a.candidates for a in running), *(w.candidates for w in waiting)],
            rows,
            strict=True,
        ):
            room.take(job.owner, None if row is None else candidates.shapes[row])
        return rows

    def _offer(self, assessment: Assessment) -> Options:
        """Returns a running job's options. The target, its best shape, counts for more than any cheaper one."""
        value = self._value(assessment.job, assessment.candidates)
        limited = np.minimum(value, value[assessment.target] * (1 - 1e-9))
        limited[assessment.target] = value[assessment.target]
        rows = assessment.offered
        return _options(assessment.job, assessment.candidates.take(rows), limited[rows], must=True)

    def _value(self, job: JobView, candidates: Candidates) -> Floats:
        settings = self._settings
        net = candidates.net / (1 + DOUBT_PRICE * candidates.doubt)
        return weighted_value(
            candidates.gross, net, job.remaining_samples, settings.rho, settings.epsilon, job.priority
        )

    def _plan_running(self, cluster: ClusterView, assessment: Assessment, row: int | None, room: Room) -> PlannedShape:
        job, candidates = assessment.job, assessment.candidates
        if row and self._better_kept(assessment, row, room):
            room.give_back(job.owner, candidates.shapes[row])
            room.take(job.owner, candidates.shapes[0])
            row = 0
        similar = self._starts[job.id].similar
        if row == 0 and not assessment.grows and not assessment.problem and self._settings.exploration > 0:
            found = None
            with suppress(ArithmeticError, ValueError):  # numbers too far apart: no experiment
                found = self._experiment(cluster, assessment, room)
            if found is not None:
                trials, experiment = found
                room.give_back(job.owner, candidates.shapes[0])
                room.take(job.owner, trials.shapes[experiment.row])
                return explain_experiment(assessment, trials, experiment, similar)
        return explain_running(assessment, row, self._weight(assessment, row or 0), similar)

    def _weight(self, assessment: Assessment, row: int) -> float:
        """WG of equation 14."""
        candidates, job = assessment.candidates, assessment.job
        one = weighted_value(
            candidates.gross[row : row + 1],
            np.ones(1),
            job.remaining_samples,
            self._settings.rho,
            self._settings.epsilon,
            job.priority,
        )
        return float(one[0])

    def _better_kept(self, assessment: Assessment, row: int, room: Room) -> bool:
        """Whether the present shape fits after all, and the selected one does not save the minimum gain."""
        if not assessment.keeps:
            return False
        bill, shapes, owner = assessment.candidates.bill, assessment.candidates.shapes, assessment.job.owner
        if bill[row] <= bill[0] * (1 - self._settings.minimum_gain):
            return False
        room.give_back(owner, shapes[row])
        fits = room.fits(owner, shapes[0])
        room.take(owner, shapes[row])
        return fits

    def _experiment(
        self, cluster: ClusterView, assessment: Assessment, room: Room
    ) -> tuple[Candidates, Experiment] | None:
        """Returns a small change that is worth trying and has room; None if there is none."""
        job, present, fit = assessment.job, assessment.present, assessment.fit
        model = self._models[job.id]
        if fit is None or model.profiles_of(present) < _PROFILES_BEFORE_EXPERIMENTS:
            return None
        room.give_back(job.owner, present)
        # another measurement of a shape would not teach by how much the model is wrong there
        unknown = (shape for shape in neighbours(present, job.bounds) if not model.profiles_of(shape))
        near = tuple(shape for shape in unknown if room.fits(job.owner, shape))
        room.take(job.owner, present)
        if not near:
            return None
        constants = ModelConstants.of(job.metadata, cluster.network_bytes_per_second)
        horizon = Horizon(present, float(assessment.candidates.gross[0]), DWELL_SECONDS, cluster.overheads)
        value = self._settings.time_value_per_hour
        trials = evaluate((present, *near), constants, fit, cluster.prices, horizon, job.remaining_samples, value).take(
            np.arange(1, len(near) + 1)
        )
        experiment = best_experiment(
            trials, assessment.candidates, constants, fit, job.remaining_samples, value, self._settings.exploration
        )
        return None if experiment is None else (trials, experiment)


def _finite(assessed: A) -> A:
    """Returns its argument. Raises ArithmeticError if a number is not finite and would spoil every job's selection."""
    candidates = assessed.candidates
    for name in ("cost", "gross", "net", "bill"):
        if not np.isfinite(getattr(candidates, name)).all():
            raise ArithmeticError(f"{name} is not finite")
    return assessed


def _options(job: JobView, candidates: Candidates, value: Floats, must: bool) -> Options:
    return Options(
        owner=job.owner,
        must=must,
        cpu=np.array([shape.cpu for shape in candidates.shapes]),
        memory=np.array([shape.memory for shape in candidates.shapes], dtype=np.float64),
        value=value,
    )
