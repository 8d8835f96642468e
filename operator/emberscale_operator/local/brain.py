"""The brain of a job on this machine: one that runs elsewhere, or the one that all jobs of this user share.

All runs of a user share one brain, so that together they stay within the machine: its cores, and most of its memory.
The brain is a process beside the run that holds the seat, a lock that ends with the run's program however that ends.
Then another run takes the seat and starts the brain again at the same address, with the same token. What the brain has
learned is in a database that outlives it, so that the next job like this one starts with the shape that this one ended
with. If the machine permits CPU quotas, a fraction of a core is a quota; otherwise, processes share the core.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import grpc
import grpc.aio
import psutil
import structlog
import yaml

from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import tls
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.token import CHANNEL_OPTIONS, call_metadata
from emberscale_api.shape import GIB
from emberscale_operator.local.folder import RunFolder, try_lock, write_private
from emberscale_operator.local.port import HOST, bind_shared
from emberscale_operator.local.process import Launch

_UNBOUND = (OSError, OverflowError, ValueError)
"""What is raised for a port that is taken, or for a file without one: a crash may leave it empty."""


class BrainSeat:
    """One run's view of the seat, to be entered while the run lasts. Raises UnavailableError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: int | None = None
        self._socket: socket.socket | None = None
        self._held = False

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "brain.lock", os.O_RDWR | os.O_CREAT, 0o600)
            self._socket = self._bound()
        except _UNBOUND as error:
            self.__exit__(None, None, None)
            raise UnavailableError(f"{self._folder}: cannot start a brain there: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._lock is not None:
            os.close(self._lock)
        self._socket = self._lock = None
        self._held = False

    @property
    def address(self) -> str:
        """The brain's address, `host:port`, whichever run owns it."""
        return f"{HOST}:{self._port_file.read_text(encoding='ascii')}"

    @property
    def token(self) -> str:
        """The secret by which masters and the brain know each other."""
        return self.token_file.read_text(encoding="ascii")

    @property
    def token_file(self) -> Path:
        """The secret, in a file that only its owner can read."""
        return self._folder / "brain.token"

    def take(self) -> bool:
        """Takes the seat if it is free. Returns whether this run has it, and so starts the brain."""
        if not self._held and self._lock is not None:
            self._held = try_lock(self._lock)
        return self._held

    def _give_up(self) -> None:
        if self._held and self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._held = False

    @property
    def _port_file(self) -> Path:
        return self._folder / "brain.port"

    def _bound(self) -> socket.socket:
        """Binds the brain's port. The first run chooses it; so does one that cannot bind it and finds nobody seated.

        All runs and the brain bind the same port, which the kernel permits to one user; only the brain listens.
        """
        beginning = os.open(self._folder / "brain.begin", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(beginning, fcntl.LOCK_EX)
            try:
                return bind_shared(int(self._port_file.read_text(encoding="ascii")))
            except _UNBOUND:
                if not self.take():  # the port is the seated run's
                    raise
            bound = bind_shared(0)
            write_private(self.token_file, secrets.token_hex(32))
            write_private(self._port_file, str(bound.getsockname()[1]))
            self._give_up()
            return bound
        finally:
            os.close(beginning)


_MEMORY_SHARE = 0.75
_NODE_SHARE = 0.5
_CPU_STEP = 0.5
_PLANNING_SECONDS = 15
_NICE = "10"
_CLAIM_SECONDS = 2.0
"""A person who presses Ctrl-C waits for the call that ends the claim."""
_log = structlog.get_logger()


@dataclass(frozen=True)
class BrainAddress:
    """A brain that runs elsewhere; `address` is `host:port`, `authority`, in PEM, speaks for one that serves TLS."""

    address: str
    token: str
    authority: bytes | None = None


NO_BRAIN = BrainAddress("", "")


async def end_claim(brain: BrainAddress, job_uid: str) -> None:
    """Tells a brain that a job's processes are gone; gives up after two seconds.

    A master that ends its job tells the brain itself. A master that was killed cannot, and the brain would count the
    job's cores and memory until it has heard nothing for half an hour.
    """
    # the job has neither succeeded nor failed
    request = pb.ReportOutcomeRequest(job_uid=job_uid, phase=JobPhase.SUSPENDED.value)
    channel = tls.connect_async(brain.address, brain.authority, CHANNEL_OPTIONS)
    try:
        await BrainStub(channel).ReportOutcome(request, timeout=_CLAIM_SECONDS, metadata=call_metadata(brain.token))
    except grpc.aio.AioRpcError as error:
        # a brain that this run started is gone by now, and nobody else's
        if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE):
            _log.warning("brain_claim_not_ended", address=brain.address, problem=error.details())
    finally:
        await channel.close(None)


@dataclass(frozen=True)
class EmbeddedBrain:
    """A brain on this user's database, which all jobs of the user share.

    With `settings`, each `path=value`, the job gets a brain of its own; they override the settings of this machine.
    """

    database: Path
    settings: tuple[str, ...] = ()

    @contextmanager
    def seat(self, authority: bytes | None) -> Iterator[BrainSeat]:
        """Enters the run's view of the seat.

        Runs with the same authority share a brain, and so do runs without TLS. Raises UnavailableError, and
        InvalidError if the file is no usable database.
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
        """Writes the brain's settings and creates the database's folder. Raises OSError."""
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
        """Returns how to start the brain, with a lower priority than the processes that train."""
        nice = shutil.which("nice")
        polite = () if nice is None else (nice, "-n", _NICE)
        overrides = [argument for setting in self.settings for argument in ("--set", setting)]
        command = (*polite, sys.executable, "-P", "-m", "emberscale_brain", "--config", str(configuration), *overrides)
        return Launch(command, environment, incarnation="-")


def _check_database(path: Path) -> None:
    """Raises InvalidError for a file that is no usable database. A missing or busy database passes."""
    if not path.exists():
        return
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("SELECT name FROM sqlite_master").fetchall()
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN):
            raise InvalidError(f"{path}: {error}; move it aside and a new database will be created") from error


def default_database(environment: Mapping[str, str]) -> Path:
    """Returns the database of this user's jobs on this machine, by the XDG base directories."""
    home = environment.get("XDG_DATA_HOME") or str(Path(environment.get("HOME", "."), ".local", "share"))
    return Path(home, "emberscale", "brain.db")


def machine_settings(cores: int, memory: int) -> dict[str, object]:
    """The brain's settings for a machine with these cores and bytes.

    The brain takes over no jobs from its predecessor: jobs that still run report to it by themselves.
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
        "planning": {"interval": f"{_PLANNING_SECONDS}s", "adoption": "60s", "takeOver": False},
    }
