"""Reads and writes the configuration database.

Writes are idempotent: a change that is written twice, say after a connection broke at the commit, counts once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import structlog
from pydantic import Field
from sqlalchemy import CursorResult, Engine, Select, delete, desc, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.orm import Session

from emberscale_api.job.schema import ManifestPart
from emberscale_api.shape import JobProfile
from emberscale_brain.history.changes import (
    COMPLETE,
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.history.database import Claim, WriteRefusedError, failure, first_line, migrate, open_engine
from emberscale_brain.history.tables import (
    HistoryTable,
    JobRow,
    PlanRow,
    ProfileRow,
    StartUpRow,
    UnreadableRowError,
    columns,
    end_values,
    job_values,
    metadata_of,
    past_job_of,
    plan_of,
    plan_values,
    profile_of,
    submission_of,
)
from emberscale_brain.planner.types import JobId, JobMetadata, PastJob

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_DAY = 86_400.0
_Row = TypeVar("_Row", bound=HistoryTable)
_Kind = TypeVar("_Kind")
_log = structlog.get_logger()


class Retention(ManifestPart):
    """How long the database keeps each kind of record. A running job keeps the profiles of its window."""

    profiles_per_job: int = Field(default=256, ge=1)
    profile_days: Positive = 30.0
    plans_per_job: int = Field(default=64, ge=1)
    start_up_days: Positive = 90.0
    job_days: Positive = 365.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """The number of rows removed."""

    profiles: int
    plans: int
    start_ups: int
    jobs: int


class HistoryStore:
    """The database. Every method raises DatabaseAwayError while it cannot be reached, and DatabaseUnusableError.

    Rows that this version cannot read are left out and logged.

    With `exclusive`, the latest claimant is the only writer, and all earlier ones raise ClaimLostError.
    """

    def __init__(self, engine: Engine, exclusive: bool = False) -> None:
        self._engine = engine
        dialect = postgresql if engine.dialect.name == "postgresql" else sqlite
        self._insert: Callable[[Any], Any] = dialect.insert
        self._claim = Claim(self._insert) if exclusive else None

    @classmethod
    def open(cls, url: str, exclusive: bool = False) -> "HistoryStore":
        """Returns a store without connecting. Raises DatabaseUnusableError for an invalid address."""
        return cls(open_engine(url), exclusive)

    @property
    def address(self) -> str:
        """The database's URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def migrate(self) -> None:
        """Creates or upgrades the schema."""
        migrate(self._engine)

    def claim(self) -> None:
        """Claims the database if the store is exclusive, so that earlier claimants can no longer write.

        Raises ClaimLostError if a later claimant has claimed it since.
        """
        with self._writing():
            pass

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def write(self, changes: Sequence[Change]) -> None:
        """Writes all changes in one transaction, in order.

        Raises WriteRefusedError if the database refuses one of them, and ClaimLostError.
        """
        with self._writing() as session:
            for change in changes:
                match change:
                    case JobSubmitted():
                        # a suspended job that is submitted again runs again, with its new description
                        statement = self._insert(JobRow).values(**job_values(change))
                        anew = {column.name: column for column in statement.excluded}
                        session.execute(statement.on_conflict_do_update(index_elements=["uid"], set_=anew))
                    case ProfileReported():
                        self._add(session, ProfileRow, change, job_uid=change.job, time=change.profile.time)
                    case StartUpObserved():
                        self._add(session, StartUpRow, change, job_uid=change.job)
                    case PlanMade():
                        # a plan that stays in force gets new reasons as more is known
                        values = plan_values(change)
                        statement = self._insert(PlanRow).values(**values)
                        session.execute(
                            statement.on_conflict_do_update(index_elements=["job_uid", "version"], set_=values)
                        )
                    case JobEnded():
                        ended = update(JobRow).where(JobRow.uid == change.job).values(**end_values(change))
                        if not _count(session, ended):
                            raise WriteRefusedError(f"job {change.job!r} is not in the database")

    def running_ids(self) -> list[JobId]:
        """The jobs that have not ended, readable or not."""
        with self._transaction() as session:
            return [JobId(uid) for uid in session.scalars(select(JobRow.uid).where(JobRow.phase.is_(None)))]

    def running_jobs(self, profiles_per_job: int) -> list[Change]:
        """Returns what a brain needs after a restart: running jobs, their last plans and their latest profiles.

        A job whose description or plan in force cannot be read is left out: the job is then unknown, and its master
        submits it again.
        """
        running = select(JobRow).where(JobRow.phase.is_(None)).order_by(JobRow.submitted_at)
        with self._transaction() as session:
            jobs = _readable(session.scalars(running), lambda row: self._running(session, row, profiles_per_job))
            return [change for job in jobs for change in job]

    def _running(self, session: Session, row: JobRow, profiles_per_job: int) -> list[Change]:
        job = JobId(row.uid)
        profiles = session.scalars(_latest(ProfileRow, job, ProfileRow.sequence, profiles_per_job)).all()
        plans = session.scalars(_latest(PlanRow, job, PlanRow.version, 1))
        return [submission_of(row), *_readable(reversed(profiles), profile_of), *map(plan_of, plans)]

    def past_jobs(self, limit: int) -> list[PastJob]:
        """Returns completed jobs for the warm start, the latest first, at most `limit`."""
        completed = select(JobRow).where(JobRow.phase == COMPLETE, JobRow.final_shape.is_not(None))
        with self._transaction() as session:
            rows = session.scalars(completed.order_by(desc(JobRow.finished_at)).limit(limit))
            return list(_readable(rows, past_job_of))

    def start_ups(self, limit_per_role: int, limit_per_job: int) -> dict[str, list[tuple[float, float]]]:
        """(seconds, paused seconds) of the latest start-ups of each role, of each job only some."""
        of_job = func.row_number().over(
            partition_by=(StartUpRow.role, StartUpRow.job_uid), order_by=desc(StartUpRow.time)
        )
        every = select(
            StartUpRow.role, StartUpRow.time, StartUpRow.seconds, StartUpRow.paused_seconds, of_job.label("rank")
        )
        known = every.subquery().c
        latest = select(known.seconds, known.paused_seconds).where(known.rank <= limit_per_job)
        with self._transaction() as session:
            return {
                role: [
                    (seconds, paused)
                    for seconds, paused in session.execute(
                        latest.where(known.role == role).order_by(desc(known.time)).limit(limit_per_role)
                    )
                ]
                for role in ("worker", "ps")
            }

    def plans(self, job: JobId, limit: int) -> list[PlanMade]:
        """A job's plans, the latest first."""
        with self._transaction() as session:
            return list(_readable(session.scalars(_latest(PlanRow, job, PlanRow.version, limit)), plan_of))

    def metadata(self, job: JobId) -> JobMetadata | None:
        """Returns what is known of a job, running or ended; None for an unknown one."""
        with self._transaction() as session:
            rows = session.scalars(select(JobRow).where(JobRow.uid == job))
            return next(_readable(rows, metadata_of), None)

    def profiles(self, job: JobId, limit: int) -> list[JobProfile]:
        """A job's latest profiles, oldest first."""
        with self._transaction() as session:
            rows = session.scalars(_latest(ProfileRow, job, ProfileRow.sequence, limit)).all()
            return [reported.profile for reported in _readable(reversed(rows), profile_of)]

    def prune(self, retention: Retention, now: float) -> Pruned:
        """Deletes expired records. Running jobs keep their latest profiles and plans, however old.

        Raises ClaimLostError.
        """

        with self._writing() as session:
            ended = select(JobRow.uid).where(JobRow.phase.is_not(None))
            old = ProfileRow.time < now - retention.profile_days * _DAY
            profiles = _count(session, delete(ProfileRow).where(old, ProfileRow.job_uid.in_(ended)))
            profiles += self._keep_latest(session, ProfileRow, ProfileRow.sequence, retention.profiles_per_job)
            plans = self._keep_latest(session, PlanRow, PlanRow.version, retention.plans_per_job)
            start_ups = _count(
                session, delete(StartUpRow).where(StartUpRow.time < now - retention.start_up_days * _DAY)
            )
            jobs = _count(session, delete(JobRow).where(JobRow.finished_at < now - retention.job_days * _DAY))
        return Pruned(profiles, plans, start_ups, jobs)

    def _keep_latest(self, session: Session, table: Any, order: Any, keep: int) -> int:
        """Deletes all but the `keep` latest rows of each job."""
        rank = func.row_number().over(partition_by=table.job_uid, order_by=desc(order)).label("rank")
        ranked = select(table.id, rank).subquery()
        return _count(session, delete(table).where(table.id.in_(select(ranked.c.id).where(ranked.c.rank > keep))))

    def _add(self, session: Session, table: type[HistoryTable], change: Change, **converted: Any) -> None:
        values = columns(table, change, **converted)
        session.execute(self._insert(table).values(**values).on_conflict_do_nothing())

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """A transaction that commits only if this store may write."""
        with self._transaction() as session:
            if self._claim is not None:
                self._claim.hold(session)
            yield session
        if self._claim is not None:
            self._claim.committed()

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except (IntegrityError, DataError) as error:
            raise WriteRefusedError(first_line(error)) from error
        except DBAPIError as error:
            raise failure(error, self._engine) from error
        except (StatementError, OverflowError) as error:
            # a value that the driver cannot write, such as a number beyond 64 bits
            raise WriteRefusedError(str(error)) from error


def _readable(rows: Iterable[_Row], read: Callable[[_Row], _Kind]) -> Iterator[_Kind]:
    """Yields what `read` makes of each row; logs and skips unreadable rows, so that they do not hold up the others."""
    for row in rows:
        try:
            found = read(row)
        except UnreadableRowError as error:
            job = row.uid if isinstance(row, JobRow) else getattr(row, "job_uid", "")
            _log.warning("row_unreadable", table=row.__tablename__, job_uid=job, problem=str(error))
        else:
            yield found


def _latest(table: Any, job: JobId, order: Any, limit: int) -> Select[Any]:
    """Selects the latest rows of a job, the latest first."""
    return select(table).where(table.job_uid == job).order_by(desc(order)).limit(limit)


def _count(session: Session, statement: Any) -> int:
    result = session.execute(statement.execution_options(synchronize_session=False))
    return result.rowcount if isinstance(result, CursorResult) else 0
