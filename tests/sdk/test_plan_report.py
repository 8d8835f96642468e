"""The report on a plan for people."""

from io import StringIO
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from emberscale._reports.pictures import draw_plan
from emberscale._reports.plan_report import plan_report
from emberscale_api.rpc import brain_pb2 as pb

GIB = 1 << 30


def shape(workers: int) -> pb.Shape:
    return pb.Shape(workers=workers, ps=1, worker_cpu=2, ps_cpu=1, worker_memory=GIB, ps_memory=2 * GIB)


def point(workers: int) -> pb.PlanPoint:
    speed = 1000.0 * workers
    return pb.PlanPoint(
        shape=shape(workers), cost_per_hour=workers / 10, throughput=speed, net=0.99 * speed, uncertainty=0.04
    )


def explanation(**more: object) -> pb.PlanExplanation:
    plan = pb.BrainPlan(job_uid="uid", version=4, planner="default", action="Scale", shape=shape(3), reason="[so]")
    plan.fault_tolerance.reason = "FullRecovery is expected to cost 0.10% of the job's time"
    whole = pb.PlanExplanation(plan=plan, chosen=point(3), present=point(2), front=[point(n) for n in range(1, 31)])
    whole.MergeFrom(pb.PlanExplanation(**more))  # type: ignore[arg-type]  # fields by keyword
    return whole


def printed(of: pb.PlanExplanation, width: int = 400) -> str:
    console = Console(width=width, record=True, file=StringIO())
    for part in plan_report(of, "ads"):
        console.print(part)
    return console.export_text()


def test_a_change_is_told_with_what_it_brings_and_costs() -> None:
    text = printed(explanation(expected_gain=950.0, expected_cost=0.1, overhead_seconds=45, saved_seconds=-90))
    assert "ads: plan 4 by default, Scale" in text
    assert "[so]" in text
    assert "3,000 samples/s +- 4% for 0.3 an hour, in the currency of planner.cpuCoreHour; that is" in text
    assert "that is 950 samples/s more and +0.1 an hour" in text
    assert "which takes 45s; done 1m30s later" in text
    assert "recovery  FullRecovery is expected to cost" in text


def test_a_job_that_stays_as_it_is_gains_nothing_and_says_so() -> None:
    text = printed(explanation(chosen=point(2), kept="Kept: no [other] is better."))
    assert "since     Kept: no [other] is better.\n" in text
    assert "expected  2,000 samples/s for 0.2 an hour, in the currency of planner.cpuCoreHour, as it is\n" in text


@pytest.mark.parametrize("width", [80, 400])
def test_the_front_is_short_and_has_the_present_and_the_chosen_shape_in_a_line_each(width: int) -> None:
    _, front = printed(explanation(), width).split("The cheapest shape", 1)
    rows = [line for line in front.splitlines() if "%" in line]
    assert len(rows) <= 12
    (present,) = (row for row in rows if "now" in row)
    (chosen,) = (row for row in rows if "chosen" in row)
    assert " ".join(present.split()) == "2 x 2, 1 GiB 1 x 1, 2 GiB 0.2 2,000 1,980 4% now"
    assert " ".join(chosen.split()) == "3 x 2, 1 GiB 1 x 1, 2 GiB 0.3 3,000 2,970 4% chosen"


def test_the_model_says_what_it_rests_on() -> None:
    fit = pb.FitSummary(rmsle=0.031, profiles=12, distinct_shapes=1, noise=0.05, outliers=1, prior_share=0.4, overlap=4)
    text = printed(explanation(fit=fit))
    assert "off by 3.1% (RMSLE) over 12 profiles of 1 shape; profiles scatter by 5.0%, 1 outlier set aside" in text
    assert "40% of it is the prior" in text
    assert "overlap (exponent 4)" in text
    assert "not measured" in printed(explanation(fit=pb.FitSummary(prior_share=1.0)))


def test_the_picture_is_drawn_with_and_without_measurements(tmp_path: Path) -> None:
    measured = [
        pb.MeasuredPoint(profile=pb.Profile(shape=shape(n), throughput=900.0 * n), predicted=1000.0 * n) for n in (1, 2)
    ]
    for number, of in enumerate((explanation(measured=measured), pb.PlanExplanation(plan=explanation().plan))):
        picture = tmp_path / f"{number}.png"
        draw_plan(of, picture)
        assert matplotlib.image.imread(picture).std() > 0.05
