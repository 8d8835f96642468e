"""The state of one parameter server, and everything that may happen to it, under one lock."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_api.wire import Header, Status
from emberscale_trainer.partition import Partition, PartitionSnapshot
from emberscale_trainer.server.staleness import StalenessBound, Ticket
from emberscale_trainer.table import Reader, require_finite

log = structlog.get_logger()

FREEZE_SECONDS = 10.0
"""A frozen server goes on by itself after this: the master that froze it may have died."""

Clock = Callable[[], float]

Fatal = Callable[[BaseException], None]
"""Ends the process, because its state is half changed."""


@dataclass(frozen=True)
class Totals:
    """What a server has done since it started."""

    pulls: int = 0
    pushes: int = 0
    repeated: int = 0
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    dense_seconds: float = 0.0
    hold_seconds: float = 0.0


class CutRefusedError(Exception):
    """A cut that was not prepared, or for which a batch that others have applied did not come in time."""


def end_process(cause: BaseException) -> None:
    """Ends the process at once, without an answer to anyone: the job recovers as from any lost parameter server."""
    try:
        log.critical("push_half_applied", problem=repr(cause))
    finally:  # there may be no memory for the line either
        os._exit(1)


def _ticket(header: Header) -> Ticket:
    return (header.worker, header.epoch, header.batch)


class ServerState:
    """Rows, dense slice and applied batches, from one `adopt` to the next.

    Threads call in freely. A pull or push whose routing epoch is not the server's is answered REFRESH.
    """

    def __init__(self, clock: Clock = time.monotonic, fatal: Fatal = end_process) -> None:
        self._fatal = fatal
        self._changed = threading.Condition()
        self._clock = clock
        self._partition: Partition | None = None
        self._bound: StalenessBound | None = None
        self._newest_token: dict[tuple[int, int], int] = {}
        self._frozen: tuple[int, float] | None = None
        self._settling: set[tuple[int, int]] = set()
        self._totals = Totals()

    @property
    def routing_epoch(self) -> int:
        """The epoch that is served; 0 before the first `adopt` and during one."""
        partition = self._partition
        return 0 if partition is None else partition.routing_epoch

    @property
    def totals(self) -> Totals:
        """Counters since the start of the process."""
        return self._totals

    def leave(self) -> None:
        """Serves nothing until the next `adopt`: all requests, held ones too, are answered REFRESH."""
        with self._changed:
            if self._partition is not None:
                self._partition.tables.abandon_snapshots()
            self._partition = None
            self._frozen = None
            self._bound = None
            self._newest_token.clear()
            self._changed.notify_all()

    def adopt(self, partition: Partition, bound: StalenessBound | None) -> None:
        """Serves this partition from now on; `bound` is None on all servers but the one that keeps it."""
        with self._changed:
            self._partition = partition
            self._bound = bound
            self._changed.notify_all()

    def rows(self) -> dict[str, int]:
        """Rows by table."""
        with self._changed:
            return {} if self._partition is None else self._partition.tables.rows()

    def table_bytes(self) -> int:
        """Memory that the tables have allocated, in bytes."""
        with self._changed:
            return 0 if self._partition is None else self._partition.tables.allocated_bytes

    def expected_values(self, counts: NDArray[np.uint32]) -> tuple[int, int] | None:
        """How many floats the rows of a request and the dense slice take; None where nothing is served."""
        partition = self._partition
        if partition is None:
            return None
        return partition.tables.values_per_request(counts), len(partition.dense)

    def admit(self, header: Header) -> Status:
        """Waits until the staleness bound admits the pull of a batch for training."""
        with self._changed:
            started = self._clock()
            while True:
                if self._partition is None or self._partition.routing_epoch != header.routing_epoch:
                    return Status.REFRESH
                if self._bound is None or self._bound.may_pull():
                    break
                self._changed.wait()
            if self._bound is not None:
                self._bound.pulled(_ticket(header))
            self._count(hold_seconds=self._clock() - started)
            return Status.OK

    def complete(self, header: Header) -> None:
        """Takes note that all servers have applied a batch."""
        with self._changed:
            serving = self._partition is not None and self._partition.routing_epoch == header.routing_epoch
            if serving and self._bound is not None:
                self._bound.completed(_ticket(header))
                self._changed.notify_all()

    def pull(
        self,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        rows: NDArray[np.float32],
        dense: NDArray[np.float32] | None,
    ) -> Status:
        """Fills `rows` and `dense`."""
        with self._changed:
            started = self._clock()
            partition = self._partition
            if partition is None or partition.routing_epoch != header.routing_epoch:
                return Status.REFRESH
            partition.tables.pull(counts, keys, rows)
            if dense is not None:
                dense[:] = partition.dense.values
            self._count(pulls=1, pull_seconds=self._clock() - started)
            return Status.OK

    def push(
        self,
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        gradients: NDArray[np.float32],
        dense: NDArray[np.float32],
    ) -> Status:
        """Applies a batch unless it is applied already; waits while a cut or the staleness bound holds it.

        A batch is applied whole or not at all: what can fail happens before the batch is recorded, and a failure after
        it is fatal. Raises NonFiniteGradientError, ValueError and MemoryError, nothing being done.
        """
        require_finite(gradients, "rows")
        require_finite(dense, "dense parameters")
        batch = (header.epoch, header.batch)
        ticket = _ticket(header)
        with self._changed:
            started = self._clock()
            while True:
                partition = self._partition
                if partition is None or partition.routing_epoch != header.routing_epoch:
                    return Status.REFRESH
                refusal = self._refusal(partition, header, batch)
                if refusal is not None:
                    if self._bound is not None:
                        self._bound.forget(ticket)
                    self._changed.notify_all()
                    return refusal
                thaw_in = self._held_for(batch)
                if thaw_in is None and (self._bound is None or self._bound.may_push(ticket)):
                    break
                self._changed.wait(thaw_in)
            admitted = self._clock()
            partition.dense.check(dense)
            partition.tables.reserve(counts, keys, gradients)
            partition.applied.record(*batch)
            try:
                partition.tables.push(counts, keys, gradients)
                updated = self._clock()
                partition.dense.step(dense)
            except BaseException as error:
                self._fatal(error)
                raise
            if self._bound is not None:
                self._bound.pushed(ticket)
            self._count(
                pushes=1,
                push_seconds=updated - admitted,
                dense_seconds=self._clock() - updated,
                hold_seconds=admitted - started,
            )
            self._changed.notify_all()
            return Status.OK

    def disconnected(self, worker: int) -> None:
        """A worker's connection broke: what it has pulled will not be pushed, nor completed what it has pushed."""
        with self._changed:
            if self._bound is not None:
                self._bound.forget_worker(worker)
            self._changed.notify_all()

    def freeze(self, cut: int, asked: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Holds pushes from now on; returns those of the asked (epoch, first, stop) ranges of batches that are applied.

        Raises CutRefusedError where nothing is served.
        """
        with self._changed:
            partition = self._serving()
            self._frozen = (cut, self._clock() + FREEZE_SECONDS)
            self._settling = set()
            return [
                (epoch, max(first, start), min(stop, end))
                for epoch, start, end in asked
                for first, stop in partition.applied.ranges(epoch)
                if max(first, start) < min(stop, end)
            ]

    def cut(
        self,
        number: int,
        settle: Sequence[tuple[int, int, int]],
        settle_seconds: float,
        hold_seconds: float = 0.0,
    ) -> tuple[PartitionSnapshot, float]:
        """Lets the batches to settle through, begins a snapshot of the partition, and goes on.

        With `hold_seconds`, pushes wait for so long after that, unless the cut is thawed or the server leaves.
        Returns the snapshot, and the seconds for which its beginning held pushes. Raises CutRefusedError.
        """
        with self._changed:
            if self._frozen is None or self._frozen[0] != number:
                raise CutRefusedError(f"cut {number} is not prepared here")
            self._settling = {(epoch, batch) for epoch, first, stop in settle for batch in range(first, stop)}
            self._changed.notify_all()
            if not self._changed.wait_for(self._settled, timeout=settle_seconds):
                raise CutRefusedError(f"a batch that others have applied did not come within {settle_seconds:g} s")
            partition = self._serving()
            started = self._clock()
            taken = partition.snapshot(Reader.CHECKPOINT, self._changed)
            self._frozen = (number, self._clock() + hold_seconds) if hold_seconds > 0 else None
            self._settling = set()
            self._changed.notify_all()
            return taken, self._clock() - started

    def thaw(self, cut: int) -> None:
        """Gives up a cut; held pushes go through."""
        with self._changed:
            if self._frozen is not None and self._frozen[0] == cut:
                self._frozen = None
                self._changed.notify_all()

    def _serving(self) -> Partition:
        if self._partition is None:
            raise CutRefusedError("the server holds no partition")
        return self._partition

    def _settled(self) -> bool:
        return self._partition is None or all(batch in self._partition.applied for batch in self._settling)

    def _refusal(self, partition: Partition, header: Header, batch: tuple[int, int]) -> Status | None:
        shard = (header.epoch, header.shard)
        if header.token < self._newest_token.get(shard, 0):
            return Status.FENCED
        self._newest_token[shard] = header.token
        if batch in partition.applied:
            self._count(repeated=1)
            return Status.REPEATED
        return None

    def _held_for(self, batch: tuple[int, int]) -> float | None:
        """Seconds for which a cut holds this batch at most; None if none does."""
        if self._frozen is None or batch in self._settling:
            return None
        left = self._frozen[1] - self._clock()
        if left > 0:
            return left
        self._frozen = None
        return None

    def _count(
        self,
        pulls: int = 0,
        pushes: int = 0,
        repeated: int = 0,
        pull_seconds: float = 0.0,
        push_seconds: float = 0.0,
        dense_seconds: float = 0.0,
        hold_seconds: float = 0.0,
    ) -> None:
        totals = self._totals
        self._totals = Totals(
            totals.pulls + pulls,
            totals.pushes + pushes,
            totals.repeated + repeated,
            totals.pull_seconds + pull_seconds,
            totals.push_seconds + push_seconds,
            totals.dense_seconds + dense_seconds,
            totals.hold_seconds + hold_seconds,
        )
