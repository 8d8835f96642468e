"""The discrete-event core: a heap of the next events.

Deterministic: the jobs, the scenario and the seed determine everything. Between two events all rates are constant, so a
job costs a handful of events however long it runs.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from emberscale_api.job.units import memory_bytes
from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId, JobView
from emberscale_brain.preferences import PROFILES_SHOWN
from emberscale_simulator.adviser import CheckpointAdviser
from emberscale_simulator.job import Happening, RunPhase, SimulatedJob
from emberscale_simulator.mechanics import FailureLaw
from emberscale_simulator.resources import NOTHING, Amounts, role_resources
from emberscale_simulator.run import JobRun
from emberscale_simulator.scenario import ClusterSpec, Scenario, SchedulerSpec
from emberscale_simulator.schedulers.protocol import ScheduledJob, Scheduler

_HOUR, _DAY = 3600.0, 86_400.0


class _EventKind(IntEnum):
    """Kinds of events; of simultaneous events, the lower kind goes first."""

    CAPACITY = 0
    JOB = 1
    ARRIVAL = 2
    TICK = 3


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one seed under one scheduler."""

    runs: tuple[JobRun, ...]
    ended_at: float


class Simulation:
    """One scheduler, one seed."""

    def __init__(
        self, scenario: Scenario, spec: SchedulerSpec, scheduler: Scheduler, jobs: Sequence[SimulatedJob], seed: int
    ) -> None:
        failures = FailureLaw.of(scenario.failures.daily_pod_failures, scenario.failures.median_over_mean)
        self._scheduler = scheduler
        self._adviser = CheckpointAdviser()
        self._interval = spec.interval
        self._horizon = scenario.horizon
        mechanics = scenario.mechanics[spec.mechanics]
        self._sees_capacity = mechanics.sees_capacity
        self._runs = [
            JobRun(job, mechanics, scenario, failures, (seed, number))
            for number, job in enumerate(sorted(jobs, key=lambda job: (job.arrival, job.id)))
        ]
        self._number = {run.job.id: number for number, run in enumerate(self._runs)}
        self._profiles: list[deque[JobProfile]] = [deque(maxlen=PROFILES_SHOWN) for _ in self._runs]
        self._whole = whole_cluster(scenario.cluster)
        self._node = Amounts(scenario.cluster.node_cpu, memory_bytes(scenario.cluster.node_memory))
        self._capacity = self._whole
        self._capacity_events = list(capacity_fractions(scenario.cluster, scenario.horizon))
        self._active: dict[int, JobRun] = {}
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0

    def run(self) -> RunResult:
        """Runs until every job has ended, or to the horizon."""
        for number, run in enumerate(self._runs):
            self._push(run.job.arrival, _EventKind.ARRIVAL, number)
        for number, (at, _) in enumerate(self._capacity_events):
            self._push(at, _EventKind.CAPACITY, number)
        to_arrive = len(self._runs)
        ticking = False
        now = 0.0
        while self._heap and (to_arrive or self._active):
            at, kind, _, number, version = heapq.heappop(self._heap)
            if at > self._horizon:
                break
            if kind == _EventKind.JOB:
                if version == self._runs[number].version and number in self._active:
                    now = at
                    self._job_event(number, now)
                continue
            now = at
            if kind == _EventKind.ARRIVAL:
                to_arrive -= 1
                self._active[number] = self._runs[number]
                self._admit(now)
                if not ticking:
                    ticking = True
                    self._push(self._next_tick(now), _EventKind.TICK, 0)
            elif kind == _EventKind.CAPACITY:
                self._capacity_changes(self._capacity_events[number][1], now)
            else:
                self._decide(now, may_change=True)
                ticking = bool(self._active)
                if ticking:
                    self._push(self._next_tick(now), _EventKind.TICK, 0)
        end = min(self._horizon, now) if not (to_arrive or self._active) else self._horizon
        for run in self._active.values():
            run.advance(end)
        return RunResult(tuple(self._runs), end)

    def _push(self, at: float, kind: _EventKind, number: int, version: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, kind, self._sequence, number, version))

    def _next_tick(self, now: float) -> float:
        return (math.floor(now / self._interval) + 1) * self._interval

    def _announce(self, number: int) -> None:
        event = self._runs[number].next_event()
        if event is not None:
            self._push(event[0], _EventKind.JOB, number, self._runs[number].version)

    def _job_event(self, number: int, now: float) -> None:
        run = self._runs[number]
        event = run.next_event()
        if event is None:
            return
        run.happen(event[1], now, self._capacity - self._reserved())
        if run.ended:
            del self._active[number]
            self._report_starts(run)
            final = run.shape
            if final is not None:
                self._scheduler.job_ended(run.job, final, run.phase is RunPhase.COMPLETE, now)
            self._room_appears(now)
        else:
            self._announce(number)
            if event[1] is Happening.CHANGE_READY:
                self._room_appears(now)

    def _capacity_changes(self, fraction: float, now: float) -> None:
        before = self._capacity
        self._capacity = Amounts(self._whole.cpu * fraction, int(self._whole.memory * fraction))
        if self._capacity.cpu > before.cpu:
            self._room_appears(now)
            return
        youngest_first = sorted(
            (number for number, run in self._active.items() if run.shape is not None),
            key=lambda number: self._runs[number].started_at or 0.0,
            reverse=True,
        )
        for evicting in (False, True):
            for number in youngest_first:
                over = self._reserved() - self._capacity
                if over.fits(NOTHING):
                    return
                run = self._runs[number]
                if evicting:
                    run.evict(now)
                elif run.shape is not None:
                    needed = max(over.cpu / run.shape.worker_cpu, over.memory / run.shape.worker_memory)
                    run.evict_workers(math.ceil(needed), now)
                self._announce(number)

    def _reserved(self) -> Amounts:
        total = NOTHING
        for run in self._active.values():
            total = total + run.reserved
        return total

    def _room_appears(self, now: float) -> None:
        """Brings evicted workers back, those of the oldest jobs first; then waiting jobs may start."""
        for number in sorted(self._active, key=lambda number: self._runs[number].started_at or math.inf):
            run = self._runs[number]
            while (needed := run.evicted_workers) != NOTHING and needed.fits(self._capacity - self._reserved()):
                run.return_worker(now)
                self._announce(number)
        self._admit(now)

    def _admit(self, now: float) -> None:
        if any(run.phase is RunPhase.QUEUED for run in self._active.values()):
            self._decide(now, may_change=False)

    def _decide(self, now: float, may_change: bool) -> None:
        jobs = []
        overlapping = NOTHING
        for number in sorted(self._active):
            run = self._runs[number]
            if may_change:
                profile = run.measure(now)
                if profile is not None:
                    self._profiles[number].append(profile)
                    self._advise(number, run, profile, now)
            self._report_starts(run)
            if run.shape is not None:
                overlapping = overlapping + (run.reserved - role_resources(run.shape).total).larger(NOTHING)
            jobs.append(ScheduledJob(self._view(number, run, may_change), run.job.request))
        seen = self._capacity if self._sees_capacity else self._whole
        capacity = ClusterCapacity(
            cpu=seen.cpu - overlapping.cpu,
            memory=seen.memory - overlapping.memory,
            largest_node_cpu=self._node.cpu,
            largest_node_memory=self._node.memory,
        )
        self._carry_out(self._scheduler.decide(jobs, capacity, now), now)

    def _carry_out(self, shapes: Mapping[JobId, JobShape], now: float) -> None:
        """Changes shapes. Shrinking jobs come first, to make room for growing and starting ones."""
        free = self._capacity - self._reserved()

        def growth(job: JobId) -> float:
            present = self._runs[self._number[job]].shape
            return shapes[job].cpu - (present.cpu if present is not None else 0.0)

        for job in sorted(shapes, key=growth):
            number = self._number[job]
            run, shape = self._runs[number], shapes[job]
            if number not in self._active or shape == run.shape:
                continue
            before = run.reserved
            if run.shape is None:
                if not role_resources(shape).total.fits(free):
                    continue
                run.start(shape, now)
            elif not run.change_to(shape, now, free):
                continue
            free = free - (run.reserved - before)
            self._announce(number)

    def _view(self, number: int, run: JobRun, may_change: bool) -> JobView:
        job = run.job
        return JobView(
            id=job.id,
            owner=job.owner,
            metadata=job.metadata,
            remaining_samples=run.remaining_samples,
            current=run.shape,
            bounds=job.bounds,
            profiles=tuple(self._profiles[number]),
            submitted_at=job.arrival,
            last_scaled_at=run.scaled_at,
            fixed=run.shape is not None and (run.in_transition or not may_change),
        )

    def _advise(self, number: int, run: JobRun, profile: JobProfile, now: float) -> None:
        job, begun_at = run.job, run.job.arrival if run.started_at is None else run.started_at
        interval = self._adviser.interval(
            job.id, job.owner, profile, begun_at, run.remaining_samples, run.checkpoint_cost
        )
        if interval is not None:
            run.advise(interval, now)
            self._announce(number)

    def _report_starts(self, run: JobRun) -> None:
        starts = run.take_start_times()
        if starts:
            self._adviser.observe_starts(starts)
            self._scheduler.observe_starts(starts)


def whole_cluster(cluster: ClusterSpec) -> Amounts:
    """Returns the resources of all nodes together."""
    return Amounts(cluster.nodes * cluster.node_cpu, cluster.nodes * memory_bytes(cluster.node_memory))


def capacity_fractions(cluster: ClusterSpec, horizon: float) -> Iterator[tuple[float, float]]:
    """Yields (time, usable fraction of the cluster) for each change: the steps, and the daily dip within them."""
    times = {step.at for step in cluster.capacity_steps}
    dip = cluster.daily_dip
    if dip is not None:
        for day in range(math.ceil(horizon / _DAY)):
            times |= {day * _DAY + dip.start_hour * _HOUR, day * _DAY + dip.end_hour * _HOUR}
    for at in sorted(times):
        fraction = 1.0
        for step in cluster.capacity_steps:
            if step.at <= at:
                fraction = step.fraction
        if dip is not None and dip.start_hour <= at % _DAY / _HOUR < dip.end_hour:
            fraction *= 1 - dip.fraction
        if at <= horizon:
            yield at, fraction
