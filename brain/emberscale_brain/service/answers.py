"""Encodes the brain's answers: plans, and the numbers behind them."""

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.codec import message_of
from emberscale_brain.fault_tolerance import FaultToleranceAdvice
from emberscale_brain.model.predict import throughput
from emberscale_brain.planner.types import COEFFICIENTS, Explanation, MemoryForecast, ThroughputFit
from emberscale_brain.service.in_force import ExplainedPlan, PlanInForce


def plan_to(plan: PlanInForce) -> pb.BrainPlan:
    """Encodes a plan in force."""
    made = plan.made
    advice = None if plan.advice is None else _advice(plan.advice)
    if made is None:
        reason = "no plan has been made yet"
        return pb.BrainPlan(job_uid=plan.job, reason=reason, stale_because=plan.stale_because, fault_tolerance=advice)
    planned, chosen = made.planned, made.planned.explanation.chosen
    return message_of(
        pb.BrainPlan,
        made,
        job_uid=plan.job,
        action=planned.action.value,
        shape=planned.shape,
        reason=planned.reason,
        expected_throughput=0.0 if chosen is None else chosen.throughput,
        stale_because=plan.stale_because,
        fault_tolerance=advice,
    )


def _advice(advice: FaultToleranceAdvice) -> pb.FaultToleranceAdvice:
    """Encodes the best recovery strategy of the job, and the cost of each strategy."""
    ways = [
        message_of(pb.RecoveryEstimate, cost, strategy=str(way), checkpoint_interval=cost.interval)
        for way, cost in advice.costs.items()
    ]
    return message_of(pb.FaultToleranceAdvice, advice, strategy=advice.strategy.value, ways=ways)


def explanation_to(explained: ExplainedPlan) -> pb.PlanExplanation:
    """Encodes the numbers behind a plan."""
    made, constants = explained.made, explained.constants
    explanation = Explanation() if made is None else made.planned.explanation
    fit, memory = explanation.fit, explanation.memory
    measured = []
    if fit is not None and constants is not None:
        measured = [
            pb.MeasuredPoint(
                profile=message_of(pb.Profile, profile, sequence=0),
                predicted=throughput(constants, fit, profile.shape)[0],
            )
            for profile in explained.profiles
            if not profile.restarted
        ]
    return message_of(
        pb.PlanExplanation,
        explanation,
        plan=plan_to(explained.plan),
        fit=None if fit is None else _fit(fit),
        similar=[message_of(pb.SimilarPastJob, job, job_uid=job.id or "") for job in explanation.similar],
        memory=None if memory is None else _memory(memory),
        measured=measured,
        remaining_samples=explained.remaining_samples,
        earlier=[plan_to(PlanInForce.of(before)) for before in explained.earlier],
        kept="" if made is None else made.kept,
    )


def _fit(fit: ThroughputFit) -> pb.FitSummary:
    return message_of(pb.FitSummary, fit, coefficients=dict(zip(COEFFICIENTS, fit.coefficients, strict=True)))


def _memory(forecast: MemoryForecast) -> pb.MemoryOutlook:
    return message_of(pb.MemoryOutlook, forecast, oom_at_samples=forecast.oom_at_samples or 0.0)
