"""The turns of a pipeline's pulls and pushes of rounds, and what is trained and yet to be pushed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from emberscale_trainer.worker.channel import ChannelClosedError
from emberscale_trainer.worker.local_rows import LocalChanges


class RoundTurns:
    """Lets a pipeline pull or push a round, one at a time, and pull one round ahead of the push of the one before.

    So a pull sees the whole push of an earlier round on all servers or nothing of it, the worker knows which, and only
    the push of the round before can be missing. A round that is trained again, as its push was not answered, is the
    exception: the pull may have seen its changes, which are then in the gradients of the next round twice. What the
    servers apply is exact even so.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._aborted = False
        self._pulled = 0
        self._pushed = 0
        self._trained = 0
        self._changes: LocalChanges | None = None

    @contextmanager
    def pull(self) -> Iterator[int]:
        """The turn of a pull, which counts unless it raises; yields how many rounds are pushed."""
        with self._turn(lambda: self._pulled <= self._pushed + 1):
            yield self._pushed
            self._pulled += 1

    @contextmanager
    def push(self) -> Iterator[None]:
        """The turn of a push, which counts unless it raises."""
        with self._turn(lambda: True):
            yield
            self._pushed += 1

    def await_push(self, pushed: int) -> None:
        """Waits until more rounds than this are pushed. Raises ChannelClosedError."""
        self._wait(lambda: self._pushed > pushed)

    def unseen(self, pushed: int) -> LocalChanges | None:
        """The changes of the round that was trained last, unless a pull after `pushed` pushes has seen them."""
        return self._changes if pushed < self._trained else None

    def trained(self, changes: LocalChanges) -> None:
        """Keeps the changes of a round that is to be pushed."""
        self._trained += 1
        self._changes = changes

    def abort(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    @contextmanager
    def _turn(self, may_begin: Callable[[], bool]) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._taken and may_begin())
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()

    def _wait(self, over: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or over())
            if self._aborted:
                raise ChannelClosedError
