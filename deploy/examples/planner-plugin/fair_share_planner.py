"""A planner in forty lines: every job gets the same share of the cluster's cores, three quarters of it for workers.

It learns nothing and is meant to be read. `emberscale_brain.planner.types` says what a planner is given and may answer.
"""

from collections.abc import Mapping

from emberscale_brain.planner.types import (
    ClusterView,
    JobId,
    JobShape,
    JobView,
    PlanAction,
    PlannedShape,
    PlannerSettings,
)

WORKER_SHARE = 0.75
PROCESS_CORES = 4.0


class FairSharePlanner:
    """Takes the operator's settings, as every planner does, and needs none of them."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """Equal cores for all jobs; those that run keep their memory and, while they change, their shape."""
        fixed = sum(job.current.cpu for job in cluster.jobs if job.fixed and job.current is not None)
        free = [job for job in cluster.jobs if not job.fixed]
        share = (cluster.capacity.cpu - fixed) / max(1, len(free))
        return {job.id: self._plan(job, share) for job in free}

    def _plan(self, job: JobView, share: float) -> PlannedShape:
        bounds = job.bounds
        worker_cpu = min(max(PROCESS_CORES, bounds.worker_cpu[0]), bounds.worker_cpu[1])
        ps_cpu = min(max(PROCESS_CORES, bounds.ps_cpu[0]), bounds.ps_cpu[1])
        workers = min(int(share * WORKER_SHARE / worker_cpu), bounds.workers[1])
        ps = min(int(share * (1 - WORKER_SHARE) / ps_cpu), bounds.ps[1])
        if workers < bounds.workers[0] or ps < bounds.ps[0]:
            return PlannedShape(job.current, PlanAction.WAIT, f"a share of {share:.0f} cores is below its bounds")
        worker_memory = bounds.worker_memory[1] if job.current is None else job.current.worker_memory
        shape = JobShape(workers, ps, worker_cpu, ps_cpu, worker_memory, bounds.ps_memory[1])
        if shape == job.current:
            return PlannedShape(shape, PlanAction.KEEP, "it has its share")
        action = PlanAction.START if job.current is None else PlanAction.SCALE
        return PlannedShape(shape, action, f"its share is {share:.0f} cores")
