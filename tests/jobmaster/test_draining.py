"""Servers that are to go give their rows away first, and their successors get shares back."""

from itertools import pairwise

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.test_rescaling import edit

from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster import draining, progress, status
from emberscale_jobmaster.events import DrainWanted, HeartbeatReceived
from emberscale_jobmaster.figures import servers_wanted
from emberscale_jobmaster.membership import DrainPhase
from emberscale_jobmaster.state import Stage


def training(servers: int = 2, interval: float = 1000.0) -> Driven:
    driven = Driven(servers=servers, interval=interval)
    driven.start()
    driven.train(4)
    return driven


def drain(driven: Driven, index: int) -> str:
    incarnation = driven.ps[index].member.incarnation
    driven.tell(DrainWanted(now=driven.now, index=index, incarnation=incarnation, why="a test"))
    return incarnation


def standing_in() -> Driven:
    """A job whose only server was drained, and has ended; ps-1 stands in for it."""
    driven = training(servers=1)
    drain(driven, 0)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    driven.kill(Role.PS, 0)
    return driven


def owners(driven: Driven) -> set[int]:
    return {server.index for server in driven.job.routing.table.owners}


def steps(driven: Driven) -> list[str]:
    return [step.reason for step in driven.job.scaling.steps]


@pytest.mark.parametrize("index", [0, 1])
def test_a_drained_server_goes_and_its_successor_gets_its_share_without_a_roll_back(index: int) -> None:
    driven = training()
    incarnation = drain(driven, index)
    driven.pass_time(5)
    assert owners(driven) == {1 - index}
    assert draining.may_go(driven.job, index, incarnation)
    driven.kill(Role.PS, index)
    driven.train(4)
    driven.pass_time(5)
    assert owners(driven) == {1 - index}
    driven.join(Role.PS, index)
    driven.pass_time(5)
    assert owners(driven) == {0, 1}
    assert driven.job.routing.table.servers[index].incarnation == driven.ps[index].member.incarnation
    assert (driven.job.recoveries, driven.job.routing.table.generation) == (0, 1)
    assert not driven.job.drains
    assert steps(driven)[0] == "PlannedDrain"
    assert [one for one in steps(driven) if one in ("DrainedServer", "JoinedServer", "ReplacedServer")] == [
        "DrainedServer",
        "JoinedServer",
        "ReplacedServer",
    ]


def test_rows_count_once_while_the_server_that_gave_them_away_still_has_them() -> None:
    driven = training()
    drain(driven, 0)
    driven.pass_time(5)
    assert owners(driven) == {1}
    for index, rows in ((0, 7), (1, 12)):
        served = driven.state.seen.sightings[f"ps-{index}"].server
        assert served is not None
        report = replace(served, rows={"C1": rows})
        driven.tell(HeartbeatReceived(now=driven.now, member=driven.ps[index].member, served=report))
    told = status.job_status(driven.job, driven.state.seen, driven.spec, driven.now)
    assert dict(told.rows) == {"C1": 12}


def test_the_plan_names_a_drained_server_until_its_successor_has_its_share() -> None:
    driven = training()
    told: list[tuple[int, list[str]]] = []

    def look() -> list[str]:
        plan = status.plan(driven.job, driven.spec)
        told.append((plan.version, [server.incarnation for server in plan.drained]))
        return told[-1][1]

    assert look() == []
    incarnation = drain(driven, 1)
    driven.pass_time(5)
    assert look() == [incarnation]
    driven.kill(Role.PS, 1)
    assert look() == [incarnation]
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert look() == []
    assert all(one[0] < other[0] for one, other in pairwise(told) if one[1] != other[1]), "the operator would not learn"


@pytest.mark.parametrize("servers", [1, 2])
def test_rows_leave_a_server_while_the_job_evaluates(servers: int) -> None:
    """An evaluation may take longer than the server has."""
    driven = Driven(servers=servers, records=40, evaluation=40)
    driven.start()
    driven.train_all()
    assert driven.job.stage is Stage.EVALUATE
    incarnation = drain(driven, 0)
    if servers == 1:
        driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert driven.job.stage is Stage.EVALUATE
    assert draining.may_go(driven.job, 0, incarnation)
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert driven.job.stage is Stage.EVALUATE
    assert (owners(driven), driven.job.recoveries, driven.job.drains) == ({*range(servers)}, 0, {})


