"""Bounds of what a master says: its pods run a team's own code, and the operator looks after the jobs of all."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from emberscale_api.job.roles import MAX_REPLICAS
from emberscale_api.job.status import MAX_COUNT, MAX_QUANTITY
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.fields import PresentField, present_fields

MAX_MESSAGE_BYTES = 4 << 20
"""A status of 1024 workers takes a tenth of that."""
MAX_CORES = 1 << 14
MAX_MEMORY_BYTES = 1 << 50
MAX_ENTRIES = 4096
MAX_CHARACTERS = 4096
MAX_STEPS = 16
"""Each becomes an Event."""
_REASON = re.compile("[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")
"""The bound of metav1.Condition, and at most the length that an Event takes."""
_METRICS = frozenset({"loss", "auc", "logloss", "normalized_entropy", "calibration"})
"""Fractions that may be NaN, which says that there is none; all others are quantities."""
_SIGNED = frozenset({"eta_seconds"})
"""A quantity that may be negative."""
_INTEGERS = frozenset({FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_UINT32})
_Said = TypeVar("_Said", bound=Message)


def bounded(said: _Said, tell: Callable[[str], None] = lambda _: None) -> _Said:
    """Brings a plan or a status within bounds, in place, and returns it.

    A role with sizes that no cluster has is left out of the plan: the manifest's hold then. Texts and lists are cut. A
    number that is read as a quantity is finite, and an integer exact in JSON. A reason that no condition may have is
    left out. `tell` is called with the name of each field that had a number or a role beyond these bounds.
    """
    if isinstance(said, pb.Plan):
        possible = [part for part in said.roles if _possible(part)]
        if len(possible) < len(said.roles):
            tell("roles")
            del said.roles[:]
            said.roles.extend(possible)
    for present in present_fields(said):
        present.cut(MAX_ENTRIES)
        if present.is_message:
            for part in present.values:
                bounded(part, tell)
        elif present.is_single and present.name == "reason" and not _REASON.fullmatch(present.values[0]):
            said.ClearField("reason")
        else:
            present.replace(partial(_fitting, present, tell))
    if isinstance(said, pb.Sizing):
        del said.steps[:-MAX_STEPS]
    return said


def _fitting(present: PresentField, tell: Callable[[str], None], value: Any) -> Any:
    """A text or a number of a field within its bounds; anything else as it is."""
    kind, name = present.field.type, present.name
    if kind == FieldDescriptor.TYPE_STRING:
        return value[:MAX_CHARACTERS]
    if kind in _INTEGERS:
        fitting = min(value, MAX_COUNT)
    elif kind == FieldDescriptor.TYPE_DOUBLE and name not in _METRICS:
        least = -MAX_QUANTITY if name in _SIGNED else 0.0
        fitting = 0.0 if math.isnan(value) else max(least, min(value, MAX_QUANTITY))
    else:
        return value
    if fitting != value:
        tell(name)
    return fitting


def _possible(part: pb.RolePlan) -> bool:
    sizes = ((part.replicas, MAX_REPLICAS), (part.cpu_cores, MAX_CORES), (part.memory_bytes, MAX_MEMORY_BYTES))
    return all(0 <= size <= most for size, most in sizes)  # false of what is no number
