from dataclasses import replace

from emberscale_api.shape import GIB, JobShape
from emberscale_brain.history.changes import PlanMade
from emberscale_brain.planner.types import Candidate, Explanation, JobId, PlanAction, PlannedShape, ThroughputFit
from emberscale_brain.service.in_force import PlansInForce, refreshed
from eventually import unwrap

JOB = JobId("a")
SHAPE = JobShape(4, 2, 4, 4, GIB, GIB)
FIT = ThroughputFit((1.0,) * 6, ((0.0,) * 6,) * 6, 0.05, 0.02, 3, 1)
FRONT = tuple(
    Candidate(replace(SHAPE, workers=workers), workers, 100.0 * workers, 99.0 * workers, 0.1) for workers in (1, 2, 4)
)
SCALED = PlannedShape(SHAPE, PlanAction.SCALE, "faster", Explanation(fit=FIT, front=FRONT))
KEPT = PlannedShape(
    SHAPE, PlanAction.KEEP, "as good as over", Explanation(fit=replace(FIT, profiles=9), front=FRONT[:1])
)


def given(*planned: PlannedShape) -> PlansInForce:
    plans = PlansInForce()
    for one in planned:
        plans.keep(JOB, one, None)
    return plans


def test_while_a_job_runs_the_last_round_says_why() -> None:
    assert given(SCALED, KEPT).latest(JOB) == KEPT


def test_of_a_job_that_is_over_the_last_choice_stays_with_the_last_fit() -> None:
    reasons = given(SCALED, KEPT)
    left = unwrap(reasons.end(JOB))
    assert (left.reason, left.explanation.front, left.explanation.fit) == ("faster", FRONT, KEPT.explanation.fit)
    assert reasons.latest(JOB) is None


def test_a_choice_that_narrows_towards_the_end_is_not_the_one_that_stays() -> None:
    front = tuple(replace(point, shape=replace(SHAPE, workers=number)) for number, point in enumerate(FRONT * 3, 1))
    wide = replace(SCALED, explanation=replace(SCALED.explanation, front=front))
    left = unwrap(given(wide, SCALED).end(JOB))
    assert left.explanation.front == front


def test_a_choice_of_another_shape_says_nothing_of_the_last() -> None:
    other = replace(KEPT, shape=replace(SHAPE, workers=1))
    assert given(SCALED, other).end(JOB) == other


def test_nothing_is_left_of_a_job_that_never_had_a_plan() -> None:
    assert PlansInForce().end(JOB) is None


def test_a_plan_stays_as_it_was_made_and_tells_beside_it_why_it_was_kept() -> None:
    made = PlanMade(JOB, 1, 0.0, "p", SCALED)
    assert refreshed(made, SCALED) is made
    kept = refreshed(made, KEPT)
    assert (kept.planned.action, kept.planned.reason, kept.kept) == (SCALED.action, "faster", "as good as over")
    assert kept.planned.explanation == KEPT.explanation
    over = given(SCALED).end(JOB)
    assert refreshed(kept, over).kept == "as good as over"
