"""Requests that wait for a change of the server, such as the end of a barrier, until the core decides about them."""

import threading
from collections import Counter
from collections.abc import Callable

from emberscale_api.wire import Status
from emberscale_trainer.server.core import Decision


class SessionEndedError(Exception):
    """A connection of the session that a request belongs to ended while the request waited."""


class WaitingRequests:
    """The waiting requests of each session. The caller holds the lock, which a wait releases.

    `changed`: the lock, and the condition that is notified when a decision may change.
    """

    def __init__(self, changed: threading.Condition, clock: Callable[[], float]) -> None:
        self._changed = changed
        self._clock = clock
        self._waiting: Counter[int] = Counter()
        self._ended: set[int] = set()

    def decided(self, session: int, decide: Callable[[float], Decision]) -> tuple[Status, float]:
        """Repeats `decide` after every change and at its deadline until it decides; returns also the seconds of this.

        Raises SessionEndedError.
        """
        began = self._clock()
        now = began
        while True:
            decision = decide(now)
            if isinstance(decision, Status):
                return decision, now - began
            self._wait(session, None if decision.until is None else max(0.0, decision.until - now))
            now = self._clock()

    def give_up(self, session: int) -> None:
        """Gives up the session's waiting requests; the caller notifies them."""
        if session in self._waiting:
            self._ended.add(session)

    def _wait(self, session: int, seconds: float | None) -> None:
        """Waits for a change. Raises SessionEndedError, as nobody reads the connection of a waiting request."""
        self._waiting[session] += 1
        self._changed.wait(seconds)
        self._waiting[session] -= 1
        ended = session in self._ended
        if not self._waiting[session]:
            del self._waiting[session]
            self._ended.discard(session)
        if ended:
            raise SessionEndedError(f"session {session} ended")
