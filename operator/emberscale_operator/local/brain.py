"""A brain for a job on this machine: somebody else's, or the one that this user's jobs share.

That is a process beside one of the jobs (`brain_seat.py`); what it learns is in a database that outlives it, so that
the next job like this one starts with the shape that this one ended with. It plans within this machine: its cores, and
most of its memory. Where the machine lets quotas of CPU be set, a fraction of a core is one; elsewhere it is a place on
a core that others share.
"""

import hashlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import yaml

from emberscale_api.errors import StartError
from emberscale_api.shape import GIB
from emberscale_operator.local.brain_seat import BrainSeat
from emberscale_operator.local.folder import RunFolder, write_private
from emberscale_operator.local.processes import Launch

_MEMORY_SHARE = 0.75
_NODE_SHARE = 0.5
_CPU_STEP = 0.5
_PLANNING_SECONDS = 15
_NICE = "10"


class BrainDatabaseUnusableError(StartError):
    """The file in which this user's jobs are remembered is none that can be read."""


@dataclass(frozen=True)
class BrainAddress:
    """A brain that runs elsewhere; `address` is `host:port`, `authority`, in PEM, speaks for one that serves TLS."""

    address: str
    token: str
    authority: bytes | None = None


@dataclass(frozen=True)
class EmbeddedBrain:
    """A brain on this user's database, shared with other jobs; with `settings`, `path=value` on top of this machine's,
    one of the job's own.
    """

    database: Path
    settings: tuple[str, ...] = ()

    @contextmanager
    def seat(self, authority: bytes | None) -> Iterator[BrainSeat]:
        """The run's view of who has the brain beside it.

        Raises BrainSeatUnavailableError, and BrainDatabaseUnusableError for a file that no brain could begin with.
        Runs share a brain that all of them can talk to: those of one authority, or those without TLS.
        """
        if not any(setting.startswith("database=") for setting in self.settings):
            _check_database(self.database)
        with ExitStack() as held:
            folder = self.database.parent
            if self.settings:
                folder = Path(held.enter_context(TemporaryDirectory()))
            elif authority is not None:
                folder /= f"tls-{hashlib.sha256(authority).hexdigest()[:16]}"
            yield held.enter_context(BrainSeat(folder))

    def configure(self, folder: RunFolder, seat: BrainSeat) -> Path:
        """Writes its settings and makes the database's folder. Raises OSError."""
        self.database.parent.mkdir(parents=True, exist_ok=True)
        path = folder.state / "brain.yaml"
        cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
        document = machine_settings(cores, memory)
        document |= {
            "listen": seat.address,
            "metrics": None,
            "database": f"sqlite:///{self.database.resolve()}",
            "tokenFile": str(seat.token_file.resolve()),
        }
        write_private(path, yaml.safe_dump(document))
        return path

    def launch(self, configuration: Path, environment: Mapping[str, str]) -> Launch:
        """The brain as an instance of the job, behind the processes that train where there is little CPU."""
        nice = shutil.which("nice")
        polite = () if nice is None else (nice, "-n", _NICE)
        overrides = [argument for setting in self.settings for argument in ("--set", setting)]
        command = (*polite, sys.executable, "-P", "-m", "emberscale_brain", "--config", str(configuration), *overrides)
        return Launch(command, environment, incarnation="-")


def _check_database(path: Path) -> None:
    """Raises BrainDatabaseUnusableError. One that is busy is as good as one that is not there yet."""
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN):
            raise BrainDatabaseUnusableError(
                f"{path}: {error}; move it aside and a new database will be created"
            ) from error


def default_database(environment: Mapping[str, str]) -> Path:
    """Where this user's jobs on this machine are remembered, by the XDG base directories."""
    home = environment.get("XDG_DATA_HOME") or str(Path(environment.get("HOME", "."), ".local", "share"))
    return Path(home, "emberscale", "brain.db")


def machine_settings(cores: int, memory: int) -> dict[str, object]:
    """The brain's settings for a machine with these cores and bytes.

    It takes no job over from the brain before it: those that still run tell it of themselves.
    """
    usable = int(memory * _MEMORY_SHARE)
    largest = max(GIB, int(usable * _NODE_SHARE))
    return {
        "cluster": {"cpu": cores, "memory": usable, "largestNodeCpu": cores, "largestNodeMemory": usable},
        "bounds": {
            "maxWorkers": max(1, 2 * cores - 1),
            "maxPs": max(1, cores),
            "maxWorkerCpu": max(_CPU_STEP, cores - _CPU_STEP),
            "maxPsCpu": max(_CPU_STEP, cores - _CPU_STEP),
            "maxWorkerMemory": largest,
            "maxPsMemory": largest,
            "cpuStep": _CPU_STEP,
        },
        "planning": {"interval": f"{_PLANNING_SECONDS}s", "settle": "60s", "takeOver": False},
    }
