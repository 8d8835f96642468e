"""Edits of the numbers in a running job's manifest: what the master does, and what it reports."""

from dataclasses import replace

import pytest
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault

from emberscale_api.job.roles import Role
from emberscale_api.job.rounds import RoundsDecision, RoundsReason
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import takeover
from emberscale_jobmaster.events import Advised, HeartbeatReceived, Rescaled, TakenOver
from emberscale_jobmaster.figures import sizes_of, wanted_sizes
from emberscale_jobmaster.machine import MasterState
from emberscale_jobmaster.operations import MovePhase
from emberscale_jobmaster.reports import WorkReport
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.status import explanation, job_status, plan
from eventually import unwrap


def training(servers: int = 2) -> Driven:
    driven = Driven(servers=servers)
    driven.start()
    driven.train(4)
    return driven


def edit(driven: Driven, ps: int | None = None, worker: int | None = None, waits: str = "") -> None:
    before = sizes_of(driven.job, driven.spec)
    driven.spec = driven.spec.resized(ps, worker)
    driven.tell(Rescaled(now=driven.now, before=before, waits=waits, wall=1e9))


def replicas(driven: Driven) -> dict[str, int]:
    """Returns the numbers that the plan asks for, without the master."""
    asked = {0: "none", 1: "master", 2: "ps", 3: "worker"}
    return {asked[role.role]: role.replicas for role in plan(driven.job, driven.spec).roles[1:]}


def steps(driven: Driven) -> list[str]:
    return [step.reason for step in driven.job.scaling.steps]


def servers(driven: Driven) -> int:
    return len(driven.job.routing.table.servers)


def test_new_servers_start_then_rows_move_and_each_step_is_told() -> None:
    driven = training()
    edit(driven, ps=3)
    assert (replicas(driven)["ps"], servers(driven)) == (3, 2)
    assert steps(driven) == ["PlannedScaling"]
    driven.pass_time(2)
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    assert (replicas(driven)["ps"], servers(driven), driven.job.recoveries) == (3, 3, 0)
    assert steps(driven) == ["PlannedScaling", "StartedMembers", "CopiedRows", "HeldPushes", "SwitchedServers"]
    joined = driven.job.scaling.steps[1]
    assert (joined.message, joined.seconds) == ("ps-2 joined", 2.0)
    assert driven.job.scaling.reshaping is None
    driven.train_all()
    driven.beat()


def test_old_servers_go_once_their_rows_have() -> None:
    driven = training(3)
    driven.faults["Copy", 0] = Fault(code="DEADLINE_EXCEEDED", times=8)
    edit(driven, ps=2)
    assert (replicas(driven)["ps"], servers(driven)) == (3, 3)
    driven.pass_time(4)
    assert (replicas(driven)["ps"], servers(driven)) == (2, 2)
    assert driven.job.scaling.reshaping is not None
    driven.kill(Role.PS, 2)
    assert driven.job.scaling.steps[-1].message == "ps-2 ended"
    assert driven.job.recoveries == 0


def test_the_status_says_how_far_a_move_is() -> None:
    driven = training(3)
    driven.faults["Prepare", 0] = Fault(code="DEADLINE_EXCEEDED", times=4)
    driven.faults["Copy", 0] = Fault(code="DEADLINE_EXCEEDED", times=8)
    edit(driven, ps=2)
    assert explanation(driven.job, driven.spec)[1] == "epoch 1 of 1; 2 parameter servers prepare to take rows"
    driven.pass_time(2)
    assert explanation(driven.job, driven.spec)[1].startswith("epoch 1 of 1; rows move to 2 parameter servers, ")
    driven.pass_time(4)
    assert explanation(driven.job, driven.spec)[1] == "epoch 1 of 1"


def test_workers_are_wanted_at_once() -> None:
    driven = training()
    workers = replicas(driven)["worker"]
    edit(driven, worker=workers + 1)
    assert replicas(driven) == {"ps": 2, "worker": workers + 1}
    driven.join(Role.WORKER, workers)
    assert [step.message for step in driven.job.scaling.steps] == [
        f"workers {workers} -> {workers + 1}: the manifest was edited",
        f"worker-{workers} joined",
    ]


