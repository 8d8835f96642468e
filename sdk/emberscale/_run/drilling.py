"""Rehearses the loss of a parameter server of a run under way on this machine, for `emberscale drill`."""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from emberscale._drill import Look
from emberscale._run.master import live_servers, open_master, status_of, unanswered
from emberscale._run.scaling import folder_under_way
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.job.running import JobStatus, ProtectionStatus, kept_protection
from emberscale_api.job.status import JobPhase
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_operator.local.folder import try_lock
from emberscale_operator.local.requests import KillRequest

_CALL_SECONDS = 5.0
_TAKEN_SECONDS = 10.0
_POLL_SECONDS = 0.02


class DrilledRun:
    """The run under way in a folder, locked against other rehearsals.

    Raises InvalidError if no run is under way, or another rehearsal is.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = folder_under_way(root)
        self._channel = open_master(root, self._folder)
        self._lock = os.open(self._folder.drill, os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(self._lock):
            os.close(self._lock)
            self._channel.close()
            raise InvalidError(f"{root}: another drill is under way; try again once it is over")
        self._stub: MasterStub = MasterStub(self._channel)
        self._incarnations: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        os.close(self._lock)

    def look(self) -> Look:
        """Asks the master. Raises UnavailableError if it does not answer, and InvalidError once the run is over."""
        try:
            status = status_of(self._stub, _CALL_SECONDS)
        except grpc.RpcError as error:
            folder_under_way(self._root)
            raise unanswered(self._root, error) from error
        self._incarnations = live_servers(status)
        return look_at_run(status, time.monotonic())

    def kill(self, index: int) -> float:
        """Has the run kill the server that was seen last under this index; returns when, on the clock of `look`.

        Raises UnavailableError where nobody does, and InvalidError once the run is over.
        """
        request = KillRequest(f"ps-{index}", self._incarnations[index])
        deadline = time.monotonic() + _TAKEN_SECONDS
        try:
            request.ask(self._folder)
            while self._folder.kill_request.exists() and time.monotonic() <= deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            is_left = request.take_back(self._folder)
        if is_left:
            folder_under_way(self._root)
            raise UnavailableError(
                f"{self._root}: its `emberscale run` does not answer, or {request.member} ended by itself; nothing was "
                "killed"
            )
        return time.monotonic()


def look_at_run(status: JobStatus, at: float) -> Look:
    """Reads a master's status of its job."""
    protection = status.protection or ProtectionStatus()
    return Look(
        at=at,
        phase=status.phase or JobPhase.PENDING,
        samples=status.samples,
        speed=status.samples_per_second,
        checkpoint=status.checkpoint,
        servers=live_servers(status),
        protected=None if kept_protection(status) is None else protection.protected,
        problem=protection.problem,
        recoveries=status.recoveries,
        pls=status.pls,
        rebuilds=protection.rebuilds,
        rebuild_seconds=protection.seconds,
        rebuild_bytes=protection.bytes,
    )
