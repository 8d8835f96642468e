"""Rows that a server receives by a move: before its switch or, if they follow on demand, partly after it.

On demand, the server learns the keys of all rows before the switch. It then serves the rows, and those that have yet to
arrive are missing: a request that names one of them waits until it is there.
"""

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.core import Decision, ServerCore, Wait
from emberscale_trainer.server.missing import MissingPart, MissingRows
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.served import ServedRows
from emberscale_trainer.stream import Item
from emberscale_trainer.table import TableStore, keys_of


class ArrivingRows:
    """The rows that arrive by the latest move. The caller holds the lock.

    * `staged`: the tables of a server that joins by the move, until its switch.
    * `missing`: the served rows that have yet to arrive; None if all are there.
    * `followed`: the move whose table is in force, if its rows follow on demand or have done so.
    """

    def __init__(
        self,
        core: ServerCore,
        changed: threading.Condition,
        served: ServedRows,
        clock: Callable[[], float],
    ) -> None:
        """`core` learns whether rows are missing; `changed`, the lock, is notified when they are wanted or arrive."""
        self._core = core
        self._changed = changed
        self._served = served
        self._clock = clock
        self._coming: MissingRows | None = None
        self.staged: TableStore | None = None
        self.missing: MissingRows | None = None
        self.followed: Transfer | None = None

    def forget(self) -> None:
        """Forgets rows that have yet to arrive: other rows are served from now on, or none."""
        self.followed = None
        self._miss(None)

    # Before the switch

    def expect(self, transfer: Transfer) -> None:
        """Begins to receive the rows of a move."""
        self._coming = MissingRows(transfer) if transfer.on_demand else None

    def drop(self) -> None:
        """Drops what has arrived for a server that joins, and what else is known of the rows of the move."""
        self.staged = self._coming = None

    def has_room(self, transfer: Transfer) -> bool:
        """Whether the rows that an earlier move has left in the buckets of this one are gone."""
        return transfer.joins or not self._served.retirement.has(transfer.gained)

    def require_room(self, transfer: Transfer) -> None:
        """Raises NotHeldError while the removal of rows would also remove some that the move brings."""
        if not self.has_room(transfer):
            raise NotHeldError(f"move {transfer.number} is not prepared here: rows of an earlier one are being removed")

    def tell(self, number: int, item: Item) -> None:
        """Notes the keys of rows that will arrive. Raises NotHeldError, and ValueError for malformed keys."""
        tables, coming = self._receiving(number), self._coming
        if coming is None or not 0 <= item.table < len(tables.specs) or len(item.keys) % 2:
            raise ValueError(f"move {number} brings no keys of table {item.table}")
        coming.tell(item.table, item.keys)

    def retire(self, number: int, table: int, keys: NDArray[np.int64]) -> None:
        """Retires rows that their giver no longer has. Raises NotHeldError."""
        if not self._misses(number):
            self._receiving(number).retire(table, keys)

    def _receiving(self, number: int) -> TableStore:
        transfer = self._core.moving(number)
        self.require_room(transfer)
        tables = self.staged if transfer.joins else self._served.tables
        if tables is None:
            raise NotHeldError(f"nothing is prepared here for move {number}")
        return tables

    def switched(self, transfer: Transfer) -> None:
        """Misses the rows of this move that have yet to arrive: its table is in force."""
        coming = self._coming
        self.drop()
        self.followed = None
        if coming is not None and coming.transfer is transfer:
            coming.begin(self._clock())
            self.followed = transfer
            self._miss(coming if coming.count else None)

    # Before and after the switch

    def take(self, number: int, table: int, records: NDArray[np.uint8]) -> None:
        """Takes over rows: before the switch of their move or, if they are missing since, after it.

        Raises NotHeldError, and ValueError for rows that do not fit the tables.
        """
        keys = keys_of(records)
        if not self._misses(number):
            self._receiving(number).load(table, records)
            if self._coming is not None:
                self._coming.arrived(table, keys, self._clock())
            return
        missing, tables = self.missing, self._served.tables
        assert missing is not None
        assert tables is not None
        still = missing.still_missing(table, keys)
        if still.any():
            tables.load(table, records[still])
            missing.arrived(table, keys[still], self._clock())
            if not missing.count:
                self._miss(None)
            self._changed.notify_all()

    # After the switch

    def _misses(self, number: int) -> bool:
        """Whether rows of this move are missing; its table is in force."""
        return self.missing is not None and self.missing.transfer.number == number

    def has_all_of(self, number: int) -> bool:
        """Whether all rows of this move have arrived; its table is in force."""
        return self.followed is not None and self.followed.number == number and self.missing is None

    def _miss(self, missing: MissingRows | None) -> None:
        self.missing = missing
        self._core.misses_rows = missing is not None

    def once_there(
        self, counts: NDArray[np.uint32], keys: NDArray[np.int64], decide: Callable[[float], Decision]
    ) -> Callable[[float], Decision]:
        """Returns a decision that waits while rows of the request are missing."""
        seen: MissingRows | None = None
        part: MissingPart | None = None

        def decide_once_there(now: float) -> Decision:
            nonlocal seen, part
            if self.missing is not seen:
                seen = self.missing
                part = None if seen is None else seen.of_request(self._served.require().named_by(counts, keys))
                if part is not None:
                    self._changed.notify_all()
            return decide(now) if part is None or seen is None or part.is_there() else Wait(None)

        return decide_once_there
