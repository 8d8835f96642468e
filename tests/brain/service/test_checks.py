import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.history.changes import StartUpObserved
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.checks import Refusal, check_profile, check_start_up
from eventually import unwrap

SHAPE = JobShape(4, 2, 4, 4, GIB, GIB)
START_UP = StartUpObserved(JobId("a"), "ps", 100.0, 20.0, 1.0)
GOOD = JobProfile(100.0, SHAPE, 512, 0.1, 20_480.0, 10_000, 10, GIB, GIB, 0.5, 0.5, {"pull": 0.2})


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"throughput": math.nan}, Refusal.NOT_FINITE, "throughput is nan"),
        ({"iteration_seconds": math.inf}, Refusal.NOT_FINITE, "iteration_seconds is inf"),
        ({"stage_fractions": {"pull": math.nan}}, Refusal.NOT_FINITE, "stage_fractions.pull is nan"),
        ({"shape": replace(SHAPE, ps_cpu=math.inf)}, Refusal.NOT_FINITE, "ps_cpu is inf"),
        ({"throughput": -1.0}, Refusal.NEGATIVE, "throughput is -1"),
        ({"ps_cpu_utilization": -0.1}, Refusal.NEGATIVE, "ps_cpu_utilization is -0.1"),
        ({"time": 200.0}, Refusal.FROM_THE_FUTURE, "1m40s ahead"),
        ({"samples": 1 << 63}, Refusal.INCONSISTENT, "more than there can be"),
        (
            {"throughput": 1e9},
            Refusal.INCONSISTENT,
            "4 workers that take 100ms for a batch of 512 train 20,480",
        ),
        ({"total_samples": 1 << 61}, Refusal.INCONSISTENT, "total_samples is 2.30584e+18: more than there can be"),
        ({"total_samples": 9_999}, Refusal.INCONSISTENT, "total_samples is 9999, less than the 10000 samples done"),
        ({"failures": 1 << 32}, Refusal.INCONSISTENT, "failures is 4.29497e+09: more than there can be"),
        ({"checkpoint_cost": 1e18}, Refusal.INCONSISTENT, "checkpoint_cost is 1e+18"),
        ({"worker_cpu_utilization": 5000.0}, Refusal.INCONSISTENT, "worker_cpu_utilization is 5000"),
        ({"batch_size": 256}, Refusal.INCONSISTENT, "the job's is 512"),
        ({"throughput": 0.0}, Refusal.INCONSISTENT, "unless the profile is marked as restarted"),
    ],
)
def test_nonsense_is_refused_with_its_field(changes: dict[str, Any], reason: Refusal, detail: str) -> None:
    refused = unwrap(check_profile(replace(GOOD, **changes), 512, now=100.0, clock_skew=30.0))
    assert refused.reason is reason
    assert detail in refused.message


def test_sense_is_let_pass() -> None:
    for good in (GOOD, replace(GOOD, time=129.0), replace(GOOD, throughput=0.0, iteration_seconds=0.0, restarted=True)):
        assert check_profile(good, 512, now=100.0, clock_skew=30.0) is None


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"role": "master"}, Refusal.INCONSISTENT, "role: must be worker or ps"),
        ({"seconds": math.nan}, Refusal.NOT_FINITE, "seconds is nan"),
        ({"paused_seconds": -1.0}, Refusal.NEGATIVE, "paused_seconds is -1"),
        ({"seconds": 1e7}, Refusal.INCONSISTENT, "seconds is 1e+07: more than there can be"),
        ({"time": math.nan}, Refusal.NOT_FINITE, "time is nan"),
    ],
)
def test_a_start_up_that_makes_no_sense_is_refused_with_its_field(
    changes: dict[str, Any], reason: Refusal, detail: str
) -> None:
    refused = unwrap(check_start_up(replace(START_UP, **changes)))
    assert refused.reason is reason
    assert detail in refused.message
    assert check_start_up(START_UP) is None


PASSING = {
    "time": (0.0, 130.0),
    "iteration_seconds": (0.01, 1.0),
    "throughput": (2_048.0, 204_800.0),
    "worker_cpu_utilization": (0.0, 1000.0),
    "ps_cpu_utilization": (0.0, 1000.0),
    "checkpoint_cost": (0.0, 86_400.0),
    "samples": (0, 10**15),
}
"""By field of a profile that is good otherwise, the least and the largest number that pass."""


@given(st.sampled_from(sorted(PASSING)), st.data())
def test_a_number_passes_exactly_within_its_bounds(field: str, data: st.DataObject) -> None:
    least, most = PASSING[field]
    numbers: st.SearchStrategy[float]
    if isinstance(least, int) and isinstance(most, int):
        numbers = st.integers(least, most) | st.sampled_from((least - 1, most + 1)) | st.integers()
    else:
        beyond = (0.999 * least or -0.001, 1.001 * most)
        numbers = st.floats(least, most) | st.sampled_from(beyond) | st.floats()
    number: Any = data.draw(numbers)
    refused = check_profile(replace(GOOD, **{field: number}), 512, now=100.0, clock_skew=30.0)
    assert (refused is None) is (least <= number <= most)