def test_servers_that_do_not_come_are_given_up_for_the_reason_that_the_operator_names() -> None:
    driven = training()
    edit(driven, ps=4)
    driven.join(Role.PS, 2)
    edit(driven, ps=4, waits="ps-3: Unschedulable: 0/2 nodes are available")
    driven.pass_time(driven.spec.scaling.timeout + 1)
    assert (replicas(driven)["ps"], servers(driven), driven.job.recoveries) == (2, 2, 0)
    assert steps(driven)[-1] == "GaveUpScaling"
    message = driven.job.scaling.steps[-1].message
    assert "ps-3 did not join within 10m: ps-3: Unschedulable: 0/2 nodes are available" in message
    assert "edit spec.ps.replicas, which is 4, to try again" in message
    driven.train(2)
    driven.kill(Role.PS, 2)
    assert steps(driven)[-1] == "GaveUpScaling"
    assert driven.job.scaling.reshaping is None


def test_a_number_that_was_given_up_is_tried_again_only_once_it_is_edited() -> None:
    driven = training()
    edit(driven, ps=3)
    driven.pass_time(driven.spec.scaling.timeout + 1)
    edit(driven, ps=3, waits="")
    driven.master_dies()
    driven.beat()
    assert (replicas(driven)["ps"], driven.job.scaling.target) == (2, None)
    edit(driven, ps=2)
    edit(driven, ps=3)
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    assert servers(driven) == 3


def test_an_edit_back_ends_the_change() -> None:
    driven = training()
    edit(driven, ps=3)
    edit(driven, ps=2)
    assert (replicas(driven)["ps"], driven.job.scaling.target, driven.job.move) == (2, None, None)
    assert driven.job.scaling.reshaping is None


def test_a_newer_edit_takes_the_place_of_one_that_is_under_way() -> None:
    driven = training()
    edit(driven, ps=3)
    driven.faults["Copy", 0] = Fault(code="DEADLINE_EXCEEDED", times=8)
    driven.join(Role.PS, 2)
    assert driven.job.move is not None
    edit(driven, ps=4)
    driven.join(Role.PS, 3)
    driven.pass_time(4)
    assert (servers(driven), driven.job.recoveries) == (4, 0)


def test_a_new_master_follows_an_edit_that_the_old_one_never_heard_of() -> None:
    driven = training()
    driven.spec = driven.spec.resized(ps=3)
    driven.master_dies()
    driven.beat()
    assert (replicas(driven)["ps"], servers(driven)) == (3, 2)
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    assert (servers(driven), driven.job.recoveries) == (3, 0)


def test_a_job_without_rows_takes_another_number_as_it_is() -> None:
    driven = Driven(servers=2)
    driven.join(Role.PS, 0)
    edit(driven, ps=1)
    assert (replicas(driven)["ps"], driven.job.scaling.target) == (1, None)


def test_the_plan_says_what_was_heard() -> None:
    driven = training()
    version = driven.job.plan_version
    edit(driven, ps=2, waits="ps-1: ErrImagePull")
    said = plan(driven.job, driven.spec)
    assert (said.asked.ps, said.asked.waits) == (2, "ps-1: ErrImagePull")
    assert said.version > version


def test_the_plan_says_how_many_servers_have_rows_or_are_to_get_some() -> None:
    driven, said = Driven(servers=2), []

    def note() -> None:
        told = plan(driven.job, driven.spec)
        said.append((told.routed_ps, told.version))

    note()
    driven.start()
    driven.train(4)
    note()
    edit(driven, ps=4)
    note()
    driven.join(Role.PS, 2)
    note()
    driven.kill(Role.PS, 2)
    note()
    driven.join(Role.PS, 2)
    driven.join(Role.PS, 3)
    driven.pass_time(2)
    note()
    assert [routed for routed, _ in said] == [0, 2, 2, 3, 2, 4]
    versions = [version for _, version in said]
    assert sorted(set(versions)) == versions


