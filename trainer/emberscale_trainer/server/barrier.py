"""One server's side of a barrier: it holds pushes, admits those that other servers have applied, and ends.

A barrier is held from `hold` on, for as many seconds as its last call granted. After that it has lapsed: pushes
continue, and no later call of this barrier succeeds.

    hold -> settle -> (settled) -> finish
       any of them -> lapsed, resumed, or replaced by a barrier with a larger number
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from emberscale_trainer.partition import AppliedBatches

Batch = tuple[int, int]
"""A batch by its epoch and number."""


class NotHeldError(Exception):
    """The barrier is not held here, or has not reached the step that the call requires."""


@dataclass(slots=True)
class _Held:
    """The barrier that is held.

    * `since`: when its `hold` arrived.
    * `until`: when it lapses unless another call renews it.
    * `settling`: batches that are admitted, because other servers have applied them.
    * `settled`: when the last of these batches was applied; None before that, and before `settle`.
    """

    number: int
    since: float
    until: float
    settling: set[Batch] = field(default_factory=set)
    settled: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a barrier on this server.

    * `applied`: all batches in the rows.
    * `held_seconds`, `settled_seconds`: how long pushes were held, in total and after they were settled.
    * `repeated`: the same call arrived before, and its work is done.
    """

    applied: AppliedBatches
    held_seconds: float
    settled_seconds: float
    repeated: bool = False


class Barrier:
    """The barrier of one server, if one is held. Times are in seconds, on one monotonic clock."""

    def __init__(self) -> None:
        self._held: _Held | None = None
        self._over = 0
        self._finished: tuple[int, str, Outcome] | None = None

    @property
    def newest(self) -> int:
        """The largest number that was held or resumed; 0 if there was none."""
        return self._over if self._held is None else max(self._over, self._held.number)

    def hold(self, number: int, seconds: float, now: float) -> None:
        """Holds pushes from now on. Raises NotHeldError for a barrier that is over, or older than the one held."""
        held = self._current(now)
        newest = self._over if held is None else max(self._over, held.number - 1)
        if number <= newest:
            raise NotHeldError(f"barrier {number} is over")
        if held is not None and held.number == number:
            held.until = now + seconds
            return
        self._end()
        self._held = _Held(number, since=now, until=now + seconds)

    def settle(self, number: int, missing: Iterable[Batch], seconds: float, now: float) -> None:
        """Admits the `missing` batches, which are not applied here. Raises NotHeldError."""
        held = self._named(number, now)
        held.until = now + seconds
        held.settling = set(missing)
        if held.settling:
            held.settled = None
        elif held.settled is None:
            held.settled = now

    def settled(self, number: int, now: float) -> bool:
        """Returns whether all batches to settle are applied. Raises NotHeldError."""
        return self._named(number, now).settled is not None

    def renew(self, number: int, seconds: float, now: float) -> None:
        """Holds a settled barrier for `seconds` more. Raises NotHeldError."""
        held = self._named(number, now)
        if held.settled is None:
            raise NotHeldError(f"barrier {number} is not settled")
        held.until = now + seconds

    def held_until(self, batch: Batch, now: float) -> float | None:
        """Returns the latest time until which this batch is held; None if it is not held."""
        held = self._current(now)
        return None if held is None or batch in held.settling else held.until

    def is_held(self, now: float) -> bool:
        """Whether pushes are held, except those of the batches to settle."""
        return self._current(now) is not None

    def applied(self, batch: Batch, now: float) -> None:
        """Notes that a batch is being applied. Raises RuntimeError for one that is held."""
        held = self._current(now)
        if held is None:
            return
        if batch not in held.settling:
            raise RuntimeError(f"batch {batch} must not be applied within barrier {held.number}")
        held.settling.discard(batch)
        if not held.settling:
            held.settled = now

    def finish(self, number: int, call: str, applied: AppliedBatches, now: float) -> Outcome:
        """Releases a settled barrier, which `call` ends with success. Raises NotHeldError."""
        held = self._named(number, now)
        if held.settled is None:
            raise NotHeldError(f"barrier {number} is not settled")
        self._end()
        return self._note(number, call, Outcome(applied.copy(), now - held.since, now - held.settled))

    def finish_unheld(self, number: int, call: str, applied: AppliedBatches) -> Outcome:
        """Notes that `call` ended a barrier that this server had no need to hold."""
        return self._note(number, call, Outcome(applied.copy(), 0.0, 0.0))

    def again(self, number: int, call: str) -> Outcome | None:
        """Returns the outcome of the last barrier if the same call ended it, otherwise None."""
        if self._finished is None or self._finished[:2] != (number, call):
            return None
        return replace(self._finished[2], repeated=True)

    def _note(self, number: int, call: str, outcome: Outcome) -> Outcome:
        self._finished = (number, call, outcome)
        return outcome

    def resume(self, number: int) -> None:
        """Releases a barrier that has failed somewhere. It cannot be held again."""
        if self._held is not None and self._held.number <= number:
            self._end()
        self._over = max(self._over, number)

    def _named(self, number: int, now: float) -> _Held:
        held = self._current(now)
        if held is None or held.number != number:
            raise NotHeldError(f"barrier {number} is not held")
        return held

    def _current(self, now: float) -> _Held | None:
        if self._held is not None and now >= self._held.until:
            self._end()
        return self._held

    def _end(self) -> None:
        if self._held is not None:
            self._over = max(self._over, self._held.number)
            self._held = None
