"""Encodes the brain's answers: plans, and the numbers behind them."""

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.codec import wire_profile, wire_shape
from emberscale_brain.fault_tolerance import FaultToleranceAdvice
from emberscale_brain.model.predict import throughput
from emberscale_brain.planner.types import (
    COEFFICIENTS,
    Candidate,
    Explanation,
    MemoryForecast,
    SimilarJob,
    ThroughputFit,
)
from emberscale_brain.service.in_force import ExplainedPlan, PlanInForce
from emberscale_brain.service.runtime import JobSummary


def plan_to(plan: PlanInForce) -> pb.BrainPlan:
    """A plan in force."""
    made = plan.made
    advice = None if plan.advice is None else _advice(plan.advice)
    if made is None:
        reason = "no plan has been made yet"
        return pb.BrainPlan(job_uid=plan.job, reason=reason, stale_because=plan.stale_because, fault_tolerance=advice)
    planned, chosen = made.planned, made.planned.explanation.chosen
    return pb.BrainPlan(
        job_uid=plan.job,
        version=made.version,
        made_at=made.made_at,
        planner=made.planner,
        action=planned.action.value,
        shape=None if planned.shape is None else wire_shape(planned.shape),
        reason=planned.reason,
        expected_throughput=0.0 if chosen is None else chosen.throughput,
        stale_because=plan.stale_because,
        fault_tolerance=advice,
    )


def _advice(advice: FaultToleranceAdvice) -> pb.FaultToleranceAdvice:
    """Returns the best recovery of the job, and the cost of each."""
    return pb.FaultToleranceAdvice(
        strategy=advice.strategy.value,
        checkpoint_interval=advice.checkpoint_interval,
        between_failures=advice.between_failures,
        reason=advice.reason,
        ways=[
            pb.RecoveryEstimate(
                strategy=str(way),
                overhead=cost.overhead,
                checkpoint_interval=cost.interval,
                expected_pls=cost.expected_pls,
            )
            for way, cost in advice.costs.items()
        ],
    )


def explanation_to(explained: ExplainedPlan) -> pb.PlanExplanation:
    """The numbers behind a plan."""
    made, constants = explained.made, explained.constants
    explanation = Explanation() if made is None else made.planned.explanation
    fit = explanation.fit
    message = pb.PlanExplanation(
        plan=plan_to(explained.plan),
        front=[_point(candidate) for candidate in explanation.front],
        expected_gain=explanation.expected_gain,
        expected_cost=explanation.expected_cost,
        overhead_seconds=explanation.overhead_seconds,
        saved_seconds=explanation.saved_seconds,
        weight=explanation.weight,
        similar=[_similar(job) for job in explanation.similar],
        numbers=explanation.numbers,
        remaining_samples=explained.remaining_samples,
        earlier=[plan_to(PlanInForce.of(before)) for before in explained.earlier],
        kept="" if made is None else made.kept,
    )
    if fit is not None:
        message.fit.CopyFrom(_fit(fit))
    if fit is not None and constants is not None:
        message.measured.extend(
            pb.MeasuredPoint(profile=wire_profile(profile), predicted=throughput(constants, fit, profile.shape)[0])
            for profile in explained.profiles
            if not profile.restarted
        )
    if explanation.chosen is not None:
        message.chosen.CopyFrom(_point(explanation.chosen))
    if explanation.present is not None:
        message.present.CopyFrom(_point(explanation.present))
    if explanation.memory is not None:
        message.memory.CopyFrom(_memory(explanation.memory))
    return message


def summary_to(job: JobSummary) -> pb.JobSummary:
    """A job in one line."""
    return pb.JobSummary(
        job_uid=job.submitted.job,
        name=job.submitted.metadata.name,
        owner=job.submitted.owner,
        current=None if job.current is None else wire_shape(job.current),
        plan=plan_to(job.plan),
        remaining_samples=job.remaining_samples,
        profiles=job.profiles,
        throughput=job.throughput,
    )


def _point(candidate: Candidate) -> pb.PlanPoint:
    return pb.PlanPoint(
        shape=wire_shape(candidate.shape),
        cost_per_hour=candidate.cost_per_hour,
        throughput=candidate.throughput,
        net=candidate.net,
        uncertainty=candidate.uncertainty,
    )


def _fit(fit: ThroughputFit) -> pb.FitSummary:
    return pb.FitSummary(
        coefficients=dict(zip(COEFFICIENTS, fit.coefficients, strict=True)),
        noise=fit.noise,
        rmsle=fit.rmsle,
        profiles=fit.profiles,
        distinct_shapes=fit.distinct_shapes,
        outliers=fit.outliers,
        prior_share=fit.prior_share,
        overlap=fit.overlap,
    )


def _similar(job: SimilarJob) -> pb.SimilarPastJob:
    return pb.SimilarPastJob(
        job_uid=job.id or "", similarity=job.similarity, features=job.features, shape=wire_shape(job.shape)
    )


def _memory(forecast: MemoryForecast) -> pb.MemoryOutlook:
    return pb.MemoryOutlook(
        law=forecast.law,
        expected=forecast.expected,
        lower=forecast.lower,
        upper=forecast.upper,
        oom_at_samples=forecast.oom_at_samples or 0.0,
    )