def test_the_same_numbers_change_nothing() -> None:
    driven = training()
    before = driven.job
    edit(driven, ps=2)
    assert replace(driven.job, plan_version=before.plan_version) == before


def test_an_edit_back_while_servers_switch_brings_the_rows_back() -> None:
    driven = training()
    driven.faults["Switch", 0] = Fault(code="UNAVAILABLE", times=4)
    edit(driven, ps=3)
    driven.join(Role.PS, 2)
    driven.pass_time(0.5)
    assert unwrap(driven.job.move).phase is MovePhase.SWITCH
    edit(driven, ps=2)
    driven.pass_time(6)
    assert (replicas(driven)["ps"], servers(driven), driven.job.recoveries) == (2, 2, 0)


def test_an_edit_back_that_only_a_new_master_hears_of_brings_the_rows_back() -> None:
    driven = training()
    driven.faults["Switch", 0] = Fault(code="UNAVAILABLE", times=4)
    edit(driven, ps=3)
    driven.join(Role.PS, 2)
    driven.pass_time(0.5)
    driven.spec = driven.spec.resized(ps=2)
    driven.master_dies()
    driven.pass_time(6)
    assert (replicas(driven)["ps"], servers(driven), driven.job.recoveries) == (2, 2, 0)


@pytest.mark.parametrize("dies", [False, True])
def test_a_switch_that_nobody_edits_back_leads_to_its_number(dies: bool) -> None:
    driven = Driven(servers=2, sizes_open=True)
    driven.start()
    driven.train(4)
    driven.faults["Switch", 0] = Fault(code="UNAVAILABLE", times=4)
    driven.plan(3)
    driven.join(Role.PS, 2)
    driven.pass_time(0.5)
    assert unwrap(driven.job.move).phase is MovePhase.SWITCH
    if dies:
        driven.master_dies()
    edit(driven, waits="")
    driven.pass_time(4)
    assert (replicas(driven)["ps"], servers(driven), driven.job.scaling.target) == (3, 3, None)
    assert steps(driven).count("PlannedScaling") == 1


def test_a_server_that_restarts_during_a_long_change_may_take_the_whole_timeout() -> None:
    driven = training()
    edit(driven, ps=3)
    driven.faults["Copy", 0] = Fault(code="UNAVAILABLE", times=100_000)
    driven.join(Role.PS, 2)
    driven.pass_time(30)
    late = replace(driven.job.scaling, target_since=driven.job.scaling.target_since - driven.spec.scaling.timeout)
    driven.state = replace(driven.state, job=replace(driven.job, scaling=late))
    driven.kill(Role.PS, 2)
    driven.pass_time(5)
    assert "GaveUpScaling" not in steps(driven)
    assert replicas(driven)["ps"] == 3
    driven.pass_time(driven.spec.scaling.timeout)
    assert "ps-2 did not join within 10m" in driven.job.scaling.steps[-1].message


def test_an_edit_lowers_no_memory_of_servers_whose_rows_have_not_moved() -> None:
    driven = Driven(servers=2, sizes_open=True)
    driven.start()
    driven.train(4)
    driven.plan(2, workers=3)
    smaller = RoleShapes(RoleShape(4, 1.0, 1 << 29), RoleShape(3, 1.0, 1 << 30))
    driven.now += 100
    driven.tell(Advised(now=driven.now, advice=Advice(9, "Scale", smaller, "more, smaller ones"), wall=1e9))
    edit(driven, waits="ps-2: Unschedulable")
    assert driven.job.scaling.target == smaller
    assert wanted_sizes(driven.job, driven.spec).ps == RoleShape(4, 1.0, 1 << 30)


