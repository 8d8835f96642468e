"""Rounds of a simulated worker: their lengths, and the same turns of pulls and pushes as in the real pipeline."""

from collections.abc import Callable
from random import Random

from tests.simulation.units import Batch
from tests.simulation.world import Condition, Task

from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec
from emberscale_trainer.worker.rounds import RoundFigures, RoundLengths

MEASURED = 1
"""The value of a scenario's `rounds` that leaves the lengths to `RoundLengths`."""


class ClosedError(Exception):
    """The pipeline has ended."""


class RandomLengths(RoundLengths):
    """Trains some leases in rounds of random lengths up to `most`, and others batch by batch."""

    def __init__(self, most: int, lease_timeout: float, random: Random) -> None:
        super().__init__(HotEmbeddingsSpec(mode=HotEmbeddingsMode.ENABLED), lease_timeout)
        self._most = most
        self._random = random
        self._drawn = 1

    @property
    def length(self) -> int:
        """The length drawn for the lease."""
        return self._drawn

    def begin_lease(self, token: int) -> bool:
        """Trains two leases of three in rounds."""
        self._drawn = 1 << self._random.randrange(self._most.bit_length())
        return self._random.random() < 2 / 3 and token not in self._split


def lengths_of(rounds: int, lease_timeout: float, compute_seconds: float, random: Random) -> RoundLengths:
    """Returns the round lengths for a scenario's `rounds`; a round is short enough for its lease not to lapse."""
    if rounds > MEASURED:
        while rounds * compute_seconds > lease_timeout / 4 and rounds > 2:
            rounds //= 2
        return RandomLengths(rounds, lease_timeout, random)
    mode = HotEmbeddingsMode.ENABLED if rounds else HotEmbeddingsMode.DISABLED
    return RoundLengths(HotEmbeddingsSpec(mode=mode), lease_timeout)


def figures(batches: int, seconds: float) -> RoundFigures:
    """Returns the figures of a round that saves half of the traffic."""
    return RoundFigures(batches, batches, 2 * batches, batches, batches, 2 * batches, seconds, batches)


class Turns:
    """Like `RoundTurns`, but for coroutines; in place of changes to push, it keeps the names of batches."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._taken = False
        self._closed = False
        self._trained = 0
        self._changes: tuple[Batch, ...] = ()
        self.pulled = 0
        self.pushed = 0

    def begin_pull(self) -> Task[int]:
        """Takes the turn of a pull; returns the number of pushed rounds. Raises ClosedError."""
        yield from self.take(lambda: self.pulled <= self.pushed + 1)
        return self.pushed

    def take(self, may_begin: Callable[[], bool] = lambda: True) -> Task[None]:
        """Takes the turn. Raises ClosedError."""
        yield from self._wait(lambda: not self._taken and may_begin())
        self._taken = True

    def give(self) -> None:
        """Ends the turn."""
        self._taken = False
        self._changed.notify()

    def await_push(self, pushed: int) -> Task[None]:
        """Waits until more than `pushed` rounds are pushed. Raises ClosedError."""
        yield from self._wait(lambda: self.pushed > pushed)

    def unseen(self, pushed: int) -> tuple[Batch, ...]:
        """Returns the batches of the last trained round, unless a pull after `pushed` pushes has seen them."""
        return self._changes if pushed < self._trained else ()

    def trained(self, batches: tuple[Batch, ...]) -> None:
        """Records a trained round, which is to be pushed."""
        self._trained += 1
        self._changes = batches

    def close(self) -> None:
        """Ends all waiting."""
        self._closed = True
        self._changed.notify()

    def _wait(self, over: Callable[[], bool]) -> Task[None]:
        while not self._closed and not over():
            yield self._changed
        if self._closed:
            raise ClosedError
