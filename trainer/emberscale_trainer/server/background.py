"""Background work: a call starts it or attaches to it, waits a while, and reports its progress."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from emberscale_trainer.checkpoint import Work

_Result = TypeVar("_Result")


class Background(Generic[_Result]):
    """One piece of work in a thread of its own, which ends with the process."""

    def __init__(self, name: str, run: Callable[[Work], _Result], work: Work | None = None) -> None:
        """Starts at once."""
        self.work = Work() if work is None else work
        self._run = run
        self._done = threading.Event()
        self._result: _Result | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._carry_out, name=name, daemon=True).start()

    def result(self, wait_seconds: float) -> _Result | None:
        """Returns the work's result; None while it runs. Raises what it raised."""
        self._done.wait(wait_seconds)
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self) -> None:
        """Makes the work end soon, because nothing waits for it any more."""
        self.work.abandon()

    def _carry_out(self) -> None:
        try:
            self._result = self._run(self.work)
        except BaseException as error:  # noqa: BLE001 - it is raised again by `result`, in the thread that waits
            self._error = error
            self.work.abandon()  # reads ahead may be under way in other threads
        self._done.set()
