"""Rebuilds of a lost parameter server's rows from parity, driven by the master's machine."""

from dataclasses import replace

import pytest
from tests.jobmaster.driven import Driven, Fault

from emberscale_api.job import MOST_DOUBLE_PARITY_SERVERS, FaultToleranceStrategy
from emberscale_api.job.roles import Role
from emberscale_api.routing import ParityTrouble
from emberscale_jobmaster import moving, rebuilding, retry
from emberscale_jobmaster.effects import CallServer, WriteManifest
from emberscale_jobmaster.events import HeartbeatReceived, IntervalAdvised, ManifestWritten
from emberscale_jobmaster.operations import CopyReport, MovePhase
from emberscale_jobmaster.parity import PARTINGS_SECONDS
from emberscale_jobmaster.recovery import Decode, Failure, ParityGroup, Protection, RollBack, choose
from emberscale_jobmaster.state import Stage, committed_samples, due_parity
from emberscale_jobmaster.status import job_status
from eventually import unwrap

ALL = frozenset({0, 1, 2})


def protected(servers: int = 3, interval: float = 1000.0, parity: int = 1) -> Driven:
    """A job that has trained a little, and whose servers hold parity of each other."""
    driven = Driven(servers=servers, interval=interval, parity=parity)
    driven.start()
    driven.train(4)
    driven.pass_time(1)
    assert driven.job.parity_group.protected == frozenset(range(servers))
    return driven


def is_over(driven: Driven) -> bool:
    return driven.job.rebuilding is None and driven.job.move is None


@pytest.mark.parametrize(
    ("failure", "protected", "parity", "expected"),
    [
        (Failure((1,), "lost", is_loss=True), ALL, 1, Decode((1,))),
        (Failure((0, 1), "lost", is_loss=True), ALL, 1, RollBack()),
        (Failure((1,), "lost", is_loss=True), ALL, 2, Decode((1,))),
        (Failure((0, 1), "lost", is_loss=True), ALL, 2, Decode((0, 1))),
        (Failure((0, 1, 2), "lost", is_loss=True), ALL, 2, RollBack()),
        (Failure((1,), "lost", is_loss=True), frozenset(), 2, RollBack()),
        (Failure((1, 3), "lost", is_loss=True), ALL, 2, RollBack()),
        (Failure((1,), "unknown rows"), ALL, 2, RollBack()),
    ],
)
def test_parity_is_taken_where_it_covers_what_is_lost(
    failure: Failure, protected: frozenset[int], parity: int, expected: Decode | RollBack
) -> None:
    protection = Protection(has_checkpoint=True, protected=protected, parity=parity)
    assert choose(failure, protection) == expected


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
    assert "Completed" in driven.describe()


def advise(driven: Driven, strategy: FaultToleranceStrategy) -> None:
    driven.tell(IntervalAdvised(now=driven.now, seconds=1000.0, strategy=strategy))


def test_auto_takes_up_parity_and_gives_it_up_when_all_servers_load_rows() -> None:
    driven = Driven(servers=3, interval=1000.0, parity=1, strategy="Auto")
    driven.start()
    driven.train(4)
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.pass_time(2)
    assert driven.job.chosen_parity == 0, "a group begins with its rows"
    assert driven.job.parity_group.protected == frozenset()

    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.train(4)
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.job.chosen_parity, driven.job.parity_group.protected) == (1, 1, ALL)
    told = driven.job.scaling.steps[-1]
    assert told.reason == "ChangedParity"
    assert told.message.startswith("with parity of rows from now on")

    advise(driven, FaultToleranceStrategy.FULL_RECOVERY)
    driven.kill(Role.PS, 2)
    driven.join(Role.PS, 2)
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (1, 1), "the parity that is kept is used"
    assert driven.ps[2].parity == 1, "the successor keeps parity as the others do"

    driven.kill(Role.PS, 0)
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 0)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.job.chosen_parity, driven.job.parity_group.protected) == (2, 0, frozenset())
    assert driven.job.scaling.steps[-1].message.startswith("without parity of rows from now on")
    totals = job_status(driven.job, driven.state.seen, driven.spec, driven.now).protection
    assert (totals.rebuilds, totals.rebuilt, totals.protected, totals.given_up) == (1, "ps-2", False, True), (
        "totals stay"
    )
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in driven.describe()


