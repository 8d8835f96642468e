"""Rebuilds of a lost parameter server's rows from parity, driven by the master's machine."""

from dataclasses import replace

import pytest
from tests.jobmaster.driven import Driven, protected
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe
from tests.jobmaster.storage_double import as_ranges

from emberscale_api.job.roles import Role
from emberscale_jobmaster import losses, moving, rebuilding
from emberscale_jobmaster.effects import CallServer
from emberscale_jobmaster.events import HeartbeatReceived
from emberscale_jobmaster.operations import CopyReport, MovePhase
from emberscale_jobmaster.state import Stage
from eventually import unwrap


def is_over(driven: Driven) -> bool:
    return driven.job.rebuilding is None and driven.job.move is None


def test_a_lost_server_is_rebuilt_under_the_same_generation() -> None:
    driven = protected()
    before = driven.job.routing.table
    applied = [driven.ps[index].applied for index in range(3)]
    driven.kill(Role.PS, 1)
    assert driven.job.routing.ready
    assert unwrap(driven.job.rebuilding).servers == (1,)
    driven.join(Role.PS, 1)
    after = driven.job.routing.table
    assert (after.generation, after.version) == (before.generation, before.version + 1)
    assert after.bucket_owners == before.bucket_owners
    assert after.servers[1].incarnation == driven.ps[1].member.incarnation
    assert [driven.ps[index].applied for index in range(3)] == applied
    assert (driven.job.recoveries, driven.job.rebuilt.count, driven.job.rebuilding) == (0, 1, None)
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_nobody_holds_a_barrier_for_it() -> None:
    driven = protected()
    driven.kill(Role.PS, 0)
    driven.called.clear()
    driven.join(Role.PS, 0)
    assert not [name for name, _ in driven.called if name in ("Hold", "Settle", "HandOver", "Assign")]


def test_people_are_told_of_the_loss_and_of_its_end() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    assert driven.job.scaling.steps[-1].reason == "Degraded"
    assert losses.unprotected_reason(driven.job, driven.spec) == "ps-1 is lost, and its rows are being rebuilt"
    driven.pass_time(2)
    driven.join(Role.PS, 1)
    step = driven.job.scaling.steps[-1]
    assert (step.reason, step.seconds) == ("Recovered", 2.0)
    assert "rows of ps-0, ps-1, ps-2 are still sent" in losses.unprotected_reason(driven.job, driven.spec)
    driven.pass_time(1)
    assert not losses.unprotected_reason(driven.job, driven.spec)


def test_before_all_rows_are_in_parity_a_lost_server_takes_the_job_back() -> None:
    driven = protected()
    group = replace(driven.job.parity_group, protected=frozenset({0, 1}))
    driven.state = replace(driven.state, job=replace(driven.job, parity_group=group))
    driven.kill(Role.PS, 1)
    assert (driven.job.recoveries, driven.job.stage) == (1, Stage.READY)


def test_after_a_rebuild_the_next_loss_waits_for_protection() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1


def test_a_second_loss_takes_the_job_back() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.kill(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilding) == (1, None)
    driven.join(Role.PS, 1)
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    driven.train_all()


def test_a_loss_that_is_told_again_is_one_loss() -> None:
    driven = protected(adopts_rows=False)
    lost = driven.ps[1].member
    driven.quiet.add(lost.slot)
    driven.pass_time(40)  # silent, then registered anew
    assert driven.job.rebuilding is not None
    driven.join(Role.PS, 1)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_server_that_speaks_again_before_anybody_was_told_goes_on() -> None:
    driven = protected(adopts_rows=False)
    lost = driven.ps[1]
    driven.quiet.add(lost.member.slot)
    driven.pass_time(20)
    assert driven.job.rebuilding is not None
    driven.quiet.clear()
    driven.tell(HeartbeatReceived(now=driven.now, member=lost.member, generation=lost.generation, version=lost.version))
    driven.pass_time(1)
    assert is_over(driven)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 0)
    driven.train_all()


def test_a_successor_that_dies_is_followed_by_another() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    batches = driven.lost[1]
    driven.faults["Copy", 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert unwrap(driven.job.move).phase is MovePhase.COPY
    driven.kill(Role.PS, 1)
    driven.lost[1] = batches
    driven.join(Role.PS, 1)
    driven.pass_time(3)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    assert driven.ps[1].applied == batches


@pytest.mark.parametrize("call", ["Prepare", "Copy", "Switch"])
def test_a_new_master_goes_on_where_the_one_before_died(call: str) -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults[call, 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    assert driven.job.move is not None
    driven.master_dies()
    driven.pass_time(5)
    assert is_over(driven)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_what_fails_again_and_again_takes_the_job_back() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 0] = Fault(code="FAILED_PRECONDITION", times=rebuilding.MOST_ATTEMPTS)
    driven.join(Role.PS, 1)
    driven.pass_time(4 * rebuilding.MOST_ATTEMPTS * rebuilding.AGAIN_SECONDS)
    assert driven.job.recoveries == 1
    driven.train_all()


def test_servers_that_differ_about_the_lost_rows_take_the_job_back() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    driven.lost[1] = {0: {0}}
    driven.answer(next(call for call in driven.unanswered if isinstance(call, CallServer)))
    assert driven.job.recoveries == 1


@pytest.mark.parametrize(("tells", "recoveries"), [((0,), 0), ((), 1)])
def test_only_servers_with_parity_of_a_lost_one_tell_what_it_had(tells: tuple[int, ...], recoveries: int) -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    for index in (0, 2):
        driven.faults["Copy", index] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    job, spec, has = driven.job, driven.spec, driven.lost[1]
    for index in (0, 2):
        rebuilt = {1: as_ranges(has)} if index in tells else {}
        job = moving.on_copied(job, spec, unwrap(job.move), index, CopyReport(True, 0, 1, rebuilt), driven.now)
    assert job.recoveries == recoveries
    if tells:
        move = unwrap(job.move)
        assert (move.phase, move.settled) == (MovePhase.SWITCH, {1: as_ranges(has)})


def test_a_server_that_takes_its_rows_out_of_the_parity_gets_on() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    job, spec, move = driven.job, driven.spec, unwrap(driven.job.move)
    answer = CopyReport(ready=False, copied_bytes=0, rounds=1)
    job = moving.on_copied(job, spec, move, 2, answer, move.deadline - 1)
    renewed = unwrap(job.move).deadline
    assert renewed == move.deadline - 1 + moving.COPY_SECONDS
    job = moving.on_copied(job, spec, unwrap(job.move), 2, answer, move.deadline)
    assert unwrap(job.move).deadline == renewed


def test_no_checkpoint_and_no_move_begins_until_the_rows_are_there_again() -> None:
    driven = protected(interval=5)
    driven.kill(Role.PS, 1)
    driven.pass_time(20)
    assert not driven.job.operations
    driven.join(Role.PS, 1)
    driven.pass_time(6)
    assert driven.job.checkpoint
