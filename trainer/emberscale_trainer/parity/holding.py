"""What one server holds for the other members of its group: parity, and the last item of each member in it.

A source numbers its items from 1, and sends each holder one item for one or several pushes. A holder keeps an item
until the source has declared it stored, which means that all holders have it, and only then applies it. An
interrupted push has reached only some holders: when its server is lost, the others agree on the last number that all of
them have, and drop later items. So the rebuilt rows, and the record of the batches in them, are of one moment. They
have every batch of the items that all holders have acknowledged, and may have later ones.

This module has no clock, thread, socket or row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from emberscale_trainer.partition import AppliedBatches

Batch = tuple[int, int]

_Deltas = TypeVar("_Deltas")
_Sent = TypeVar("_Sent", contravariant=True)


class Blocks(Protocol[_Sent]):
    """The parity itself, which the deltas of all sources go into."""

    def apply(self, source: int, deltas: _Sent) -> None:
        """Applies deltas of a source; after a MemoryError, none of them is."""


class SourceOverError(Exception):
    """The source counts as lost, or has withdrawn its rows; its items are no longer accepted."""


@dataclass
class _Source(Generic[_Deltas]):
    """The items of one source.

    * `received`, `applied`: the last item that arrived, and the last that is in the parity.
    * `kept`: the items in between: their batches, if any, and the deltas, which the first item lacks.
    * `batches`: the batches in the parity.
    * `paused`: what arrives is kept, also once all holders have it.
    * `lost`: no more items are accepted. `withdrawn`: the parity has none of its rows any more.
    """

    received: int = 0
    applied: int = 0
    kept: deque[tuple[tuple[Batch, ...], _Deltas | None]] = field(default_factory=deque)
    batches: AppliedBatches = field(default_factory=AppliedBatches)
    paused: bool = False
    lost: bool = False
    withdrawn: bool = False


class Holding(Generic[_Deltas]):
    """One member's holding. `blocks` gets the deltas of all the others."""

    def __init__(self, blocks: Blocks[_Deltas], member: int, members: int) -> None:
        self._blocks = blocks
        self._sources: dict[int, _Source[_Deltas]] = {
            source: _Source() for source in range(members) if source != member
        }

    def begin(self, source: int, batches: AppliedBatches) -> None:
        """Takes an item of a source that comes before any of a push: all batches in its rows as it begins."""
        one = self._of(source)
        one.batches = batches
        one.kept.append(((), None))
        one.received += 1

    def take(self, source: int, stored: int, batches: Sequence[Batch], deltas: _Deltas) -> None:
        """Takes the next item of a source, with the changes of these batches, and perhaps of none.

        All holders have the source's items up to `stored`. The deltas are kept as they are.

        Raises SourceOverError, and ValueError for what are no deltas. After a MemoryError the item has not come.
        """
        one = self._of(source)
        if not one.paused:
            self._apply(source, min(stored, one.received))
        one.kept.append((tuple(batches), deltas))
        one.received += 1

    def take_at_once(self, source: int, deltas: _Deltas) -> None:
        """Takes the next item of a source that will never be lost: applies it and all before it, unless it is paused.

        Raises as `take` does.
        """
        one = self._of(source)
        if one.paused:
            one.kept.append(((), deltas))
        else:
            self._apply(source, one.received)
            self._blocks.apply(source, deltas)
            one.applied += 1
        one.received += 1

    def is_withdrawn(self, source: int) -> bool:
        """Whether none of a source's rows is left in the parity."""
        return self._sources[source].withdrawn

    def pause(self, source: int) -> None:
        """Takes an item without changes: the parity has exactly what came before it until `resume`.

        Raises SourceOverError; after a MemoryError the item has not come.
        """
        one = self._of(source)
        if not one.paused:
            self._apply(source, one.received)
            one.paused = True
        one.kept.append(((), None))
        one.received += 1

    def resume(self) -> None:
        """Ends all pauses. Raises MemoryError; a later call then does the rest."""
        for source, one in self._sources.items():
            if one.paused:
                self._apply(source, one.received)
                one.paused = False

    def received(self, source: int) -> int:
        """Returns the number of items that arrived from a source."""
        return self._sources[source].received

    def lose(self, source: int) -> int:
        """Accepts no more items from a lost source; returns the number of its items that arrived."""
        one = self._sources[source]
        one.lost = True
        return one.received

    def agree(self, source: int, agreed: int) -> None:
        """Applies the items of a lost source up to the last that all holders have, and drops the others.

        Raises ValueError if more is applied here already.
        """
        one = self._sources[source]
        if not one.lost or not one.applied <= agreed <= one.received:
            raise ValueError(f"{agreed} items of server {source} were agreed on, and {one.applied} are applied here")
        self._apply(source, agreed)
        one.kept.clear()
        one.received = agreed

    def withdraw(self, source: int) -> None:
        """Notes that a live source has withdrawn all its rows: none of them is left in the parity."""
        one = self._of(source)
        self._apply(source, one.received)
        one.withdrawn = True

    def applied(self, source: int) -> AppliedBatches:
        """Returns the batches of a source that are in the parity."""
        return self._sources[source].batches

    def _of(self, source: int) -> _Source[_Deltas]:
        one = self._sources[source]
        if one.lost or one.withdrawn:
            raise SourceOverError(f"nothing more of server {source} is taken here")
        return one

    def _apply(self, source: int, number: int) -> None:
        one = self._sources[source]
        while one.applied < number:
            batches, deltas = one.kept[0]
            if deltas is not None:  # first: without memory for it, the item comes again
                self._blocks.apply(source, deltas)
            for batch in batches:
                one.batches.record(*batch)
            one.kept.popleft()
            one.applied += 1
