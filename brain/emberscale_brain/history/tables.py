"""The tables, as SQLAlchemy's typed ORM, and the way between their rows and records of what happened.

The schema is the same on SQLite and PostgreSQL.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.history.changes import Codec, JobEnded, JobSubmitted, PlanMade, ProfileReported, StartUpObserved
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

# PostgreSQL numbers rows with 64 bits; SQLite numbers them by itself only where the column is a plain INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")
_Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


class HistoryTable(DeclarativeBase):
    """Base of the tables."""


class JobRow(HistoryTable):
    """A job, running or ended. JSON columns hold the planner's types of the same name.

    `fit` is JSON as text: its covariance may be infinite, which PostgreSQL's JSON cannot say.
    """

    __tablename__ = "jobs"

    uid: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(255))
    architecture: Mapped[str] = mapped_column(String(255))
    metadata_: Mapped[dict[str, Any]] = mapped_column("metadata", _Json)
    bounds: Mapped[dict[str, Any]] = mapped_column(_Json)
    current: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    priority: Mapped[float]
    fixed: Mapped[bool]
    submitted_at: Mapped[float]
    last_plan: Mapped[int] = mapped_column(BigInteger, server_default="0")
    finished_at: Mapped[float | None]
    phase: Mapped[str | None] = mapped_column(String(32))
    final_shape: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    fit: Mapped[str | None] = mapped_column(Text)
    rows: Mapped[int] = mapped_column(BigInteger, default=0)

    __table_args__ = (Index("jobs_by_end", "phase", "finished_at"),)


class ClaimRow(HistoryTable):
    """The brain that may write; at most one row. `token` is one brain's alone, `holder` says which that is."""

    __tablename__ = "claims"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    token: Mapped[str] = mapped_column(String(32))
    holder: Mapped[str] = mapped_column(Text)
    begun_at: Mapped[float]


class ProfileRow(HistoryTable):
    """One accepted profile, as JSON."""

    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=True)
    job_uid: Mapped[str] = mapped_column(ForeignKey("jobs.uid", ondelete="CASCADE"))
    sequence: Mapped[int] = mapped_column(BigInteger)
    time: Mapped[float]
    profile: Mapped[str] = mapped_column(Text)

    __table_args__ = (UniqueConstraint("job_uid", "sequence", name="profile_once"), Index("profiles_by_time", "time"))


class StartUpRow(HistoryTable):
    """The time that a pod took to serve."""

    __tablename__ = "start_ups"

    id: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=True)
    job_uid: Mapped[str] = mapped_column(ForeignKey("jobs.uid", ondelete="CASCADE"))
    role: Mapped[str] = mapped_column(String(16))
    time: Mapped[float]
    seconds: Mapped[float]
    paused_seconds: Mapped[float]

    __table_args__ = (
        UniqueConstraint("job_uid", "role", "time", name="start_up_once"),
        Index("start_ups_by_role", "role", "time"),
    )


class PlanRow(HistoryTable):
    """One plan of one job. `explanation`, of the round that `kept` it last, is JSON as text: it may hold infinities."""

    __tablename__ = "plans"

    id: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=True)
    job_uid: Mapped[str] = mapped_column(ForeignKey("jobs.uid", ondelete="CASCADE"))
    version: Mapped[int] = mapped_column(BigInteger)
    made_at: Mapped[float]
    planner: Mapped[str] = mapped_column(String(255))
    action: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(Text)
    shape: Mapped[dict[str, Any] | None] = mapped_column(_Json)
    explanation: Mapped[str] = mapped_column(Text)
    kept: Mapped[str] = mapped_column(Text, server_default="")

    __table_args__ = (UniqueConstraint("job_uid", "version", name="plan_once"),)


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
