"""Takes the rows of live servers out of the parity of their group, so that those of lost servers are left in it.

There are two ways:

* `decode`: the servers withdraw all rows, and then each decodes what it holds.
* `find_keys`, then `withdraw_next` and `withdraw_places` again and again, of one lost server: the servers first tell
  each other the keys of their rows, a small part of the bytes, and so learn the keys of the lost ones. Training can go
  on from then on: a row is decoded as soon as all have withdrawn theirs at its place in the stripe, and rows that a
  request waits for come before others.

Lock order: as in `parity_group`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.parity.blocks import key_columns
from emberscale_trainer.parity.places import place_numbers, split_places
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.stream import NO_RECORDS, Item, ItemKind

_WITHDRAW_BYTES = 2 << 20
"""Rows that are withdrawn at a time: each piece takes an item to every holder."""
_WITHDRAW_AHEAD = 2
"""Pieces that are sent before the holders have acknowledged earlier ones; holders keep as many."""
_COLUMNS_BYTES = 4 << 20
_DECODE_BYTES = 2 << 20
"""Lost rows that are decoded at a time: copies, made while others wait for the lock of the group."""

Rows = tuple[int, NDArray[np.uint8]]
"""The number of a table, and some of its rows: uint8[n, stride]."""
LostKeys = tuple[int, NDArray[np.int64], NDArray[np.int64]]
"""The number of a table, and keys of lost rows with their places (`parity.places`): int64[n] each."""


class Withdrawing:
    """One server's part in the withdrawal of all rows but lost ones. It survives failed rebuilds of the same group.

    `pieces`: the pieces of rows that were taken out of the parity, and of parity that was sent to other holders.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.pieces = 0
        self._working = threading.Lock()
        self._agreed: dict[int, AppliedBatches] | None = None
        self._marks: dict[int, int] = {}
        self._keys: list[LostKeys] | None = None
        self._on_demand: bool | None = None

    def decode(self, lost: frozenset[int]) -> dict[int, AppliedBatches]:
        """Withdraws all other rows from the parity of lost members; returns the batches in the rows of each.

        Of lost members of which this server holds no parity, it returns none.

        Waits until all other members have done so. Raises NotHeldError if this group cannot rebuild the rows.
        """
        group = self.group
        self._marks = group.lose(lost)
        with self._working:
            self._require_same_way(on_demand=False)
            if self._agreed is None:
                if not self.has_withdrawn:  # an earlier attempt failed after it
                    while not self._withdraw_piece(tells_ends=False):
                        pass
                    self.end()
                agreed = self._await_agreed()
                if len(lost) > 1:
                    self._send_halves()
                    self._await_halves()
                self._agreed = agreed
            return self._agreed

    def decoded(self, member: int) -> Iterator[Rows]:
        """Yields the rows of a lost member that this server decodes."""
        group = self.group
        for table, layout in enumerate(group.layouts):
            for slots in group.blocks.decoded(group.core.lost, member, table):
                records = chosen(slots, layout.fields(slots)["pushes"] != 0)
                if len(records):
                    yield table, records

    def _require_same_way(self, *, on_demand: bool) -> None:
        """Raises NotHeldError if an earlier attempt has begun to withdraw in the other way."""
        if self._on_demand not in (None, on_demand):
            raise NotHeldError("an earlier attempt has begun to take rows out of the parity in another way")
        self._on_demand = on_demand

    def _withdraw_piece(self, *, tells_ends: bool) -> bool:
        """Withdraws the next rows; returns whether none is left."""
        group = self.group
        with group.state.lock:
            group.core.require()
            group.log.withdraw(_WITHDRAW_BYTES)
            group.withdraw(what=group.log.ends if tells_ends else ())
            empty = group.log.is_empty
        group.send_queued()
        group.await_holders(ahead=_WITHDRAW_AHEAD)
        self.pieces += 1
        return empty

    def _await_agreed(self) -> dict[int, AppliedBatches]:
        """Waits for all others; returns the batches of each lost server that all of its parity has."""
        group = self.group
        with group.changed:
            while (agreed := group.core.agreed()) is None:
                group.changed.wait()
            return agreed

    def _send_halves(self) -> None:
        """Sends other holders the parity that they need to decode two lost rows of a stripe, and then an end mark."""
        group = self.group
        following = (group.me + 1) % len(group.members)
        for table in range(len(group.layouts)):
            for stripe, first, rows in group.blocks.halves(group.core.lost, table):
                half = Item(ItemKind.HALF, table, rows, np.array([stripe, first], np.int64))
                none = Item(ItemKind.HALF, table, rows[:0], half.keys)
                with group.state.lock:
                    group.core.require()
                    group.send_to_holders({following: half}, otherwise=none)
                group.await_holders()
                self.pieces += 1
        with group.state.lock:
            group.core.require()
            group.send(Item(ItemKind.HALF, 0, NO_RECORDS))
        group.await_others()

    def _await_halves(self) -> None:
        with self.group.changed:
            while not self.group.core.has_halves():
                self.group.changed.wait()

    # Rows of one lost server that follow on demand

    def find_keys(self, lost: int) -> dict[int, AppliedBatches]:
        """Learns the keys of a lost member's rows; returns the batches in its rows, if this server holds its parity.

        Waits until all other members have told those of their rows. Raises NotHeldError as `decode` does.
        """
        group = self.group
        self._marks = group.lose(frozenset((lost,)))
        with self._working:
            self._require_same_way(on_demand=True)
            if self._agreed is None:
                self._tell_columns(lost, self._marks[lost])
                agreed = self._await_agreed()
                with group.changed:
                    if self._keys is None:  # from what the parity has before it changes again
                        self._keys = self._find_keys(lost)
                    self._go_on(self._keys)
                self._agreed = agreed
            return self._agreed

    def lost_keys(self) -> Sequence[LostKeys]:
        """Returns the keys of the lost rows that this server decodes, once they are found."""
        return self._keys or ()

    def _tell_columns(self, lost: int, mark: int) -> None:
        """Tells each holder the keys of the rows whose parity has lost rows, too."""
        group = self.group
        with group.state.lock:
            group.core.require()
            if group.core.has_told:  # an earlier attempt failed after it
                return
            ends = group.log.begin_withdrawal(self._is_needed)
            pieces = {member: self._columns(frozenset((lost,)), ends, member) for member in group.core.holders}
            group.withdraw(what=())
            none = Item(ItemKind.COLUMNS, 0, NO_RECORDS)
            for number in range(max(map(len, pieces.values()), default=0)):
                some = {member: piece[number] for member, piece in pieces.items() if number < len(piece)}
                group.send_to_holders(some, otherwise=none)
            said = np.array([lost, mark, *ends], np.int64)
            group.send(Item(ItemKind.COLUMNS_TOLD, 0, NO_RECORDS, said))
            group.core.told_columns()
        group.await_others()

    def _columns(self, lost: frozenset[int], ends: Sequence[int], holder: int) -> list[Item]:
        group, pieces = self.group, [_Columns()]
        for table, (layout, end) in enumerate(zip(group.layouts, ends, strict=True)):
            for segment in range(-(-end >> layout.slot_bits)):
                stripe = group.layout.stripe(group.me, table, segment)
                if not group.layout.lost_rows(lost, table, stripe):
                    continue
                if group.layout.decoding_member(lost, table, stripe) != holder:
                    continue
                rows = group.rows_of(table, segment)[: end - (segment << layout.slot_bits)]
                if pieces[-1].nbytes >= _COLUMNS_BYTES:
                    pieces.append(_Columns())
                pieces[-1].add(table, stripe, key_columns(layout, rows))
        return [piece.item() for piece in pieces]

    def _is_needed(self, table: int, segment: int) -> bool:
        group = self.group
        stripe = group.layout.stripe(group.me, table, segment)
        return bool(group.layout.lost_rows(group.core.lost, table, stripe))

    def _find_keys(self, lost: int) -> list[LostKeys]:
        """Finds the keys; raises MemoryError, and then has changed nothing. The lock of `changed` is held."""
        group = self.group
        return [
            (table, keys, place_numbers(table, stripe, places, layout))
            for table, layout in enumerate(group.layouts)
            for stripe, keys, places in group.blocks.lost_keys(lost, table, group.withdrawals.columns)
        ]

    def _go_on(self, found: Sequence[LostKeys]) -> None:
        """Lets the parity change again; raises MemoryError, and a later call then does the rest."""
        group = self.group
        first_places = [numbers[:1] for _, _, numbers in found]
        parts = [part for numbers in first_places for part in split_places(numbers, group.layouts)]
        group.withdrawals.begin((table, stripe) for table, stripe, _ in parts)
        group.core.holding.resume()

    def withdraw_next(self) -> bool:
        """Withdraws the next rows from the parity, the last first; returns whether none is left."""
        return self._withdraw_piece(tells_ends=True)

    def want(self, numbers: NDArray[np.int64]) -> None:
        """Decodes the lost rows at these places of stripes before others. Raises ValueError."""
        group = self.group
        parts = [*split_places(numbers, group.layouts)]
        with group.changed:
            for table, stripe, places in parts:
                group.withdrawals.decodable.want(table, stripe, places)

    def withdraw_places(self, numbers: NDArray[np.int64]) -> None:
        """Withdraws the rows at these places of stripes. Raises ValueError, and MemoryError as `DeltaLog.fill` does."""
        group = self.group
        parts = [*split_places(numbers, group.layouts)]
        with group.state.lock:
            group.core.require()
            for table, stripe, places in parts:
                segment = group.layout.segment(group.me, table, stripe)
                if segment is not None:
                    group.log.withdraw_slots(table, places + (segment << group.layouts[table].slot_bits))
            group.withdraw(ItemKind.WITHDRAWN_PLACES, numbers.tolist())
        group.send_queued()

    def end(self) -> None:
        """Tells the others that this server has withdrawn all its rows, and waits until they know."""
        group = self.group
        with group.state.lock:
            group.core.require()
            said = np.array([*self._marks.items()], np.int64).reshape(-1)
            group.send(Item(ItemKind.WITHDRAWN, 0, NO_RECORDS, said))
            group.core.withdrew()
        group.await_others()

    @property
    def has_withdrawn(self) -> bool:
        """Whether this server has withdrawn all its rows."""
        return self.group.core.has_withdrawn

    def has_only_lost_rows(self) -> bool:
        """Whether all other live members have withdrawn their rows. Raises NotHeldError."""
        with self.group.changed:
            return self.group.core.has_only_lost_rows()

    def has_decodable(self) -> bool:
        """Whether `take_decoded` may return rows."""
        return self.group.withdrawals.decodable.has_more

    def has_wanted(self) -> bool:
        """Whether `take_decoded` may return rows that are wanted."""
        return self.group.withdrawals.decodable.has_wanted

    def wait_for(self, condition: Callable[[], object], left: Callable[[], float | None] = lambda: None) -> None:
        """Waits until a condition holds or no seconds are `left`; None: there is no limit.

        `notify`, and what others send, have both looked at again. Raises NotHeldError once the group is over.
        """
        group = self.group
        with group.changed:
            while not (group.core.is_over or condition()):
                seconds = left()
                if seconds is not None and seconds <= 0:
                    break
                group.changed.wait(seconds)
            group.core.require()

    def notify(self) -> None:
        """Has `wait_for` look at its condition again."""
        with self.group.changed:
            self.group.changed.notify_all()

    def take_decoded(self) -> list[Rows]:
        """Returns a few of the lost rows that can be decoded, those that are wanted first.

        After a MemoryError, the next call returns them.
        """
        group = self.group
        with group.changed:
            group.core.require()
            decodable = group.withdrawals.decodable
            alone = decodable.take(_DECODE_BYTES)
            try:
                found = [(one.table, group.blocks.alone(one.table, one.stripe, one.places)) for one in alone]
            except MemoryError:
                decodable.give_back(alone)
                raise
        return [(table, rows) for table, rows in found if len(rows)]


class _Columns:
    """The key columns of several segments for one holder."""

    def __init__(self) -> None:
        self._said: list[int] = []
        self._parts: list[NDArray[np.uint8]] = []
        self.nbytes = 0

    def add(self, table: int, stripe: int, columns: NDArray[np.uint8]) -> None:
        self._said += [table, stripe, len(columns)]
        self._parts.append(columns)
        self.nbytes += columns.nbytes

    def item(self) -> Item:
        records = np.concatenate(self._parts) if self._parts else NO_RECORDS
        return Item(ItemKind.COLUMNS, 0, records, np.array(self._said, np.int64))


def chosen(records: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Returns the records, uint8 [n, stride], that the mask, bool [n], chooses: without a copy if it chooses all."""
    return records if mask.all() else records[mask]
