"""Rejects profiles and start-ups that are unfit to learn from; pure.

An authorised caller may still be mistaken: a single absurd number from one job would make every round of planning fail.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from emberscale_api.readable import duration_text, rate_text
from emberscale_api.shape import JobProfile
from emberscale_brain.history.changes import StartUpObserved

LARGEST = 1 << 62
"""The largest whole number: the sum of two is still a 64-bit integer."""
MOST_SAMPLES = 10**15
"""The most samples of a job, over all epochs: a million a second for thirty years."""


_MOST = {
    "samples": MOST_SAMPLES,
    "total_samples": MOST_SAMPLES,
    "failures": 1e6,
    "checkpoint_cost": 86_400.0,
    "worker_cpu_utilization": 1000.0,
    "ps_cpu_utilization": 1000.0,
    "seconds": 1e6,
    "paused_seconds": 1e6,
}
_SAME_SPEED = 10.0  # a factor: both are means over a window, but over different steps


class Refusal(StrEnum):
    """Reasons to refuse a profile or a start-up."""

    NOT_FINITE = "NotFinite"
    NEGATIVE = "Negative"
    FROM_THE_FUTURE = "FromTheFuture"
    UNKNOWN_JOB = "UnknownJob"
    INCONSISTENT = "Inconsistent"
    TOO_MANY = "TooMany"


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason of a refusal, with the field and value that show it."""

    reason: Refusal
    message: str


def check_profile(profile: JobProfile, batch_size: int, now: float, clock_skew: float) -> Refused | None:
    """Returns why a profile is refused, or None. `batch_size` is the job's; clocks may be ahead by `clock_skew`."""
    numbers = {
        field.name: value
        for field in fields(profile)
        if isinstance(value := getattr(profile, field.name), int | float) and not isinstance(value, bool)
    }
    numbers |= {f"stage_fractions.{stage}": share for stage, share in profile.stage_fractions.items()}
    numbers |= {"worker_cpu": profile.shape.worker_cpu, "ps_cpu": profile.shape.ps_cpu}
    problem = _impossible(numbers)
    if problem is not None:
        return problem
    if profile.time > now + clock_skew:
        return Refused(
            Refusal.FROM_THE_FUTURE,
            f"time is {duration_text(profile.time - now)} ahead of the brain's clock, "
            f"beyond the tolerance of {duration_text(clock_skew)}",
        )
    if 0 < profile.total_samples < profile.samples:
        return Refused(
            Refusal.INCONSISTENT,
            f"total_samples is {profile.total_samples}, less than the {profile.samples} samples done",
        )
    if profile.batch_size != batch_size:
        return Refused(Refusal.INCONSISTENT, f"batch_size is {profile.batch_size}, the job's is {batch_size}")
    if not profile.restarted and not (profile.throughput > 0 and profile.iteration_seconds > 0):
        return Refused(
            Refusal.INCONSISTENT,
            "throughput and iteration_seconds must be above 0 unless the profile is marked as restarted",
        )
    if not profile.restarted:
        implied = profile.shape.workers * batch_size / profile.iteration_seconds
        if not implied / _SAME_SPEED <= profile.throughput <= implied * _SAME_SPEED:
            return Refused(
                Refusal.INCONSISTENT,
                f"throughput is {rate_text(profile.throughput)}, but {profile.shape.workers} workers that take "
                f"{duration_text(profile.iteration_seconds)} for a batch of {batch_size} train {rate_text(implied)}",
            )
    return None


def check_start_up(start_up: StartUpObserved) -> Refused | None:
    """Returns why a start-up is refused, or None."""
    if start_up.role not in ("worker", "ps"):
        return Refused(Refusal.INCONSISTENT, "role: must be worker or ps")
    return _impossible({name: getattr(start_up, name) for name in ("time", "seconds", "paused_seconds")})


def _impossible(numbers: Mapping[str, float]) -> Refused | None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            return Refused(Refusal.NOT_FINITE, f"{name} is {value}")
        if value < 0:
            return Refused(Refusal.NEGATIVE, f"{name} is {value:g}")
        if value > _MOST.get(name, LARGEST):
            return Refused(Refusal.INCONSISTENT, f"{name} is {value:g}: more than there can be")
    return None
