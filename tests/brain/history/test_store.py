import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import text

from emberscale_api.shape import GIB, JobProfile, JobShape
from emberscale_brain.history import database
from emberscale_brain.history.changes import (
    Change,
    JobEnded,
    JobSubmitted,
    PlanMade,
    ProfileReported,
    StartUpObserved,
)
from emberscale_brain.history.database import (
    ClaimLostError,
    DatabaseAwayError,
    DatabaseUnusableError,
    WriteRefusedError,
    open_engine,
)
from emberscale_brain.history.store import HistoryStore, Pruned, Retention
from emberscale_brain.history.tables import HistoryTable
from emberscale_brain.planner.types import (
    Explanation,
    JobId,
    JobMetadata,
    PlanAction,
    PlannedShape,
    ShapeBounds,
    SimilarJob,
    ThroughputFit,
)
from own_logs import own_logs
from postgres import PostgresServer

SHAPE = JobShape(8, 4, 4, 4, 4 * GIB, 300 * GIB)
FIT = ThroughputFit((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), ((math.inf,) * 6,) * 6, 0.05, 0.03, 10, 3)


def submitted(job: str, owner: str = "ann", architecture: str = "DLRM", at: float = 0.0) -> JobSubmitted:
    metadata = JobMetadata(architecture, 512, 10**6, 416, 26, 10**12, name="ads")
    return JobSubmitted(JobId(job), owner, metadata, ShapeBounds(), at, current=SHAPE, last_plan=7)


def profile(job: str, sequence: int, time: float = 0.0) -> ProfileReported:
    measured = JobProfile(
        time=time,
        shape=SHAPE,
        batch_size=512,
        iteration_seconds=0.1,
        throughput=41_000.5,
        samples=10**12,
        rows=10**10,
        ps_memory=200 * GIB,
        worker_memory=GIB,
        worker_cpu_utilization=0.4,
        ps_cpu_utilization=0.3,
        stage_fractions={"pull": 0.25},
        restarted=True,
        total_samples=10**13,
        failures=3,
        checkpoint_cost=1.5,
    )
    return ProfileReported(JobId(job), sequence, measured)


def plan(job: str, version: int) -> PlanMade:
    explanation = Explanation(
        fit=FIT, similar=(SimilarJob(JobId("z"), 0.9, {"owner": 1.0}, SHAPE),), numbers={"gain": math.inf}
    )
    return PlanMade(JobId(job), version, 7.0, "default", PlannedShape(SHAPE, PlanAction.SCALE, "faster", explanation))


def ended(job: str, at: float = 100.0, phase: str = "Complete") -> JobEnded:
    return JobEnded(JobId(job), phase, at, SHAPE, FIT, 5 * 10**9)


def migrations_of(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("emberscale_brain.history") / "migrations"))
    config.attributes["engine"] = open_engine(database_url)
    return config


