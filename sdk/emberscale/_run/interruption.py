"""Signals that ask a run to end."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Self

from emberscale_operator.local.runner import LocalJob

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Handles signals that ask for an end: before the job runs they end the program; while it runs, the first saves
    its state and the second does not wait for that; after it they do nothing, since the program ends in a moment.

    Only the main thread gets signals; in any other thread, this does not change their handlers.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
        ending: Callable[[int], BaseException] = lambda number: SystemExit(128 + number),
    ) -> None:
        """`ending` is raised for a signal that comes before the job runs."""
        self.signal: int | None = None
        self._ending = ending
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._local: LocalJob | None = None
        self._over = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in self._signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def of(self, local: LocalJob) -> Iterator[None]:
        """Runs the body, in which a signal interrupts this job."""
        self._local = local
        try:
            yield
        finally:
            self._local, self._over = None, True

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        if self._over:
            return
        if self._local is None:
            raise self._ending(number)
        if self.signal is None:
            self._local.suspend()
        else:
            self._local.kill()
        self.signal = number
