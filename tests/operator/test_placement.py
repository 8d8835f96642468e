"""Which cores a process may use."""

import math

from hypothesis import given
from hypothesis import strategies as st

from emberscale_operator.local.cpu import loads_of, place


def test_without_a_limit_a_process_runs_anywhere() -> None:
    assert place(None, {0: 0.0, 1: 0.0}) is None


def test_the_least_loaded_cores_come_first_and_the_lowest_among_equals() -> None:
    assert place(2, {0: 1.0, 1: 0.0, 2: 0.5, 3: 1.0}) == (1, 2)
    assert place(1, {0: 0.5, 1: 0.5}) == (0,)


def test_a_fraction_of_a_core_takes_a_whole_one() -> None:
    assert place(0.5, {3: 0.0, 4: 0.0}) == (3,)
    assert place(1.5, {3: 0.0, 4: 0.0}) == (3, 4)


def test_a_limit_above_the_machine_gets_the_machine() -> None:
    assert place(64, {0: 0.0, 1: 9.0}) == (0, 1)


def test_promises_are_shared_over_the_cores_of_a_process() -> None:
    placed = {"ps-0": (2.0, (0, 1)), "worker-0": (0.5, (1,)), "master-0": (None, None), "gone": (1.0, (9,))}
    assert loads_of(placed.values(), frozenset({0, 1, 2})) == {0: 1.0, 1: 1.5, 2: 0.0}


@given(
    st.lists(st.floats(0.1, 8), min_size=1, max_size=12),
    st.integers(1, 8),
)
def test_placing_one_by_one_never_leaves_a_core_two_processes_behind(limits: list[float], cores: int) -> None:
    usable = frozenset(range(cores))
    placed: dict[str, tuple[float | None, tuple[int, ...] | None]] = {}
    for number, limit in enumerate(limits):
        got = place(limit, loads_of(placed.values(), usable))
        assert got is not None
        assert len(got) == min(math.ceil(limit), cores)
        placed[f"worker-{number}"] = (limit, got)
    loads = loads_of(placed.values(), usable)
    assert (
        max(loads.values()) - min(loads.values())
        <= max(limit / min(math.ceil(limit), cores) for limit in limits) + 1e-9
    )
