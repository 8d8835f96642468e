"""The tables, in SQLAlchemy's typed ORM, and the conversion between their rows and changes.

The schema is the same on SQLite and PostgreSQL.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    inspect,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from emberscale_api.shape import JobProfile, JobShape
from emberscale_brain.history.changes import Codec, JobEnded, JobSubmitted, PlanMade, ProfileReported
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
_Kind = TypeVar("_Kind")


class UnreadableRowError(ValueError):
    """A row holds a value that this version cannot read, for example because another version wrote it."""


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands for an object that cannot be read. Using its row raises an error; other rows of a query stay usable."""

    problem: str


class _Document(TypeDecorator[Any]):
    """A column that holds objects of one type as JSON.

    With `as_text`, the column is text: numbers may be infinite, which PostgreSQL's JSON cannot express.
    """

    impl: Any = JSON
    cache_ok = True

    def __init__(self, kind: type[Any], as_text: bool = False) -> None:
        super().__init__()
        self.kind, self.as_text = kind, as_text
        self.impl = Text() if as_text else _Json
        self._codec: Codec[Any] = Codec(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Converts an object to the column's value."""
        write = self._codec.text if self.as_text else self._codec.plain
        return None if value is None else write(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """The inverse. Raises ValueError."""
        read = self._codec.from_text if self.as_text else self._codec.from_plain
        return None if value is None else read(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """Returns a function that reads the driver's values, which SQLite does not check to be JSON."""
        read = super().result_processor(dialect, coltype) or (lambda value: value)

        def processed(value: Any) -> Any:
            try:
                return read(value)
            except ValueError as error:  # the base of pydantic's and json's errors
                return _Unreadable(str(error))

        return processed


class HistoryTable(DeclarativeBase):
    """Base of the tables."""


class JobRow(HistoryTable):
    """A job, running or ended."""

    __tablename__ = "jobs"

    uid: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(255))
    architecture: Mapped[str] = mapped_column(String(255))
    metadata_: Mapped[JobMetadata] = mapped_column("metadata", _Document(JobMetadata))
    bounds: Mapped[ShapeBounds] = mapped_column(_Document(ShapeBounds))
    current: Mapped[JobShape | None] = mapped_column(_Document(JobShape))
    priority: Mapped[float]
    fixed: Mapped[bool]
    submitted_at: Mapped[float]
    last_plan: Mapped[int] = mapped_column(BigInteger, server_default="0")
    finished_at: Mapped[float | None]
    phase: Mapped[str | None] = mapped_column(String(32))
    final_shape: Mapped[JobShape | None] = mapped_column(_Document(JobShape))
    fit: Mapped[ThroughputFit | None] = mapped_column(_Document(ThroughputFit, as_text=True))
    rows: Mapped[int] = mapped_column(BigInteger, default=0)

    __table_args__ = (Index("jobs_by_end", "phase", "finished_at"),)


class ClaimRow(HistoryTable):
    """The brain that may write; at most one row. `token` is unique to one brain, and `holder` describes it."""

    __tablename__ = "claims"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    token: Mapped[str] = mapped_column(String(32))
    holder: Mapped[str] = mapped_column(Text)
    begun_at: Mapped[float]


class ProfileRow(HistoryTable):
    """One accepted profile."""

    __tablename__ = "profiles"

    id: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=True)
    job_uid: Mapped[str] = mapped_column(ForeignKey("jobs.uid", ondelete="CASCADE"))
    sequence: Mapped[int] = mapped_column(BigInteger)
    time: Mapped[float]
    profile: Mapped[JobProfile] = mapped_column(_Document(JobProfile, as_text=True))

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
    """One plan of one job; `explanation` comes from the last round that `kept` the plan."""

    __tablename__ = "plans"

    id: Mapped[int] = mapped_column(_Id, primary_key=True, autoincrement=True)
    job_uid: Mapped[str] = mapped_column(ForeignKey("jobs.uid", ondelete="CASCADE"))
    version: Mapped[int] = mapped_column(BigInteger)
    made_at: Mapped[float]
    planner: Mapped[str] = mapped_column(String(255))
    action: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str] = mapped_column(Text)
    shape: Mapped[JobShape | None] = mapped_column(_Document(JobShape))
    explanation: Mapped[Explanation] = mapped_column(_Document(Explanation, as_text=True))
    kept: Mapped[str] = mapped_column(Text, server_default="")

    __table_args__ = (UniqueConstraint("job_uid", "version", name="plan_once"),)


def job_values(change: JobSubmitted) -> dict[str, Any]:
    """Columns of `jobs`."""
    metadata = change.metadata
    named = {"uid": change.job, "name": metadata.name, "architecture": metadata.architecture, "metadata_": metadata}
    return columns(JobRow, change, **named, rows=0)


def submission_of(row: JobRow) -> JobSubmitted:
    """The inverse of `job_values`."""
    return _read(JobSubmitted, row, job=JobId(row.uid), metadata=row.metadata_)


def end_values(change: JobEnded) -> dict[str, Any]:
    """Columns of `jobs` that say how it ended."""
    return columns(JobRow, change, **({} if change.metadata is None else {"metadata_": change.metadata}))


def metadata_of(row: JobRow) -> JobMetadata:
    """Returns what is known of a job. Raises UnreadableRowError, like all functions here that read rows."""
    return _readable("metadata", row.metadata_)


def profile_of(row: ProfileRow) -> ProfileReported:
    """The profile of a row."""
    return ProfileReported(JobId(row.job_uid), row.sequence, _readable("profile", row.profile))


def plan_values(change: PlanMade) -> dict[str, Any]:
    """Columns of `plans`."""
    planned = columns(PlanRow, change.planned, action=change.planned.action.value)
    return columns(PlanRow, change, job_uid=change.job, **planned)


def plan_of(row: PlanRow) -> PlanMade:
    """The inverse of `plan_values`."""
    try:
        action = PlanAction(row.action)
    except ValueError as error:
        raise UnreadableRowError(str(error)) from error
    planned = _read(PlannedShape, row, action=action)
    return _read(PlanMade, row, job=JobId(row.job_uid), planned=planned)


def past_job_of(row: JobRow) -> PastJob:
    """Returns a job that ended with a shape, as warm starts use it."""
    return _read(PastJob, row, id=JobId(row.uid), metadata=row.metadata_, finished_at=row.finished_at or 0.0)


def columns(table: type[HistoryTable], record: object, /, **converted: Any) -> dict[str, Any]:
    """Returns the values of a table's columns: a record's fields of the same names, and the `converted` ones.

    Columns without a field keep their defaults or, in an update, their values.
    """
    names = [column.key for column in inspect(table).column_attrs]
    return {name: getattr(record, name) for name in names if hasattr(record, name)} | converted


def _read(kind: type[_Kind], row: HistoryTable, /, **converted: Any) -> _Kind:
    """Returns a record whose fields have the values of the row's columns of the same names, or `converted` ones."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # all records are dataclasses
    values = {name: converted[name] if name in converted else getattr(row, name) for name in names}
    return kind(**{name: _readable(name, value) for name, value in values.items()})


def _readable(name: str, value: _Kind) -> _Kind:
    if isinstance(value, _Unreadable):
        raise UnreadableRowError(f"{name}: {value.problem}")
    return value
