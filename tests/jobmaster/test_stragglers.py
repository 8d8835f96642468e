from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobmaster.driven import Driven

from emberscale_api.job.roles import Role
from emberscale_jobmaster.events import TaskWanted
from emberscale_jobmaster.stragglers import LATE_REPLACE_SECONDS, LONGEST_REST_SECONDS, TRIAL_BATCHES

FOUND_SECONDS = 20.0


def training(workers: int = 3, bound: int | None = None) -> Driven:
    """A job that has trained for a while, with another bound on staleness if one is given."""
    driven = Driven(records=100_000)
    if bound is not None:
        limits = {"max_staleness": bound, "staleness_warmup": 0}
        driven.spec = driven.spec.model_copy(update={"training": driven.spec.training.model_copy(update=limits)})
    driven.start()
    for index in range(1, workers):
        driven.join(Role.WORKER, index)
    driven.pass_time(15)
    return driven


def leased(driven: Driven, worker: int) -> list[int]:
    """Returns the batches of each lease that a worker gets until it gets no more."""
    sizes = []
    while (task := driven.tell(TaskWanted(now=driven.now, member=driven.workers[worker]))) is not None:
        sizes.append((task.stop - task.start) // 10)
    return sizes


def test_a_worker_that_becomes_slow_loses_its_leases() -> None:
    driven = training(bound=1000)
    taken = [driven.take(driven.workers[worker]) for worker in (1, 0)]
    driven.factors["worker-1"] = 33
    driven.pass_time(FOUND_SECONDS)
    assert driven.job.ledger.leases.keys() == {taken[1].token}
    assert leased(driven, 1) == [1], "one at a time, and of one batch"
    assert leased(driven, 0) == [3], "the rest of what was taken away"
    assert leased(driven, 2) == [4, 4], "what it got before"


def test_a_slow_worker_that_holds_nobody_up_is_replaced_only_after_minutes() -> None:
    driven = training(bound=1000)
    driven.factors["worker-1"] = 33
    driven.pass_time(LATE_REPLACE_SECONDS)
    assert driven.job.members.given_up() == ()
    driven.pass_time(FOUND_SECONDS)
    assert [member.slot for member in driven.job.members.given_up()] == ["worker-1"]


def test_one_that_holds_the_others_up_rests_and_is_then_tried() -> None:
    driven = training(bound=16)
    driven.factors["worker-1"] = 33
    asked = {}
    while not driven.job.members.given_up():
        asked[driven.now] = leased(driven, 1) if driven.state.seen.slowness("worker-1") else []
        driven.pass_time(1)
    assert [sizes for sizes in asked.values() if sizes] == [[TRIAL_BATCHES]]


@pytest.mark.parametrize("bound", [0, 16, 1000])
def test_a_worker_that_is_fast_again_gets_what_the_others_get(bound: int) -> None:
    driven = training(bound=bound)
    driven.factors["worker-1"] = 33
    driven.pass_time(14)
    assert driven.state.seen.slowness("worker-1")
    driven.factors["worker-1"] = 1
    driven.pass_time(FOUND_SECONDS)
    assert driven.state.seen.slowness("worker-1") is None
    assert leased(driven, 1) == [4, 4]


def test_a_successor_that_is_slow_too_is_tried_less_and_less_and_not_replaced_soon() -> None:
    driven = training(bound=0)
    driven.factors["worker-1"] = 33
    driven.pass_time(40)
    assert [member.slot for member in driven.job.members.given_up()] == ["worker-1"]
    driven.join(Role.WORKER, 1)
    trials = []
    for second in range(550):
        driven.pass_time(1)
        if second > FOUND_SECONDS and leased(driven, 1):
            trials.append(second)
    assert driven.job.members.given_up() == ()
    pauses = [after - before for before, after in pairwise(trials)]
    assert pauses == sorted(pauses)
    assert max(pauses) <= LONGEST_REST_SECONDS + 1


def test_a_single_worker_is_never_slow() -> None:
    driven = training(workers=1)
    driven.factors["worker-0"] = 100
    driven.pass_time(60)
    assert driven.state.seen.slow == {}
    assert leased(driven, 0) == [4, 4]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(0.5, 1.9), min_size=3, max_size=3), min_size=5, max_size=40))
def test_a_noisy_machine_takes_no_leases_away(noise: list[list[float]]) -> None:
    driven = training()
    for member in driven.workers.values():
        driven.take(member)
    held = driven.job.ledger.leases.keys()
    for factors in noise:
        driven.factors = {f"worker-{index}": factor for index, factor in enumerate(factors)}
        driven.pass_time(1)
    assert driven.job.members.given_up() == ()
    assert driven.state.seen.slow == {}
    assert driven.job.ledger.leases.keys() == held
