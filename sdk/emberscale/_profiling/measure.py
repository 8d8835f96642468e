"""Runs a job for a while on this machine, and profiles it."""

import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emberscale._profiling.job_profile import Reading, TimeBreakdown, profile_of, take_reading
from emberscale._run.interruption import Interruption
from emberscale_api.job import TrainingJob
from emberscale_api.job.status import JobPhase
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.runner import LocalJob
from emberscale_operator.local.snapshot import RunView

_NEVER = 10 * 365 * 86400.0
_ROOF_SECONDS = 3.0
_WARM_UP = 0.25

Progress = Callable[[str, int, int], None]
"""Called with the present activity, the samples trained, and the samples to train."""


class ProfileFailedError(Exception):
    """The job ended before it had been measured; the text says why."""


def profile_job(job: TrainingJob, samples: int, interruption: Interruption, progress: Progress) -> TimeBreakdown:
    """Trains `samples` samples after a quarter as many to warm up, ends the job, and measures its roof.

    Raises ProfileFailedError, UnavailableError and EntrypointError.
    """
    before, after = measure_job(job, samples, interruption, progress)
    # torch takes a second to import, which should not delay the job
    from emberscale._profiling.roof import measure_roof

    progress("computing without parameter servers", samples, samples)
    return profile_of(job.metadata.name, before, after, measure_roof(job, _ROOF_SECONDS))


def _endless(job: TrainingJob) -> TrainingJob:
    """The job while it only trains: no evaluation, no checkpoint, no start-up transient."""
    spec = job.spec
    changes = {
        "data": spec.data.model_copy(update={"evaluation": ()}),
        "training": spec.training.model_copy(update={"epochs": 10_000, "staleness_warmup": 0}),
        "checkpoint": spec.checkpoint.model_copy(update={"interval": _NEVER}),
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})


@dataclass
class _Window:
    """Takes a reading when the job is warm, and another when enough samples are trained after that."""

    samples: int
    before: Reading | None = None
    after: Reading | None = None

    def see(self, snapshot: RunView) -> bool:
        """Whether the window is over."""
        status = snapshot.status
        if status is None or status.phase is not JobPhase.TRAINING:
            return False
        if self.before is None and status.samples >= self.samples * _WARM_UP:
            self.before = take_reading(snapshot)
        elif self.before is not None and status.samples >= self.before.samples + self.samples:
            self.after = take_reading(snapshot)
        return self.after is not None


def measure_job(
    job: TrainingJob, samples: int, interruption: Interruption, progress: Progress
) -> tuple[Reading, Reading]:
    """Readings of the job when it is warm, and `samples` samples later.

    Raises ProfileFailedError and UnavailableError.
    """
    window = _Window(samples)

    def is_over(snapshot: RunView) -> bool:
        over = window.see(snapshot)
        trained = 0 if snapshot.status is None else snapshot.status.samples
        doing = "starting" if not trained else "warming up" if window.before is None else "training"
        progress(doing, trained, int(samples * (1 + _WARM_UP)))
        return over

    train_until(is_over, job, interruption)
    if window.before is None or window.after is None:
        raise ProfileFailedError("the job ended before it was warm")
    return window.before, window.after


def train_until(is_over: Callable[[RunView], bool], job: TrainingJob, interruption: Interruption) -> None:
    """Only trains, until `is_over` is true of a view of the job; then kills the job.

    Raises ProfileFailedError, also when the job ends by itself, and UnavailableError.
    """
    job = _endless(job)
    folder = Path(tempfile.mkdtemp(prefix="emberscale-profile-"))
    checkpoint = job.spec.checkpoint.model_copy(update={"uri": str(folder / "checkpoints")})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"checkpoint": checkpoint})})
    over = False
    with LocalJob(job, str(uuid.uuid4()), RunFolder(folder)) as local, interruption.of(local):

        def observe(snapshot: RunView) -> None:
            nonlocal over
            if not over and is_over(snapshot):
                over = True
                local.kill()

        outcome = local.run(observe)
    if not over and interruption.signal is None:
        raise ProfileFailedError(f"{outcome.reason}: {outcome.message}; logs are in {folder / 'logs'}")
    shutil.rmtree(folder)
    if not over:
        raise ProfileFailedError("interrupted")
