"""One job of the simulation: a state machine that knows its next event; its rates are constant between events."""

import math

import numpy as np

from emberscale_api.job.units import memory_bytes
from emberscale_api.shape import JobProfile, JobShape
from emberscale_simulator.ground_truth import Rate, rate
from emberscale_simulator.job import Happening, RunPhase, SimulatedJob
from emberscale_simulator.mechanics import ChangeMethod, FailureLaw, Mechanics
from emberscale_simulator.pods import LiveChange, Pods, StartTime, begin_live_change
from emberscale_simulator.profiler import Profiler
from emberscale_simulator.recovery import Checkpoints, MemoryRestarts
from emberscale_simulator.resources import NOTHING, Amounts, RoleResources, Usage, ps_pod, role_resources, worker_pod
from emberscale_simulator.scenario import Surroundings


class JobRun:
    """Mutable, and without I/O: the engine tells it the time and asks for its next event.

    `samples` are committed (a roll-back takes some back). `scalings` counts changes of shape, `shapes` holds (time,
    shape) from the first on, `servers_lost` counts the PS that failed or ran out of memory. `timeline` holds (time,
    samples per second) at every change of speed.
    """

    def __init__(
        self,
        job: SimulatedJob,
        mechanics: Mechanics,
        surroundings: Surroundings,
        failures: FailureLaw | None,
        seed: tuple[int, int],
    ) -> None:
        self.job = job
        self.phase = RunPhase.QUEUED
        self.shape: JobShape | None = None
        self.first_shape: JobShape | None = None
        self.shapes: list[tuple[float, JobShape]] = []
        self.samples = 0.0
        self.scalings = 0
        self.servers_lost = 0
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.scaled_at = job.arrival
        self.usage = Usage()
        self.timeline: list[tuple[float, float]] = []
        self.version = 0
        self._mechanics = mechanics
        self._surroundings = surroundings
        self._failure_law = failures
        # One random stream per purpose: two schedulers see the same failures as long as they make the same decisions.
        pods, self._failures, measuring = (np.random.default_rng([*seed, purpose]) for purpose in (1, 2, 3))
        self._pods = Pods(surroundings.stragglers, surroundings.start_up, pods)
        self._profiler = Profiler(job, surroundings, measuring)
        self._now = job.arrival
        self._until = math.inf
        self._change: LiveChange | None = None
        self._checkpoints = Checkpoints(mechanics)
        self._memory_restarts = MemoryRestarts(mechanics)
        self._mend_at = math.inf
        self._steady_since = math.inf
        self._ran_out_of_memory: JobShape | None = None
        self._crash_looping = False
        self._rate = Rate(0.0, 0.0, 0.0)
        self._pod_seconds_left = self._draw_failure()

    @property
    def reserved(self) -> Amounts:
        """The resources that the cluster reserves for the job, including replacement pods."""
        return self._reserved.total

    @property
    def _reserved(self) -> RoleResources:
        if self.shape is None or self.ended:
            return RoleResources(NOTHING, NOTHING)
        reserved = role_resources(self.shape) if self._change is None else self._change.reserved
        missing = worker_pod(self.shape) * self._pods.evicted
        return RoleResources(reserved.worker - missing, reserved.ps)

    @property
    def restarts(self) -> int:
        """The number of times that a PS ran out of memory."""
        return self._memory_restarts.count

    @property
    def ended(self) -> bool:
        """Whether the job has completed or failed."""
        return self.phase in (RunPhase.COMPLETE, RunPhase.FAILED)

    @property
    def in_transition(self) -> bool:
        """Whether the job starts, stands still or waits for pods, and cannot change its shape now.

        A job whose servers keep running out of memory is not in transition, since it needs another shape.
        """
        busy = self.phase is not RunPhase.TRAINING and not self._crash_looping
        return busy or self._change is not None or self._pods.evicted > 0

    @property
    def remaining_samples(self) -> int:
        """Samples that are not committed yet."""
        return max(0, math.ceil(self.job.metadata.total_samples - self.samples))

    def take_start_times(self) -> list[StartTime]:
        """Returns the start times of pods since the last call, from which a brain learns overheads."""
        return self._pods.take_start_times()

    # -- what others do to it ------------------------------------------------------------------------------------

    def start(self, shape: JobShape, now: float) -> None:
        """Starts the pods of a queued job, for the first time or after an eviction."""
        self.advance(now)
        if self.started_at is None:
            self.started_at = now
            self.first_shape = shape
            self.shapes.append((now, shape))
        load = self._load_seconds(shape) if self.samples > 0 else 0.0
        self.shape = shape
        self._memory_restarts.given(shape)
        self.scaled_at = now
        self.phase = RunPhase.STARTING
        serving = now + self._pods.renew(shape.workers, shape.ps)
        self._memory_restarts.serving_since(serving)
        self._until = serving + load
        self._touch()

    def change_to(self, target: JobShape, now: float, free: Amounts) -> bool:
        """Begins a change of shape; returns False if the job is in transition or the cluster has no room for it."""
        self.advance(now)
        present = self.shape
        if present is None or self.in_transition:
            return False
        if self._crash_looping or self._mechanics.change is ChangeMethod.STOP_AND_RESTART:
            return self._replace_all(present, target, now, free)
        return self._begin_live(present, target, now, free)

    def evict(self, now: float) -> None:
        """Puts the job back into the queue; samples since the last checkpoint are lost."""
        self.advance(now)
        self._roll_back()
        self.shape = None
        self.phase = RunPhase.QUEUED
        self._change = None
        self._crash_looping = False
        self._until = math.inf
        self._touch()

    @property
    def evicted_workers(self) -> Amounts:
        """The resources that an evicted worker needs to come back; `NOTHING` if none was evicted."""
        if self.shape is None or not self._pods.evicted:
            return NOTHING
        return worker_pod(self.shape)

    def evict_workers(self, count: int, now: float) -> int:
        """Takes up to `count` workers, never the last one, from an elastic job; returns the number taken."""
        self.advance(now)
        if self.shape is None or not self._mechanics.elastic or self._change is not None:
            return 0
        taken = self._pods.evict_workers(count)
        if taken:
            self._steady_since = now
            self._touch()
        return taken

    def return_worker(self, now: float) -> None:
        """Starts an evicted worker again; the caller has checked that there is room."""
        self.advance(now)
        self._pods.return_workers(1, now)
        self._touch()

    # -- time -----------------------------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, Happening] | None:
        """Returns the time and kind of the job's next event of its own; None if there is none."""
        if self.phase in (RunPhase.STARTING, RunPhase.STANDSTILL):
            return self._until, Happening.READY
        if self.phase is not RunPhase.TRAINING or self.shape is None:
            return None
        speed = self._rate.samples_per_second
        events = [(self._mend_at, Happening.MENDED)]
        back = self._pods.next_worker_back
        if back is not None:
            events.append((back, Happening.WORKER_BACK))
        if self._change is not None:
            events.append((self._change.ready_at, Happening.CHANGE_READY))
        pods = self.shape.workers + self.shape.ps
        events.append((self._now + self._pod_seconds_left / pods, Happening.FAILURE))
        if speed > 0:
            events.append((self._now + (self.job.metadata.total_samples - self.samples) / speed, Happening.DONE))
            full = self._full_at(self.shape)
            events.append((self._now + max(0.0, full - self.samples) / speed, Happening.OUT_OF_MEMORY))
        when, what = min(events, key=lambda event: event[0])
        return (when, what) if when < math.inf else None

    def happen(self, what: Happening, now: float, free: Amounts) -> None:
        """Applies the event that `next_event` announced; `free` is the room left in the cluster."""
        self.advance(now)
        match what:
            case Happening.READY:
                self._resume(now)
            case Happening.DONE:
                self.samples = float(self.job.metadata.total_samples)
                self._end(RunPhase.COMPLETE, now)
            case Happening.FAILURE:
                self._fail_a_pod(now)
            case Happening.OUT_OF_MEMORY:
                self._run_out_of_memory(now, free)
            case Happening.CHANGE_READY:
                self._finish_live(now)
            case Happening.MENDED:
                self._mend(now)
            case Happening.WORKER_BACK:
                self._pods.worker_is_back()
        self._touch()

    def advance(self, now: float) -> None:
        """Integrates progress and usage up to `now`."""
        elapsed = now - self._now
        if elapsed <= 0:
            return
        if self.shape is not None:
            self.usage.hold(self._reserved, self._memory_used(self.shape), elapsed)
        if self.phase is RunPhase.TRAINING and self.shape is not None:
            speed = self._rate.samples_per_second
            self._checkpoints.time_passes(self._now, now, self.samples, speed)
            self.samples += speed * elapsed
            self.usage.train(self._rate, elapsed)
            self._pod_seconds_left = max(0.0, self._pod_seconds_left - elapsed * (self.shape.workers + self.shape.ps))
        self._now = now

    @property
    def checkpoint_cost(self) -> float:
        """Seconds of training that a checkpoint costs now; 0 before the first."""
        if self.shape is None or not self._checkpoints.saved_samples:
            return 0.0
        return self._checkpoints.cost(self._save_seconds(self.shape))

    def advise(self, interval: float, now: float) -> None:
        """Takes the brain's advice of another checkpoint interval, in seconds."""
        self.advance(now)
        self._checkpoints.advised(interval, now)
        self._touch()

    def measure(self, now: float) -> JobProfile | None:
        """Returns the profiler's report at `now` on the time since its last report.

        None while nothing trains, or evicted workers are missing. After an out-of-memory kill, one report has the
        memory that was reached.
        """
        self.advance(now)
        if self.shape is None:
            return None
        if self._ran_out_of_memory is not None:
            reached, self._ran_out_of_memory = self._ran_out_of_memory, None
            return self._profiler.report_out_of_memory(now, reached, self.samples, self.servers_lost)
        if self.phase is not RunPhase.TRAINING or self._pods.evicted:
            return None
        return self._profiler.report(now, self.shape, self.samples, self._rate, self._steady_since, self.servers_lost)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _touch(self) -> None:
        """Notes a change of state: voids announced events, and computes the speed again."""
        self.version += 1
        speed = self._speed()
        if speed.samples_per_second != self._rate.samples_per_second:
            self.timeline.append((self._now, speed.samples_per_second))
        self._rate = speed

    def _speed(self) -> Rate:
        if self.phase is not RunPhase.TRAINING or self.shape is None:
            return Rate(0.0, 0.0, 0.0)
        shape = self.shape
        workers = self._pods.effective_workers(self._mechanics.dynamic_sharding)
        servers = self._pods.effective_ps()
        whole = rate(self.job.physics, round(workers, 3), round(servers, 3), shape.worker_cpu, shape.ps_cpu)
        kept = self._checkpoints.kept(self._save_seconds(shape))
        return Rate(whole.samples_per_second * kept, whole.worker_busy_cores * kept, whole.ps_busy_cores * kept)

    def _tables_of_largest_ps(self, shape: JobShape) -> float:
        """Bytes of rows that the largest server of a shape holds now."""
        return self.job.largest_ps(self.samples, shape.ps, self._surroundings.ps_memory_skew) - self.job.ps_base

    def _moved_bytes(self, present: JobShape, target: JobShape) -> float:
        """Bytes of rows that the busiest server gives away or takes over when the number of servers changes."""
        fewer, more = sorted((present.ps, target.ps))
        each = min(self._tables_of_largest_ps(present), self._tables_of_largest_ps(target))
        return each * max(1.0, (more - fewer) / fewer)

    def _save_seconds(self, shape: JobShape) -> float:
        return self._tables_of_largest_ps(shape) / memory_bytes(self._mechanics.save_bandwidth)

    def _load_seconds(self, shape: JobShape) -> float:
        return self._tables_of_largest_ps(shape) / memory_bytes(self._mechanics.load_bandwidth)

    def _memory_used(self, shape: JobShape) -> float:
        job = self.job
        held = job.growth.bytes_at(self.samples) + shape.ps * job.ps_base + shape.workers * job.worker_memory
        return min(held, float(shape.memory))

    def _full_at(self, shape: JobShape) -> float:
        """The number of samples at which a process exceeds its memory."""
        if shape.worker_memory < self.job.worker_memory:
            return 0.0
        return self.job.samples_that_fit(shape.ps_memory, shape.ps, self._surroundings.ps_memory_skew)

    def _draw_failure(self) -> float:
        return math.inf if self._failure_law is None else self._failure_law.draw(self._failures)

    def _resume(self, now: float) -> None:
        if self.phase is RunPhase.STARTING:
            self.scaled_at = now
        self.phase = RunPhase.TRAINING
        self._crash_looping = False
        self._until = math.inf
        self._steady_since = now
        self._checkpoints.training_begins(now)
        self._watch_for_slow_pods(now)

    def _watch_for_slow_pods(self, now: float) -> None:
        delay = self._mechanics.straggler_seconds
        slow = self._pods.slow_ps or (self._pods.slow_worker and not self._mechanics.dynamic_sharding)
        self._mend_at = now + delay if delay is not None and slow else math.inf

    def _mend(self, now: float) -> None:
        """Works around slow pods: moves load off them, or replaces them."""
        self._mend_at = math.inf
        self._steady_since = now
        if self._mechanics.dynamic_sharding:
            self._pods.balanced = True
            return
        self._pods.replace_slow()
        if self._mechanics.change is ChangeMethod.STOP_AND_RESTART and self.shape is not None:
            moving = self._save_seconds(self.shape) + self._load_seconds(self.shape)
            self._stand_still(now, moving + self._pods.start_seconds("ps", 1))

    def _stand_still(self, now: float, seconds: float) -> None:
        self.phase = RunPhase.STANDSTILL
        self._until = now + seconds

    def _fail_a_pod(self, now: float) -> None:
        self._pod_seconds_left = self._draw_failure()
        shape = self.shape
        if shape is None:
            return
        silent = self._failures.uniform() < self._surroundings.failures.silent
        detected = self._mechanics.detection if silent else self._mechanics.end_detection
        is_worker = self._failures.uniform() < shape.workers / (shape.workers + shape.ps)
        if is_worker and self._mechanics.elastic:
            self._steady_since = self._pods.lose_worker(now + detected)
            return
        self.servers_lost += not is_worker
        self._lose_servers(now, detected)

    def _run_out_of_memory(self, now: float, free: Amounts) -> None:
        """Kills a PS that ran out of memory, and restarts it, with more memory per PS if there is room."""
        shape = self.shape
        if shape is None:
            return
        backoff = self._memory_restarts.killed(now)
        if self._memory_restarts.exhausted:
            self._end(RunPhase.FAILED, now)
            return
        self.servers_lost += 1
        self._ran_out_of_memory, self._crash_looping = shape, True
        grown = self._memory_restarts.grown(shape, self.job.bounds.ps_memory[1])
        if grown != shape and (role_resources(grown).total - role_resources(shape).total).fits(free):
            self.shape = grown
            self.shapes.append((now, grown))
        self._lose_servers(now, self._mechanics.end_detection + backoff)

    def _lose_servers(self, now: float, delay: float) -> None:
        """Replaces lost pods after `delay` seconds, or all pods if the job is not elastic.

        The job stands still until they serve, with the rows that they had or those of the last checkpoint.
        """
        shape = self.shape
        if shape is None:
            return
        elastic = self._mechanics.elastic
        wait = delay + (self._pods.start_seconds("ps", 1) if elastic else self._pods.renew(shape.workers, shape.ps))
        self._memory_restarts.serving_since(now + wait)
        if self._mechanics.rollback:
            self._roll_back()
            wait += self._load_seconds(shape)
        self._change = None
        self._stand_still(now, wait)

    def _roll_back(self) -> None:
        self.samples = self._checkpoints.rolled_back(self.samples)

    def _end(self, phase: RunPhase, now: float) -> None:
        self.phase = phase
        self.finished_at = now
        self._change = None
        self._until = math.inf

    def _take_on(self, target: JobShape, now: float) -> None:
        self.shape = target
        self._memory_restarts.given(target)
        self.shapes.append((now, target))
        self.scaled_at = now
        self.scalings += 1

    def _replace_all(self, present: JobShape, target: JobShape, now: float, free: Amounts) -> bool:
        """Replaces all pods; servers that were killed for their memory have nothing to save."""
        if not (role_resources(target).total - role_resources(present).total).fits(free):
            return False
        wait = self._load_seconds(target)
        if self._crash_looping:
            self._crash_looping = False
        else:
            self._checkpoints.taken(self.samples)
            wait += self._save_seconds(present)
        self._take_on(target, now)
        wait += self._pods.renew(target.workers, target.ps)
        self._memory_restarts.serving_since(now + wait)
        for role in ("worker", "ps"):
            self._pods.stood_still(role, wait)
        self._stand_still(now, wait)
        self._touch()
        return True

    def _begin_live(self, present: JobShape, target: JobShape, now: float, free: Amounts) -> bool:
        room = free + role_resources(present).total
        self._change = begin_live_change(present, target, now, room, self._mechanics.resize, self._pods)
        if self._change is not None:
            self._touch()
        return self._change is not None

    def _finish_live(self, now: float) -> None:
        change, present = self._change, self.shape
        if change is None or present is None:
            return
        target, pause = change.target, 0.0
        resized = self._mechanics.resize is not None
        same_worker = resized or worker_pod(target) == worker_pod(present)
        if not same_worker or target.workers != present.workers:
            self._pods.set_workers(target.workers, keep=same_worker)
            pause = self._mechanics.worker_pause
            self._pods.stood_still("worker", pause)
        same_ps = resized or ps_pod(target) == ps_pod(present)
        if not same_ps or target.ps != present.ps:
            standstill, slowed = self._mechanics.reshape, 0.0
            if same_ps and self._mechanics.move_bandwidth is not None:
                moving = self._moved_bytes(present, target) / memory_bytes(self._mechanics.move_bandwidth)
                slowed = self._mechanics.move_slowdown * moving
            else:
                standstill += self._save_seconds(present) + self._load_seconds(target)
                self._checkpoints.taken(self.samples)
            self._pods.set_ps(target.ps, keep=same_ps)
            self._pods.stood_still("ps", standstill)
            pause = max(pause, standstill + slowed)
        self._change = None
        self._take_on(target, now)
        self._stand_still(now, pause + change.lost_seconds)
