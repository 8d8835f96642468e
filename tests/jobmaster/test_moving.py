"""Live moves driven by the master's machine, in cases that a scenario's commands cannot express."""

from dataclasses import replace

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import describe

from emberscale_api.job.roles import Role
from emberscale_api.routing import BUCKETS
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import moving, retry
from emberscale_jobmaster.effects import CallServer, CopyCall
from emberscale_jobmaster.events import Advised, DrainWanted, Exited, HeartbeatReceived
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from eventually import unwrap


def training(servers: int = 2, interval: float = 1000.0) -> Driven:
    """A job that has trained a little and may have any number of servers."""
    driven = Driven(servers=2, interval=interval, sizes_open=True)
    driven.start()
    driven.train(4)
    if servers > 2:
        driven.plan(servers)
        for index in range(2, servers):
            driven.join(Role.PS, index)
    return driven


def in_the_barrier() -> tuple[Driven, CallServer]:
    """A job of two servers that a third joins, and the call whose answer the barrier still lacks."""
    driven = training()
    driven.plan(3)
    driven.faults["HandOver", 1] = Fault(hangs=True)
    driven.join(Role.PS, 2)
    last = driven.unanswered.pop()
    assert isinstance(last, CallServer)
    return driven, last


def test_a_late_heartbeat_of_a_server_that_has_left_changes_nothing() -> None:
    driven = training(3)
    left = driven.ps[2]
    said = left.generation, left.version
    driven.plan(2)
    assert len(driven.job.routing.table.servers) == 2
    for generation, version in (said, (left.generation, left.version)):
        driven.tell(HeartbeatReceived(now=driven.now, member=left.member, generation=generation, version=version))
    assert driven.job.recoveries == 0
    assert driven.job.routing.ready


def test_a_server_that_has_left_and_is_silent_during_another_move_may_speak_again() -> None:
    driven = training(3)
    left = driven.ps[2].member
    driven.plan(2)
    driven.quiet.add(left.slot)
    driven.pass_time(20)
    assert driven.job.members.process(Role.PS, 2) is None
    version, leaving = driven.job.routing.table.version, driven.ps[1].member
    driven.tell(DrainWanted(now=driven.now, index=1, incarnation=leaving.incarnation, why="its node goes"))
    driven.pass_time(5)
    assert driven.job.routing.table.version > version
    driven.quiet.discard(left.slot)
    driven.pass_time(2)
    assert driven.job.members.process(Role.PS, 2) is not None
    assert driven.job.recoveries == 0


def test_a_server_that_has_left_is_forgotten_with_the_next_move_after_its_end() -> None:
    driven = training(4)
    left = driven.ps[3].member
    driven.plan(3)
    driven.quiet.add(left.slot)
    driven.tell(Exited(now=driven.now, member=left, exit_code=0, reason="Completed"))
    driven.plan(2)
    assert [server.index for server in driven.job.routing.left] == [2]


def test_a_server_that_dies_while_it_joins_fails_the_barrier_and_not_the_job() -> None:
    driven, last = in_the_barrier()
    driven.kill(Role.PS, 2)
    driven.answer(last)
    assert "Switch" not in describe(driven)
    driven.join(Role.PS, 2)
    driven.pass_time(60)
    assert describe(driven).startswith("Training, generation 1")
    assert len(driven.job.routing.table.servers) == 3
    assert not driven.job.operations


def test_a_switch_recovers_where_the_slot_of_a_server_is_empty() -> None:
    driven = training()
    driven.plan(3)
    driven.faults["Switch", 1] = Fault(hangs=True)
    driven.join(Role.PS, 2)
    gone = driven.ps[2].member
    driven.quiet.add(gone.slot)
    driven.state = replace(driven.state, job=replace(driven.job, members=driven.job.members.exited(gone)))
    driven.pass_time(1)
    assert driven.job.recoveries == 1


def test_a_barrier_that_may_have_been_switched_is_not_let_go() -> None:
    """A server whose Switch is still under way would own rows that another server then trains."""
    driven = training()
    driven.plan(3)
    driven.faults["Switch", 1] = Fault(hangs=True)
    driven.join(Role.PS, 2)
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1
    assert driven.called["Abandon", 1] == 1
    assert not driven.called["Resume", 0] + driven.called["Resume", 1]


def test_a_new_master_lets_no_barrier_go_that_may_have_been_switched_since_its_state_was_written() -> None:
    driven, _ = in_the_barrier()
    driven.master_dies()
    assert driven.job.move is None
    assert driven.called["Abandon", 0] == 1
    assert not driven.called["Resume", 0] + driven.called["Resume", 1]