def with_two_servers_by_plan() -> Driven:
    """A job that began with one server, and took up parity on the brain's advice."""
    driven = Driven(servers=1, interval=1000.0, parity=1, strategy="Auto", sizes_open=True)
    driven.start()
    driven.train(4)
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.plan(servers=2)
    driven.join(Role.PS, 1)
    driven.pass_time(60)
    for index in (0, 1):
        driven.kill(Role.PS, index)
        driven.join(Role.PS, index)
    driven.train(4)
    driven.pass_time(2)
    assert (driven.job.chosen_parity, due_parity(driven.job, driven.spec)) == (1, 1)
    return driven


def test_auto_keeps_no_parity_while_the_plan_has_too_few_servers_for_it() -> None:
    driven = with_two_servers_by_plan()
    driven.plan(servers=1)
    driven.pass_time(60)
    assert len(driven.job.routing.table.owners) == 1
    assert due_parity(driven.job, driven.spec) == 0, "nobody is to be alarmed"
    driven.plan(servers=2)
    driven.pass_time(60)
    assert (due_parity(driven.job, driven.spec), driven.job.parity_group.protected) == (1, frozenset({0, 1}))


def test_auto_says_when_too_few_servers_are_why_it_gives_parity_up() -> None:
    driven = with_two_servers_by_plan()
    driven.plan(servers=1)
    driven.pass_time(60)
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert driven.job.chosen_parity == 0
    assert driven.job.scaling.steps[-1].message == "without parity of rows from now on: it takes 2 parameter servers"


def test_a_job_that_was_advised_parity_before_it_loads_begins_with_it() -> None:
    driven = Driven(servers=2, parity=1, strategy="Auto")
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.start()
    driven.train(4)
    driven.pass_time(2)
    assert driven.job.parity_group.protected == {0, 1}


@pytest.mark.parametrize(
    ("servers", "strategy", "parity"),
    [(1, "Auto", 1), (2, "Auto", 2), (MOST_DOUBLE_PARITY_SERVERS + 1, "Auto", 2), (2, "FullRecovery", 1)],
)
def test_parity_is_not_taken_where_it_cannot_be_or_is_ruled_out(servers: int, strategy: str, parity: int) -> None:
    driven = Driven(servers=servers, parity=parity, strategy=strategy)
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.start()
    assert driven.job.chosen_parity == 0
    assert "ChangedParity" not in {step.reason for step in driven.job.scaling.steps}


def test_auto_takes_parity_once_all_servers_say_that_they_keep_it() -> None:
    """A server of the previous version ignores the request to keep parity, and the others would wait for it."""
    driven = Driven(servers=3, parity=1, strategy="Auto")
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.join(Role.PS, 0)
    for index in (1, 2):
        driven.join(Role.PS, index, most_parity=0)
    driven.prepare()
    driven.train(4)
    driven.pass_time(2)
    assert (driven.job.chosen_parity, [server.parity for server in driven.ps.values()]) == (0, [0, 0, 0])
    told = [step.message for step in driven.job.scaling.steps if step.reason == "ChangedParity"]
    (why,) = told
    assert "ps-1, ps-2 did not say that they keep it" in why

    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    assert driven.job.chosen_parity == 0
    assert "but ps-2 did not say" in driven.job.scaling.steps[-1].message

    driven.kill(Role.PS, 2)
    driven.join(Role.PS, 2)
    driven.train(4)
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.job.chosen_parity, driven.job.parity_group.protected) == (2, 1, ALL)
    assert driven.job.scaling.steps[-1].message.startswith("with parity of rows from now on")


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
    assert rebuilding.unprotected_reason(driven.job, driven.spec) == "ps-1 is lost, and its rows are being rebuilt"
    driven.pass_time(3)
    driven.join(Role.PS, 1)
    step = driven.job.scaling.steps[-1]
    assert (step.reason, step.seconds) == ("Recovered", 3.0)
    assert "rows of ps-0, ps-1, ps-2 are still sent" in rebuilding.unprotected_reason(driven.job, driven.spec)
    driven.pass_time(1)
    assert not rebuilding.unprotected_reason(driven.job, driven.spec)


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


