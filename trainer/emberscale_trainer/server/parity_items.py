"""The items of parity streams: how a member makes them of its deltas, and what each asks of the group that takes it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.parity import ParityBlocks
from emberscale_trainer.parity.holding import Batch
from emberscale_trainer.parity.places import split_places
from emberscale_trainer.parity.withdrawals import Withdrawals
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.group import GroupCore
from emberscale_trainer.stream import NO_RECORDS, Item, ItemKind, StreamLostError
from emberscale_trainer.table import RowLayout

Taken = Sequence[NDArray[np.uint8]]
"""Deltas that were taken from the log, by the holder that they go to: uint8[bytes]."""


def base_item(applied: AppliedBatches) -> Item:
    """Returns the item that names all batches in a member's rows."""
    runs = [(epoch, *run) for epoch in applied.epochs() for run in applied.runs(epoch)]
    return Item(ItemKind.BASE, 0, NO_RECORDS, np.array(runs, np.int64).reshape(-1))


def delta_items(taken: Taken, stored: int, batches: Sequence[Batch]) -> Iterator[Item]:
    """Yields each holder's item with the changes of these batches; all holders have the items up to `stored`."""
    if len(batches) > 1:
        numbers = [number for batch in batches for number in batch]
        return _items(ItemKind.COALESCED, taken, [stored, *numbers])
    return _items(ItemKind.DELTA if batches else ItemKind.FILL, taken, [stored], *batches)


def withdrawal_items(taken: Taken, stored: int, kind: ItemKind, what: Sequence[int]) -> Iterator[Item]:
    """Yields each holder's item with the deltas that take rows out of the parity; the keys `what` say which."""
    return _items(kind, taken, [stored, *what])


def _items(kind: ItemKind, taken: Taken, numbers: Sequence[int], batch: Batch = (0, 0)) -> Iterator[Item]:
    keys = np.array(numbers, np.int64)
    for deltas in taken:
        yield Item(kind, 0, deltas.reshape(1, -1) if len(deltas) else NO_RECORDS, keys, *batch)


class ItemTaker:
    """Takes the items that other members send to a group, whose parts these are. The caller guards the group."""

    def __init__(
        self,
        core: GroupCore[NDArray[np.uint8]],
        blocks: ParityBlocks,
        withdrawals: Withdrawals,
        layouts: Sequence[RowLayout],
    ) -> None:
        self._core = core
        self._blocks = blocks
        self._withdrawals = withdrawals
        self._layouts = layouts

    def take(self, source: int, item: Item) -> None:
        """Takes an item of a member.

        Raises SourceOverError and NotHeldError if the group takes no more of it, StreamLostError if the item was taken
        without all that it says, and ValueError for an item of another kind.
        """
        core, keys = self._core, item.keys.tolist()
        match item.kind:
            case ItemKind.BASE:
                runs = item.keys.reshape(-1, 4).tolist()
                core.begin(source, AppliedBatches.from_runs((epoch, [run]) for epoch, *run in runs))
            case ItemKind.DELTA:
                core.take(source, keys[0], ((item.epoch, item.batch),), item.records.reshape(-1).copy())
            case ItemKind.COALESCED:
                batches = tuple(zip(keys[1::2], keys[2::2], strict=True))
                core.take(source, keys[0], batches, item.records.reshape(-1).copy())
            case ItemKind.FILL:
                core.take(source, keys[0], (), item.records.reshape(-1).copy())
            case ItemKind.WITHDRAWAL:
                core.take_withdrawal(source, item.records.reshape(-1).copy())
                if ends := keys[1:]:
                    with _taken_once():
                        self._withdrawals.withdrew_to(source, ends)
            case ItemKind.WITHDRAWN_PLACES:
                parts = [*split_places(item.keys[1:], self._layouts)]
                core.take_withdrawal(source, item.records.reshape(-1).copy())
                with _taken_once():
                    for table, stripe, places in parts:
                        self._withdrawals.withdrew(source, table, stripe, places)
            case ItemKind.COLUMNS:
                core.take_columns(source)
                with _taken_once():
                    self._take_columns(item)
            case ItemKind.COLUMNS_TOLD:
                self._withdrawals.tell_ends(source, keys[2:])
                core.marked(source, {keys[0]: keys[1]})
            case ItemKind.WITHDRAWN:
                core.withdrawn(source, dict(zip(keys[::2], keys[1::2], strict=True)))
            case ItemKind.HALF if keys:
                core.require()
                self._blocks.take_half(item.table, keys[0], keys[1], item.records)
            case ItemKind.HALF:
                core.sent_halves(source)
            case _:
                raise ValueError(f"an item of kind {item.kind} in a stream of parity")

    def _take_columns(self, item: Item) -> None:
        first = 0
        for table, stripe, count in item.keys.reshape(-1, 3).tolist():
            self._withdrawals.tell_keys(table, stripe, item.records[first : first + count])
            first += count


@contextmanager
def _taken_once() -> Iterator[None]:
    """Ends the stream if memory is short: its item is taken already, and must not be repeated."""
    try:
        yield
    except MemoryError as error:
        raise StreamLostError(f"no memory to note what is withdrawn: {error}") from error