@pytest.fixture
def others(postgres_server: PostgresServer) -> Iterator[None]:
    """A database with tables of another program, and a user without rights."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE guest LOGIN")
        connection.execute("CREATE DATABASE others")
        with psycopg.connect(postgres_server.url("others"), autocommit=True) as others:
            others.execute("CREATE TABLE jobs (name TEXT)")
        yield
        connection.execute("DROP DATABASE others")
        connection.execute("DROP OWNED BY guest")
        connection.execute("DROP ROLE guest")


def test_what_is_written_is_read_again_exactly(store: HistoryStore) -> None:
    changes: list[Change] = [submitted("a"), profile("a", 1), profile("a", 2), plan("a", 1), plan("a", 2)]
    store.write(changes)
    assert store.running_jobs(10) == [submitted("a"), profile("a", 1), profile("a", 2), plan("a", 2)]
    assert store.plans(JobId("a"), 5) == [plan("a", 2), plan("a", 1)]
    assert store.profiles(JobId("a"), 1) == [profile("a", 2).profile]


@pytest.mark.parametrize(
    ("spoil", "running"),
    [
        ("UPDATE jobs SET bounds = '{\"workers\": \"some\"}' WHERE uid = 'b'", ["a"]),
        ("UPDATE plans SET explanation = '{' WHERE job_uid = 'b'", ["a"]),
        ("UPDATE plans SET action = 'Split' WHERE job_uid = 'b'", ["a"]),
        ("UPDATE profiles SET profile = '{}' WHERE job_uid = 'b'", ["b", "a"]),
    ],
)
def test_a_row_that_cannot_be_read_holds_up_no_other(
    store: HistoryStore, database_url: str, spoil: str, running: list[str]
) -> None:
    """Another version may have written the row. Without its last plan, a job would get plan versions again."""
    for job in ("b", "a"):
        store.write([submitted(job), profile(job, 1), plan(job, 1)])
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text(spoil))
    engine.dispose()
    with own_logs() as told:
        changes = store.running_jobs(10)
    assert list(dict.fromkeys(change.job for change in changes)) == running
    assert changes[-3:] == [submitted("a"), profile("a", 1), plan("a", 1)]
    assert [(entry["event"], entry["job_uid"]) for entry in told] == [("row_unreadable", "b")]
    assert sorted(store.running_ids()) == ["a", "b"]
    store.write([submitted("b"), plan("b", 1)])
    assert [change.job for change in store.running_jobs(0) if isinstance(change, PlanMade)] == ["b", "a"]


@pytest.mark.parametrize("spoilt", ["", "{", "no JSON", "NaN"])
def test_text_that_is_no_json_holds_up_no_other(tmp_path: Path, spoilt: str) -> None:
    """SQLite stores any text as JSON; PostgreSQL does not."""
    url = f"sqlite:///{tmp_path}/history.db"
    store = HistoryStore.open(url)
    store.migrate()
    for job in ("a", "b"):
        store.write([submitted(job), ended(job)])
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET metadata = :spoilt WHERE uid = 'a'"), {"spoilt": spoilt})
    engine.dispose()
    with own_logs() as told:
        assert [job.id for job in store.past_jobs(10)] == ["b"]
        assert store.metadata(JobId("a")) is None
    assert [(entry["event"], entry["job_uid"]) for entry in told] == [("row_unreadable", "a")] * 2
    store.close()


def test_a_past_job_that_cannot_be_read_holds_up_no_other(store: HistoryStore, database_url: str) -> None:
    for job in ("a", "b"):
        store.write([submitted(job), ended(job)])
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET fit = '[]', metadata = '{}' WHERE uid = 'a'"))
    engine.dispose()
    assert [job.id for job in store.past_jobs(10)] == ["b"]
    assert store.metadata(JobId("a")) is None


def test_writing_again_changes_nothing(store: HistoryStore) -> None:
    changes: list[Change] = [
        submitted("a"),
        profile("a", 1),
        StartUpObserved(JobId("a"), "ps", 3.0, 40.0, 2.0),
        plan("a", 1),
    ]
    store.write(changes)
    store.write([*changes, replace(profile("a", 1), profile=replace(profile("a", 1).profile, throughput=1.0))])
    assert store.running_jobs(10) == [submitted("a"), profile("a", 1), plan("a", 1)]
    assert store.start_ups(10, 10) == {"worker": [], "ps": [(40.0, 2.0)]}


def test_of_the_latest_start_ups_one_job_has_a_share(store: HistoryStore) -> None:
    store.write([submitted("a"), submitted("b")])
    store.write([StartUpObserved(JobId("a"), "ps", float(at), 40.0 + at, 2.0) for at in range(4)])
    store.write([StartUpObserved(JobId("b"), "ps", 10.0 + at, 100.0 + at, 9.0) for at in range(8)])
    store.write([StartUpObserved(JobId("b"), "worker", 1.0, 7.0, 1.0)])
    assert store.start_ups(10, 3) == {
        "worker": [(7.0, 1.0)],
        "ps": [(107.0, 9.0), (106.0, 9.0), (105.0, 9.0), (43.0, 2.0), (42.0, 2.0), (41.0, 2.0)],
    }
    assert len(store.start_ups(4, 3)["ps"]) == 4


def test_a_batch_is_written_whole_or_not_at_all(store: HistoryStore) -> None:
    with pytest.raises(WriteRefusedError):
        store.write([submitted("a"), profile("nobody", 1)])
    with pytest.raises(WriteRefusedError):
        store.write([submitted("a"), replace(submitted("b"), owner="x" * 300), profile("a", 1 << 70)])
    assert store.running_jobs(10) == []


def test_of_those_that_write_alone_the_last_to_come_does(store: HistoryStore, database_url: str) -> None:
    first, second = (HistoryStore.open(database_url, exclusive=True) for _ in range(2))
    first.claim()
    first.write([submitted("a"), plan("a", 1)])
    second.claim()
    for refused in (lambda: first.write([plan("a", 2)]), lambda: first.prune(Retention(), 0.0), first.claim):
        with pytest.raises(ClaimLostError, match=r"another brain has the database now, process \d+ on .*, begun at 20"):
            refused()
    second.write([plan("a", 3)])
    second.claim()
    store.write([plan("a", 4)])  # from a store that shares the database, as brains next to jobs of one machine do
    assert [made.version for made in second.plans(JobId("a"), 10)] == [4, 3, 1]
    for opened in (first, second):
        opened.close()


def test_a_write_that_the_database_refuses_claims_nothing(store: HistoryStore, database_url: str) -> None:
    first, second = (HistoryStore.open(database_url, exclusive=True) for _ in range(2))
    first.claim()
    with pytest.raises(WriteRefusedError):
        second.write([profile("nobody", 1)])
    first.write([submitted("a")])
    second.write([submitted("b")])
    with pytest.raises(ClaimLostError):
        first.write([submitted("c")])
    for opened in (first, second):
        opened.close()


def test_a_database_that_lost_everything_belongs_to_who_had_it(store: HistoryStore, database_url: str) -> None:
    mine = HistoryStore.open(database_url, exclusive=True)
    mine.claim()
    command.downgrade(migrations_of(database_url), "base")
    mine.migrate()
    mine.claim()
    mine.write([submitted("a")])
    assert mine.running_jobs(10) == [submitted("a")]
    mine.close()


def test_a_brain_that_fell_silent_while_it_wrote_holds_up_nobody_for_ever(
    store: HistoryStore, database_url: str
) -> None:
    silent, next_one = open_engine(database_url), HistoryStore.open(database_url, exclusive=True)
    next_one.claim()
    with silent.connect() as connection:
        connection.execute(text("UPDATE claims SET holder = 'silent'"))
        with pytest.raises(DatabaseAwayError, match="lock"):
            next_one.write([submitted("a")])
    next_one.write([submitted("a")])
    next_one.close()


def test_a_statement_that_hangs_in_the_server_ends_and_the_database_counts_as_away(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_STATEMENT_SECONDS", 1)
    store = HistoryStore.open(postgres_url)
    store.migrate()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END'"
        )
        connection.execute("CREATE TRIGGER hang BEFORE INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION hang()")
    with pytest.raises(DatabaseAwayError, match="statement timeout"):
        store.write([submitted("a")])
    store.close()


def test_a_migration_may_take_longer_than_other_statements(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_STATEMENT_SECONDS", 1)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION dawdle() RETURNS event_trigger LANGUAGE plpgsql AS "
            "'BEGIN IF NOT EXISTS (SELECT FROM pg_class WHERE relname = ''profiles'') THEN PERFORM pg_sleep(1.2); "
            "END IF; END'"
        )
        connection.execute("CREATE EVENT TRIGGER dawdle ON ddl_command_end EXECUTE FUNCTION dawdle()")
    store = HistoryStore.open(postgres_url)
    try:
        store.migrate()
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP EVENT TRIGGER dawdle")
    assert store.running_jobs(1) == []
    store.close()


def test_a_server_that_was_cut_off_is_noticed_within_seconds(postgres_url: str) -> None:
    engine = open_engine(postgres_url)
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        parameters = driver.info.get_parameters()
    engine.dispose()
    assert parameters["tcp_user_timeout"] == "10000"
    assert [parameters[f"keepalives_{name}"] for name in ("idle", "interval", "count")] == ["10", "5", "3"]


def test_ended_jobs_become_history_with_the_latest_first(store: HistoryStore) -> None:
    for number in range(5):
        store.write([submitted(str(number)), ended(str(number), at=float(number))])
    store.write([submitted("failed"), ended("failed", phase="Failed"), submitted("running")])
    assert [job.id for job in store.past_jobs(2)] == ["4", "3"]
    assert store.past_jobs(1)[0].fit == FIT
    assert store.past_jobs(1)[0].rows == 5 * 10**9
    assert [change.job for change in store.running_jobs(10)] == ["running"]


def test_a_job_that_is_submitted_again_runs_again(store: HistoryStore) -> None:
    store.write([submitted("a"), profile("a", 1), ended("a", phase="Suspended")])
    assert store.running_jobs(10) == []
    again = replace(submitted("a", at=5.0), bounds=ShapeBounds(workers=(1, 2)), current=None, last_plan=9)
    store.write([again])
    assert store.running_jobs(10) == [again, profile("a", 1)]


def test_retention_keeps_the_latest_of_running_jobs_and_the_young_of_ended_ones(store: HistoryStore) -> None:
    day = 86_400.0
    profiles: list[Change] = [profile("run", number, time=0.0) for number in range(6)]
    plans: list[Change] = [plan("run", number) for number in range(5)]
    store.write([submitted("run"), *profiles, *plans, submitted("done"), ended("done", 50 * day)])
    store.write([profile("done", 1, time=0.0), profile("done", 2, time=50 * day)])
    store.write([submitted("ancient"), profile("ancient", 1), plan("ancient", 1), ended("ancient", 1.0)])
    store.write([StartUpObserved(JobId("run"), "ps", at, 40.0) for at in (0.0, 59 * day)])
    retention = Retention(profiles_per_job=4, profile_days=30, plans_per_job=3, start_up_days=30, job_days=55)
    pruned = store.prune(retention, now=60 * day)
    assert pruned == Pruned(profiles=2 + 1 + 1, plans=2, start_ups=1, jobs=1)
    assert [item.sequence for item in store.running_jobs(10) if isinstance(item, ProfileReported)] == [2, 3, 4, 5]
    assert [item.version for item in store.plans(JobId("run"), 10)] == [4, 3, 2]
    assert len(store.profiles(JobId("done"), 10)) == 1
    assert [job.id for job in store.past_jobs(10)] == ["done"]
    assert store.plans(JobId("ancient"), 10) == []


def test_the_migrations_make_the_tables_of_the_code(store: HistoryStore, database_url: str) -> None:
    with open_engine(database_url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, HistoryTable.metadata) == []


def test_migrating_again_keeps_everything(store: HistoryStore) -> None:
    store.write([submitted("a"), profile("a", 1)])
    store.migrate()
    assert store.running_jobs(10) == [submitted("a"), profile("a", 1)]


def test_a_schema_of_a_newer_version_is_refused(store: HistoryStore, database_url: str) -> None:
    with open_engine(database_url).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusableError, match="written by a newer Emberscale"):
        store.migrate()


def test_a_server_that_is_not_there_is_away_not_unusable(tmp_path: Path) -> None:
    gone = HistoryStore.open(f"postgresql://brain@/brain?host={tmp_path}")
    with pytest.raises(DatabaseAwayError, match="No such file"):
        gone.migrate()
    with pytest.raises(DatabaseAwayError):
        gone.write([submitted("a")])


def write_text(path: Path) -> None:
    path.write_text("This is no database.\n" * 100)


def write_other_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (name TEXT)")


def cut_off(path: Path) -> None:
    with closing(HistoryStore.open(f"sqlite:///{path}")) as store:
        store.migrate()
    path.write_bytes(path.read_bytes()[:4096] + bytes(4096))


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (write_text, "file is not a database"),
        (write_other_tables, "table jobs already exists"),
        (cut_off, "database disk image is malformed"),
        (Path.mkdir, "unable to open database file"),
    ],
)
def test_a_file_that_is_no_database_of_ours_is_unusable(
    tmp_path: Path, write: Callable[[Path], None], problem: str
) -> None:
    write(tmp_path / "brain.db")
    store = HistoryStore.open(f"sqlite:///{tmp_path / 'brain.db'}")
    with closing(store), pytest.raises(DatabaseUnusableError, match=problem):
        store.migrate()


@pytest.mark.parametrize(
    ("user", "database", "problem"),
    [
        ("brain", "nowhere", 'database "nowhere" does not exist'),
        ("nobody", "postgres", 'role "nobody" does not exist'),
        ("guest", "others", "permission denied for schema public"),
        ("brain", "others", 'relation "jobs" already exists'),
    ],
)
def test_a_server_that_refuses_us_is_unusable(
    postgres_server: PostgresServer, others: None, user: str, database: str, problem: str
) -> None:
    url = postgres_server.url(database).replace("//brain@", f"//{user}@")
    with closing(HistoryStore.open(url)) as store, pytest.raises(DatabaseUnusableError, match=problem):
        store.migrate()


def test_rights_that_are_missing_once_the_schema_is_there_make_it_unusable(postgres_url: str, others: None) -> None:
    with closing(HistoryStore.open(postgres_url)) as store:
        store.migrate()
    with psycopg.connect(postgres_url) as connection:
        connection.execute("GRANT USAGE ON SCHEMA public TO guest")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO guest")
    with closing(HistoryStore.open(postgres_url.replace("//brain@", "//guest@"), exclusive=True)) as guest:
        guest.migrate()
        assert guest.past_jobs(1) == []
        with pytest.raises(DatabaseUnusableError, match="permission denied for table claims"):
            guest.claim()


def test_a_brain_that_was_killed_while_it_made_the_schema_leaves_room_for_the_next(
    tmp_path: Path, run_python: Callable[[str], int]
) -> None:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    code = f"""
import os, signal
from sqlalchemy import event
from emberscale_brain.history.database import migrate, open_engine
engine = open_engine({url!r})
@event.listens_for(engine, "after_cursor_execute")
def kill(connection, cursor, statement, *_):
    if "CREATE TABLE plans" in statement:
        os.kill(os.getpid(), signal.SIGKILL)