def test_a_job_whose_rows_are_lost_begins_with_the_smaller_number_at_once() -> None:
    driven = training(4)
    for server in driven.ps.values():
        driven.quiet.add(server.member.slot)
    driven.spec = driven.spec.resized(ps=2)
    driven.master_dies()
    driven.join(Role.PS, 0)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert (replicas(driven)["ps"], servers(driven), driven.job.routing.ready) == (2, 2, True)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_number_that_is_left_open_again_stays_and_is_heard(scaled: bool) -> None:
    driven = training()
    if scaled:
        edit(driven, ps=3)
        driven.join(Role.PS, 2)
        driven.pass_time(2)
    edit(driven, ps=0)
    assert (plan(driven.job, driven.spec).asked.ps, driven.job.scaling.target) == (0, None)
    assert replicas(driven)["ps"] == servers(driven) == (3 if scaled else 2)


def test_a_number_that_was_given_up_is_not_waited_for_when_rows_are_lost() -> None:
    driven = training()
    edit(driven, ps=3)
    driven.pass_time(driven.spec.scaling.timeout + 1)
    driven.kill(Role.PS, 0)
    edit(driven, ps=3, waits="ps-0: ContainerCreating")
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert (replicas(driven)["ps"], servers(driven), driven.job.routing.ready) == (2, 2, True)


def test_an_edit_while_rows_are_lost_keeps_nobody_waiting() -> None:
    driven = training()
    driven.kill(Role.PS, 0)
    edit(driven, ps=100)
    assert (replicas(driven)["ps"], sizes_of(driven.job, driven.spec).ps.replicas) == (100, 2)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert (servers(driven), driven.job.routing.ready) == (2, True)
    driven.pass_time(driven.spec.scaling.timeout)
    assert (replicas(driven)["ps"], steps(driven)[-1]) == (2, "GaveUpScaling")


def test_a_number_that_is_edited_while_the_master_restarts_and_rows_are_lost_keeps_nobody_waiting() -> None:
    driven = training()
    driven.kill(Role.PS, 0)
    driven.spec = driven.spec.resized(ps=100)
    driven.master_dies()
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert (servers(driven), driven.job.routing.ready) == (2, True)


def test_a_resumed_job_begins_with_the_edited_number() -> None:
    driven = training()
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    driven.spec = driven.spec.resized(ps=3)
    driven.all_die()
    for index in range(3):
        driven.join(Role.PS, index)
    driven.pass_time(2)
    assert (servers(driven), driven.job.routing.ready, driven.moved) == (3, True, [])


def test_a_new_master_tells_a_change_no_second_time_and_keeps_its_timeout() -> None:
    driven = training()
    edit(driven, ps=3)
    driven.pass_time(driven.spec.scaling.timeout - 5)
    driven.master_dies()
    driven.beat()
    assert steps(driven) == ["PlannedScaling"]
    driven.pass_time(6)
    assert steps(driven) == ["PlannedScaling", "GaveUpScaling"]


def test_steps_are_numbered_beyond_those_of_a_state_that_was_lost() -> None:
    driven = training()
    edit(driven, ps=3)
    known = driven.job.scaling.steps[-1].number
    driven.state = MasterState(takeover.initial(wall=1100.0))
    driven.tell(TakenOver(now=driven.now, wall=1100.0))
    edit(driven, ps=2)
    assert driven.job.scaling.steps[-1].number > known


def test_a_worker_that_has_left_for_a_smaller_shape_tells_nothing_of_rounds() -> None:
    driven = training()
    edit(driven, worker=2)
    driven.join(Role.WORKER, 1)
    decision = RoundsDecision(False, RoundsReason.BUDGET_TOO_SMALL, "two batches take 3 GiB")
    leaving = driven.workers[1]
    work = WorkReport(10, 1.0, (), (), {}, rounds=decision)
    sequence = driven.worked[leaving.incarnation] + 1
    driven.tell(HeartbeatReceived(now=driven.now, member=leaving, sequence=sequence, work=work))

    def told() -> tuple[list[int], int]:
        status = job_status(driven.job, driven.state.seen, driven.spec, driven.now)
        deciding = [one.member.index for one in status.members if one.HasField("rounds")]
        return deciding, sum("without rounds" in text for text in status.warnings)

    assert told() == ([1], 1)
    edit(driven, worker=1)
    assert told() == ([], 0)
