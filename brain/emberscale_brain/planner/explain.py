"""Reasons in words: the decision, the gain expected of it, and the evidence."""

from types import MappingProxyType

from emberscale_api.readable import bytes_text, count_text, duration_text, rate_text
from emberscale_brain.planner.candidates import DWELL_SECONDS, Candidates, Experiment
from emberscale_brain.planner.running import Assessment
from emberscale_brain.planner.types import (
    Explanation,
    JobView,
    MemoryForecast,
    PlanAction,
    PlannedShape,
    SimilarJob,
    ThroughputFit,
)
from emberscale_brain.planner.waiting import FirstShapes
from emberscale_brain.warm_start import describe


def fit_in_words(fit: ThroughputFit) -> str:
    """Describes the data behind the model, and its uncertainty."""
    if not fit.profiles:
        return "The model is that of similar jobs; this job has no measurements yet."
    text = (
        f"The fit rests on {count_text(fit.profiles, 'profile')} of {count_text(fit.distinct_shapes, 'shape')}, "
        f"RMSLE {fit.rmsle:.3f}"
    )
    if fit.outliers:
        text += f", {count_text(fit.outliers, 'outlier')} set aside"
    if fit.prior_share >= 0.05:
        text += f"; {fit.prior_share:.0%} of it is the prior"
    return text + "."


def gain_in_words(candidates: Candidates, now: int, then: int, remaining_samples: float) -> str:
    """Describes the gain and cost of a change from one row to another: throughput, cost, time and pause."""
    before, after = float(candidates.gross[now]), float(candidates.gross[then])
    saved = remaining_samples / before - remaining_samples / max(float(candidates.net[then]), 1e-12)
    cost = float(candidates.cost[then] - candidates.cost[now])
    dearer = "more" if cost >= 0 else "less"
    sooner = f"done {duration_text(abs(saved))} {'sooner' if saved >= 0 else 'later'}"
    speed = f"{rate_text(before)} -> {rate_text(after)}, +-{candidates.doubt[then]:.1%}"
    return (
        f"{after / before - 1:+.1%} throughput ({speed}) for {abs(cost):.3g}/h {dearer}; {sooner}, "
        f"{duration_text(float(candidates.pause[then]))} of standstill"
    )


def memory_in_words(forecast: MemoryForecast, limit: int) -> str:
    """Describes how much memory the largest PS is expected to need at the end."""
    return (
        f"at the end the largest PS is expected to need {bytes_text(forecast.expected)} "
        f"({bytes_text(forecast.lower)} to {bytes_text(forecast.upper)}, {forecast.law}) of {bytes_text(limit)}"
    )


def _explanation(
    assessment: Assessment, candidates: Candidates, row: int, weight: float, similar: tuple[SimilarJob, ...]
) -> Explanation:
    present = assessment.candidates
    before, remaining = float(present.gross[0]), assessment.job.remaining_samples
    net = max(float(candidates.net[row]), 1e-12)
    return Explanation(
        fit=assessment.fit,
        front=tuple(present.point(option) for option in range(1, 1 + assessment.front_rows)),
        chosen=candidates.point(row),
        present=present.point(0),
        expected_gain=float(candidates.net[row]) - before,
        expected_cost=float(candidates.cost[row] - present.cost[0]),
        overhead_seconds=float(candidates.delay[row] + candidates.pause[row]),
        saved_seconds=remaining / before - remaining / net,
        weight=weight,
        similar=similar,
        memory=assessment.memory,
        numbers=MappingProxyType(
            {
                "present_bill": float(present.bill[0]),
                "chosen_bill": float(candidates.bill[row]),
                "smallest_bill": float(present.bill.min()),
            }
        ),
    )


