"""The protocol between the service and its planning process: one JSON object per line."""

import json
from collections.abc import Mapping
from typing import Any, NewType

from emberscale_brain.history.changes import (
    Change,
    Codec,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.planner.types import PastJob, PlannedShape, PlannerSettings
from emberscale_brain.service.state import Conditions

Frame = NewType("Frame", bytes)

_CHANGES: dict[str, Codec[Any]] = {
    kind.__name__: Codec(kind) for kind in (JobSubmitted, ProfileReported, StartUpObserved, PlanMade, JobEnded)
}
PAST_JOB: Codec[PastJob] = Codec(PastJob)
PLANNED: Codec[PlannedShape] = Codec(PlannedShape)
SETTINGS: Codec[PlannerSettings] = Codec(PlannerSettings)
CONDITIONS: Codec[Conditions] = Codec(Conditions)


def frame(kind: str, **content: Any) -> Frame:
    """Returns a line; `content` is plain JSON. Raises UnicodeEncodeError for text that UTF-8 cannot encode."""
    return Frame(json.dumps({"kind": kind, **content}, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")


def read_frame(line: bytes) -> Mapping[str, Any]:
    """Returns the object of a line. Raises json.JSONDecodeError."""
    content: Mapping[str, Any] = json.loads(line)
    return content


def change_frame(change: Change) -> Frame:
    """Encodes a change. Plans are sent without their explanation, which planning does not need."""
    name = type(change).__name__
    plain = _CHANGES[name].plain(change)
    if isinstance(change, PlanMade):
        plain["planned"]["explanation"] = {}
    return frame("change", name=name, change=plain)


def read_change(content: Mapping[str, Any]) -> Change:
    """The inverse of `change_frame`."""
    change: Change = _CHANGES[content["name"]].from_plain(content["change"])
    return change
