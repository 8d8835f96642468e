"""Converts between messages and the planner's types."""

from collections.abc import Sequence

from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.codec import profile_from_wire, shape_from_wire, wire_profile, wire_shape
from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.fault_tolerance import FaultToleranceAdvice
from emberscale_brain.history.changes import (
    COMPLETE,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.model.predict import ModelConstants, throughput
from emberscale_brain.planner.types import (
    COEFFICIENTS,
    Candidate,
    Explanation,
    JobId,
    JobMetadata,
    MemoryForecast,
    ShapeBounds,
    SimilarJob,
    ThroughputFit,
)
from emberscale_brain.service.checks import (
    LARGEST,
    MalformedRequestError,
    check_number,
    check_shape,
    check_stages,
    check_submission,
    check_text,
)
from emberscale_brain.service.state import KnownJob

_PHASES = (COMPLETE, JobPhase.FAILED.value, JobPhase.SUSPENDED.value)


def shape_from(message: pb.Shape) -> JobShape:
    """A shape. Raises MalformedRequestError."""
    check_shape("shape", message)
    try:
        return shape_from_wire(message)
    except ValueError as error:
        raise MalformedRequestError(f"shape: {error}") from error


def submission_from(request: pb.SubmitJobRequest, defaults: ShapeBounds, now: float) -> JobSubmitted:
    """A submission; limits that are 0 take the defaults. Raises MalformedRequestError."""
    check_submission(request)
    description = request.description
    try:
        metadata = JobMetadata(
            architecture=description.architecture,
            batch_size=description.batch_size,
            dense_bytes=description.dense_bytes,
            embedding_dimension=description.embedding_dimension,
            tables=description.tables,
            total_samples=description.total_samples,
            name=description.name,
            optimizer=description.optimizer,
            data_bytes=description.data_bytes,
            epochs=max(1, description.epochs),
            most_rows=description.most_rows,
            target_pls=description.target_pls,
        )
    except ValueError as error:
        raise MalformedRequestError(f"description: {error}") from error
    return JobSubmitted(
        job=JobId(request.job_uid),
        owner=request.owner,
        metadata=metadata,
        bounds=_bounds_from(request.limits, defaults),
        submitted_at=min(request.submitted_at or now, now),
        current=shape_from(request.current) if request.HasField("current") else None,
        priority=request.priority if request.priority > 0 else 1.0,
        fixed=request.fixed,
        last_plan=request.last_plan,
    )


def _bounds_from(limits: pb.ShapeLimits, defaults: ShapeBounds) -> ShapeBounds:
    least, most = limits.least, limits.most
    step = limits.cpu_step or defaults.cpu_step
    try:
        return ShapeBounds(
            workers=(least.workers or defaults.workers[0], most.workers or defaults.workers[1]),
            ps=(least.ps or defaults.ps[0], most.ps or defaults.ps[1]),
            worker_cpu=(
                least.worker_cpu or min(step, defaults.worker_cpu[0]),
                most.worker_cpu or defaults.worker_cpu[1],
            ),
            ps_cpu=(least.ps_cpu or min(step, defaults.ps_cpu[0]), most.ps_cpu or defaults.ps_cpu[1]),
            worker_memory=(
                least.worker_memory or defaults.worker_memory[0],
                most.worker_memory or defaults.worker_memory[1],
            ),
            ps_memory=(least.ps_memory or defaults.ps_memory[0], most.ps_memory or defaults.ps_memory[1]),
            cpu_step=step,
        )
    except ValueError as error:
        raise MalformedRequestError(f"limits: {error}") from error


def profile_from(job: JobId, message: pb.Profile) -> ProfileReported:
    """Decodes a reported profile, and checks only its sequence and shape. Raises MalformedRequestError."""
    check_number("sequence", message.sequence, 0, LARGEST)
    check_stages(list(message.stage_fractions))
    check_shape("shape", message.shape)
    try:
        profile = profile_from_wire(message)
    except ValueError as error:
        raise MalformedRequestError(f"shape: {error}") from error
    return ProfileReported(job, message.sequence, profile)


def start_up_from(job: JobId, message: pb.StartUp, now: float) -> StartUpObserved:
    """Decodes a reported start-up without checks; a time in the future becomes now."""
    return StartUpObserved(job, message.role, min(message.time or now, now), message.seconds, message.paused_seconds)


def job_from(uid: str) -> JobId:
    """The name of a job that may be known. Raises MalformedRequestError."""
    return JobId(check_text("job_uid", uid))


def outcome_from(request: pb.ReportOutcomeRequest, now: float) -> JobEnded:
    """Returns the end of a job. Raises MalformedRequestError."""
    if request.phase not in _PHASES:
        raise MalformedRequestError(f"phase: must be {', '.join(_PHASES)}, not {request.phase!r}")
    check_number("finished_at", request.finished_at, 0, LARGEST)
    check_number("rows", request.rows, 0, LARGEST)
    return JobEnded(
        job=job_from(request.job_uid),
        phase=request.phase,
        finished_at=min(request.finished_at or now, now),
        final_shape=shape_from(request.final_shape) if request.HasField("final_shape") else None,
        rows=request.rows,
    )


def plan_to(plan: PlanMade) -> pb.BrainPlan:
    """A plan in force."""
    planned = plan.planned
    chosen, advice = planned.explanation.chosen, planned.explanation.fault_tolerance
    return pb.BrainPlan(
        job_uid=plan.job,
        version=plan.version,
        made_at=plan.made_at,
        planner=plan.planner,
        action=planned.action.value,
        shape=None if planned.shape is None else wire_shape(planned.shape),
        reason=planned.reason,
        expected_throughput=0.0 if chosen is None else chosen.throughput,
        fault_tolerance=None if advice is None else advice_to(advice),
    )


def no_plan(job: JobId) -> pb.BrainPlan:
    """The message for a job without a plan."""
    return pb.BrainPlan(job_uid=job, version=0, reason="no plan has been made yet")


def advice_to(advice: FaultToleranceAdvice) -> pb.FaultToleranceAdvice:
    """Returns the best recovery of the job, and the cost of each."""
    return pb.FaultToleranceAdvice(
        strategy=advice.strategy.value,
        checkpoint_interval=advice.checkpoint_interval,
        between_failures=advice.between_failures,
        reason=advice.reason,
        ways=[
            pb.RecoveryEstimate(
                strategy=way.value,
                overhead=cost.overhead,
                checkpoint_interval=cost.interval,
                expected_pls=cost.expected_pls,
            )
            for way, cost in advice.costs.items()
        ],
    )


def explanation_to(
    plan: pb.BrainPlan,
    made: PlanMade | None,
    earlier: Sequence[PlanMade],
    remaining_samples: int = 0,
    profiles: Sequence[JobProfile] = (),
    constants: ModelConstants | None = None,
) -> pb.PlanExplanation:
    """The numbers behind a plan; with `constants`, also the fit's prediction for every measured shape.

    `plan` is the plan's message, and `made` the same with present knowledge; None for a plan that was never made.
    """
    explanation = Explanation() if made is None else made.planned.explanation
    fit = explanation.fit
    message = pb.PlanExplanation(
        plan=plan,
        front=[_point(candidate) for candidate in explanation.front],
        expected_gain=explanation.expected_gain,
        expected_cost=explanation.expected_cost,
        overhead_seconds=explanation.overhead_seconds,
        saved_seconds=explanation.saved_seconds,
        weight=explanation.weight,
        similar=[_similar(job) for job in explanation.similar],
        numbers=explanation.numbers,
        remaining_samples=remaining_samples,
        earlier=[plan_to(before) for before in earlier],
        kept="" if made is None else made.kept,
    )
    if fit is not None:
        message.fit.CopyFrom(_fit(fit))
    if fit is not None and constants is not None:
        message.measured.extend(
            pb.MeasuredPoint(profile=wire_profile(profile), predicted=throughput(constants, fit, profile.shape)[0])
            for profile in profiles
            if not profile.restarted
        )
    if explanation.chosen is not None:
        message.chosen.CopyFrom(_point(explanation.chosen))
    if explanation.present is not None:
        message.present.CopyFrom(_point(explanation.present))
    if explanation.memory is not None:
        message.memory.CopyFrom(_memory(explanation.memory))
    return message


def summary_to(known: KnownJob, plan: pb.BrainPlan) -> pb.JobSummary:
    """A job in one line."""
    return pb.JobSummary(
        job_uid=known.submitted.job,
        name=known.submitted.metadata.name,
        owner=known.submitted.owner,
        current=None if known.shape is None else wire_shape(known.shape),
        plan=plan,
        remaining_samples=known.remaining_samples,
        profiles=len(known.profiles),
        throughput=known.profiles[-1].throughput if known.profiles else 0.0,
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
