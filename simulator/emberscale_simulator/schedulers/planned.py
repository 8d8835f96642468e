"""Any planner of the brain, unchanged, under the simulation."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from emberscale_brain.planner.types import (
    ClusterCapacity,
    ClusterView,
    JobId,
    JobShape,
    PastJob,
    Planner,
    Prices,
    ScalingOverheads,
    ThroughputFit,
)
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.scenario import Mechanics
from emberscale_simulator.schedulers.protocol import ScheduledJob

_STARTS_REMEMBERED = 200
_JOBS_REMEMBERED = 500


class PlannedScheduler:
    """Plays the brain's part around a planner: it keeps the history and learns how long pods take to start.

    Without `use_history` it forgets every job that has ended. What a change costs, of `mechanics`, is what the brain
    knows of its own system.
    """

    def __init__(
        self,
        planner: Planner,
        prices: Prices,
        mechanics: Mechanics,
        network_bytes_per_second: float,
        use_history: bool = True,
    ) -> None:
        self._planner = planner
        self._prices = prices
        self._mechanics = mechanics
        self._network = network_bytes_per_second
        self._use_history = use_history
        self._history: deque[PastJob] = deque(maxlen=_JOBS_REMEMBERED)
        self._starts = {role: deque[float](maxlen=_STARTS_REMEMBERED) for role in ("worker", "ps")}
        self._fits: dict[JobId, ThroughputFit] = {}

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """What the planner plans, for every job that it does not leave as it is."""
        cluster = ClusterView(
            jobs=tuple(job.view for job in jobs),
            capacity=capacity,
            prices=self._prices,
            overheads=self._overheads(),
            history=tuple(self._history),
            network_bytes_per_second=self._network,
        )
        decided = {}
        for job, planned in self._planner.plan(cluster, now).items():
            if planned.explanation.fit is not None:
                self._fits[job] = planned.explanation.fit
            if planned.shape is not None:
                decided[job] = planned.shape
        return decided

    def observe_starts(self, role: str, seconds: Sequence[float]) -> None:
        """Remembers the latest."""
        self._starts[role].extend(seconds)

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """A completed job becomes history."""
        fit = self._fits.pop(job.id, None)
        if completed and self._use_history:
            rows = (job.growth.bytes_at(job.metadata.total_samples) - job.growth.base_bytes) / job.row_bytes
            self._history.append(
                PastJob(job.id, job.owner, job.metadata, final_shape, fit=fit, finished_at=now, rows=int(rows))
            )

    def _overheads(self) -> ScalingOverheads:
        known = {role: median(seconds) for role, seconds in self._starts.items() if seconds}
        base = ScalingOverheads()
        return ScalingOverheads(
            worker_start_seconds=known.get("worker", base.worker_start_seconds),
            ps_start_seconds=known.get("ps", base.ps_start_seconds),
            worker_pause_seconds=self._mechanics.worker_pause,
            ps_pause_seconds=self._mechanics.ps_pause,
            resize_seconds=self._mechanics.resize,
        )
