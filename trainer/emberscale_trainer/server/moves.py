"""One server's part in a live move, as pure state: what it gives away and takes over, and whether it still moves.

prepare -> (copy) -> hand over, within a barrier -> switch
   abandoned, replaced by a move with a larger number, or not mentioned for a minute -> over
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emberscale_api.routing import RoutingTable
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.barrier import NotHeldError

PATIENCE_SECONDS = 60.0
"""The time after which a server leaves a move that the master no longer mentions."""

_SERVERS = 1 << 10
_WANTS = 1 << 62


@dataclass(frozen=True, eq=False)
class Transfer:
    """The part of the server with this index in a move: it owns `before` until `table` comes into force.

    * `replaces`: the table replaces lost servers. No rows are sent: successors load them from a checkpoint.
    * `lost`: the indexes of servers whose rows the others rebuild for their new owners; empty: rows move.
    * `on_demand`: of a rebuild, the new owners serve the rows once they know their keys.
    """

    number: int
    table: RoutingTable
    index: int
    before: Ownership
    replaces: bool = False
    lost: tuple[int, ...] = ()
    on_demand: bool = False

    @cached_property
    def after(self) -> Ownership:
        """What the server owns under the new table."""
        return Ownership.of(self.table, self.index) if self.index < len(self.table.servers) else Ownership.of_nothing()

    @property
    def orders(self) -> bool:
        """Whether the server orders the staleness of all once the table is in force."""
        return bool(self.table.owners) and self.table.owners[0].index == self.index

    @property
    def joins(self) -> bool:
        """Whether the server has no rows, and will have only what it receives or loads."""
        return not self.before

    @property
    def gained(self) -> Ownership:
        """What the server takes over."""
        return self.after.without(self.before)

    def given(self) -> dict[int, Ownership]:
        """Returns what the server gives away, by the index of the receiver."""
        return new_owners(self.before.without(self.after), self.table)


class Moves:
    """The moves that the master has asked of a server, one at a time. Times are in seconds, on one clock.

    `transfer` is the move under way, if there is one.
    """

    def __init__(self) -> None:
        self.transfer: Transfer | None = None
        self._heard_at = 0.0
        self._over = 0

    @property
    def newest(self) -> int:
        """The largest number of a move that was asked of the server."""
        return max(self._over, 0 if self.transfer is None else self.transfer.number)

    def begin(self, transfer: Transfer, now: float) -> None:
        """Joins a move and leaves any earlier one. Raises NotHeldError for a move that is over."""
        if transfer.number <= self.newest:
            raise NotHeldError(f"move {transfer.number} is over")
        self.end()
        self.transfer, self._heard_at = transfer, now

    def named(self, number: int) -> Transfer:
        """Returns the move of this number. Raises NotHeldError if it is not under way."""
        if self.transfer is None or self.transfer.number != number:
            raise NotHeldError(f"move {number} is not under way here")
        return self.transfer

    def renew(self, number: int, now: float) -> Transfer:
        """As `named`, and notes that the master still wants the move."""
        transfer = self.named(number)
        self._heard_at = now
        return transfer

    def lapsed(self, now: float) -> bool:
        """Whether the master has not mentioned the move under way for too long."""
        return self.transfer is not None and now >= self._heard_at + PATIENCE_SECONDS

    def abandon(self, number: int) -> Transfer | None:
        """Ends all moves up to this number, and returns the current one if it is among them."""
        transfer = self.transfer
        self._over = max(self._over, number)
        if transfer is None or transfer.number > number:
            return None
        self.end()
        return transfer

    def end(self) -> None:
        """Ends the move under way."""
        if self.transfer is not None:
            self._over = max(self._over, self.transfer.number)
            self.transfer = None


def new_owners(owned: Ownership, table: RoutingTable) -> dict[int, Ownership]:
    """Returns who owns these buckets and pieces under a table, by index, with the part of each."""
    buckets, pieces = np.array(table.bucket_owners), np.array(table.piece_owners)
    peers = sorted({*buckets[owned.buckets].tolist(), *pieces[owned.pieces].tolist()})
    return {peer: Ownership(owned.buckets & (buckets == peer), owned.pieces & (pieces == peer)) for peer in peers}


def stream_of(move: int, source: int) -> int:
    """Returns the 64-bit number of the row stream of a move from a server."""
    return move * _SERVERS + source


def wants_stream(move: int, source: int) -> int:
    """Returns the 64-bit number of the stream with which a server asks for rows that follow on demand."""
    return _WANTS | stream_of(move, source)


def asks_for_rows(stream: int) -> bool:
    """Whether a stream asks for rows, rather than bringing them."""
    return bool(stream & _WANTS)


def move_of(stream: int) -> int:
    """Returns the number of the move that a stream belongs to."""
    return (stream & ~_WANTS) // _SERVERS
