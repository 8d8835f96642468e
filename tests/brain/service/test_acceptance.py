import re
from dataclasses import replace

import pytest

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.history.changes import JobSubmitted
from emberscale_brain.planner.types import (
    ClusterCapacity,
    JobId,
    JobMetadata,
    PlanAction,
    PlannedShape,
    Prices,
    Quota,
    ShapeBounds,
)
from emberscale_brain.service.acceptance import beside_newcomers, missing_room, unacceptable
from emberscale_brain.service.state import BrainState, Conditions

SHAPE = JobShape(2, 1, 4, 4, 2 * GIB, 4 * GIB)  # 12 cores, 8 GiB
CONDITIONS = Conditions(
    ClusterCapacity(40, 40 * GIB, largest_node_cpu=8, largest_node_memory=16 * GIB),
    Prices(),
    {"bob": Quota(cpu=20, memory=12 * GIB)},
    1e9,
    adoption_seconds=0.0,
)


def a_state(**owners: str) -> BrainState:
    """Returns a state with jobs of 12 cores and 8 GiB each, given as name=owner."""
    state = BrainState(10, 10)
    for job, owner in owners.items():
        metadata = JobMetadata("DLRM", 512, 1, 1, 1, 10**6)
        state.apply(JobSubmitted(JobId(job), owner, metadata, ShapeBounds(), 0.0, current=SHAPE))
    return state


def plans(**shapes: JobShape | None) -> dict[JobId, PlannedShape]:
    return {JobId(job): PlannedShape(shape, PlanAction.SCALE, "why") for job, shape in shapes.items()}


def problem(state: BrainState, planned: dict[JobId, PlannedShape], conditions: Conditions = CONDITIONS) -> str | None:
    return unacceptable(state, conditions, planned, frozenset(state.jobs), now=100.0)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (replace(SHAPE, workers=8), None),
        (replace(SHAPE, workers=10), "44 cores in all, of 40"),
        (replace(SHAPE, worker_memory=15 * GIB, ps_memory=15 * GIB), "45 GiB in all, of 40 GiB"),
        (replace(SHAPE, workers=40), "40 workers x 4 cores 2 GiB, 1 PS x 4 cores 4 GiB for job a is beyond its bounds"),
        (replace(SHAPE, worker_cpu=12.0), "2 workers x 12 cores .* for job a: no node is so large"),
        (replace(SHAPE, workers=1, ps_memory=20 * GIB), ".*: no node is so large"),
    ],
)
def test_a_plan_for_more_than_there_is_is_not_accepted(shape: JobShape, found: str | None) -> None:
    said = problem(a_state(a="ann"), plans(a=shape))
    assert said is None if found is None else re.fullmatch(found, said or "")


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (replace(SHAPE, workers=4), None),
        (replace(SHAPE, workers=5), "24 cores for the jobs of bob, of 20"),
        (replace(SHAPE, ps_memory=9 * GIB), "13 GiB for the jobs of bob, of 12 GiB"),
    ],
)
def test_an_owner_gets_no_more_than_the_quota(shape: JobShape, found: str | None) -> None:
    assert problem(a_state(a="bob"), plans(a=shape)) == found


def test_what_jobs_have_already_is_not_too_much() -> None:
    state = a_state(a="ann", b="bob", c="bob")
    small = replace(CONDITIONS, capacity=ClusterCapacity(10, GIB, largest_node_cpu=1, largest_node_memory=GIB))
    assert problem(state, plans(a=SHAPE, b=replace(SHAPE, workers=1)), small) is None
    found = problem(state, plans(a=replace(SHAPE, workers=3)), small)
    assert found == "36 cores in all, of 10", "16, and those of bob for no more than the quota"


def test_a_running_job_that_is_told_to_wait_still_counts() -> None:
    state = a_state(a="ann", b="ann")
    assert problem(state, plans(a=None, b=replace(SHAPE, workers=7))) == "44 cores in all, of 40"


def test_the_planner_is_not_blamed_for_jobs_that_it_was_not_shown() -> None:
    state = a_state(a="ann", b="ann", new="ann")
    planned = plans(a=replace(SHAPE, workers=6), b=replace(SHAPE, workers=1))
    shown = frozenset({JobId("a"), JobId("b")})
    assert unacceptable(state, CONDITIONS, planned, shown, now=100.0) is None
    still = beside_newcomers(state, CONDITIONS, planned, shown, now=100.0)
    assert list(still) == ["b"]  # 28 + 8 + 12 cores are more than 40
    smaller = plans(a=replace(SHAPE, workers=4), b=replace(SHAPE, workers=1))
    assert beside_newcomers(state, CONDITIONS, smaller, shown, now=100.0) == smaller
    assert beside_newcomers(state, CONDITIONS, planned, frozenset(state.jobs), now=100.0) == planned


def test_what_is_missing_is_not_a_rounding_error() -> None:
    whole = replace(CONDITIONS.capacity, cpu=0.6, memory=40 * GIB)
    free = replace(whole, cpu=0.6 - 0.2, memory=GIB)
    wanted = JobShape(3, 1, 0.1, 0.1, GIB, GIB)
    assert missing_room(wanted, free, whole) == "4 GiB are needed and 1 GiB of 40 GiB are free"
