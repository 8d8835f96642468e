"""The service's end of the planning process: feeds it, asks it, and replaces it when it crashes or stalls."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from emberscale_brain.history.changes import Change
from emberscale_brain.planner.types import JobId, PastJob, PlannedShape, PlannerSettings
from emberscale_brain.service.frames import (
    CONDITIONS,
    PAST_JOB,
    PLANNED,
    SETTINGS,
    Frame,
    change_frame,
    frame,
    read_frame,
)
from emberscale_brain.service.state import Conditions

_READ_BYTES = 1 << 16
_WRITE_BYTES = 1 << 16
_EXIT_SECONDS = 2.0


class PlanningFailedError(Exception):
    """The planner returned no plan. `how` is "raised", "stalled", "unusable" or "crashed"."""

    def __init__(self, how: str, reason: str) -> None:
        super().__init__(reason)
        self.how = how


@dataclass(frozen=True, slots=True)
class PlannerChoice:
    """The planner, its settings, and the number of profiles and past jobs that it sees."""

    name: str
    settings: PlannerSettings
    profiles_per_job: int
    past_jobs: int


class PlanningProcess:
    """One process with one planner; used by one thread. After a failure the process is gone: begin another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "emberscale_brain.service.planning_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._buffer = b""

    def begin(self, choice: PlannerChoice, timeout: float) -> None:
        """Loads the planner. Raises PlanningFailedError if loading fails or takes too long."""
        begin = frame(
            "begin",
            planner=choice.name,
            settings=SETTINGS.plain(choice.settings),
            profiles_per_job=choice.profiles_per_job,
            past_jobs=choice.past_jobs,
        )
        self._write([begin], timeout)
        for _ in self._answers("ready", time.monotonic() + timeout):
            pass

    def feed(self, past: Iterable[PastJob], changes: Iterable[Change], timeout: float) -> None:
        """Sends past jobs and changes.

        Raises PlanningFailedError if the process is gone, or reads nothing for `timeout` seconds.
        """
        self._write((frame("past", job=PAST_JOB.plain(job)) for job in past), timeout)
        self._write((change_frame(change) for change in changes), timeout)

    def plan(self, conditions: Conditions, now: float, timeout: float) -> Iterator[tuple[JobId, PlannedShape]]:
        """Returns the plan of each job. Raises PlanningFailedError if the planner raises, crashes or takes too long."""
        deadline = time.monotonic() + timeout
        self._write([frame("plan", now=now, conditions=CONDITIONS.plain(conditions))], timeout)
        for content in self._answers("done", deadline):
            try:
                yield JobId(str(content["job"])), PLANNED.from_plain(content["planned"])
            except (KeyError, ValidationError) as error:
                self.close()
                raise PlanningFailedError("raised", f"the planner returned no valid plan: {error}") from error

    def kill(self) -> None:
        """Kills the process from another thread; the thread that waits for it then reports a crash."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _write(self, frames: Iterable[Frame], timeout: float) -> None:
        """Writes all frames; a process that reads nothing for `timeout` seconds, as it was stopped, has stalled."""
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            raise PlanningFailedError("crashed", "the planning process has ended")
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_WRITE)
            for chunk in _chunks(frames):
                left = memoryview(chunk)
                while left:
                    if not selector.select(timeout):
                        self.close()
                        raise PlanningFailedError("stalled", "the planning process read nothing and was stopped")
                    try:
                        left = left[os.write(pipe.fileno(), left) :]
                    except BrokenPipeError as error:
                        self.close()
                        raise PlanningFailedError("crashed", "the planning process has ended") from error

    def _answers(self, last: str, deadline: float) -> Iterator[dict[str, object]]:
        """Yields frames until the frame of kind `last` (excluded)."""
        for line in self._lines(deadline):
            try:
                content = dict(read_frame(line))
            except json.JSONDecodeError as error:
                self.close()
                raise PlanningFailedError("crashed", "the planning process sent invalid JSON") from error
            kind = content["kind"]
            if kind == last:
                return
            if kind in ("raised", "unusable"):
                self.close()
                raise PlanningFailedError(str(kind), str(content["reason"]))
            yield content

    def _lines(self, deadline: float) -> Iterator[bytes]:
        pipe = self._process.stdout
        if pipe is None:
            raise PlanningFailedError("crashed", "the planning process has ended")
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while True:
                line, separator, rest = self._buffer.partition(b"\n")
                if separator:
                    self._buffer = rest
                    yield line
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.close()
                    raise PlanningFailedError("stalled", "the planner timed out and was stopped")
                data = os.read(pipe.fileno(), _READ_BYTES)
                if not data:
                    status = self._status()
                    self.close()
                    raise PlanningFailedError("crashed", f"the planning process ended with status {status}")
                self._buffer += data

    def _status(self) -> int | None:
        """Returns the exit status of a process that ended by itself; None if it still runs."""
        try:
            return self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return None


def _chunks(frames: Iterable[Frame]) -> Iterator[bytes]:
    """Joins frames, so that each write carries many."""
    chunk = bytearray()
    for line in frames:
        chunk += line
        if len(chunk) >= _WRITE_BYTES:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)
