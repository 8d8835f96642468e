"""Bounds of what a master says: its pods run a team's own code, and the operator looks after the jobs of all."""

import math
import re
from typing import TypeVar

import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from emberscale_api.rpc import master_pb2 as pb

MAX_MESSAGE_BYTES = 4 << 20
"""A status of 1024 workers takes a tenth of that."""
MAX_REPLICAS = 1024
"""The same bound as in the manifest."""
MAX_CORES = 1 << 14
MAX_MEMORY_BYTES = 1 << 50
MAX_ENTRIES = 4096
MAX_CHARACTERS = 4096
MAX_STEPS = 16
"""Each becomes an Event."""
_LAST_STEP = 1 << 53
_LARGEST = 1e15
_REASON = re.compile("[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?")
"""The bound of metav1.Condition, and at most the length that an Event takes."""
_QUANTITIES = frozenset(
    {"samples_per_second", "expected_samples_per_second", "eta_seconds", "training_seconds", "since", "seconds"}
)
"""Loss and AUC, in contrast, may be no number."""
_Said = TypeVar("_Said", bound=Message)
_log = structlog.get_logger()


def bounded(said: _Said) -> _Said:
    """Brings a plan or a status within bounds, in place, and returns it.

    A role with sizes that no cluster has is left out of the plan: the manifest's hold then. Texts and lists are cut. A
    number that is read as a quantity is finite. A reason that no condition may have is left out.
    """
    for field, value in said.ListFields():
        if field.is_repeated and not _is_map(field):
            del value[MAX_ENTRIES:]
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for part in value if field.is_repeated else (value,):
                bounded(part)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                value[:] = [text[:MAX_CHARACTERS] for text in value]
            elif field.name == "reason" and not _REASON.fullmatch(value):
                said.ClearField("reason")
            else:
                setattr(said, field.name, value[:MAX_CHARACTERS])
        elif field.type == FieldDescriptor.TYPE_DOUBLE and not field.is_repeated and field.name in _QUANTITIES:
            setattr(said, field.name, 0.0 if math.isnan(value) else max(-_LARGEST, min(value, _LARGEST)))
    if isinstance(said, pb.ScalingStep):
        said.number = min(said.number, _LAST_STEP)
    if isinstance(said, pb.Sizing):
        del said.steps[:-MAX_STEPS]
    if isinstance(said, pb.Plan):
        possible = [part for part in said.roles if _possible(part)]
        if len(possible) < len(said.roles):
            _log.warning("plan_exceeds_any_cluster", plan_version=said.version)
            del said.roles[:]
            said.roles.extend(possible)
    return said


def _possible(part: pb.RolePlan) -> bool:
    sizes = ((part.replicas, MAX_REPLICAS), (part.cpu_cores, MAX_CORES), (part.memory_bytes, MAX_MEMORY_BYTES))
    return all(0 <= size <= most for size, most in sizes)  # false of what is no number


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
