"""Opens the database, migrates its schema to this version, and claims it: the last to claim it may write."""

import os
import re
import socket
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Engine, create_engine, event, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, ProgrammingError
from sqlalchemy.orm import Session

from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_brain.history.tables import ClaimRow

_THE_ONE = 1


class ClaimLostError(Exception):
    """Another brain has claimed the database since; the text says which. Retrying does not help."""


class Claim:
    """One brain's claim to the database. `insert` is the database dialect's function.

    A claim ends when the next brain claims the database, not with time: the successor of a killed brain need not wait.
    """

    def __init__(self, insert: Callable[[Any], Any]) -> None:
        self._insert = insert
        self._row = {
            "id": _THE_ONE,
            "token": uuid4().hex,
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "begun_at": time.time(),
        }
        self._committed = False

    def hold(self, session: Session) -> None:
        """Makes the claim the first time, and checks later that it still holds. Raises ClaimLostError.

        The row stays locked until the transaction ends, so the next brain to claim the database reads all writes.
        """
        mine = ClaimRow.token == self._row["token"] if self._committed else None
        statement = self._insert(ClaimRow).values(**self._row)
        statement = statement.on_conflict_do_update(index_elements=["id"], set_=self._row, where=mine)
        if session.execute(statement.returning(ClaimRow.id)).first() is None:
            other = session.scalars(select(ClaimRow)).one()
            begun = datetime.fromtimestamp(other.begun_at, UTC).isoformat(timespec="seconds")
            raise ClaimLostError(
                f"another brain has the database now, {other.holder}, begun at {begun}: "
                "end one of the two, or give each a database of its own"
            )

    def committed(self) -> None:
        """Notes that a transaction that held the claim was committed."""
        self._committed = True


_WAIT_SECONDS = 3
_IDLE_SECONDS = 60
_STATEMENT_SECONDS = 60
# A server that was cut off closes no connection: by itself, TCP would wait for a quarter of an hour.
_NOTICES_DEAD_SERVERS = {
    "tcp_user_timeout": 10_000,  # milliseconds
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
_HOPELESS = frozenset(
    {
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_NOTADB,
    }
)
# libpq gives no SQLSTATE for a connection that the server refuses, only the server's message; if that is not in
# English, the database counts as away
_REFUSED_LOGIN = re.compile(
    r"FATAL: .*(authentication failed|does not exist|not permitted to log in|permission denied|pg_hba\.conf)"
    r"|no password supplied"
)


class DatabaseAwayError(UnavailableError):
    """The database cannot be reached, or cannot answer now; retrying later may help."""


class WriteRefusedError(Exception):
    """The database refuses a write; retrying does not help."""


class DatabaseUnusableError(InvalidError):
    """The database's address, schema or rights are wrong, or the file is not a database; retrying does not help."""


def read_url(url: str) -> URL:
    """Parses `sqlite:///path` or `postgresql://...`. Raises DatabaseUnusableError."""
    shown = re.sub(r"://.*@", "://...@", url)  # hides the password
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise DatabaseUnusableError(
            f"{shown!r} is not a database URL: write sqlite:///path/to/file.db or postgresql://user@host/name"
        ) from error
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise DatabaseUnusableError(
            f"{shown!r}: the database must be SQLite or PostgreSQL, not {parsed.drivername}: write sqlite:///... or "
            f"postgresql://..."
        )
    return parsed


def open_engine(url: str) -> Engine:
    """An engine for `sqlite:///path` or `postgresql://...`; connects to nothing yet. Raises DatabaseUnusableError."""
    parsed = read_url(url)
    if parsed.drivername == "sqlite":
        return _open_sqlite(parsed)
    engine = create_engine(
        parsed,
        pool_pre_ping=True,
        pool_size=4,
        connect_args={
            "connect_timeout": _WAIT_SECONDS,
            "application_name": "emberscale-brain",
            "client_encoding": "utf8",  # of a database that says SQL_ASCII, texts would come as bytes
            **_NOTICES_DEAD_SERVERS,
        },
    )
    event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _open_sqlite(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        folder = Path(url.database).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseUnusableError(f"cannot create the database folder {folder}: {error.strerror}") from error
    engine = create_engine(url, connect_args={"timeout": _WAIT_SECONDS})
    event.listen(engine, "connect", _set_up_sqlite)
    return engine


def migrate(engine: Engine) -> None:
    """Creates or upgrades the schema. Raises DatabaseAwayError, or DatabaseUnusableError, also for a newer schema."""
    config = Config()
    config.set_main_option("script_location", str(files("emberscale_brain.history") / "migrations"))
    config.attributes["engine"] = engine
    try:
        command.upgrade(config, "head")
    except DBAPIError as error:
        raise failure(error, engine) from error
    except CommandError as error:
        raise DatabaseUnusableError(
            f"this version does not know the database's schema ({error}); it was written by a newer Emberscale, or by "
            f"something else"
        ) from error


def failure(error: DBAPIError, engine: Engine) -> DatabaseAwayError | DatabaseUnusableError:
    """Classifies an error: a database that may come back, or one that never will."""
    return (DatabaseUnusableError if _is_hopeless(error, engine) else DatabaseAwayError)(first_line(error))


def _is_hopeless(error: DBAPIError, engine: Engine) -> bool:
    """Whether the database answers, but refuses this brain."""
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
        if code == sqlite3.SQLITE_CANTOPEN:  # a folder that is not there may be a volume that is not mounted
            return Path(engine.url.database or "").resolve().parent.is_dir()
        return code in _HOPELESS
    return isinstance(error, ProgrammingError) or _REFUSED_LOGIN.search(str(cause)) is not None


def first_line(error: DBAPIError) -> str:
    """Returns the database's message, in one line."""
    lines = str(error.orig or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _set_up_postgresql(connection: Any, _record: object) -> None:
    # a client that falls silent within a transaction, such as a machine that was cut off, must not block others long
    connection.execute(f"SET lock_timeout = '{_WAIT_SECONDS}s'")
    connection.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_SECONDS}s'")
    # a statement that hangs in the server, say on its disk, must not hold up the brain's only writer for ever
    connection.execute(f"SET statement_timeout = '{_STATEMENT_SECONDS}s'")
    connection.commit()


def _set_up_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA journal_mode = WAL")
    # An accepted profile survives a crash of the machine, not only of the process.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()
