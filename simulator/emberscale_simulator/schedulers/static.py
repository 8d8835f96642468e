"""What owners ask for is what they get (Kubeflow without any auto-scaling)."""

from collections.abc import Mapping, Sequence

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterCapacity, JobId
from emberscale_simulator.schedulers.protocol import Memoryless, ScheduledJob, admit


class StaticScheduler(Memoryless):
    """Starts each job as requested once all of it fits; never changes it."""

    def decide(self, jobs: Sequence[ScheduledJob], capacity: ClusterCapacity, now: float) -> Mapping[JobId, JobShape]:
        """The requests of waiting jobs that fit."""
        return admit(jobs, capacity, {job.view.id: job.request for job in jobs})
