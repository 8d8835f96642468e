"""The reconciler, one decision at a time."""

from dataclasses import replace

import pytest

from emberscale_operator.machine import (
    Backoff,
    Create,
    Delete,
    Demand,
    Desired,
    ExitReason,
    Fail,
    History,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Policy,
    ReportExit,
    Resize,
    Resources,
    Role,
    Wait,
    advance,
    reconcile,
)

POLICY = Policy(Backoff(base=1.0, factor=2.0, limit=8.0, reset_after=60.0), backoff_limit=2, stop_grace=10.0)
SMALL, LARGE = Resources(1.0, 1 << 30), Resources(2.0, 2 << 30)
MASTER = Demand(Role.MASTER, 1)


def running(role: Role, index: int = 0, incarnation: int = 1, resources: Resources | None = None) -> Instance:
    wanted = Resources() if resources is None else resources
    return Instance(InstanceId(role, index, incarnation), InstanceState.RUNNING, wanted, started_at=0.0)


def exited(instance: Instance, reason: ExitReason = ExitReason.ERROR, code: int = 1, at: float = 5.0) -> Instance:
    return replace(instance, state=InstanceState.EXITED, exit=InstanceExit(reason, code, at))


def decide(
    demands: list[Demand],
    observed: list[Instance],
    now: float = 5.0,
    ended_at: float | None = None,
    history: History | None = None,
) -> tuple[object, ...]:
    past = advance(history or History(), observed, POLICY.backoff)
    return reconcile(POLICY, Desired(tuple(demands), ended_at), observed, past, now)


def test_what_is_wanted_and_missing_is_created() -> None:
    assert decide([MASTER, Demand(Role.WORKER, 2, SMALL)], [running(Role.MASTER), running(Role.WORKER, 1)]) == (
        Create(InstanceId(Role.WORKER, 0, 1), SMALL),
        Resize(InstanceId(Role.WORKER, 1, 1), SMALL),
    )


def test_what_is_as_wanted_is_left_alone() -> None:
    assert decide([Demand(Role.PS, 1, SMALL)], [running(Role.PS, resources=SMALL)]) == ()


def test_a_first_restart_is_immediate_and_has_the_next_incarnation() -> None:
    died = exited(running(Role.MASTER))
    assert Create(InstanceId(Role.MASTER, 0, 2), Resources()) in decide([MASTER], [died])


def test_a_second_restart_in_a_row_waits() -> None:
    past = advance(History(), [exited(running(Role.MASTER))], POLICY.backoff)
    again = exited(running(Role.MASTER, incarnation=2), at=6.0)
    assert decide([MASTER], [again], now=6.5, history=past) == (Delete(again.id), Wait(7.0))
    assert Create(InstanceId(Role.MASTER, 0, 3), Resources()) in decide([MASTER], [again], now=7.0, history=past)


def test_one_that_is_terminating_is_waited_for() -> None:
    going = replace(running(Role.WORKER), state=InstanceState.TERMINATING)
    assert decide([Demand(Role.WORKER, 1)], [going]) == ()


def test_scaling_in_deletes_the_highest_indices() -> None:
    workers = [running(Role.WORKER, index) for index in range(3)]
    assert decide([Demand(Role.WORKER, 1)], workers) == (Delete(workers[1].id), Delete(workers[2].id))


def test_other_resources_are_a_resize() -> None:
    worker = running(Role.WORKER, resources=SMALL)
    assert decide([Demand(Role.WORKER, 1, LARGE)], [worker]) == (Resize(worker.id, LARGE),)


def test_the_older_of_two_lives_of_one_member_is_deleted() -> None:
    old, new = running(Role.WORKER, 0, 1), running(Role.WORKER, 0, 2)
    assert decide([Demand(Role.WORKER, 1)], [new, old]) == (Delete(old.id),)


def test_an_exit_is_reported_to_a_live_master_and_then_forgotten() -> None:
    died = exited(running(Role.WORKER))
    demands = [MASTER, Demand(Role.WORKER, 1)]
    assert died.exit is not None
    assert ReportExit(died.id, died.exit) in decide(demands, [running(Role.MASTER), died])
    past = advance(History(), [died], POLICY.backoff).with_reported(died.id)
    actions = decide(demands, [running(Role.MASTER), died], history=past)
    assert Delete(died.id) in actions
    assert ReportExit(died.id, died.exit) not in actions


def test_an_exit_is_kept_while_there_is_no_master_to_hear_of_it() -> None:
    died = exited(running(Role.WORKER))
    actions = decide([MASTER, Demand(Role.WORKER, 1)], [exited(running(Role.MASTER)), died])
    assert not any(isinstance(action, ReportExit) for action in actions)
    assert Delete(died.id) not in actions


def test_members_may_end_by_themselves_before_they_are_deleted() -> None:
    observed = [running(Role.MASTER), running(Role.WORKER), running(Role.REDIS)]
    assert decide([], observed, now=12.0, ended_at=5.0) == (Wait(15.0),)
    assert decide([], observed, now=15.0, ended_at=5.0) == (Delete(observed[1].id),)


def test_the_master_goes_after_its_members_and_the_store_after_the_master() -> None:
    master, store = running(Role.MASTER), running(Role.REDIS)
    assert decide([], [master, store], ended_at=5.0) == (Delete(master.id),)
    leaving = replace(master, state=InstanceState.TERMINATING)
    assert decide([], [leaving, store], ended_at=5.0) == ()
    assert decide([], [store], ended_at=5.0) == (Delete(store.id),)


def test_nothing_is_created_once_the_job_has_ended() -> None:
    assert decide([MASTER, Demand(Role.WORKER, 3)], [], ended_at=5.0) == ()


@pytest.mark.parametrize(
    ("reason", "code", "told"),
    [(ExitReason.ERROR, 1, "exit code 1"), (ExitReason.OOM_KILLED, -9, "for want of memory")],
)
def test_a_member_that_keeps_failing_fails_the_job(reason: ExitReason, code: int, told: str) -> None:
    past = History()
    for incarnation in (1, 2, 3):
        died = exited(running(Role.MASTER, incarnation=incarnation), reason, code)
        past = advance(past, [died], POLICY.backoff)
    failures = [action for action in decide([MASTER], [died], history=past) if isinstance(action, Fail)]
    assert [failure.reason for failure in failures] == ["BackoffLimitExceeded"]
    assert told in failures[0].message
    assert "master-0" in failures[0].message


def test_kills_from_outside_never_fail_the_job() -> None:
    past = History()
    for incarnation in range(1, 10):
        died = exited(running(Role.WORKER, incarnation=incarnation), ExitReason.KILLED, -9)
        past = advance(past, [died], POLICY.backoff)
    actions = decide([Demand(Role.WORKER, 1)], [died], history=past)
    assert not any(isinstance(action, Fail) for action in actions)
