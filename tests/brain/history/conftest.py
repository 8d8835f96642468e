import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from emberscale_brain.history.store import HistoryStore

_INSTALLATIONS = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))


def _postgres_bin() -> Path:
    for folder in [*reversed(_INSTALLATIONS), *map(Path, os.environ.get("PATH", "").split(":"))]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("no postgres binary on this machine: apt-get install postgresql")


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server on a Unix socket only; it refuses to run as root, so it runs as `nobody` then."""
    binaries = _postgres_bin()
    # socket paths have at most 107 characters, and `nobody` must be able to reach the folder
    home = Path(os.path.realpath("/tmp")) / f"emberscale-pg-{os.getpid()}"
    home.mkdir(mode=0o755)
    as_user: dict[str, str] = {}
    if os.getuid() == 0:
        shutil.chown(home, "nobody")
        as_user = {"user": "nobody"}
    data = home / "data"
    server: subprocess.Popen[bytes] | None = None
    try:
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "brain", "--auth=trust", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=home,
            **as_user,  # type: ignore[call-overload]  # the stubs do not take optional keywords from a mapping
        )
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", home, "-c", "listen_addresses=", "-c", "fsync=off"],
            stdout=subprocess.DEVNULL,
            stderr=(home / "log").open("wb"),
            cwd=home,
            **as_user,  # type: ignore[call-overload]
        )
        _await_server(binaries, home, server)
        yield str(home)
    finally:
        if server is not None:
            server.terminate()
            server.wait(timeout=20)
        shutil.rmtree(home, ignore_errors=True)


def _await_server(binaries: Path, home: Path, server: subprocess.Popen[bytes]) -> None:
    ready = [str(binaries / "pg_isready"), "-h", str(home), "-U", "brain", "-t", "1", "-q"]
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None:
            raise RuntimeError(f"postgres ended: {(home / 'log').read_text()}")


@pytest.fixture
def postgres_url(postgres_server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of its own for the test."""
    name = f"test_{abs(hash(request.node.nodeid))}"
    with psycopg.connect(host=postgres_server, user="brain", dbname="postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    yield f"postgresql://brain@/{name}?host={postgres_server}"
    with psycopg.connect(host=postgres_server, user="brain", dbname="postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


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
    """Runs code in a process of its own; its return code."""

    def run(code: str) -> int:
        return subprocess.run([sys.executable, "-c", code], check=False).returncode

    return run
