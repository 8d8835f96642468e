"""Converts between the types that components share and their messages."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from google.protobuf.message import Message

from emberscale_api.dataset import Block, DataFile, Dataset, Split
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import Role
from emberscale_api.job.status import EvaluationResult, JobPhase
from emberscale_api.rpc import brain_pb2 as brain_pb
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.shape import JobProfile, JobShape

_Kind = TypeVar("_Kind")
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


def same_fields(kind: type[_Kind], message: Message, **converted: Any) -> _Kind:
    """A dataclass from the fields of a message that have the same names, but for those that are `converted`."""
    names = (one.name for one in fields(kind))  # type: ignore[arg-type]  # every kind is a dataclass
    return kind(**{name: converted[name] if name in converted else getattr(message, name) for name in names})


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
    return pb.EvaluationStatus(
        epoch=result.epoch,
        samples=result.samples,
        auc=_or_nan(result.auc),
        logloss=_or_nan(result.logloss),
        normalized_entropy=_or_nan(result.normalized_entropy),
        calibration=_or_nan(result.calibration),
    )


def evaluation_from_wire(message: pb.EvaluationStatus) -> EvaluationResult:
    """Returns the evaluation of a message."""
    return EvaluationResult(
        epoch=message.epoch,
        samples=message.samples,
        auc=_or_none(message.auc),
        logloss=_or_none(message.logloss),
        normalized_entropy=_or_none(message.normalized_entropy),
        calibration=_or_none(message.calibration),
    )


def wire_bad_record(record: BadRecord) -> pb.BadRecord:
    """Returns the message of a malformed record."""
    return pb.BadRecord(file=record.file, line=record.line, problem=record.problem)


def wire_file(file: DataFile) -> pb.DataFile:
    """Returns the message of a data file."""
    return pb.DataFile(uri=file.uri, bytes=file.bytes)


def file_from_wire(message: pb.DataFile) -> DataFile:
    """Returns the data file of a message."""
    return DataFile(message.uri, message.bytes)


def wire_block(block: Block) -> pb.Block:
    """Returns the message of a block."""
    return pb.Block(**asdict(block))


def block_from_wire(message: pb.Block) -> Block:
    """Returns the block of a message."""
    return same_fields(Block, message)


def dataset_from_wire(message: pb.Dataset) -> Dataset:
    """Returns the index of the data of a message."""
    return Dataset(
        training_files=tuple(map(file_from_wire, message.training_files)),
        training_blocks=tuple(map(block_from_wire, message.training_blocks)),
        evaluation_files=tuple(map(file_from_wire, message.evaluation_files)),
        evaluation_blocks=tuple(map(block_from_wire, message.evaluation_blocks)),
    )


def wire_shape(shape: JobShape) -> brain_pb.Shape:
    """Returns the message of a shape."""
    return brain_pb.Shape(**asdict(shape))


def shape_from_wire(message: brain_pb.Shape) -> JobShape:
    """Returns the shape of a message. Raises ValueError for one that no job can have."""
    return same_fields(JobShape, message)


def wire_profile(profile: JobProfile, sequence: int = 0) -> brain_pb.Profile:
    """Returns the message of a profile, whose fields have the same names."""
    measured = {one.name: getattr(profile, one.name) for one in fields(JobProfile)}
    return brain_pb.Profile(**{**measured, "sequence": sequence, "shape": wire_shape(profile.shape)})


def profile_from_wire(message: brain_pb.Profile) -> JobProfile:
    """Returns the profile of a message without its sequence. Raises ValueError for a shape that no job can have."""
    shape, stages = shape_from_wire(message.shape), dict(message.stage_fractions)
    return same_fields(JobProfile, message, shape=shape, stage_fractions=stages)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
