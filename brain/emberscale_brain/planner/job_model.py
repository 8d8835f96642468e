"""A planner's knowledge of one job: its window of profiles, its fits, and the front that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.memory import Expectation, MemoryTrack, PsMemoryModel, PsMemoryNeed, fit_memory
from emberscale_brain.model.fit import first_prior, fit_window, prior_fit
from emberscale_brain.model.predict import ModelConstants, shape_features
from emberscale_brain.model.prior import Prior, similar_prior
from emberscale_brain.model.window import ProfileWindow, ShapeKey, shape_key
from emberscale_brain.planner.front import Front
from emberscale_brain.planner.grid import Ints
from emberscale_brain.planner.types import MEMORY_UNIT, JobMetadata, JobView, PastJob, SimilarJob, ThroughputFit
from emberscale_brain.warm_start import more_rows

_WORKER_HEADROOM = 1.25
_TELLING = 16
"""The profiles of each shape of the window whose processor times are kept."""
_SAME_JOB_ROWS = 0.1  # relative standard deviation of the rows of two runs of one job


def prior_of(past: Sequence[PastJob], similar: Sequence[SimilarJob], constants: ModelConstants) -> Prior | None:
    """Derives a prior from the fits of similar jobs; None if none of them has a fit."""
    fitted = [(job, like) for job, like in zip(past, similar, strict=True) if job.fit is not None]
    if not fitted:
        return None
    fits = [job.fit for job, _ in fitted if job.fit is not None]
    return similar_prior(
        fits, [like.similarity for _, like in fitted], shape_features(constants, fitted[0][0].final_shape)
    )


def expected_rows(past: Sequence[PastJob], similar: Sequence[SimilarJob], metadata: JobMetadata) -> Expectation | None:
    """Predicts a job's rows at the end of its first epoch from similar jobs; None if none of them counted rows."""
    counted = [(one, like.similarity) for one, like in zip(past, similar, strict=True) if one.rows > 0]
    if not counted:
        return None
    weights = np.array([similarity for _, similarity in counted])
    logs = np.log([one.rows * more_rows(metadata, one.metadata) for one, _ in counted])
    mean = float(np.average(logs, weights=weights))
    between = float(np.average((logs - mean) ** 2, weights=weights)) ** 0.5
    likeness = float(np.average(weights, weights=weights))
    return Expectation(metadata.epoch_samples, float(np.exp(mean)), _SAME_JOB_ROWS + between + (1 - likeness))


@dataclass(slots=True)
class JobModel:
    """Collects the profiles that `observe` receives, and fits again only if there are new ones."""

    prior: Prior | None
    expected: Expectation | None = None
    window: ProfileWindow = field(default_factory=ProfileWindow)
    telling: Mapping[ShapeKey, tuple[JobProfile, ...]] = field(default_factory=dict)
    track: MemoryTrack = field(default_factory=MemoryTrack)
    fit: ThroughputFit | None = None
    memory: PsMemoryModel | None = None
    worker_memory: int = 0
    front: Front | None = None
    front_key: tuple[object, ...] = ()
    front_fit: ThroughputFit | None = None
    population: Ints | None = None

    def observe(self, job: JobView, constants: ModelConstants, now: float) -> None:
        """Takes in the profiles that are new since the last call."""
        before = self.window
        self.window = before.add(job.profiles, now)
        if self.window is before and self.fit is not None:
            return
        fresh = [profile for profile in job.profiles if before.latest < profile.time <= self.window.latest]
        if fresh or self.memory is None:
            self.track = self.track.add(fresh)
            self.memory = fit_memory(self.track, job.metadata, self.expected)
            self.worker_memory = max([self.worker_memory, *(profile.worker_memory for profile in fresh)])
        self._keep(fresh)
        self.fit = self._fitted(job, constants)

    def _keep(self, fresh: Sequence[JobProfile]) -> None:
        """Keeps what was measured at the window's shapes: the latest profiles may all be of one shape, or of none."""
        known = dict(self.telling)
        for profile in fresh:
            if not profile.restarted:
                key = shape_key(profile.shape)
                known[key] = (*known.get(key, ()), profile)[-_TELLING:]
        self.telling = {key: profiles for key, profiles in known.items() if key in self.window.shapes}

    def _told(self) -> tuple[JobProfile, ...]:
        kept = (one for profiles in self.telling.values() for one in profiles)
        return tuple(sorted(kept, key=lambda one: one.time))

    def _fitted(self, job: JobView, constants: ModelConstants) -> ThroughputFit | None:
        if self.window.shapes:
            prior = self.prior or first_prior(self._told(), self.window, constants)
            return None if prior is None else fit_window(self.window, constants, prior)
        if job.fit is not None:
            return job.fit
        return None if self.prior is None else prior_fit(self.prior)

    def profiles_of(self, shape: JobShape) -> int:
        """Usable profiles of a shape in the window."""
        summary = self.window.shapes.get(shape_key(shape))
        return 0 if summary is None else len(summary.log_seconds)

    def ps_memory_need(self, present: JobShape) -> PsMemoryNeed:
        """Returns the need for the rest of the job; before any measurement, the total memory of the present PS."""
        if self.memory is None:
            return PsMemoryNeed(0.0, float(present.ps * present.ps_memory))
        return self.memory.need()

    def worker_memory_need(self, present: JobShape) -> int:
        """Returns the present memory if it is one to two times the need, else the need: the most used plus headroom."""
        if not self.worker_memory:
            return present.worker_memory
        need = int(np.ceil(self.worker_memory * _WORKER_HEADROOM / MEMORY_UNIT)) * MEMORY_UNIT
        return present.worker_memory if need <= present.worker_memory <= 2 * need else need
