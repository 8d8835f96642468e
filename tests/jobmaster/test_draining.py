"""Servers that are to go give their rows away first, and their successors get shares back."""

import pytest
from tests.jobmaster.driven import Driven, Fault

from emberscale_api.job.roles import Role
from emberscale_jobmaster import draining
from emberscale_jobmaster.events import DrainWanted


def training(servers: int = 2, interval: float = 1000.0) -> Driven:
    driven = Driven(servers=servers, interval=interval)
    driven.start()
    driven.train(4)
    return driven


def drain(driven: Driven, index: int) -> str:
    incarnation = driven.ps[index].member.incarnation
    driven.tell(DrainWanted(now=driven.now, index=index, incarnation=incarnation, why="a test"))
    return incarnation


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


def test_the_only_server_cannot_be_drained() -> None:
    driven = training(servers=1)
    with pytest.raises(draining.RefusedDrainError, match="no other parameter server can take over what ps-0 owns"):
        drain(driven, 0)
    assert not driven.job.drains


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
