import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from emberscale_brain.history.store import HistoryStore
from postgres import PostgresServer, postgres_binaries


@pytest.fixture(scope="session")
def postgres_server(socket_folder: Path) -> Iterator[PostgresServer]:
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no postgres binary on this machine: apt-get install postgresql")
    server = PostgresServer(binaries, socket_folder)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """An empty database."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres_server.url()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'history.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def store(database_url: str) -> Iterator[HistoryStore]:
    opened = HistoryStore.open(database_url)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def run_python() -> Callable[[str], int]:
    """Runs code in its own process; returns the exit code."""

    def run(code: str) -> int:
        return subprocess.run([sys.executable, "-c", code], check=False).returncode

    return run