def explain_running(
    assessment: Assessment, row: int | None, weight: float, similar: tuple[SimilarJob, ...]
) -> PlannedShape:
    """Explains why a running job gets the candidate in `row`; None: no candidate fits."""
    candidates, present = assessment.candidates, assessment.present
    if row is None:
        reason = (
            f"No room: capacity or the owner's quota is below the least that it runs with ({present.describe()} now)."
        )
        return PlannedShape(None, PlanAction.WAIT, reason, _explanation(assessment, candidates, 0, weight, similar))
    explanation = _explanation(assessment, candidates, row, weight, similar)
    fit = "" if assessment.fit is None else " " + fit_in_words(assessment.fit)
    if assessment.grows and assessment.memory is not None:
        reason = (
            f"More memory before it runs out: {memory_in_words(assessment.memory, present.ps_memory)}; "
            f"{candidates.shapes[row].describe()}."
        )
        return PlannedShape(candidates.shapes[row], PlanAction.GROW_MEMORY, reason + fit, explanation)
    if row == 0:
        return PlannedShape(present, PlanAction.KEEP, _why_kept(assessment) + fit, explanation)
    gain = gain_in_words(candidates, 0, row, assessment.job.remaining_samples)
    reason = f"{gain}.{_no_room_for_target(assessment, row)}{fit}"
    action = PlanAction.SHRINK if candidates.cost[row] < candidates.cost[0] else PlanAction.SCALE
    return PlannedShape(candidates.shapes[row], action, reason, explanation)


def _why_kept(assessment: Assessment) -> str:
    if assessment.problem:
        return f"Kept: {assessment.problem}."
    candidates = assessment.candidates
    if assessment.target:
        wanted = candidates.shapes[assessment.target].describe()
        gain = gain_in_words(candidates, 0, assessment.target, assessment.job.remaining_samples)
        return f"Kept: there is no room for {wanted}: {gain}."
    others = candidates.bill[1:]
    if not len(others):
        return "Kept: no other shape is within the bounds."
    best = int(others.argmin()) + 1
    saves = 1 - float(candidates.bill[best] / candidates.bill[0])
    words = f"would make the rest of the job {saves:.1%} cheaper" if saves > 0 else "would cost more"
    return (
        f"Kept: of {len(candidates) - 1} other shapes the best, {candidates.shapes[best].describe()}, {words}, "
        "time and the change included."
    )


def _no_room_for_target(assessment: Assessment, row: int) -> str:
    if row == assessment.target:
        return ""
    wanted = assessment.candidates.shapes[assessment.target]
    return f" The best for this job alone, {wanted.describe()}, is more than the cluster has for it now."


def explain_experiment(
    assessment: Assessment, trials: Candidates, experiment: Experiment, similar: tuple[SimilarJob, ...]
) -> PlannedShape:
    """Explains why a running job tries a small change."""
    shape = trials.shapes[experiment.row]
    explanation = _explanation(assessment, trials, experiment.row, 0.0, similar)
    fit = "" if assessment.fit is None else fit_in_words(assessment.fit)
    reason = (
        f"A trial of {duration_text(DWELL_SECONDS)}: what is learned in it should make the rest of the job "
        f"{experiment.worth:.3g} cheaper and costs {experiment.cost:.3g}. {fit}"
    )
    return PlannedShape(shape, PlanAction.EXPLORE, reason, explanation)


def explain_waiting(first: FirstShapes, row: int | None) -> PlannedShape:
    """Explains why a job that does not run yet starts with the candidate in `row`; None: it waits, or never can."""
    candidates = first.candidates
    if row is None:
        action, reason = PlanAction.REFUSE, "Refused: its smallest shape exceeds the cluster or the owner's quota."
        if len(candidates):
            least = candidates.shapes[-1].describe()
            reason = f"Waits: the cluster or the owner's quota has no room for it (at least {least})."
            action, reason = PlanAction.WAIT, f"{reason} Then a {first.start.reason}."
        return PlannedShape(None, action, reason, Explanation(fit=first.fit, similar=first.start.similar))
    shape = candidates.shapes[row]
    reason = f"{first.start.reason[:1].upper()}{first.start.reason[1:]}."
    if shape != first.start.shape:
        reason += f" The cluster has room for a part of it now: {shape.describe()}."
    if len(first.start.similar) > 1:
        reason += " Also like " + "; ".join(describe(one) for one in first.start.similar[1:3]) + "."
    return PlannedShape(
        shape,
        PlanAction.START,
        reason,
        Explanation(
            fit=first.fit,
            chosen=candidates.point(row) if first.fit is not None else None,
            expected_cost=float(candidates.cost[row]),
            similar=first.start.similar,
        ),
    )


def explain_quarantined(job: JobView, error: Exception) -> PlannedShape:
    """Explains why a job that cannot be planned keeps its shape, or gets none; the reason names the error."""
    problem = f"its model cannot be computed ({type(error).__name__}: {error}); other jobs are planned"
    if job.current is None:
        return PlannedShape(None, PlanAction.REFUSE, f"Refused: {problem}.")
    return PlannedShape(job.current, PlanAction.KEEP, f"Kept: {problem}.")