def test_two_servers_lost_at_once_are_rebuilt_together_once_both_have_successors() -> None:
    driven = protected(servers=4, parity=2)
    before = driven.job.routing.table
    applied = [driven.ps[index].applied for index in range(4)]
    driven.kill(Role.PS, 1)
    driven.kill(Role.PS, 3)
    assert rebuilding.unprotected_reason(driven.job, driven.spec) == (
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
    assert "Completed" in driven.describe()


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


def test_a_third_loss_takes_the_job_back() -> None:
    driven = protected(servers=4, parity=2)
    for index in (0, 1):
        driven.kill(Role.PS, index)
        assert driven.job.recoveries == 0
    driven.kill(Role.PS, 2)
    assert driven.job.recoveries == 1


def test_one_of_two_servers_that_speaks_again_is_not_rebuilt() -> None:
    driven = protected(servers=4, parity=2)
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
    assert rebuilding.unprotected_reason(job, driven.spec) == (
        "only 2 parameter servers have rows, and parity 2 needs 3"
    )


def test_a_loss_that_is_told_again_is_one_loss() -> None:
    driven = protected()
    lost = driven.ps[1].member
    driven.quiet.add(lost.slot)
    driven.pass_time(40)  # silent, then registered anew
    assert driven.job.rebuilding is not None
    driven.join(Role.PS, 1)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_server_that_speaks_again_before_anybody_was_told_goes_on() -> None:
    driven = protected()
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


def parted(driven: Driven, seconds: float, *, broken: bool = True) -> ParityTrouble:
    return ParityTrouble(driven.job.routing.table.version, "ps-2 takes no more of its changes", seconds, broken)


@pytest.mark.parametrize(
    ("broken", "seconds"), [(True, rebuilding.PARTED_SECONDS), (False, 2 * 15.0)], ids=["parted", "silent"]
)
def test_servers_that_live_but_do_not_get_together_again_take_the_job_back(broken: bool, seconds: float) -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, seconds - 1, broken=broken)
    driven.pass_time(2)
    assert driven.job.recoveries == 0
    assert rebuilding.unprotected_reason(driven.job, driven.spec) == "ps-1: ps-2 takes no more of its changes"
    driven.troubles[1] = parted(driven, seconds, broken=broken)
    driven.pass_time(seconds)
    assert driven.job.recoveries == 1
    step = driven.job.scaling.steps[-1]
    assert step.reason == "RolledBack"
    assert step.message.startswith("ps-1 cannot protect its rows: ps-2 takes no more of its changes; the whole job")
    driven.pass_time(2)  # reports about the previous table mean nothing
    assert driven.job.recoveries == 1
    assert not rebuilding.unprotected_reason(driven.job, driven.spec)
    driven.troubles.clear()
    driven.train_all()


def part_again(driven: Driven, times: int) -> None:
    """Lets servers meet and part again this many times."""
    for _ in range(times):
        driven.pass_time(2)
        driven.troubles[1] = parted(driven, rebuilding.PARTED_SECONDS)
        driven.pass_time(rebuilding.PARTED_SECONDS + 1)
        driven.troubles.clear()


@pytest.mark.parametrize("strategy", ["ErasureCoding", "Auto"])
def test_a_link_that_comes_and_goes_takes_the_job_back_a_bounded_number_of_times(strategy: str) -> None:
    driven = Driven(servers=3, parity=1, strategy=strategy)
    advise(driven, FaultToleranceStrategy.ERASURE_CODING)
    driven.start()
    driven.train(4)
    part_again(driven, 2)
    assert (driven.job.recoveries, driven.job.chosen_parity, driven.job.forgone) == (2, 1, "")
    part_again(driven, 10)
    assert (driven.job.recoveries, driven.job.chosen_parity) == (3, 0)
    assert [server.parity for server in driven.ps.values()] == [0, 0, 0]
    why = "servers did not get together 3 times, the last time ps-1: ps-2 takes no more of its changes"
    assert driven.job.forgone == why
    assert driven.job.scaling.steps[-1].message == f"without parity of rows from now on: {why}"
    told = job_status(driven.job, driven.state.seen, driven.spec, driven.now)
    assert told.protection.problem == why
    assert told.protection.given_up == (strategy == "Auto")

    driven.join(Role.PS, 1)  # in place of a lost server; the successor keeps no parity, either
    driven.pass_time(2)
    assert (driven.job.recoveries, driven.ps[1].parity) == (4, 0)
    driven.train_all()
    driven.pass_time(5)
    assert "Completed" in driven.describe()


