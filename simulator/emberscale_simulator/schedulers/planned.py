"""Runs any planner of the brain, unchanged, in the simulation."""

from collections import deque
from collections.abc import Mapping, Sequence

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, ClusterView, JobId, PastJob, Planner, Prices, ThroughputFit
from emberscale_brain.preferences import PAST_JOBS_SHOWN
from emberscale_simulator.job import SimulatedJob
from emberscale_simulator.mechanics import Mechanics
from emberscale_simulator.schedulers.protocol import LearnsOverheads, ScheduledJob


class PlannedScheduler(LearnsOverheads):
    """Plays the brain's part around a planner: keeps the history, and learns how long pods take to start.

    Without `use_history`, it forgets every job that has ended. From `mechanics` it takes only the duration of a resize;
    it learns the costs of starts and changes.
    """

    def __init__(
        self,
        planner: Planner,
        prices: Prices,
        mechanics: Mechanics,
        network_bytes_per_second: float,
        use_history: bool = True,
    ) -> None:
        super().__init__()
        self._planner = planner
        self._prices = prices
        self._mechanics = mechanics
        self._network = network_bytes_per_second
        self._use_history = use_history
        self._history: deque[PastJob] = deque(maxlen=PAST_JOBS_SHOWN)
        self._fits: dict[JobId, ThroughputFit] = {}

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """Returns the planner's plans for all jobs that it changes."""
        cluster = ClusterView(
            jobs=tuple(job.view for job in jobs),
            capacity=capacity,
            prices=self._prices,
            overheads=self.overheads(self._mechanics.resize),
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

    def job_ended(self, job: SimulatedJob, final_shape: JobShape, completed: bool, now: float) -> None:
        """Adds a completed job to the history."""
        fit = self._fits.pop(job.id, None)
        if completed and self._use_history:
            rows = (job.growth.bytes_at(job.metadata.total_samples) - job.growth.base_bytes) / job.row_bytes
            self._history.append(
                PastJob(job.id, job.owner, job.metadata, final_shape, fit=fit, finished_at=now, rows=int(rows))
            )
