"""Validates requests, and rejects profiles and start-ups that are unfit to learn from; pure.

An authorised caller may still be mistaken: a single absurd number from one job would end each round of planning.
"""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from enum import StrEnum

from emberscale_api.errors import InvalidError
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.shape import JobProfile
from emberscale_brain.history.changes import StartUpObserved

LARGEST = 1 << 62
"""The largest whole number: the sum of two is still a 64-bit integer."""
MOST_SAMPLES = 10**15
"""The most samples of a job, over all epochs: a million a second for thirty years."""
MOST_PROFILES, MOST_START_UPS = 1024, 4096
_LONGEST_TEXT = 255  # of a column
_MOST_BATCH = (1 << 31) - 1  # of a column
_MOST_PROCESSES = 10_000
_MOST_CORES = 10_000.0
_MOST_MEMORY = 1 << 46
_FINEST_STEP = 1e-3
_MOST_PRIORITY = 1e6
_MOST_STAGES = 64


class MalformedRequestError(InvalidError):
    """The request is invalid; the text names the field."""


def check_text(field: str, value: str) -> str:
    """The text. Raises MalformedRequestError for one that is too long, or that PostgreSQL cannot hold."""
    if len(value) > _LONGEST_TEXT:
        raise MalformedRequestError(f"{field}: has {len(value)} characters, {_LONGEST_TEXT} are allowed")
    if "\0" in value:
        raise MalformedRequestError(f"{field}: must not contain NUL")
    return value


def check_number(field: str, value: float, least: float, most: float) -> None:
    """Raises MalformedRequestError for what is not a number from `least` to `most`."""
    if not (math.isfinite(value) and least <= value <= most):
        raise MalformedRequestError(f"{field}: must be from {least:g} to {most:g}, not {value:g}")


def check_count(field: str, values: Sized, most: int) -> None:
    """Raises MalformedRequestError for more of something than one request may hold."""
    if len(values) > most:
        raise MalformedRequestError(f"{field}: {len(values)} of them; up to {most} are allowed")


def check_shape(field: str, shape: pb.Shape) -> None:
    """Raises MalformedRequestError for processes that no cluster has; 0 stands for what is not said."""
    check_number(f"{field}.workers", shape.workers, 0, _MOST_PROCESSES)
    check_number(f"{field}.ps", shape.ps, 0, _MOST_PROCESSES)
    check_number(f"{field}.worker_cpu", shape.worker_cpu, 0, _MOST_CORES)
    check_number(f"{field}.ps_cpu", shape.ps_cpu, 0, _MOST_CORES)
    check_number(f"{field}.worker_memory", shape.worker_memory, 0, _MOST_MEMORY)
    check_number(f"{field}.ps_memory", shape.ps_memory, 0, _MOST_MEMORY)


def check_submission(request: pb.SubmitJobRequest) -> None:
    """Raises MalformedRequestError for the first field that makes no sense by itself."""
    if not request.job_uid:
        raise MalformedRequestError("job_uid: is required")
    description, limits = request.description, request.limits
    for field, value in (
        ("job_uid", request.job_uid),
        ("owner", request.owner),
        ("description.name", description.name),
        ("description.architecture", description.architecture),
        ("description.optimizer", description.optimizer),
    ):
        check_text(field, value)
    check_number("description.batch_size", description.batch_size, 0, _MOST_BATCH)
    for name, most in (
        ("dense_bytes", LARGEST),
        ("total_samples", MOST_SAMPLES),
        ("data_bytes", LARGEST),
        ("most_rows", LARGEST),
        ("target_pls", 1),
    ):
        check_number(f"description.{name}", getattr(description, name), 0, most)
    check_shape("limits.least", limits.least)
    check_shape("limits.most", limits.most)
    if limits.cpu_step:
        check_number("limits.cpu_step", limits.cpu_step, _FINEST_STEP, _MOST_CORES)
    check_shape("current", request.current)
    check_number("priority", request.priority, 0, _MOST_PRIORITY)
    check_number("submitted_at", request.submitted_at, 0, LARGEST)
    check_number("last_plan", request.last_plan, 0, LARGEST)


def check_stages(stages: Sequence[str]) -> None:
    """Raises MalformedRequestError for more stages, or other names of them, than a batch has."""
    check_count("stage_fractions", stages, _MOST_STAGES)
    for stage in stages:
        check_text("stage_fractions", stage)


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
_SAME_SPEED = 10.0  # a factor: both are means over a window, of other steps


class Refusal(StrEnum):
    """The reasons to refuse a profile or a start-up."""

    NOT_FINITE = "NotFinite"
    NEGATIVE = "Negative"
    FROM_THE_FUTURE = "FromTheFuture"
    UNKNOWN_JOB = "UnknownJob"
    INCONSISTENT = "Inconsistent"


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
            f"time is {profile.time - now:.0f} s ahead of the brain's clock, beyond the {clock_skew:g} s tolerance",
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
                f"throughput is {profile.throughput:g}, but {profile.shape.workers} workers that take "
                f"{profile.iteration_seconds:g} s for a batch of {batch_size} train {implied:g} samples/s",
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
