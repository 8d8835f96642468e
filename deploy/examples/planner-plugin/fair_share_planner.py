"""A planner in fifty lines: every job gets the same share of the cluster, three quarters of the cores for workers.

It learns nothing and is meant to be read. `emberscale_brain.planner.types` says what a planner is given and may answer.
"""

from collections.abc import Mapping

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterView, JobId, JobView, PlanAction, PlannedShape, PlannerSettings

WORKER_SHARE = 0.75
PROCESS_CORES = 4.0


class FairSharePlanner:
    """Takes the operator's settings, as every planner does, and needs none of them."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """Equal cores and memory for all jobs; those that run keep their workers' memory."""
        fixed = [job.current for job in cluster.jobs if job.fixed and job.current is not None]
        free = [job for job in cluster.jobs if not job.fixed]
        cores = (cluster.capacity.cpu - sum(shape.cpu for shape in fixed)) / max(1, len(free))
        memory = (cluster.capacity.memory - sum(shape.memory for shape in fixed)) // max(1, len(free))
        return {job.id: self._plan(job, cores, memory) for job in free}

    def _plan(self, job: JobView, cores: float, memory: int) -> PlannedShape:
        bounds = job.bounds
        worker_cpu = min(max(PROCESS_CORES, bounds.worker_cpu[0]), bounds.worker_cpu[1])
        ps_cpu = min(max(PROCESS_CORES, bounds.ps_cpu[0]), bounds.ps_cpu[1])
        workers = min(int(cores * WORKER_SHARE / worker_cpu), bounds.workers[1])
        ps = min(int(cores * (1 - WORKER_SHARE) / ps_cpu), bounds.ps[1])
        if workers < bounds.workers[0] or ps < bounds.ps[0]:
            return PlannedShape(job.current, PlanAction.WAIT, f"a share of {cores:.0f} cores is below its bounds")
        worker_memory = bounds.worker_memory[0] if job.current is None else job.current.worker_memory
        ps_memory = min((memory - workers * worker_memory) // ps, bounds.ps_memory[1])
        if ps_memory < bounds.ps_memory[0]:
            return PlannedShape(job.current, PlanAction.WAIT, f"a share of {memory >> 30} GiB is below its bounds")
        shape = JobShape(workers, ps, worker_cpu, ps_cpu, worker_memory, ps_memory)
        if shape == job.current:
            return PlannedShape(shape, PlanAction.KEEP, "it has its share")
        action = PlanAction.START if job.current is None else PlanAction.SCALE
        return PlannedShape(shape, action, f"its share is {cores:.0f} cores")
