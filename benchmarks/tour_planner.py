"""A planner that leads a job through a list of shapes, to be measured at each; for `throughput_fit.py`."""

import json
import os
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

SHAPES = "EMBERSCALE_TOUR_SHAPES"
PROFILES = "EMBERSCALE_TOUR_PROFILES"


class TourPlanner:
    """One shape after another, each for so many undisturbed profiles; the last one for ever."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._shapes = [JobShape(*fields) for fields in json.loads(os.environ[SHAPES])]
        self._profiles = int(os.environ[PROFILES])
        self._at: dict[JobId, int] = {}

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """The shape that is due for each job."""
        return {job.id: self._due(job) for job in cluster.jobs if not job.fixed}

    def _due(self, job: JobView) -> PlannedShape:
        at = self._at.setdefault(job.id, 0)
        measured = [
            profile
            for profile in job.profiles
            if not profile.restarted and profile.shape == self._shapes[at] and profile.time > job.last_scaled_at
        ]
        if job.current == self._shapes[at] and len(measured) >= self._profiles and at + 1 < len(self._shapes):
            at = self._at[job.id] = at + 1
        return PlannedShape(self._shapes[at], PlanAction.EXPLORE, f"stop {at + 1} of {len(self._shapes)}")
