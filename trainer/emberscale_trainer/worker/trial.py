"""An estimate of what rounds would save, from batches that are trained one by one."""

import time
from collections.abc import Callable

import structlog

from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.keys import KeyPlan, RequestTooLargeError
from emberscale_trainer.worker.rounds import Round, RoundLengths, RoundSize

_log = structlog.get_logger()

_TRIED = 64
"""Batches of an estimate at most: those of a long lease are kept until its end."""

_LEAST = 2

_COPIES = 2
"""Of the batches of an estimate: as read, and joined to a round."""


class RoundTrial:
    """The first batches of a lease that is trained one by one, and the bytes that each takes on the wire.

    They take no more memory than `budget`, the round that they are joined to included. No rows are held meanwhile.
    """

    def __init__(self, lengths: RoundLengths) -> None:
        self._lengths = lengths
        self._batches: list[Batch] = []
        self._single_bytes: list[int] = []
        self._needed = 0
        self._lacks_room = False

    def add(self, one: Round, plan: KeyPlan) -> None:
        """Adds a batch that was read, unless there are enough: what comes after a batch without room is left out."""
        if self._lacks_room or len(self._batches) >= _TRIED:
            return
        self._needed += _COPIES * sum(batch.memory_bytes for batch in one.batches)
        self._lacks_room = self._needed > self._lengths.budget
        if not self._lacks_room:
            self._batches += one.batches
            self._single_bytes.append(plan.exchange_bytes)

    def end(self, plan_round: Callable[[Round], KeyPlan]) -> None:
        """Tells the lengths what a long round of these batches that the server and the budget admit would save.

        Planning a round takes time for each of its batches, so none is planned that is likely to exceed the budget: the
        rows of a round grow with its batches at most. Each length is at least twice the one before.

        `plan_round` may raise RequestTooLargeError, which stands for a round that does not fit into a frame.
        """
        began = time.thread_time()
        longest, length = self._lengths.longest(len(self._batches)), _LEAST
        found: RoundSize | None = None
        while length <= longest:
            try:
                size = self._size(length, plan_round)
            except RequestTooLargeError:
                self._lengths.exceeds_frame(length)
                longest = length // 2
                if found is None or longest <= found.batches:
                    break
                length = longest
                continue
            if size.memory_bytes > self._lengths.budget:
                if found is None:
                    self._lengths.exceeds_budget(size)
                    return
                break
            found = size
            fit = length * self._lengths.budget // max(1, size.memory_bytes)
            if fit < 2 * length:
                break
            length = max(2 * length, min(longest, 1 << (fit.bit_length() - 1)))
        if found is not None:
            pays = self._lengths.estimated(found)
            _log.info(
                "rounds_estimated",
                batches=found.batches,
                pays=pays,
                bytes=found.bytes,
                single_bytes=found.single_bytes,
                cpu_seconds=time.thread_time() - began,
            )
        elif self._lacks_room and len(self._batches) < _LEAST:
            self._lengths.lacks_room(self._needed)
        else:
            self._lengths.none_admitted()

    def _size(self, length: int, plan_round: Callable[[Round], KeyPlan]) -> RoundSize:
        plan = plan_round(Round.of(self._batches[:length]))
        return RoundSize(length, plan.exchange_bytes, sum(self._single_bytes[:length]), plan.distinct, plan.values)
