from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault

from emberscale_api.job.roles import Role
from emberscale_api.routing import BUCKETS
from emberscale_jobmaster import draining
from emberscale_jobmaster.relief import LEAST_SHARE, TRIAL_SECONDS

FOUND_SECONDS = 20.0


def training(servers: int = 3) -> Driven:
    driven = Driven(records=100_000, servers=servers, interval=100_000)
    driven.start()
    driven.pass_time(15)
    return driven


def owned(driven: Driven) -> list[int]:
    """Buckets of each server."""
    counts = Counter(driven.job.routing.table.bucket_owners)
    return [counts[index] for index in range(len(driven.job.routing.table.servers))]


def pass_loaded(driven: Driven, seconds: float, slow: dict[int, float]) -> None:
    """Lets time pass; a server's time for a batch depends on the buckets that it owns, and on how slow it is."""
    for _ in range(round(seconds)):
        counts = owned(driven)
        driven.factors = {
            f"ps-{index}": max(0.001, count / BUCKETS * len(counts) * slow.get(index, 1.0))
            for index, count in enumerate(counts)
        }
        driven.pass_time(1)


@pytest.mark.parametrize("index", [0, 2])
def test_a_slow_server_keeps_the_buckets_that_it_serves_as_fast_as_its_peers(index: int) -> None:
    driven = training()
    pass_loaded(driven, FOUND_SECONDS, {index: 7})
    counts = owned(driven)
    assert BUCKETS / 22 < counts[index] < BUCKETS / 11
    others = [count for other, count in enumerate(counts) if other != index]
    assert max(others) - min(others) <= 1
    assert (driven.job.recoveries, len(driven.moved)) == (0, 1)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("factor", [7, 30])
def test_a_server_that_stays_slow_is_drained_and_replaced(index: int, factor: float) -> None:
    driven = training()
    driven.factors = {f"ps-{index}": factor}  # however few buckets it has
    driven.pass_time(90)
    driven.factors = {}
    assert owned(driven)[index] == 0
    assert [member.slot for member in driven.job.members.given_up()] == [f"ps-{index}"]
    driven.join(Role.PS, index)
    pass_loaded(driven, 20, {})
    assert max(owned(driven)) - min(owned(driven)) <= 1
    assert (driven.job.recoveries, driven.job.shares, driven.job.drains) == (0, {}, {})


@pytest.mark.parametrize("dies", [False, True])
def test_an_extremely_slow_server_is_replaced_at_once_if_a_checkpoint_is_fresh(dies: bool) -> None:
    driven = Driven(records=100_000, servers=3, interval=100_000, flash_interval=15)
    driven.start()
    driven.pass_time(40)
    pass_loaded(driven, FOUND_SECONDS, {1: 30})
    assert [member.slot for member in driven.job.members.given_up()] == ["ps-1"]
    assert (driven.job.recoveries, driven.moved) == (1, [])
    if dies:
        driven.master_dies()
    driven.join(Role.PS, 1)
    pass_loaded(driven, 2 * FOUND_SECONDS, {1: 30})
    assert driven.job.recoveries == 1, "a successor is kept"


@pytest.mark.parametrize("dies", [False, True])
def test_a_checkpoint_is_as_old_as_the_rows_in_it_however_long_its_files_take(dies: bool) -> None:
    driven = Driven(records=100_000, servers=3, interval=30)
    driven.start()
    driven.train(1)
    driven.faults["Saved", 0] = Fault(hangs=True)
    driven.pass_time(31)
    driven.train(1)
    driven.pass_time(50)
    driven.answer_all()
    assert driven.job.checkpoint
    if dies:
        driven.master_dies()
    pass_loaded(driven, FOUND_SECONDS, {1: 30})
    assert list(driven.job.drains) == [1], "too much would be trained again"
    assert driven.job.recoveries == 0


@pytest.mark.parametrize("dies", [False, True])
def test_a_successor_that_is_slow_too_is_kept_and_tried_less_and_less(dies: bool) -> None:
    driven = training()
    pass_loaded(driven, 60, {1: 30})
    if dies:
        driven.master_dies()
    driven.join(Role.PS, 1)
    before = len(driven.moved)
    pass_loaded(driven, 1700, {1: 30})
    assert driven.job.members.given_up() == ()
    assert owned(driven)[1] < BUCKETS / 20
    assert len(driven.moved) - before <= 14, "each trial is at most two moves, and there are at most five"


def test_a_server_that_is_fast_again_gets_its_buckets_back() -> None:
    driven = training()
    pass_loaded(driven, FOUND_SECONDS, {1: 7})
    pass_loaded(driven, 8 * TRIAL_SECONDS, {})
    assert max(owned(driven)) - min(owned(driven)) <= 1
    assert driven.job.shares == {}


