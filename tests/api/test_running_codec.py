"""Plans and statuses from a master, which may have another version or be untrusted."""

import pytest

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import (
    AdmissionCounts,
    FlashStatus,
    Forgotten,
    JobStatus,
    MemberNow,
    ProtectionStatus,
    Scale,
    SlowMember,
    Traffic,
)
from emberscale_api.job.status import CheckpointCost, JobPhase
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import message_of
from emberscale_api.rpc.running_codec import plan_from_wire, status_from_wire
from emberscale_api.shape import RoleShape

WORKER = pb.Member(role=pb.WORKER, index=2, incarnation="life-1")
UNKNOWN = pb.Member(role=9, index=1)  # type: ignore[arg-type]  # a role of a later version
COST = CheckpointCost(checkpoint="1", seconds=2, held_seconds=0.5, written_bytes=3, bytes=4)


def test_a_status_has_all_that_its_message_has() -> None:
    message = pb.JobStatus(
        phase=pb.SAVING,
        members=[pb.MemberStatus(member=WORKER, alive=True, slowness=pb.Slowness(factor=3, remedy="it rests"))],
        flash=pb.FlashStatus(checkpoint="flash-1", bytes=7),
        protection=pb.ProtectionStatus(protected=True, rebuilds=2),
        checkpoints=[pb.CheckpointCost(checkpoint="1", seconds=2, held_seconds=0.5, written_bytes=3, bytes=4)],
        forgotten=[pb.ForgottenShare(servers=[1], batches=[pb.AppliedBatches(epoch=1, ranges=[2, 5, 7, 9])])],
        traffic=pb.WorkerTraffic(bytes=9, rounds=1),
    )
    status = status_from_wire(message)
    (member,) = status.members
    assert (status.phase, member.member, member.alive) == (JobPhase.SAVING, MemberId(Role.WORKER, 2, "life-1"), True)
    assert (member.member.slot, member.slowness) == ("worker-2", SlowMember(3, 0, "it rests"))
    assert (status.flash, status.protection) == (
        FlashStatus("flash-1", bytes=7),
        ProtectionStatus(protected=True, rebuilds=2),
    )
    assert status.checkpoints == (COST,)
    assert status.forgotten == (Forgotten((1,), "", 0, 0, 0, {1: ((2, 5), (7, 9))}, 0),)
    assert status.traffic == Traffic(9, 1)


def test_a_message_has_all_that_its_source_has_and_what_is_converted() -> None:
    member = MemberNow(MemberId(Role.PS), slowness=SlowMember(2.0, 1.5), stage_seconds={"push": 3.0})
    told = message_of(pb.Slowness, member.slowness, remedy="it rests")
    assert told == pb.Slowness(factor=2.0, seconds=1.5, remedy="it rests")
    admission, traffic = {"ads": AdmissionCounts(3, 2, 1)}, Traffic(9, 1)
    status = JobStatus(checkpoints=(COST,), admission=admission, traffic=traffic)
    left = {field.name: None for field in pb.JobStatus.DESCRIPTOR.fields if not hasattr(status, field.name)}
    message = message_of(pb.JobStatus, status, phase=pb.SAVING, **left)
    assert (message.checkpoints[0].bytes, message.admission["ads"].refused, message.traffic.rounds) == (4, 2, 1)
    assert not message.HasField("flash")
    assert status_from_wire(message).admission == admission


def test_a_field_that_nothing_gives_a_value_is_a_defect() -> None:
    with pytest.raises(AttributeError, match="incarnation"):
        message_of(pb.Member, Scale(1, 2), role=pb.PS, index=1)


def test_what_is_absent_is_none() -> None:
    status, plan = status_from_wire(pb.JobStatus()), plan_from_wire(pb.Plan())
    assert (status.phase, status.flash, status.protection, plan.phase, plan.final, plan.asked) == (None,) * 6


def test_a_plan_names_shapes_by_role_and_what_it_came_to() -> None:
    roles = [pb.RolePlan(role=pb.PS, replicas=2, cpu_cores=1.5), pb.RolePlan(role=UNKNOWN.role, replicas=1)]
    asked, final = pb.ScaleRequest(ps=2, waits="why"), pb.JobStatus(phase=pb.COMPLETE)
    drained = [pb.Member(role=pb.PS, index=1, incarnation="life-2")]
    plan = plan_from_wire(pb.Plan(roles=roles, silent=[WORKER, UNKNOWN], drained=drained, asked=asked, final=final))
    assert plan.shapes == {Role.PS: RoleShape(2, 1.5, None)}
    assert plan.silent == (MemberId(Role.WORKER, 2, "life-1"),)
    assert plan.drained == (MemberId(Role.PS, 1, "life-2"),)
    assert plan.asked == Scale(2, 0, "why")
    assert plan.final is not None
    assert plan.final.phase is JobPhase.COMPLETE


def test_a_status_that_makes_no_sense_is_read_all_the_same() -> None:
    forgotten = [pb.ForgottenShare(batches=[pb.AppliedBatches(ranges=[1, 2, 3])])]
    status = status_from_wire(pb.JobStatus(forgotten=forgotten, members=[pb.MemberStatus(member=UNKNOWN)]))
    assert (status.forgotten[0].batches, status.members) == ({0: ((1, 2),)}, ())
