from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.fault_tolerance import FailureRecord, advise, failure_costs, failure_rate

DAY = 86_400.0
NOBODY = FailureRecord()
SHAPE = JobShape(4, 2, 4, 4, GIB, GIB)
LOAD, RESCHEDULE = 15.0, 45.0  # seconds
records = st.builds(FailureRecord, st.integers(0, 1000), st.floats(0, 1e9))


def test_before_anything_is_seen_the_rate_is_what_is_published() -> None:
    assert failure_rate(NOBODY, NOBODY) * DAY == pytest.approx(0.015)


def test_the_fleet_corrects_what_is_believed() -> None:
    steady = failure_rate(NOBODY, FailureRecord(0, 1000 * DAY))
    shaky = failure_rate(NOBODY, FailureRecord(100, 1000 * DAY))
    assert steady * DAY < 0.001
    assert shaky * DAY == pytest.approx(0.1, rel=0.1)


def test_a_job_that_fails_again_and_again_is_believed_whatever_the_fleet_does() -> None:
    own = FailureRecord(11, 10 * 3600.0)
    assert failure_rate(own, own + FailureRecord(0, 1000 * DAY)) == pytest.approx(1 / 3600)


def test_one_failure_alone_says_little() -> None:
    assert failure_rate(FailureRecord(1, 60.0), NOBODY) * DAY < 0.1


@given(records, records)
def test_another_failure_never_lowers_the_rate(own: FailureRecord, fleet: FailureRecord) -> None:
    once_more = FailureRecord(1, 0.0)
    assert failure_rate(own + once_more, fleet + once_more) >= failure_rate(own, fleet)


def test_dearer_checkpoints_are_rarer_and_more_ps_fail_more_often() -> None:
    def interval(cost: float, ps: int = 2, failures: int = 0) -> float:
        shape = JobShape(4, ps, 4, 4, GIB, GIB)
        own = FailureRecord(failures, DAY)
        return advise(failure_costs(shape, 100 * DAY, own, own, cost, LOAD, RESCHEDULE)).checkpoint_interval

    assert interval(4.0) == pytest.approx(2 * interval(1.0))
    assert interval(1.0, ps=8) == pytest.approx(interval(1.0) / 2)
    assert interval(1.0, failures=20) < interval(1.0) / 5


def test_no_checkpoint_yet_counts_as_one_of_a_second() -> None:
    before, after = (failure_costs(SHAPE, DAY, NOBODY, NOBODY, cost, LOAD, RESCHEDULE) for cost in (0.0, 1.0))
    assert (before.save, before.unmeasured) == (1.0, (*after.unmeasured, "what a checkpoint costs"))
    assert replace(before, unmeasured=after.unmeasured) == after


@pytest.mark.parametrize(
    ("lags", "ps", "slowdown"),
    [(False, 2, 0.1), (False, 5, 0.4), (False, 11, 0.4), (True, 2, 0.14), (True, 11, 0.14)],
)
def test_the_cost_of_parity_is_the_measured_one(lags: bool, ps: int, slowdown: float) -> None:
    shape = JobShape(2, ps, 1, 1, GIB, GIB)
    costs = failure_costs(shape, DAY, NOBODY, NOBODY, 1.0, LOAD, RESCHEDULE, async_parity=lags)
    assert costs.parity_slowdown == pytest.approx(slowdown)
    assert costs.parity_memory == 1 / min(4, ps - 1)