def test_a_job_that_evaluates_does_not_change_its_shape_meanwhile() -> None:
    driven = Driven(records=40, evaluation=40, sizes_open=True)
    driven.start()
    driven.train_all()
    driven.plan(servers=3)
    driven.join(Role.PS, 2)
    driven.pass_time(5)
    assert driven.job.stage is Stage.EVALUATE
    assert owners(driven) == {0, 1}


def test_checkpoints_are_of_the_servers_that_own_something() -> None:
    driven = training(interval=10)
    drain(driven, 0)
    driven.pass_time(5)
    driven.kill(Role.PS, 0)
    driven.called.clear()
    driven.pass_time(20)
    assert driven.called["Snapshot", 1]
    assert not driven.called["Snapshot", 0]
    assert driven.job.checkpoint


def test_a_job_that_loses_the_other_server_too_waits_for_both_and_recovers() -> None:
    driven = training(interval=10)
    drain(driven, 0)
    driven.pass_time(5)
    driven.kill(Role.PS, 0)
    driven.kill(Role.PS, 1)
    assert driven.job.recoveries == 1
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert not driven.job.routing.ready
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert driven.job.routing.ready
    assert owners(driven) == {0, 1}
    assert not driven.job.drains


def test_a_server_that_goes_before_its_rows_have_moved_costs_a_roll_back() -> None:
    driven = training()
    driven.faults["Copy", 1] = Fault(hangs=True)
    drain(driven, 1)
    driven.pass_time(1)
    driven.kill(Role.PS, 1)
    assert driven.job.recoveries == 1
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert owners(driven) == {0, 1}
    assert not driven.job.drains


def servers_planned(driven: Driven) -> int:
    plan = status.plan(driven.job, driven.spec)
    return next(role.replicas for role in plan.roles if role.role == pb.PS)


def test_another_server_stands_in_for_the_only_one() -> None:
    driven = training(servers=1)
    incarnation = drain(driven, 0)
    assert servers_planned(driven) == 2
    assert driven.job.scaling.steps[-1].message == "ps-0 moves its rows away to its stand-in ps-1: a test"
    driven.train(2)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert owners(driven) == {1}
    assert draining.may_go(driven.job, 0, incarnation)
    driven.kill(Role.PS, 0)
    driven.train(2)
    assert servers_planned(driven) == 2
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert owners(driven) == {0}
    assert len(driven.job.routing.table.servers) == 1
    assert servers_planned(driven) == 1
    assert draining.may_go(driven.job, 1, driven.ps[1].member.incarnation)
    assert (driven.job.recoveries, driven.job.routing.table.generation) == (0, 1)
    assert not driven.job.drains
    assert steps(driven)[-1] == "ReplacedServer"


