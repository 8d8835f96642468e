"""What a request may say: texts that the database can hold, and numbers that planners can reckon with; pure.

Whoever holds the token may still be mistaken: one job with a number beyond all bounds would end each round of planning.
"""

import math
from collections.abc import Sequence, Sized

from emberscale_api.rpc import brain_pb2 as pb

LARGEST = 1 << 62
"""Of any whole number: sums of two are still 64-bit integers."""
MOST_SAMPLES = 10**15
"""Of a job, over all epochs: a million samples a second for thirty years. One that claims more would seem endless."""
MOST_PROFILES, MOST_START_UPS = 1024, 4096
_LONGEST_TEXT = 255  # of a column
_MOST_BATCH = (1 << 31) - 1  # of a column
_MOST_PROCESSES = 10_000
_MOST_CORES = 10_000.0
_MOST_MEMORY = 1 << 46
_FINEST_STEP = 1e-3
_MOST_PRIORITY = 1e6
_MOST_STAGES = 64


class MalformedRequestError(ValueError):
    """A request that makes no sense; the text names the field."""


def check_text(field: str, value: str) -> str:
    """The text. Raises MalformedRequestError for one that is too long, or that PostgreSQL cannot hold."""
    if len(value) > _LONGEST_TEXT:
        raise MalformedRequestError(f"{field}: has {len(value)} characters, {_LONGEST_TEXT} are allowed")
    if "\0" in value:
        raise MalformedRequestError(f"{field}: must not hold the character NUL")
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
    for name, most in (("dense_bytes", LARGEST), ("total_samples", MOST_SAMPLES), ("data_bytes", LARGEST)):
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