def test_a_barrier_that_is_heard_of_after_its_deadline_is_not_switched() -> None:
    driven, last = in_the_barrier()
    driven.now += moving.BARRIER_SECONDS
    driven.answer(last)
    assert driven.job.recoveries == 0
    assert "MoveHeldUp" in describe(driven)


def test_a_barrier_that_never_fits_is_given_up_in_the_end() -> None:
    driven = training()
    driven.plan(3)
    driven.faults["HandOver", 1] = Fault(code="DEADLINE_EXCEEDED", times=10_000)
    driven.join(Role.PS, 2)
    driven.pass_time(retry.PATIENCE_SECONDS + 60)
    assert driven.job.move is None
    assert driven.job.scaling.reason == "GaveUpScaling"
    assert all(server.held is None for server in driven.ps.values())


def test_servers_that_are_ready_hear_of_the_move_while_others_prepare() -> None:
    driven = training()
    driven.plan(3)
    driven.faults["Prepare", 2] = Fault(code="DEADLINE_EXCEEDED", times=120)
    driven.join(Role.PS, 2)
    driven.called.clear()
    driven.pass_time(20)
    assert 9 <= driven.called["Prepare", 0] <= 11


def test_a_move_that_waits_for_a_slow_save_is_not_given_up() -> None:
    driven = training(3, interval=20)
    driven.faults["Saved", 2] = Fault(code="DEADLINE_EXCEEDED", times=10_000)
    driven.pass_time(21)
    driven.plan(2)
    move = unwrap(driven.job.move)
    for taking in driven.job.checkpointings:
        taking = replace(taking, deadline=1e9)
        driven.state = replace(driven.state, job=driven.job.having(taking))
    driven.pass_time(2 * moving.COPY_SECONDS)
    assert unwrap(driven.job.move).id == move.id
    assert "MoveFailed" not in describe(driven)


def test_workers_that_were_planned_during_a_move_stay() -> None:
    driven = training()
    driven.plan(3)
    driven.faults["Switch", 1] = Fault(hangs=True)
    driven.join(Role.PS, 2)
    driven.plan(2, workers=5)
    driven.answer(next(call for call in driven.unanswered if isinstance(call, CallServer)))
    sizes = unwrap(driven.job.scaling.sizes)
    assert (sizes.ps.replicas, sizes.worker.replicas) == (3, 5)


def test_rows_follow_the_shares() -> None:
    driven = training()
    driven.state = replace(driven.state, job=replace(driven.job, shares={1: 0.25}))
    driven.pass_time(5)
    table = driven.job.routing.table
    assert table.bucket_owners.count(1) == BUCKETS // 5 + 1
    assert driven.job.routing.shares == (1.0, 0.25)
    assert table.version == 2
    driven.state = replace(driven.state, job=replace(driven.job, shares={}))
    driven.pass_time(5)
    assert driven.job.routing.table.bucket_owners.count(1) == BUCKETS // 2
    assert driven.job.recoveries == 0


def test_a_move_whose_shares_are_not_wanted_any_more_is_dropped() -> None:
    driven = training()
    driven.faults["Copy", 0] = Fault(hangs=True)
    driven.state = replace(driven.state, job=replace(driven.job, shares={1: 0.25}))
    driven.pass_time(1)
    assert driven.job.move is not None
    driven.state = replace(driven.state, job=replace(driven.job, shares={}))
    driven.pass_time(1)
    assert driven.job.move is None
    assert driven.job.routing.table.version == 1


@pytest.mark.parametrize(
    ("action", "drained", "spared"),
    [("Scale", False, moving.SPARE_SECONDS), ("Scale", True, 0.0), ("GrowMemory", False, 0.0)],
)
def test_copying_spares_training_unless_somebody_waits_for_it(action: str, drained: bool, spared: float) -> None:
    driven = training()
    sizes = RoleShapes(RoleShape(3, 1.0, 1 << 30), RoleShape(2, 1.0, 1 << 30))
    driven.tell(Advised(now=driven.now, advice=Advice(1, action, sizes, "why"), wall=1e9))
    if drained:
        incarnation = driven.ps[1].member.incarnation
        driven.tell(DrainWanted(now=driven.now, index=1, incarnation=incarnation, why="a test"))
    driven.faults["Copy", 0] = Fault(hangs=True)
    driven.join(Role.PS, 2)
    asked = [call.request for call in driven.unanswered if isinstance(call, CallServer)]
    assert [call.spare_seconds for call in asked if isinstance(call, CopyCall)] == [spared]
