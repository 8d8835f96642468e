"""Decodes requests, and checks that each makes sense by itself."""

import math
from collections.abc import Sequence, Sized

from emberscale_api.errors import InvalidError
from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.codec import same_fields
from emberscale_api.shape import DIMENSIONS, JobProfile, JobShape
from emberscale_brain.history.changes import COMPLETE, JobEnded, JobSubmitted, ProfileReported, StartUpObserved
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
from emberscale_brain.service.checks import LARGEST, MOST_SAMPLES

MOST_PROFILES, MOST_START_UPS = 1024, 4096
_LONGEST_TEXT = 255  # of a column of the database
_MOST_BATCH = (1 << 31) - 1  # of a column of the database
_MOST_CORES = 10_000.0
_MOST = dict(zip(DIMENSIONS, (10_000, 10_000, _MOST_CORES, _MOST_CORES, 1 << 46, 1 << 46), strict=True))
_FINEST_STEP = 1e-3
_MOST_PRIORITY = 1e6
_MOST_STAGES = 64
_PHASES = (COMPLETE, JobPhase.FAILED.value, JobPhase.SUSPENDED.value)


class MalformedRequestError(InvalidError):
    """The request is invalid; the text names the field."""


def check_text(field: str, value: str) -> str:
    """Returns the text. Raises MalformedRequestError if it is too long, or PostgreSQL cannot hold it."""
    if len(value) > _LONGEST_TEXT:
        raise MalformedRequestError(f"{field}: has {len(value)} characters, {_LONGEST_TEXT} are allowed")
    if "\0" in value:
        raise MalformedRequestError(f"{field}: must not contain NUL")
    return value


def check_number(field: str, value: float, least: float, most: float) -> None:
    """Raises MalformedRequestError unless `value` is a number from `least` to `most`."""
    if not (math.isfinite(value) and least <= value <= most):
        raise MalformedRequestError(f"{field}: must be from {least:g} to {most:g}, not {value:g}")


def check_count(field: str, values: Sized, most: int) -> None:
    """Raises MalformedRequestError for more values than one request may hold."""
    if len(values) > most:
        raise MalformedRequestError(f"{field}: {len(values)} of them; up to {most} are allowed")


def check_shape(field: str, shape: pb.Shape) -> None:
    """Raises MalformedRequestError for a shape that no cluster can hold; 0 stands for an unset dimension."""
    for name, most in _MOST.items():
        check_number(f"{field}.{name}", getattr(shape, name), 0, most)


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
    """Raises MalformedRequestError for too many stages, or names that are too long or contain NUL."""
    check_count("stage_fractions", stages, _MOST_STAGES)
    for stage in stages:
        check_text("stage_fractions", stage)


def shape_from(message: pb.Shape) -> JobShape:
    """Decodes a shape. Raises MalformedRequestError."""
    check_shape("shape", message)
    try:
        return same_fields(JobShape, message)
    except ValueError as error:
        raise MalformedRequestError(f"shape: {error}") from error


def submission_from(request: pb.SubmitJobRequest, defaults: ShapeBounds, now: float) -> JobSubmitted:
    """Decodes a submission; limits that are 0 take the defaults. Raises MalformedRequestError."""
    check_submission(request)
    description = request.description
    try:
        metadata = same_fields(JobMetadata, description, epochs=max(1, description.epochs))
    except ValueError as error:
        raise MalformedRequestError(f"description: {error}") from error
    return JobSubmitted(
        job=JobId(request.job_uid),
        owner=request.owner,
        metadata=metadata,
        bounds=_bounds_from(request.limits, defaults),
        submitted_at=min(request.submitted_at or now, now),
        current=shape_from(request.current) if request.HasField("current") else None,
        priority=request.priority if request.priority > 0 else 1.0,
        fixed=request.fixed,
        last_plan=request.last_plan,
    )


def _bounds_from(limits: pb.ShapeLimits, defaults: ShapeBounds) -> ShapeBounds:
    step = limits.cpu_step or defaults.cpu_step
    bounds = {}
    for name in DIMENSIONS:
        low, high = getattr(defaults, name)
        low = min(step, low) if name.endswith("_cpu") else low
        bounds[name] = getattr(limits.least, name) or low, getattr(limits.most, name) or high
    try:
        return ShapeBounds(**bounds, cpu_step=step)
    except ValueError as error:
        raise MalformedRequestError(f"limits: {error}") from error


def profile_from(job: JobId, message: pb.Profile) -> ProfileReported:
    """Decodes a reported profile, and checks only its sequence and shape. Raises MalformedRequestError."""
    check_number("sequence", message.sequence, 0, LARGEST)
    check_stages(list(message.stage_fractions))
    check_shape("shape", message.shape)
    try:
        profile = same_fields(JobProfile, message)
    except ValueError as error:
        raise MalformedRequestError(f"shape: {error}") from error
    return ProfileReported(job, message.sequence, profile)


def start_up_from(job: JobId, message: pb.StartUp, now: float) -> StartUpObserved:
    """Decodes a reported start-up without checks; a time in the future becomes now."""
    return StartUpObserved(job, message.role, min(message.time or now, now), message.seconds, message.paused_seconds)


def job_from(uid: str) -> JobId:
    """Returns the id of a job, known or not. Raises MalformedRequestError."""
    return JobId(check_text("job_uid", uid))


def outcome_from(request: pb.ReportOutcomeRequest, now: float) -> JobEnded:
    """Decodes the end of a job. Raises MalformedRequestError."""
    if request.phase not in _PHASES:
        raise MalformedRequestError(f"phase: must be {', '.join(_PHASES)}, not {request.phase!r}")
    check_number("finished_at", request.finished_at, 0, LARGEST)
    check_number("rows", request.rows, 0, LARGEST)
    return JobEnded(
        job=job_from(request.job_uid),
        phase=request.phase,
        finished_at=min(request.finished_at or now, now),
        final_shape=shape_from(request.final_shape) if request.HasField("final_shape") else None,
        rows=request.rows,
    )
