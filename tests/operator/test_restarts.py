"""Back-off, and what the history counts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.job.roles import Role
from emberscale_operator.machine import (
    ExitReason,
    History,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Resources,
)
from emberscale_operator.machine.restarts import Backoff, advance

BACKOFF = Backoff(base=1.0, factor=2.0, limit=10.0, reset_after=60.0)


def ended(incarnation: int, started: float, at: float, reason: ExitReason = ExitReason.ERROR) -> Instance:
    instance = InstanceId(Role.WORKER, 0, incarnation)
    return Instance(instance, InstanceState.EXITED, Resources(), started, InstanceExit(reason, 1, at))


@pytest.mark.parametrize(("streak", "delay"), [(1, 0), (2, 1), (3, 2), (4, 4), (5, 8), (6, 10), (100_000, 10)])
def test_the_delay_doubles_up_to_its_limit_after_a_free_first_try(streak: int, delay: float) -> None:
    assert BACKOFF.delay(streak, ExitReason.ERROR) == delay


def test_one_that_completed_early_never_restarts_at_once() -> None:
    assert BACKOFF.delay(1, ExitReason.COMPLETED) == BACKOFF.base


def test_a_long_life_starts_the_backoff_again() -> None:
    history = History()
    for incarnation in (1, 2, 3):
        history = advance(history, [ended(incarnation, 0.0, 1.0)], BACKOFF)
    assert history.of(Role.WORKER, 0).ready_at == 3.0
    history = advance(history, [ended(4, 10.0, 70.0)], BACKOFF)
    assert history.of(Role.WORKER, 0).ready_at == 70.0


def test_an_end_that_was_asked_for_counts_nothing() -> None:
    wanted = ended(1, 0.0, 1.0)
    assert wanted.exit is not None
    deleted = replace(wanted, exit=replace(wanted.exit, deleted=True))
    lives = advance(History(), [deleted], BACKOFF).of(Role.WORKER, 0)
    assert (lives.streak, lives.faults, lives.last_incarnation) == (0, 0, 1)


def test_restarts_are_counted_by_role() -> None:
    history = History()
    for incarnation, reason in ((1, ExitReason.ERROR), (2, ExitReason.KILLED), (3, ExitReason.COMPLETED)):
        history = advance(history, [ended(incarnation, 0.0, 1.0, reason)], BACKOFF)
    assert (history.restarts(Role.WORKER), history.restarts(Role.PS)) == (2, 0)


def test_no_end_counts_once_the_job_rests() -> None:
    lives = advance(History(), [ended(1, 0.0, 1.0)], BACKOFF, wanted=False).of(Role.WORKER, 0)
    assert (lives.restarts, lives.faults, lives.last_incarnation) == (0, 0, 1)


def test_what_is_reported_is_forgotten_with_the_instance() -> None:
    died = ended(1, 0.0, 1.0)
    history = advance(History(), [died], BACKOFF).with_reported(died.id)
    assert advance(history, [died], BACKOFF).reported == {died.id}
    assert advance(history, [], BACKOFF).reported == frozenset()


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 100), st.sampled_from(list(ExitReason))), max_size=8))
def test_folding_an_observation_twice_is_folding_it_once(exits: list[tuple[int, float, ExitReason]]) -> None:
    by_incarnation = {n: ended(n, 0.0, at, reason) for n, at, reason in exits}
    observed = [by_incarnation[n] for n in sorted(by_incarnation)]
    once = advance(History(), observed, BACKOFF)
    assert advance(once, observed, BACKOFF) == once
