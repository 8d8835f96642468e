"""Between records of what happened and the rows that keep them."""

from typing import Any

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.history.changes import Codec, JobEnded, JobSubmitted, PlanMade, ProfileReported, StartUpObserved
from emberscale_brain.history.tables import JobRow, PlanRow, ProfileRow
from emberscale_brain.planner.types import (
    Explanation,
    JobId,
    JobMetadata,
    PastJob,
    PlanAction,
    PlannedShape,
    ShapeBounds,
    ThroughputFit,
)

METADATA: Codec[JobMetadata] = Codec(JobMetadata)
BOUNDS: Codec[ShapeBounds] = Codec(ShapeBounds)
SHAPE: Codec[JobShape] = Codec(JobShape)
PROFILE: Codec[JobProfile] = Codec(JobProfile)
FIT: Codec[ThroughputFit] = Codec(ThroughputFit)
EXPLANATION: Codec[Explanation] = Codec(Explanation)


def job_values(change: JobSubmitted) -> dict[str, Any]:
    """Columns of `jobs`."""
    return {
        "uid": change.job,
        "owner": change.owner,
        "name": change.metadata.name,
        "architecture": change.metadata.architecture,
        "metadata_": METADATA.plain(change.metadata),
        "bounds": BOUNDS.plain(change.bounds),
        "current": None if change.current is None else SHAPE.plain(change.current),
        "priority": change.priority,
        "fixed": change.fixed,
        "submitted_at": change.submitted_at,
        "last_plan": change.last_plan,
        "rows": 0,
    }


def submission_of(row: JobRow) -> JobSubmitted:
    """The inverse of `job_values`."""
    return JobSubmitted(
        job=JobId(row.uid),
        owner=row.owner,
        metadata=METADATA.from_plain(row.metadata_),
        bounds=BOUNDS.from_plain(row.bounds),
        submitted_at=row.submitted_at,
        current=None if row.current is None else SHAPE.from_plain(row.current),
        priority=row.priority,
        fixed=row.fixed,
        last_plan=row.last_plan,
    )


def end_values(change: JobEnded) -> dict[str, Any]:
    """Columns of `jobs` that say how it ended."""
    return {
        "phase": change.phase,
        "finished_at": change.finished_at,
        "final_shape": None if change.final_shape is None else SHAPE.plain(change.final_shape),
        "fit": None if change.fit is None else FIT.text(change.fit),
        "rows": change.rows,
        **({} if change.metadata is None else {"metadata_": METADATA.plain(change.metadata)}),
    }


def profile_values(change: ProfileReported) -> dict[str, Any]:
    """Columns of `profiles`."""
    return {
        "job_uid": change.job,
        "sequence": change.sequence,
        "time": change.profile.time,
        "profile": PROFILE.text(change.profile),
    }


def profile_of(row: ProfileRow) -> JobProfile:
    """The inverse of `profile_values`, without job and sequence."""
    return PROFILE.from_text(row.profile)


def start_up_values(change: StartUpObserved) -> dict[str, Any]:
    """Columns of `start_ups`."""
    return {
        "job_uid": change.job,
        "role": change.role,
        "time": change.time,
        "seconds": change.seconds,
        "paused_seconds": change.paused_seconds,
    }


def plan_values(change: PlanMade) -> dict[str, Any]:
    """Columns of `plans`."""
    planned = change.planned
    return {
        "job_uid": change.job,
        "version": change.version,
        "made_at": change.made_at,
        "planner": change.planner,
        "action": planned.action.value,
        "reason": planned.reason,
        "shape": None if planned.shape is None else SHAPE.plain(planned.shape),
        "explanation": EXPLANATION.text(planned.explanation),
        "kept": change.kept,
    }


def plan_of(row: PlanRow) -> PlanMade:
    """The inverse of `plan_values`."""
    return PlanMade(
        job=JobId(row.job_uid),
        version=row.version,
        made_at=row.made_at,
        planner=row.planner,
        planned=PlannedShape(
            shape=None if row.shape is None else SHAPE.from_plain(row.shape),
            action=PlanAction(row.action),
            reason=row.reason,
            explanation=EXPLANATION.from_text(row.explanation),
        ),
        kept=row.kept,
    )


def past_job_of(row: JobRow) -> PastJob:
    """A job that ended with a shape, as a warm start leans on it."""
    return PastJob(
        id=JobId(row.uid),
        owner=row.owner,
        metadata=METADATA.from_plain(row.metadata_),
        final_shape=SHAPE.from_plain(row.final_shape),
        fit=None if row.fit is None else FIT.from_text(row.fit),
        finished_at=row.finished_at or 0.0,
        rows=row.rows,
    )
