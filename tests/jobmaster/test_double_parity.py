"""Rebuilds of two lost parameter servers, and the losses that parity 2 does not cover."""

from dataclasses import replace

from tests.jobmaster.driven import protected
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe

from emberscale_api.job.roles import Role
from emberscale_jobmaster import losses
from emberscale_jobmaster.events import HeartbeatReceived
from emberscale_jobmaster.operations import MovePhase
from emberscale_jobmaster.recovery import ParityGroup
from eventually import unwrap


def test_two_servers_lost_at_once_are_rebuilt_together_once_both_have_successors() -> None:
    driven = protected(servers=4, parity=2, adopts_rows=False)
    before = driven.job.routing.table
    applied = [driven.ps[index].applied for index in range(4)]
    driven.kill(Role.PS, 1)
    driven.kill(Role.PS, 3)
    assert losses.unprotected_reason(driven.job, driven.spec) == (
        "ps-1 and ps-3 are lost, and their rows are being rebuilt"
    )
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert driven.job.move is None
    driven.join(Role.PS, 3)
    after = driven.job.routing.table
    assert (after.generation, after.version) == (before.generation, before.version + 1)
    assert [driven.ps[index].applied for index in range(4)] == applied
    assert (driven.job.recoveries, driven.job.rebuilt.count, driven.job.rebuilding) == (0, 2, None)
    assert [step.reason for step in driven.job.scaling.steps[-3:]] == ["Degraded", "Degraded", "Recovered"]
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_a_second_server_may_be_lost_while_the_successor_of_the_first_prepares() -> None:
    driven = protected(servers=4, parity=2)
    driven.kill(Role.PS, 1)
    driven.faults["Prepare", 1] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert unwrap(driven.job.move).phase is MovePhase.PREPARE
    driven.kill(Role.PS, 2)
    assert driven.job.move is None
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.job.rebuilt.count, driven.job.rebuilding) == (0, 2, None)


def test_a_second_server_that_is_lost_while_rows_leave_the_parity_takes_the_job_back() -> None:
    driven = protected(servers=4, parity=2)
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 0] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert unwrap(driven.job.move).phase is MovePhase.COPY
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1
    assert driven.job.scaling.steps[-1].message.endswith(": ps-1 is lost, and its rows are being rebuilt")


def test_a_third_loss_takes_the_job_back() -> None:
    driven = protected(servers=4, parity=2)
    for index in (0, 1):
        driven.kill(Role.PS, index)
        assert driven.job.recoveries == 0
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1


def test_one_of_two_servers_that_speaks_again_is_not_rebuilt() -> None:
    driven = protected(servers=4, parity=2, adopts_rows=False)
    silent = driven.ps[1]
    driven.quiet.add(silent.member.slot)
    driven.pass_time(20)
    driven.kill(Role.PS, 2)
    assert unwrap(driven.job.rebuilding).servers == (1, 2)
    driven.quiet.discard(silent.member.slot)
    driven.tell(
        HeartbeatReceived(now=driven.now, member=silent.member, generation=silent.generation, version=silent.version)
    )
    driven.pass_time(1)
    assert unwrap(driven.job.rebuilding).servers == (2,)
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_rows_on_too_few_servers_are_said_to_be_unprotected() -> None:
    driven = protected(servers=3, parity=2)
    table = driven.job.routing.table
    drained = replace(table, bucket_owners=(0,) * 1024, piece_owners=(1,) * 64)
    job = replace(driven.job, routing=replace(driven.job.routing, table=drained), parity_group=ParityGroup())
    assert losses.unprotected_reason(job, driven.spec) == ("only 2 parameter servers have rows, and parity 2 needs 3")