def test_parity_is_kept_again_by_servers_that_load_rows_much_later() -> None:
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    driven.start()
    driven.train(4)
    part_again(driven, 3)
    assert driven.job.forgone
    driven.pass_time(PARTINGS_SECONDS, tick=2)
    assert driven.job.forgone, "servers are told as they load rows"
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(2)
    assert (driven.job.forgone, driven.job.chosen_parity, driven.job.parity_group.protected) == ("", 1, ALL)
    told = [step.message for step in driven.job.scaling.steps if step.reason == "ChangedParity"]
    assert len(told) == 2
    assert told[-1].endswith("to rebuild one parameter server: no servers have parted for a while")


def test_servers_that_all_ignore_that_none_is_kept_are_taken_back_again() -> None:
    """Servers of the previous version go by the manifest; without a roll-back, pushes would wait for ever."""
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    for index in range(3):
        driven.join(Role.PS, index, most_parity=0)
    driven.prepare()
    driven.train(4)
    part_again(driven, 5)
    assert (driven.job.recoveries, driven.job.forgone, driven.job.chosen_parity) == (5, "", 1)

    driven.pass_time(2)
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    driven.pass_time(2)
    part_again(driven, 3)
    assert (driven.job.recoveries, bool(driven.job.forgone)) == (6, True), "one that keeps none is enough"

    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1, most_parity=0)
    driven.pass_time(2)
    assert (driven.job.forgone, driven.job.chosen_parity) == ("", 1)


def part_again_and_again(driven: Driven) -> None:
    """Lets servers part often enough to lose parity, if the partings came one right after the other."""
    for _ in range(2):
        part_again(driven, 1)
        driven.pass_time(PARTINGS_SECONDS, tick=2)
    part_again(driven, 1)


def test_partings_between_which_the_job_does_not_get_on_count_however_rare_they_are() -> None:
    """Without a checkpoint between two partings, the job has made no progress."""
    driven = Driven(servers=3, parity=1, interval=1e6)
    driven.start()
    driven.train(4)
    part_again_and_again(driven)
    assert (driven.job.recoveries, bool(driven.job.forgone)) == (3, True)


def test_partings_that_are_rare_take_no_parity_away() -> None:
    driven = Driven(servers=3, parity=1, interval=600.0, records=5000)
    driven.start()
    driven.train(4)
    part_again_and_again(driven)
    assert (driven.job.recoveries, driven.job.forgone, driven.job.chosen_parity) == (3, "", 1)


def test_servers_that_never_reached_each_other_take_nobody_back() -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, 0.0, broken=False)  # no push waits
    driven.pass_time(300)
    assert driven.job.recoveries == 0
    assert rebuilding.unprotected_reason(driven.job, driven.spec) == "ps-1: ps-2 takes no more of its changes"
    driven.troubles.clear()
    driven.pass_time(2)
    assert not rebuilding.unprotected_reason(driven.job, driven.spec)


def test_what_lasted_before_anybody_could_see_it_is_no_trouble_yet() -> None:
    driven = protected()
    driven.troubles[1] = parted(driven, 100, broken=False)  # its holder took longer to load, and connects right now
    driven.pass_time(3)
    driven.troubles.clear()
    driven.pass_time(40)
    driven.troubles[1] = parted(driven, 100, broken=False)
    driven.pass_time(3)
    assert driven.job.recoveries == 0


def test_a_master_that_was_stopped_first_sees_who_is_lost() -> None:
    driven = protected()
    driven.quiet.add(driven.ps[2].member.slot)
    driven.troubles[1] = parted(driven, 40, broken=False)
    driven.now += 40
    driven.pass_time(40)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_server_that_is_being_rebuilt_is_trouble_for_nobody() -> None:
    driven = protected()
    driven.kill(Role.PS, 2)
    driven.troubles[1] = parted(driven, 100)
    driven.pass_time(60)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_new_master_that_does_not_know_of_a_rebuild_first_sees_who_is_lost() -> None:
    driven = protected()
    driven.quiet.add(driven.ps[2].member.slot)
    driven.troubles[1] = parted(driven, 100)  # the previous master had it rebuilt, and its last second is lost
    driven.master_dies()
    driven.pass_time(40)
    assert driven.job.recoveries == 0
    driven.join(Role.PS, 2)
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_server_that_takes_its_rows_out_of_the_parity_gets_on() -> None:
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.faults["Copy", 2] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    job, spec, move = driven.job, driven.spec, unwrap(driven.job.move)
    answer = CopyReport(ready=False, copied_bytes=0, rounds=1, changed_rows=0)
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


