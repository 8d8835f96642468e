"""Converts between the types that components share and their messages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel

from emberscale_api.dataset import DataFile, Dataset, Split
from emberscale_api.job.roles import Role
from emberscale_api.job.status import EvaluationResult, JobPhase
from emberscale_api.rpc import master_pb2 as pb

_DAMAGED_FILE = "emberscale-damaged-file-bin"
_Kind = TypeVar("_Kind")
_Message = TypeVar("_Message", bound=Message)
_ROLES: Mapping["pb.Role.ValueType", Role] = {pb.MASTER: Role.MASTER, pb.PS: Role.PS, pb.WORKER: Role.WORKER}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}
_PHASE_NUMBERS: Mapping[JobPhase, "pb.Phase.ValueType"] = {
    phase: pb.Phase.Value(phase.name) for phase in JobPhase if phase is not JobPhase.SUSPENDING
}
_PHASES = {number: phase for phase, number in _PHASE_NUMBERS.items()}
WIRE_SPLITS: Mapping[Split, "pb.Split.ValueType"] = {
    Split.TRAINING: pb.TRAINING_DATA,
    Split.EVALUATION: pb.EVALUATION_DATA,
}


def message_of(kind: type[_Message], source: object, /, **converted: Any) -> _Message:
    """Returns a message whose fields have the values of `source`'s attributes of the same names, or `converted` ones.

    Objects within become messages in the same way, and None stays absent. Raises AttributeError for a field that is in
    neither.
    """
    values = {
        field.name: _written(field, converted[field.name] if field.name in converted else getattr(source, field.name))
        for field in kind.DESCRIPTOR.fields
    }
    return kind(**values)


def same_fields(kind: type[_Kind], message: Message, /, **converted: Any) -> _Kind:
    """Returns an object from the fields of a message that have the same names, but for those that are `converted`.

    Messages within become what the fields' types say: dataclasses or models, tuples and mappings of them, or None where
    an optional one is absent. Raises what the type raises, such as ValueError for a shape that no job can have.
    """
    types = _types(kind)  # type: ignore[arg-type]  # mypy takes the type that a variable stands for as unhashable
    return kind(**{name: converted[name] if name in converted else _read(types[name], message, name) for name in types})


def _written(field: Any, value: Any) -> Any:
    if field.message_type is None or value is None or isinstance(value, Message):
        return value
    if field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        return {key: _written(entry, one) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [_written(field, one) for one in value]
    return message_of(GetMessageClass(field.message_type), value)


def _read(hint: Any, message: Message, name: str) -> Any:
    if isinstance(hint, UnionType):
        if not message.HasField(name):
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    return _value(hint, getattr(message, name))


def _value(hint: Any, value: Any) -> Any:
    match get_origin(hint), get_args(hint):
        case (kind, (inner, *_)) if kind is tuple:
            return tuple(_value(inner, one) for one in value)
        case (kind, (_, inner)) if kind is Mapping:
            return {key: _value(inner, one) for key, one in value.items()}
    return same_fields(hint, value) if isinstance(value, Message) else value


@cache
def _types(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's or a model's fields, by name."""
    hints = get_type_hints(kind)
    names = kind.model_fields if issubclass(kind, BaseModel) else [one.name for one in fields(kind)]
    return {name: hints[name] for name in names}


def wire_role(role: Role) -> "pb.Role.ValueType":
    """Returns the number of a role that the master knows. Raises KeyError for Redis and the brain."""
    return _ROLE_NUMBERS[role]


def role_from_wire(number: "pb.Role.ValueType") -> Role | None:
    """Returns the role of a number, or None for an unknown one."""
    return _ROLES.get(number)


def wire_phase(phase: JobPhase) -> "pb.Phase.ValueType":
    """Returns the number of a phase. Raises KeyError for `SUSPENDING`, which only the operator tells."""
    return _PHASE_NUMBERS[phase]


def phase_from_wire(number: "pb.Phase.ValueType") -> JobPhase | None:
    """Returns the phase of a number, or None for an unknown one."""
    return _PHASES.get(number)


def wire_evaluation(result: EvaluationResult) -> pb.EvaluationStatus:
    """Returns the message of an evaluation; what is undefined is NaN."""
    undefined = {name: math.nan for name, value in result if value is None}
    return message_of(pb.EvaluationStatus, result, **undefined)


def evaluation_from_wire(message: pb.EvaluationStatus) -> EvaluationResult:
    """Returns the evaluation of a message."""
    told = {field.name: getattr(message, field.name) for field in pb.EvaluationStatus.DESCRIPTOR.fields}
    return EvaluationResult(**{name: value if math.isfinite(value) else None for name, value in told.items()})


def file_from_wire(message: pb.DataFile) -> DataFile:
    """Returns the data file of a message."""
    return DataFile(message.uri, message.bytes)


def dataset_from_wire(message: pb.Dataset) -> Dataset:
    """Returns the index of the data of a message."""
    return same_fields(
        Dataset,
        message,
        training_files=tuple(map(file_from_wire, message.training_files)),
        evaluation_files=tuple(map(file_from_wire, message.evaluation_files)),
    )


def damage_metadata(file: str) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailing metadata of a call that fails on account of a damaged file, by its URI; empty: none."""
    return ((_DAMAGED_FILE, file.encode()),) if file else ()


def damaged_file_of(error: grpc.RpcError) -> str:
    """Returns the URI of the file on account of which a call failed; empty if none was told."""
    values = (one.value for one in error.trailing_metadata() or () if one.key == _DAMAGED_FILE)
    return next((value.decode(errors="replace") for value in values if isinstance(value, bytes)), "")
