"""A bounded queue between two stages of the pipeline that can be torn down from anywhere."""

import threading
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class ChannelClosedError(Exception):
    """The pipeline is being torn down."""


class Channel(Generic[_Item]):
    """`put` waits while `capacity` items are queued, `get` while none is; after `abort` both raise."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._aborted = False

    def put(self, item: _Item) -> None:
        """Queues an item."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or len(self._items) < self._capacity)
            if self._aborted:
                raise ChannelClosedError
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> _Item:
        """Waits for the next item."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._items)
            if self._aborted:
                raise ChannelClosedError
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def abort(self) -> None:
        """Wakes and ends both sides."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
