"""A bounded queue between two stages of the pipeline that can be torn down from anywhere."""

from queue import SimpleQueue
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class ChannelClosedError(Exception):
    """The pipeline is being torn down."""


class Channel(Generic[_Item]):
    """`put` waits while `capacity` items are queued, `get` while the queue is empty; after `abort` both raise.

    Each stage uses several channels for every batch. Threads wait in a queue that is built into the interpreter: a
    Condition would run some fifty lines of Python for each item.
    """

    def __init__(self, capacity: int) -> None:
        self._items: SimpleQueue[_Item | None] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        for _ in range(capacity):
            self._places.put(None)
        self._aborted = False

    def put(self, item: _Item) -> None:
        """Queues an item."""
        self._places.get()
        if self._aborted:
            self._places.put(None)  # wakes the next waiting thread
            raise ChannelClosedError
        self._items.put(item)

    def get(self) -> _Item:
        """Waits for the next item."""
        item = self._items.get()
        if self._aborted:
            self._items.put(None)  # wakes the next waiting thread
            raise ChannelClosedError
        self._places.put(None)
        return item  # type: ignore[return-value]  # None is queued by `abort`, or is an item

    def abort(self) -> None:
        """Wakes and ends both sides."""
        self._aborted = True
        self._places.put(None)
        self._items.put(None)
