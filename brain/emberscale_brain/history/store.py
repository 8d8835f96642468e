"""Reading and writing the configuration database.

Writing is idempotent: a change that is written twice, say after a connection broke at the commit, counts once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import CursorResult, Engine, delete, desc, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, StatementError
from sqlalchemy.orm import Session

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
    METADATA,
    JobRow,
    PlanRow,
    ProfileRow,
    StartUpRow,
    end_values,
    job_values,
    past_job_of,
    plan_of,
    plan_values,
    profile_of,
    profile_values,
    start_up_values,
    submission_of,
)
from emberscale_brain.planner.types import JobId, JobMetadata, PastJob

_DAY = 86_400.0
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention of each kind of record; ages are in days. A running job keeps the profiles of its window."""

    profiles_per_job: int = 256
    profile_days: float = 30.0
    plans_per_job: int = 64
    start_up_days: float = 90.0
    job_days: float = 365.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """The number of rows removed."""

    profiles: int
    plans: int
    start_ups: int
    jobs: int


class HistoryStore:
    """The database. Every method raises DatabaseAwayError while it cannot be reached, and DatabaseUnusableError.

    With `exclusive`, the latest claimant is the only writer, and all earlier ones raise ClaimLostError.
    """

    def __init__(self, engine: Engine, exclusive: bool = False) -> None:
        self._engine = engine
        dialect = postgresql if engine.dialect.name == "postgresql" else sqlite
        self._insert: Callable[[Any], Any] = dialect.insert
        self._claim = Claim(self._insert) if exclusive else None

    @classmethod
    def open(cls, url: str, exclusive: bool = False) -> "HistoryStore":
        """Does not connect. Raises DatabaseUnusableError for an address that cannot be one."""
        return cls(open_engine(url), exclusive)

    @property
    def address(self) -> str:
        """The database's URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def migrate(self) -> None:
        """Creates or upgrades the schema."""
        migrate(self._engine)

    def claim(self) -> None:
        """Where the store is exclusive, those before it have written their last.

        Raises ClaimLostError if this one has.
        """
        self._write(lambda session: None)

    def close(self) -> None:
        """Lets go of all connections."""
        self._engine.dispose()

    def write(self, changes: Sequence[Change]) -> None:
        """Writes all changes in one transaction, in order.

        Raises WriteRefusedError if the database refuses one of them, and ClaimLostError.
        """

        def insert_all(session: Session) -> None:
            for change in changes:
                match change:
                    case JobSubmitted():
                        # a suspended job that is submitted again runs again, as it is described now
                        statement = self._insert(JobRow).values(**job_values(change))
                        anew = {column.name: column for column in statement.excluded}
                        session.execute(statement.on_conflict_do_update(index_elements=["uid"], set_=anew))
                    case ProfileReported():
                        self._add(session, ProfileRow, profile_values(change))
                    case StartUpObserved():
                        self._add(session, StartUpRow, start_up_values(change))
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

        self._write(insert_all)

    def running_jobs(self, profiles_per_job: int) -> list[Change]:
        """Returns what a brain needs after a restart: running jobs, their last plans and their latest profiles."""

        def read(session: Session) -> list[Change]:
            changes: list[Change] = []
            for row in session.scalars(select(JobRow).where(JobRow.phase.is_(None)).order_by(JobRow.submitted_at)):
                job = JobId(row.uid)
                changes.append(submission_of(row))
                profiles = session.scalars(
                    select(ProfileRow)
                    .where(ProfileRow.job_uid == job)
                    .order_by(desc(ProfileRow.sequence))
                    .limit(profiles_per_job)
                ).all()
                changes += [
                    ProfileReported(job, profile.sequence, profile_of(profile)) for profile in reversed(profiles)
                ]
                last = session.scalars(
                    select(PlanRow).where(PlanRow.job_uid == job).order_by(desc(PlanRow.version)).limit(1)
                ).first()
                if last is not None:
                    changes.append(plan_of(last))
            return changes

        return self._in_transaction(read)

    def past_jobs(self, limit: int) -> list[PastJob]:
        """Completed jobs for the warm start, the latest first, at most `limit`."""

        def read(session: Session) -> list[PastJob]:
            rows = session.scalars(
                select(JobRow)
                .where(JobRow.phase == COMPLETE, JobRow.final_shape.is_not(None))
                .order_by(desc(JobRow.finished_at))
                .limit(limit)
            )
            return [past_job_of(row) for row in rows]

        return self._in_transaction(read)

    def start_ups(self, limit_per_role: int) -> dict[str, list[tuple[float, float]]]:
        """(seconds, paused seconds) of the latest start-ups of each role."""

        def read(session: Session) -> dict[str, list[tuple[float, float]]]:
            return {
                role: [
                    (seconds, paused)
                    for seconds, paused in session.execute(
                        select(StartUpRow.seconds, StartUpRow.paused_seconds)
                        .where(StartUpRow.role == role)
                        .order_by(desc(StartUpRow.time))
                        .limit(limit_per_role)
                    )
                ]
                for role in ("worker", "ps")
            }

        return self._in_transaction(read)

    def plans(self, job: JobId, limit: int) -> list[PlanMade]:
        """A job's plans, the latest first."""

        def read(session: Session) -> list[PlanMade]:
            rows = session.scalars(
                select(PlanRow).where(PlanRow.job_uid == job).order_by(desc(PlanRow.version)).limit(limit)
            )
            return [plan_of(row) for row in rows]

        return self._in_transaction(read)

    def metadata(self, job: JobId) -> JobMetadata | None:
        """Returns what is known of a job, running or ended; None for an unknown one."""

        def read(session: Session) -> JobMetadata | None:
            row = session.get(JobRow, job)
            return None if row is None else METADATA.from_plain(row.metadata_)

        return self._in_transaction(read)

    def profiles(self, job: JobId, limit: int) -> list[JobProfile]:
        """A job's latest profiles, oldest first."""

        def read(session: Session) -> list[JobProfile]:
            rows = session.scalars(
                select(ProfileRow).where(ProfileRow.job_uid == job).order_by(desc(ProfileRow.sequence)).limit(limit)
            ).all()
            return [profile_of(row) for row in reversed(rows)]

        return self._in_transaction(read)

    def prune(self, retention: Retention, now: float) -> Pruned:
        """Deletes what is older than it is kept for. Running jobs keep their latest profiles and plans whatever.

        Raises ClaimLostError.
        """

        def remove(session: Session) -> Pruned:
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

        return self._write(remove)

    def _keep_latest(self, session: Session, table: Any, order: Any, keep: int) -> int:
        """Deletes all but the `keep` latest rows of each job."""
        rank = func.row_number().over(partition_by=table.job_uid, order_by=desc(order)).label("rank")
        ranked = select(table.id, rank).subquery()
        return _count(session, delete(table).where(table.id.in_(select(ranked.c.id).where(ranked.c.rank > keep))))

    def _add(self, session: Session, table: Any, values: Mapping[str, Any]) -> None:
        session.execute(self._insert(table).values(**values).on_conflict_do_nothing())

    def _write(self, work: Callable[[Session], R]) -> R:
        """In a transaction that ends well only if this is who may write."""
        claim = self._claim
        if claim is None:
            return self._in_transaction(work)

        def claimed(session: Session) -> R:
            claim.hold(session)
            return work(session)

        result = self._in_transaction(claimed)
        claim.committed()
        return result

    def _in_transaction(self, work: Callable[[Session], R]) -> R:
        try:
            with Session(self._engine) as session, session.begin():
                return work(session)
        except (IntegrityError, DataError) as error:
            raise WriteRefusedError(first_line(error)) from error
        except DBAPIError as error:
            raise failure(error, self._engine) from error
        except (StatementError, OverflowError) as error:
            # a value that the driver cannot write, such as a number beyond 64 bits
            raise WriteRefusedError(str(error)) from error


def _count(session: Session, statement: Any) -> int:
    result = session.execute(statement.execution_options(synchronize_session=False))
    return result.rowcount if isinstance(result, CursorResult) else 0
