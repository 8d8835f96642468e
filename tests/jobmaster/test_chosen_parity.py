"""When a job takes up parity and gives it up, and which losses it uses it for."""

import pytest
from tests.jobmaster.driven import ALL, Driven, advise
from tests.jobmaster.scenario import describe

from emberscale_api.job import FaultToleranceStrategy
from emberscale_api.job.roles import Role
from emberscale_jobmaster.figures import due_parity
from emberscale_jobmaster.recovery import Decode, Failure, Protection, RollBack, choose
from emberscale_jobmaster.status import job_status


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
    assert "Completed" in describe(driven)


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
    [(1, "Auto", 1), (2, "Auto", 2), (2, "FullRecovery", 1)],
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
