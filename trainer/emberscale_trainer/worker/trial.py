"""An estimate of what rounds would save, from batches that are trained one by one."""

from collections.abc import Callable

import structlog

from emberscale_trainer.data.source import Batch
from emberscale_trainer.worker.keys import KeyPlan, RequestTooLargeError
from emberscale_trainer.worker.rounds import Round, RoundLengths

log = structlog.get_logger()

_TRIED = 64
"""Batches of an estimate at most: those of a long lease are kept until its end."""


class RoundTrial:
    """The first batches of a lease that is trained one by one, and the bytes that each takes on the wire."""

    def __init__(self, lengths: RoundLengths) -> None:
        self._lengths = lengths
        self._batches: list[Batch] = []
        self._single_bytes: list[int] = []

    def add(self, one: Round, plan: KeyPlan) -> None:
        """Adds a batch that was read."""
        if len(self._batches) < _TRIED:
            self._batches += one.batches
            self._single_bytes.append(plan.exchange_bytes)

    def end(self, plan_round: Callable[[Round], KeyPlan]) -> None:
        """Tells the lengths what the longest round of these batches that the server and the budget admit would save.

        `plan_round` may raise RequestTooLargeError, which stands for a round that does not fit into a frame.
        """
        length, needed = self._lengths.longest(len(self._batches)), 0
        while length > 1:
            try:
                plan = plan_round(Round.of(self._batches[:length]))
            except RequestTooLargeError:
                self._lengths.exceeds_frame(length)
            else:
                needed = self._lengths.memory(plan.values)
                if needed <= self._lengths.budget:
                    size, single = plan.exchange_bytes, sum(self._single_bytes[:length])
                    pays = self._lengths.estimated(size, single, length)
                    log.info("rounds_estimated", batches=length, bytes=size, single_bytes=single, pays=pays)
                    return
            length //= 2
        if needed:
            self._lengths.rest()
            log.warning("hot_embeddings_budget_too_small", budget=self._lengths.budget, needed_for_two_batches=needed)
