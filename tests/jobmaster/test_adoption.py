"""The survivors of a lost parameter server adopt its rows while it has no successor."""

from collections import Counter

import pytest
from tests.jobmaster.driven import Driven, protected
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe

from emberscale_api.job.roles import Role
from emberscale_jobmaster import losses
from emberscale_jobmaster.events import HeartbeatReceived
from emberscale_jobmaster.membership import SupersededMemberError
from emberscale_jobmaster.rebuilding import ADOPT_SECONDS
from emberscale_jobmaster.state import Stage


def adopted(servers: int = 3, lost: tuple[int, ...] = (1,), parity: int = 1) -> Driven:
    """A job whose servers have adopted the rows of lost ones, which have no successors yet."""
    driven = protected(servers=servers, parity=parity)
    for index in lost:
        driven.kill(Role.PS, index)
    driven.pass_time(ADOPT_SECONDS + 1)
    assert driven.job.rebuilding is None
    return driven


def owned(driven: Driven) -> Counter[int]:
    return Counter(driven.job.routing.table.bucket_owners)


def test_survivors_adopt_the_rows_of_a_server_without_a_successor() -> None:
    driven = protected()
    before = driven.job.routing.table
    driven.kill(Role.PS, 1)
    driven.pass_time(ADOPT_SECONDS - 1)
    assert driven.job.move is None, "a successor may come"
    driven.pass_time(2)
    after = driven.job.routing.table
    assert (after.generation, after.version) == (before.generation, before.version + 1)
    assert set(owned(driven)) == {0, 2}
    kept = zip(before.bucket_owners, after.bucket_owners, strict=True)
    assert all(new == old for old, new in kept if old != 1), "what survivors own does not move"
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_people_are_told_who_has_the_rows() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    assert "once it has a successor, or on the other servers after 3s" in driven.job.scaling.steps[-1].message
    driven.pass_time(ADOPT_SECONDS)
    step = driven.job.scaling.steps[-1]
    assert step.reason == "Recovered"
    assert "rows of ps-1 are on ps-0 and ps-2, rebuilt from parity" in step.message


def test_the_survivors_protect_each_other_again() -> None:
    driven = adopted()
    driven.pass_time(2)
    assert not losses.unprotected_reason(driven.job, driven.spec)
    driven.kill(Role.PS, 2)
    driven.pass_time(ADOPT_SECONDS + 1)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 2)
    assert set(owned(driven)) == {0}


def test_a_successor_gets_its_share_by_a_live_move() -> None:
    driven = adopted()
    assert driven.job.move is None
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert max(owned(driven).values()) - min(owned(driven).values()) <= 1
    assert set(owned(driven)) == {0, 1, 2}
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in describe(driven)


def test_two_lost_servers_are_adopted_together() -> None:
    driven = adopted(servers=4, lost=(1, 3), parity=2)
    assert set(owned(driven)) == {0, 2}
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 2)


def test_where_only_one_of_two_lost_servers_has_a_successor_all_rows_are_adopted() -> None:
    driven = protected(servers=4, parity=2)
    driven.kill(Role.PS, 1)
    driven.kill(Role.PS, 3)
    driven.join(Role.PS, 1)
    driven.pass_time(ADOPT_SECONDS + 5)
    assert set(owned(driven)) == {0, 1, 2}, "the successor has its share by a move"


def test_a_lost_server_that_speaks_again_after_its_rows_were_adopted_is_replaced() -> None:
    driven = protected()
    lost = driven.ps[1].member
    driven.quiet.add(lost.slot)
    driven.pass_time(40)
    assert set(owned(driven)) == {0, 2}
    assert driven.job.members.given_up() == (lost,)
    with pytest.raises(SupersededMemberError):
        driven.tell(HeartbeatReceived(now=driven.now, member=lost, generation=1, version=1))


def test_survivors_without_the_memory_wait_for_the_successor() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Prepare", 2] = Fault(code="FAILED_PRECONDITION")
    driven.pass_time(30)
    assert driven.job.move is None
    assert driven.job.rebuilding is not None
    step = driven.job.scaling.steps[-1]
    assert step.reason == "Degraded"
    assert "the other servers do not adopt the rows of ps-1, which wait for a successor: ps-2: " in step.message
    driven.join(Role.PS, 1)
    driven.pass_time(3)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    assert set(owned(driven)) == {0, 1, 2}


def test_a_server_of_an_earlier_version_adopts_nothing() -> None:
    driven = protected(adopts_rows=False)
    driven.kill(Role.PS, 1)
    driven.pass_time(60)
    assert driven.job.move is None


@pytest.mark.parametrize("call", ["Prepare", "Copy", "Switch"])
def test_a_new_master_goes_on_with_an_adoption(call: str) -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults[call, 2] = Fault(hangs=True)
    driven.pass_time(ADOPT_SECONDS + 1)
    assert driven.job.move is not None
    driven.master_dies()
    driven.pass_time(ADOPT_SECONDS + 5)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    assert set(owned(driven)) == {0, 2}


def test_a_survivor_that_is_lost_before_rows_leave_the_parity_is_rebuilt_too() -> None:
    driven = protected(servers=4, parity=2)
    driven.kill(Role.PS, 1)
    driven.faults["Prepare", 2] = Fault(hangs=True)
    driven.pass_time(ADOPT_SECONDS + 1)
    driven.faults.clear()
    driven.kill(Role.PS, 2)
    driven.pass_time(ADOPT_SECONDS + 1)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 2)
    assert set(owned(driven)) == {0, 3}


def test_a_survivor_that_is_lost_while_it_adopts_rows_takes_the_job_back() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 2] = Fault(hangs=True)
    driven.pass_time(ADOPT_SECONDS + 1)
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1


def test_a_suspension_does_not_wait_for_a_successor() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.suspend()
    driven.pass_time(30)
    assert "resumes from checkpoint" in describe(driven)
    assert driven.job.recoveries == 0


def test_a_job_that_saves_its_model_ends_without_a_successor() -> None:
    driven = protected()
    driven.faults["Saved", 1] = Fault(hangs=True, times=99)
    driven.train_all()
    driven.pass_time(1)
    assert driven.job.stage is Stage.SAVE
    driven.kill(Role.PS, 1)
    driven.faults.clear()
    driven.pass_time(30)
    assert "Completed" in describe(driven)
    applied, is_complete = driven.storage.checkpoints[driven.job.checkpoint]
    assert (applied, is_complete) == ({0: set(range(50))}, True)