migrate(engine)
"""
    assert run_python(code) == -9
    with closing(HistoryStore.open(url)) as opened:
        opened.migrate()
        assert opened.running_jobs(1) == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("brain.db", "is not a database URL"),
        ("mysql://root@localhost/brain", "must be SQLite or PostgreSQL, not mysql"),
        ("postgresql+psycopg2://root@localhost/brain", r"not postgresql\+psycopg2: write"),
        ("postgresql://root@localhost:port/brain", "is not a database URL"),
        ("sqlite:////proc/no/brain.db", "cannot create the database folder /proc/no: No such file"),
    ],
)
def test_an_address_that_is_no_database_is_refused(url: str, problem: str) -> None:
    with pytest.raises(DatabaseUnusableError, match=problem):
        HistoryStore.open(url)


def test_a_refused_address_does_not_tell_its_password() -> None:
    with pytest.raises(DatabaseUnusableError) as raised:
        HistoryStore.open("mysql://root:secret@localhost/brain")
    assert "secret" not in str(raised.value)


def test_what_a_killed_writer_committed_is_there(tmp_path: Path, run_python: Callable[[str], int]) -> None:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    code = f"""
import os, signal
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.history.changes import JobSubmitted
from emberscale_brain.planner.types import JobId, JobMetadata, ShapeBounds
store = HistoryStore.open({url!r})
store.migrate()
store.write([JobSubmitted(JobId("a"), "ann", JobMetadata("DLRM", 512, 1, 1, 1, 1), ShapeBounds(), 0.0)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code) == -9
    opened = HistoryStore.open(url)
    opened.migrate()
    assert [change.job for change in opened.running_jobs(1)] == ["a"]
    opened.close()


def test_a_database_that_says_no_encoding_is_used_all_the_same(postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE plain ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    opened = HistoryStore.open(postgres_server.url("plain"))
    try:
        opened.migrate()
        opened.write([submitted("a")])
        assert opened.running_jobs(10) == [submitted("a")]
    finally:
        opened.close()