def test_nobody_is_relieved_of_everything() -> None:
    driven = training(2)
    driven.factors = {"ps-1": 7.0}
    driven.pass_time(30)
    assert owned(driven)[1] >= int(LEAST_SHARE * BUCKETS / (1 + LEAST_SHARE))


def test_what_is_drained_stays_drained() -> None:
    driven = training()
    driven.state = replace(driven.state, job=replace(driven.job, shares={1: 0.0}))
    pass_loaded(driven, 10 * TRIAL_SECONDS, {})
    assert driven.job.shares == {1: 0.0}
    assert owned(driven)[1] == 0


def test_the_successor_of_a_slow_server_gets_a_full_share() -> None:
    driven = training()
    pass_loaded(driven, FOUND_SECONDS, {1: 7})
    driven.kill(Role.PS, 1)
    driven.join(Role.PS, 1)
    pass_loaded(driven, FOUND_SECONDS, {})
    assert max(owned(driven)) - min(owned(driven)) <= 1


def test_a_server_that_joins_under_the_index_of_a_slow_one_gets_a_full_share() -> None:
    driven = Driven(records=100_000, servers=3, interval=100_000, sizes_open=True)
    driven.spec = driven.spec.model_copy(update={"ps": driven.spec.ps.model_copy(update={"min_replicas": 1})})
    driven.start()
    driven.pass_time(15)
    pass_loaded(driven, FOUND_SECONDS, {2: 7})
    driven.plan(2)
    pass_loaded(driven, 10, {})
    assert owned(driven) == [512, 512]
    driven.kill(Role.PS, 2)
    driven.join(Role.PS, 2)
    driven.plan(3)
    pass_loaded(driven, 10, {})
    assert max(owned(driven)) - min(owned(driven)) <= 1


def test_the_last_server_is_not_drained_for_being_slower_than_one_that_has_yet_to_leave() -> None:
    driven = Driven(records=100_000, servers=2, interval=100_000, sizes_open=True)
    driven.spec = driven.spec.model_copy(update={"ps": driven.spec.ps.model_copy(update={"min_replicas": 1})})
    driven.start()
    driven.pass_time(15)
    driven.plan(1)
    driven.pass_time(10)
    assert owned(driven) == [BUCKETS]
    driven.factors = {"ps-0": 30.0}
    driven.pass_time(60)
    assert (owned(driven), driven.job.drains, driven.job.recoveries) == ([BUCKETS], {}, 0)


@pytest.mark.parametrize("factor", [7, 30])
def test_a_slow_server_is_replaced_later_if_nobody_can_take_its_rows_yet(factor: float) -> None:
    driven = training(2)
    process = driven.job.members.process(Role.PS, 0)
    assert process is not None
    told = draining.begin(driven.job, 0, process.incarnation, "told to end", 15.0)
    driven.state = replace(driven.state, job=told)
    driven.pass_time(5)
    driven.factors = {"ps-1": factor}
    driven.pass_time(60)
    assert owned(driven) == [0, BUCKETS]
    driven.kill(Role.PS, 0)
    driven.join(Role.PS, 0)
    driven.pass_time(120)
    assert [member.slot for member in driven.job.members.given_up()] == ["ps-1"]


def test_a_new_master_keeps_the_shares_and_has_a_server_replaced_that_nobody_replaced_yet() -> None:
    driven = training()
    pass_loaded(driven, FOUND_SECONDS, {1: 7})
    before = owned(driven)
    driven.master_dies()
    pass_loaded(driven, 15, {1: 7})
    assert owned(driven) == before
    pass_loaded(driven, 60, {1: 7})
    assert owned(driven)[1] == 0
    assert [member.slot for member in driven.job.members.given_up()] == ["ps-1"]


def test_shares_do_not_change_while_rows_move() -> None:
    driven = training()
    driven.faults["Copy", 0] = Fault(hangs=True)
    pass_loaded(driven, FOUND_SECONDS, {1: 7})
    assert driven.job.move is not None
    wanted = dict(driven.job.shares)
    pass_loaded(driven, 20, {0: 50})
    assert driven.job.shares == wanted


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.floats(0.5, 1.9), min_size=3, max_size=3), min_size=5, max_size=60))
def test_a_noisy_cluster_moves_no_rows(noise: list[list[float]]) -> None:
    driven = training()
    for factors in noise:
        pass_loaded(driven, 1, dict(enumerate(factors)))
    assert driven.moved == []
    assert driven.job.shares == {}
