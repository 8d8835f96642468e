"""Reads the plan and the status of a running job from the master's messages."""

from collections.abc import Iterable, Iterator

from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId
from emberscale_api.job.running import (
    AdmissionCounts,
    CheckpointCost,
    FlashStatus,
    Forgotten,
    JobPlan,
    JobStatus,
    MemberNow,
    ProtectionStatus,
    Scale,
    ScalingStep,
    Sizing,
    SlowMember,
    Traffic,
)
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import evaluation_from_wire, phase_from_wire, role_from_wire, same_fields
from emberscale_api.shape import RoleShape


def plan_from_wire(message: pb.Plan) -> JobPlan:
    """Returns the plan of a message, without roles that this version does not know."""
    shapes = {
        role: RoleShape(part.replicas, part.cpu_cores or None, part.memory_bytes or None)
        for part in message.roles
        if (role := role_from_wire(part.role)) is not None
    }
    return same_fields(
        JobPlan,
        message,
        shapes=shapes,
        phase=phase_from_wire(message.phase),
        sizing=_sizing(message.sizing),
        silent=tuple(_names(message.silent)),
        final=status_from_wire(message.final) if message.HasField("final") else None,
        asked=same_fields(Scale, message.asked) if message.HasField("asked") else None,
    )


def status_from_wire(message: pb.JobStatus) -> JobStatus:
    """Returns the status of a message, without members of a role that this version does not know."""
    return same_fields(
        JobStatus,
        message,
        phase=phase_from_wire(message.phase),
        evaluations=tuple(map(evaluation_from_wire, message.evaluations)),
        members=tuple(_members(message.members)),
        rows=dict(message.rows),
        admission={table: same_fields(AdmissionCounts, counts) for table, counts in message.admission.items()},
        bad_record_samples=tuple(same_fields(BadRecord, record) for record in message.bad_record_samples),
        checkpoints=tuple(same_fields(CheckpointCost, cost) for cost in message.checkpoints),
        flash=same_fields(FlashStatus, message.flash) if message.HasField("flash") else None,
        protection=same_fields(ProtectionStatus, message.protection) if message.HasField("protection") else None,
        forgotten=tuple(map(_forgotten, message.forgotten)),
        sizing=_sizing(message.sizing),
        traffic=same_fields(Traffic, message.traffic),
        warnings=tuple(message.warnings),
    )


def _names(members: Iterable[pb.Member]) -> Iterator[MemberId]:
    for member in members:
        if (role := role_from_wire(member.role)) is not None:
            yield MemberId(role, member.index, member.incarnation)


def _members(members: Iterable[pb.MemberStatus]) -> Iterator[MemberNow]:
    for one in members:
        for name in _names([one.member]):
            yield same_fields(
                MemberNow,
                one,
                member=name,
                stage_seconds=dict(one.stage_seconds),
                slowness=same_fields(SlowMember, one.slowness) if one.HasField("slowness") else None,
            )


def _sizing(message: pb.Sizing) -> Sizing:
    return same_fields(Sizing, message, steps=tuple(same_fields(ScalingStep, step) for step in message.steps))


def _forgotten(message: pb.ForgottenShare) -> Forgotten:
    batches = {
        part.epoch: tuple(zip(part.ranges[::2], part.ranges[1::2], strict=False))  # a master may say anything
        for part in message.batches
    }
    return same_fields(Forgotten, message, servers=tuple(message.servers), batches=batches)
