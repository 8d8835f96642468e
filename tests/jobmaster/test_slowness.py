import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from emberscale_jobmaster.slowness import (
    CALM_SECONDS,
    PACE_SECONDS,
    SLOW_FACTOR,
    SLOW_SECONDS,
    WARM_UP_SECONDS,
    Pace,
    Slowness,
    factors,
    judged,
)

PACES = st.floats(1e-6, 10.0)


def paced(begin: float, seconds_a_unit: list[float], pace: Pace | None = None) -> Pace:
    """Adds a report per second, beginning after the time in which a process settles."""
    pace = Pace().add(0.0, 0.0, begin - WARM_UP_SECONDS) if pace is None else pace
    for number, seconds in enumerate(seconds_a_unit):
        pace = pace.add(seconds * 100, 100, begin + number)
    return pace


def over(before: dict[str, Slowness], now: float, seconds: float, factor: float) -> dict[str, Slowness]:
    """Returns the judgement after these seconds, in which a member was `factor` times slower than its peers."""
    for tick in range(round(seconds) + 1):
        before = judged(before, {"worker-0": factor}, now + tick)
    return before


@given(st.lists(PACES, min_size=2, max_size=9), st.floats(0.1, 100))
def test_what_slows_all_members_makes_none_slower_than_its_peers(paces: list[float], times: float) -> None:
    names = [f"worker-{index}" for index in range(len(paces))]
    alone = factors(dict(zip(names, paces, strict=True)))
    together = factors(dict(zip(names, [times * pace for pace in paces], strict=True)))
    assert all(abs(together[name] - alone[name]) <= 1e-6 * alone[name] for name in names)


@given(st.lists(PACES, min_size=2, max_size=9))
def test_each_member_is_compared_with_the_median_of_the_others(paces: list[float]) -> None:
    found = factors({f"{number}": pace for number, pace in enumerate(paces)})
    for number, pace in enumerate(paces):
        others = paces[:number] + paces[number + 1 :]
        assert math.isclose(found[f"{number}"], pace / statistics.median(others))


@given(st.lists(PACES, min_size=2, max_size=9))
def test_at_most_half_of_the_members_are_slow(paces: list[float]) -> None:
    slow = [name for name, factor in factors({f"{n}": pace for n, pace in enumerate(paces)}).items() if factor >= 4]
    assert len(slow) <= len(paces) / 2


def test_a_member_without_peers_is_not_slow() -> None:
    assert factors({"worker-0": 5.0}) == {}
    assert factors({"worker-0": 5.0, "worker-1": None}) == {}


@given(st.lists(st.floats(1.0, SLOW_FACTOR - 0.01), min_size=1, max_size=100))
def test_noise_below_the_factor_makes_nobody_slow(noise: list[float]) -> None:
    found: dict[str, Slowness] = {}
    for second, factor in enumerate(noise):
        found = judged(found, {"worker-0": factor}, float(second))
    assert found == {}


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.floats(SLOW_FACTOR, 1000))
def test_a_member_becomes_slow_only_after_an_unbroken_time(slow: list[bool], factor: float) -> None:
    found: dict[str, Slowness] = {}
    unbroken = 0
    for second, is_slow in enumerate(slow):
        found = judged(found, {"worker-0": factor if is_slow else 1.0}, float(second))
        unbroken = unbroken + 1 if is_slow else 0
        if found and found["worker-0"].lasting:
            assert unbroken - 1 >= SLOW_SECONDS
            return


def test_a_slow_member_stays_slow_until_it_is_clearly_fast_again() -> None:
    found = over({}, 0, SLOW_SECONDS, 33)
    assert (found["worker-0"].lasting, found["worker-0"].since, found["worker-0"].reported) == (True, 0, 30)
    found = over(found, 10, 60, SLOW_FACTOR / 1.5)  # neither slow nor fast
    assert found["worker-0"].lasting
    found = over(found, 100, CALM_SECONDS - 1, 1.0)
    found = over(found, 106, 1, SLOW_FACTOR)  # it was a moment only
    assert over(found, 110, CALM_SECONDS - 1, 1.0)
    assert over(found, 110, CALM_SECONDS, 1.0) == {}


def test_a_factor_that_varies_is_told_once() -> None:
    found = over({}, 0, SLOW_SECONDS, 20)
    for second in range(100):
        found = judged(found, {"worker-0": 15 + second % 20}, 10.0 + second)
        assert found["worker-0"].reported == 20
    assert judged(found, {"worker-0": 90}, 200.0)["worker-0"].reported == 90


def test_a_pace_is_the_median_so_one_pause_does_not_count() -> None:
    assert paced(100, [0.01] * 4 + [5.0] + [0.01] * 3).seconds == 0.01


def test_a_pace_follows_a_slowdown_within_its_window() -> None:
    pace = paced(100, [0.01] * 20)
    assert paced(120, [0.3] * round(PACE_SECONDS), pace).seconds == 0.3


def test_the_first_seconds_of_a_process_do_not_count() -> None:
    pace = Pace()
    for second in range(20):
        pace = pace.add(5.0 if second < WARM_UP_SECONDS else 0.5, 100, float(second))
        assert pace.seconds in (None, 0.005)
    assert pace.seconds == 0.005


def test_work_that_has_not_ended_counts_with_the_unit_that_it_is_for() -> None:
    pace = Pace().add(0.0, 0.0, 0.0)
    for second in range(10, 16):
        pace = pace.add(1.0, 1.0 if second % 3 == 0 else 0.0, float(second))
    assert pace.seconds == 3.0
