"""The planning process: it keeps its own view of the cluster, and may crash or stall without harm to the service.

It reads frames from stdin and answers on the original stdout. Its own stdout becomes stderr, so that a planner may
print. A planner's exception ends the process, after a frame that names it.
"""

import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO

from emberscale_api.errors import InvalidError
from emberscale_brain.history.changes import Change
from emberscale_brain.planner.types import Planner
from emberscale_brain.preferences import load_planner
from emberscale_brain.service.frames import CONDITIONS, PAST_JOB, PLANNED, SETTINGS, frame, read_change, read_frame
from emberscale_brain.service.state import BrainState

_PARENT_SECONDS = 2.0
_NICENESS = 5


def main() -> int:
    """Serves until stdin ends, at low priority: the service and training come first."""
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        _send(answers, frame("raised", reason=f"{kind.__name__}: {error}"))

    sys.excepthook = report
    process: _PlanningProcess | None = None
    for line in sys.stdin.buffer:
        content = read_frame(line)
        if content["kind"] == "begin":
            try:
                planner = load_planner(content["planner"], SETTINGS.from_plain(content["settings"]))
            except InvalidError as error:
                _send(answers, frame("unusable", reason=str(error)))
                return 1
            process = _PlanningProcess(planner, answers, content["profiles_per_job"], content["past_jobs"])
            _send(answers, frame("ready"))
        elif process is not None:
            process.handle(content)
    return 0


class _PlanningProcess:
    def __init__(self, planner: Planner, answers: BinaryIO, profiles_per_job: int, past_jobs: int) -> None:
        self._planner = planner
        self._answers = answers
        self._state = BrainState(profiles_per_job, past_jobs)

    def handle(self, content: Mapping[str, Any]) -> None:
        match content["kind"]:
            case "change":
                change: Change = read_change(content)
                self._state.apply(change)
            case "past":
                self._state.remember([PAST_JOB.from_plain(content["job"])])
            case "plan":
                self._plan(content)

    def _plan(self, content: Mapping[str, Any]) -> None:
        now = content["now"]
        cluster = self._state.cluster_view(CONDITIONS.from_plain(content["conditions"]), now)
        # one frame per job: the service could not answer while it reads a large one
        for job, shape in self._planner.plan(cluster, now).items():
            self._answers.write(frame("planned", job=job, planned=PLANNED.plain(shape)))
        _send(self._answers, frame("done"))


def _end_with_parent(parent: int) -> None:
    """Exits once the parent is gone: a planner that stalls must not outlive a service that was killed."""
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_PARENT_SECONDS)
    os._exit(1)


def _send(answers: BinaryIO, line: bytes) -> None:
    answers.write(line)
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
