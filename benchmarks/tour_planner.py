"""A planner that leads a job through a list of shapes, to measure each; for `real_profiles.py`.

It writes its progress to a FIFO that the benchmark reads: the number of each measured shape, one per line.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import ClusterView, JobId, JobView, PlanAction, PlannedShape, PlannerSettings

SHAPES = "EMBERSCALE_TOUR_SHAPES"
PROFILES = "EMBERSCALE_TOUR_PROFILES"
PROGRESS = "EMBERSCALE_TOUR_PROGRESS"


class TourPlanner:
    """Plans one shape after another, each until it has enough undisturbed profiles, and the last one for ever."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._shapes = [JobShape(*fields) for fields in json.loads(os.environ[SHAPES])]
        self._profiles = int(os.environ[PROFILES])
        self._progress = Path(os.environ[PROGRESS])
        self._at = 0

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """Plans the due shape for each job that may be planned."""
        return {job.id: self._due(job) for job in cluster.jobs if not job.fixed}

    def _due(self, job: JobView) -> PlannedShape:
        if self._at < len(self._shapes):
            due = self._shapes[self._at]
            measured = [
                profile
                for profile in job.profiles
                if not profile.restarted and profile.shape == due and profile.time > job.last_scaled_at
            ]
            if job.current == due and len(measured) >= self._profiles:
                self._at += 1
                with self._progress.open("a") as progress:
                    progress.write(f"{self._at}\n")
        shape = self._shapes[min(self._at, len(self._shapes) - 1)]
        return PlannedShape(shape, PlanAction.EXPLORE, f"stop {self._at + 1} of {len(self._shapes)}")
