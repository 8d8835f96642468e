"""Changes to the brain's knowledge, one record per fact, and their codecs."""

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from emberscale_api.job.status import JobPhase
from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.planner.types import JobId, JobMetadata, PlannedShape, ShapeBounds, ThroughputFit

T = TypeVar("T")


class Codec(Generic[T]):
    """Converts one type to and from values that `json` can write."""

    def __init__(self, kind: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    def plain(self, value: T) -> Any:
        """The value as dicts, lists, texts and numbers."""
        # The types' empty mappings are mapping proxies, which pydantic accepts but cannot serialize.
        return self._adapter.dump_python(value, fallback=dict, warnings="none")

    def from_plain(self, plain: Any) -> T:
        """The inverse of `plain`. Raises pydantic.ValidationError."""
        return self._adapter.validate_python(plain)

    def text(self, value: T) -> str:
        """The value as one line of JSON, with Python's spelling of infinities."""
        return json.dumps(self.plain(value), separators=(",", ":"))

    def from_text(self, text: str | bytes) -> T:
        """The inverse of `text`. Raises pydantic.ValidationError or json.JSONDecodeError."""
        return self.from_plain(json.loads(text))


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A job became known; plans made for it have versions above `last_plan`."""

    job: JobId
    owner: str
    metadata: JobMetadata
    bounds: ShapeBounds
    submitted_at: float
    current: JobShape | None = None
    priority: float = 1.0
    fixed: bool = False
    last_plan: int = 0


@dataclass(frozen=True, slots=True)
class ProfileReported:
    """A measurement of a known job was accepted. `sequence` is the reporter's; each counts once."""

    job: JobId
    sequence: int
    profile: JobProfile


@dataclass(frozen=True, slots=True)
class StartUpObserved:
    """A pod of `role` ("worker" or "ps") took `seconds` to serve; its job stood still for `paused_seconds`."""

    job: JobId
    role: str
    time: float
    seconds: float
    paused_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanMade:
    """A job has a plan in force; `kept` is the reason of a later round that kept the shape."""

    job: JobId
    version: int
    made_at: float
    planner: str
    planned: PlannedShape
    kept: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job is over; `phase` is Complete, Failed, Suspended, or Silent if nothing was heard of it for too long.

    `metadata` is what the brain knows about the job at its end, which is more than at its submission.
    """

    job: JobId
    phase: str
    finished_at: float
    final_shape: JobShape | None = None
    fit: ThroughputFit | None = None
    rows: int = 0
    metadata: JobMetadata | None = None


Change = JobSubmitted | ProfileReported | StartUpObserved | PlanMade | JobEnded
COMPLETE = JobPhase.COMPLETE.value
SILENT = "Silent"