def suspended() -> Driven:
    """A job that is to rest while a server is lost."""
    driven = protected()
    driven.kill(Role.PS, 1)
    driven.suspend()
    return driven


def test_a_suspension_waits_for_the_lost_server_and_rests_at_a_checkpoint_of_now() -> None:
    driven = suspended()
    driven.pass_time(30)
    assert not driven.job.over
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert "resumes from checkpoint" in driven.describe()
    assert (driven.job.recoveries, driven.job.rebuilt.count, committed_samples(driven.job, driven.spec)) == (0, 1, 40)


def test_a_suspension_waits_for_rows_that_are_being_rebuilt() -> None:
    driven = suspended()
    driven.faults["Prepare", 1] = Fault(hangs=True)
    driven.join(Role.PS, 1)
    driven.pass_time(retry.SUSPENSION_PATIENCE_SECONDS + 5)
    assert not driven.job.over
    driven.answer(next(call for call in driven.unanswered if isinstance(call, CallServer)))
    driven.pass_time(5)
    assert "resumes from checkpoint" in driven.describe()
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)


def test_a_suspension_does_not_wait_for_a_successor_that_does_not_come() -> None:
    driven = suspended()
    driven.pass_time(retry.SUSPENSION_PATIENCE_SECONDS + 1)
    assert "Suspended: resumes from the start: no checkpoint was taken" in driven.describe()


def saving(call: str) -> Driven:
    """A job whose last checkpoint waits for the answer of ps-1 to a call."""
    driven = protected()
    driven.faults[call, 1] = Fault(hangs=True, times=99)
    driven.train_all()
    driven.pass_time(1)
    assert driven.job.stage is Stage.SAVE
    return driven


@pytest.mark.parametrize("call", ["Hold", "Snapshot", "Saved"])
@pytest.mark.parametrize("dies", [False, True])
def test_a_server_that_is_lost_during_the_last_checkpoint_is_rebuilt_and_saves_its_rows(call: str, dies: bool) -> None:
    driven = saving(call)
    assert not rebuilding.unprotected_reason(driven.job, driven.spec)
    given_up = driven.job.checkpointings[0].checkpoint
    driven.kill(Role.PS, 1)
    assert not driven.job.checkpointings, "the snapshot of the lost server is gone"
    driven.faults.clear()
    if dies:
        driven.master_dies()
    driven.pass_time(30)
    assert driven.job.stage is Stage.SAVE
    assert not driven.job.checkpointings
    driven.join(Role.PS, 1)
    driven.pass_time(5)
    assert "Completed" in driven.describe()
    assert (driven.job.recoveries, driven.job.rebuilt.count) == (0, 1)
    assert driven.job.checkpoint > given_up
    applied, is_complete = driven.checkpoints[driven.job.checkpoint]
    assert (applied, is_complete) == ({0: set(range(50))}, True)


def test_a_last_checkpoint_whose_files_are_all_written_does_not_wait_for_a_lost_server() -> None:
    driven = protected()
    driven.storage = "fails"
    driven.train_all()
    driven.pass_time(1)
    driven.kill(Role.PS, 1)
    assert driven.job.rebuilding is not None
    driven.storage = "works"
    driven.pass_time(5)
    assert "Completed" in driven.describe()


def test_a_server_that_is_lost_after_the_last_checkpoint_takes_nothing_back() -> None:
    driven = protected()
    driven.storage = "hangs"
    driven.train_all()
    (write,) = (effect for effect in driven.unanswered if isinstance(effect, WriteManifest))
    driven.tell(ManifestWritten(now=driven.now, operation=write.operation, serial=write.serial))
    assert driven.job.prunings, "older checkpoints are still being removed"
    driven.kill(Role.PS, 1)
    driven.pass_time(60)
    assert "Completed" in driven.describe()
    assert driven.job.recoveries == 0
