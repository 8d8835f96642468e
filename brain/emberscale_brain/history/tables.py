"""The tables, as SQLAlchemy's typed ORM; the same on SQLite and PostgreSQL."""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

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

    __table_args__ = (
        Index("jobs_by_end", "phase", "finished_at"),
        Index("jobs_by_likeness", "owner", "architecture", "finished_at"),
    )


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
    """How long a pod took to serve."""

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
