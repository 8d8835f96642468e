"""Which plans of the brain the master takes: those whose numbers the job's state can hold."""

import math
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.jobmaster.small_job import job

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_jobmaster import scaling, takeover
from emberscale_jobmaster.brain_messages import advice
from emberscale_jobmaster.state import JobState, with_scaling
from emberscale_jobmaster.tasks import InvalidReportError
from eventually import unwrap

_state_json = TypeAdapter(JobState)
OPEN = job(ps={"replicas": None}, worker={"replicas": None}).spec

doubles = st.one_of(st.floats(0.1, 64), st.floats())
numbers = st.one_of(st.integers(1, 8), st.integers(0, (1 << 32) - 1))
longs = st.integers(0, (1 << 64) - 1)
shapes = st.builds(
    pb.Shape, workers=numbers, ps=numbers, worker_cpu=doubles, ps_cpu=doubles, worker_memory=longs, ps_memory=longs
)
plans = st.builds(
    pb.BrainPlan,
    version=st.one_of(st.integers(0, 3), longs),
    action=st.text(),
    reason=st.text(),
    shape=st.none() | shapes,
    expected_throughput=st.one_of(st.sampled_from([math.nan, math.inf, -1.0]), st.floats(0, 1e20)),
)


def plan(**changed: float) -> pb.BrainPlan:
    shape = {"workers": 2, "ps": 1, "worker_cpu": 1.5, "ps_cpu": 0.5, "worker_memory": 1 << 30, "ps_memory": 0}
    shape |= {name: number for name, number in changed.items() if name in shape}
    rest = {"expected_throughput": 100.0} | {name: number for name, number in changed.items() if name not in shape}
    return pb.BrainPlan(version=1, action="Start", shape=pb.Shape(**shape), **rest)  # type: ignore[arg-type]


@given(plans)
def test_a_state_that_follows_a_plan_reads_back(given: pb.BrainPlan) -> None:
    with suppress(InvalidReportError):
        taken = advice(given)
        if taken is None:
            return
        begun = takeover.initial(wall=1.0)
        waiting = with_scaling(begun, replace(begun.scaling, waits_for_plan=True))
        followed = scaling.follow(waiting, OPEN, taken, now=2.0)
        assert _state_json.validate_json(_state_json.dump_json(followed)) == followed


@pytest.mark.parametrize(
    ("field", "number"),
    [
        *[(name, number) for name in ("expected_throughput", "worker_cpu") for number in (math.nan, math.inf, -1.0)],
        ("worker_cpu", 0.0),
        ("workers", 0),
        ("workers", 1025),
        ("ps", 1025),
        ("ps_memory", 1 << 60),
    ],
)
def test_a_plan_that_no_job_can_follow_is_refused_by_name(field: str, number: float) -> None:
    with pytest.raises(InvalidReportError, match="shape" if field != "expected_throughput" else field):
        advice(plan(**{field: number}))


def test_a_plan_stands_beside_recovery_advice_without_an_end() -> None:
    given = plan()
    given.fault_tolerance.between_failures = math.inf
    assert unwrap(advice(given)).expected_throughput == 100.0
    assert advice(pb.BrainPlan()) is None
