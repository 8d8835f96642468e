"""The rows that a server serves, and all that follows a change of them: protection, eviction, retirement, a watch."""

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job.running import AdmissionCounts, total_admission
from emberscale_api.wire import Header
from emberscale_trainer.checkpoint import PushWatch
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.eviction import BackgroundEviction
from emberscale_trainer.server.reports import Figures
from emberscale_trainer.server.retiring import Retirement
from emberscale_trainer.table import TableStore


class Protector(Protocol):
    """Keeps the rows of a server safe beyond its own memory."""

    def pushed(self, epoch: int, batch: int) -> None:
        """Takes the changes of a push. The lock is held."""

    def await_pushes(self) -> None:
        """Waits until pushes are as safe as they must be before they are answered. The lock is not held."""

    def catch_up(self) -> None:
        """Waits until most changes without a push are safe. The lock is not held."""

    def presume_lost(self, servers: Collection[int]) -> None:
        """Has `catch_up` no longer wait for these servers, by index, as their rows are about to be rebuilt."""

    def end(self) -> None:
        """Ends the protection: the rows are no longer served, or protected by something else. The lock is held."""


class ServedRows:
    """The tables that a server serves, if any. The caller holds the lock, except for `catch_up` and `await_pushes`.

    * `tables`: None if nothing is served.
    * `eviction`, `retirement`: of rows of these tables.
    * `protector`: protects these rows; None: nothing does.
    * `watch`: is called for each push, under the lock.
    """

    def __init__(
        self,
        lock: threading.RLock,
        changed: threading.Condition,
        moves: Callable[[], bool],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """`changed` is the condition of `lock`; `moves` and `fatal` are as in `Retirement`."""
        self.tables: TableStore | None = None
        self.eviction = BackgroundEviction(lock)
        self.retirement = Retirement(changed, moves, self.catch_up, fatal)
        self.protector: Protector | None = None
        self.watch: PushWatch | None = None
        self._admission_before: Mapping[str, AdmissionCounts] = {}

    def require(self) -> TableStore:
        """Returns the tables. Raises NotHeldError if nothing is served."""
        if self.tables is None:
            raise NotHeldError("nothing is served here")
        return self.tables

    def serve(self, tables: TableStore | None) -> None:
        """Serves these tables, or nothing, from now on. Nothing protects them yet."""
        self.protect_by(None)
        if self.tables is not None and tables is not self.tables:
            self._admission_before = total_admission(self._admission_before, self.tables.admission_counts())
        self.tables = tables
        self.eviction.serve(tables)
        self.retirement.serve(tables)

    def protect_by(self, protector: Protector | None) -> None:
        """Replaces the protector, which ends."""
        if self.protector is not None:
            self.protector.end()
        self.protector = protector

    def apply(
        self,
        push: Callable[[], None],
        header: Header,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        applied: int,
        owned: NDArray[np.bool_],
    ) -> None:
        """Applies the reserved push of a request, and tells all that follow it. An error leaves the rows half changed.

        `applied` is the number of batches in the rows, this push included; `owned` are the server's buckets.
        """
        tables = self.require()
        if self.eviction.active:
            tables.clock = max(tables.clock, applied)
        push()
        if self.watch is not None:
            self.watch(tables, counts, keys)
        self.eviction.applied(tables.clock, owned)
        if self.protector is not None:
            self.protector.pushed(header.epoch, header.batch)

    def await_pushes(self) -> None:
        """As `Protector.await_pushes`."""
        protector = self.protector
        if protector is not None:
            protector.await_pushes()

    def catch_up(self) -> None:
        """As `Protector.catch_up`."""
        protector = self.protector
        if protector is not None:
            protector.catch_up()

    def figures(self, owned: Ownership) -> Figures:
        """Returns the figures of what the server owns of these tables."""
        if self.tables is None:
            return Figures({}, 0, self._admission_before)
        admission = total_admission(self._admission_before, self.tables.admission_counts())
        return Figures(self.tables.rows(owned.buckets), self.tables.allocated_bytes, admission)
