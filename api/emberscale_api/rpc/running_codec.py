"""Reads the plan and the status of a running job from the master's messages."""

from collections.abc import Iterable, Iterator

from emberscale_api.job.roles import MemberId
from emberscale_api.job.running import Forgotten, JobPlan, JobStatus, MemberNow
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
        silent=tuple(_names(message.silent)),
        drained=tuple(_names(message.drained)),
        final=status_from_wire(message.final) if message.HasField("final") else None,
    )


def status_from_wire(message: pb.JobStatus) -> JobStatus:
    """Returns the status of a message, without members of a role that this version does not know."""
    return same_fields(
        JobStatus,
        message,
        phase=phase_from_wire(message.phase),
        evaluations=tuple(map(evaluation_from_wire, message.evaluations)),
        members=tuple(_members(message.members)),
        forgotten=tuple(map(_forgotten, message.forgotten)),
    )


def _names(members: Iterable[pb.Member]) -> Iterator[MemberId]:
    for member in members:
        if (role := role_from_wire(member.role)) is not None:
            yield MemberId(role, member.index, member.incarnation)


def _members(members: Iterable[pb.MemberStatus]) -> Iterator[MemberNow]:
    for one in members:
        for name in _names([one.member]):
            yield same_fields(MemberNow, one, member=name)


def _forgotten(message: pb.ForgottenShare) -> Forgotten:
    batches = {
        part.epoch: tuple(zip(part.ranges[::2], part.ranges[1::2], strict=False))  # a master may say anything
        for part in message.batches
    }
    return same_fields(Forgotten, message, batches=batches)