def test_an_edit_of_the_manifest_leaves_the_stand_in_its_rows() -> None:
    driven = standing_in()
    edit(driven, worker=3)
    driven.pass_time(5)
    assert owners(driven) == {1}
    assert (servers_planned(driven), driven.job.recoveries) == (2, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert owners(driven) == {0}
    assert (servers_planned(driven), driven.job.recoveries) == (1, 0)


def test_a_lost_stand_in_costs_a_roll_back_to_the_shape_of_the_job() -> None:
    driven = training(servers=1, interval=10)
    drain(driven, 0)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    driven.kill(Role.PS, 0)
    driven.kill(Role.PS, 1)
    assert (driven.job.recoveries, servers_planned(driven)) == (1, 1)
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert owners(driven) == {0}
    assert not driven.job.drains


def test_the_next_master_keeps_the_stand_in() -> None:
    driven = standing_in()
    driven.master_dies()
    driven.pass_time(5)
    assert (owners(driven), servers_planned(driven)) == ({1}, 2)
    driven.join(Role.PS, 0)
    driven.pass_time(10)
    assert (owners(driven), servers_planned(driven), driven.job.recoveries) == ({0}, 1, 0)


def test_a_drain_is_given_up_where_no_stand_in_starts() -> None:
    driven = training(servers=1)
    drain(driven, 0)
    driven.pass_time(driven.spec.scaling.timeout + 1)
    assert not driven.job.drains
    assert (owners(driven), servers_planned(driven)) == ({0}, 1)
    assert steps(driven)[-1] == "GaveUpDrain"
    assert "ps-0 keeps its rows: ps-1 did not join within" in driven.job.scaling.steps[-1].message


def test_a_server_that_gets_rows_again_by_a_roll_back_is_drained_again() -> None:
    driven = training(servers=1)
    drain(driven, 0)
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    driven.kill(Role.PS, 1)
    driven.pass_time(5)
    assert (owners(driven), servers_planned(driven)) == ({0}, 2)
    assert driven.job.drains[0].phase is DrainPhase.LEAVES
    driven.pass_time(driven.spec.scaling.timeout + 1)
    assert (owners(driven), servers_planned(driven)) == ({0}, 1)
    assert not driven.job.drains
    assert steps(driven)[-1] == "GaveUpDrain"


def test_a_stand_in_is_not_drained_before_it_has_the_rows() -> None:
    driven = training(servers=1)
    incarnation = drain(driven, 0)
    driven.faults["Copy", 0] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    driven.pass_time(1)
    drain(driven, 1)
    assert list(driven.job.drains) == [0]
    driven.pass_time(90)
    assert owners(driven) == {1}
    assert draining.may_go(driven.job, 0, incarnation)


def test_a_job_that_is_to_rest_starts_no_stand_in() -> None:
    driven = training(servers=1)
    drain(driven, 0)
    suspending = progress.begin_suspension(driven.job, driven.now)
    assert (servers_wanted(driven.job, driven.spec), servers_wanted(suspending, driven.spec)) == (2, 1)


def test_an_edit_gives_the_rows_of_the_stand_in_to_all_servers_of_the_new_shape() -> None:
    driven = standing_in()
    edit(driven, ps=2)
    driven.pass_time(5)
    assert owners(driven) == {1}
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert (owners(driven), servers_planned(driven), driven.job.recoveries) == ({0, 1}, 2, 0)


def test_a_job_that_shrinks_while_its_first_server_is_drained_keeps_the_other_until_the_successor_joins() -> None:
    driven = training(servers=2)
    incarnation = drain(driven, 0)
    edit(driven, ps=1)
    driven.pass_time(5)
    assert (owners(driven), servers_planned(driven)) == ({1}, 2)
    assert draining.may_go(driven.job, 0, incarnation)
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(5)
    assert (owners(driven), servers_planned(driven), driven.job.recoveries) == ({0}, 1, 0)


def test_the_last_that_is_left_is_drained_once_the_first_has_a_successor() -> None:
    driven = training()
    first = drain(driven, 0)
    last = drain(driven, 1)
    driven.pass_time(5)
    assert owners(driven) == {1}
    assert list(driven.job.drains) == [0]
    assert draining.may_go(driven.job, 0, first)
    driven.kill(Role.PS, 0)
    drain(driven, 1)
    assert not draining.may_go(driven.job, 1, last)
    driven.join(Role.PS, 0)
    drain(driven, 1)
    driven.pass_time(5)
    assert owners(driven) == {0}
    assert draining.may_go(driven.job, 1, last)
    assert driven.job.recoveries == 0


def test_the_next_master_goes_on_with_a_drain() -> None:
    driven = training()
    driven.faults["Copy", 0] = Fault(hangs=True)
    incarnation = drain(driven, 0)
    driven.faults.clear()
    driven.master_dies()
    driven.pass_time(10)
    assert draining.may_go(driven.job, 0, incarnation)
    assert driven.job.recoveries == 0
