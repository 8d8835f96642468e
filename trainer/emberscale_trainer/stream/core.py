"""The two ends of a row stream, as pure state: no socket, no clock, no thread.

Items are numbered from 1 as they are put. The sender keeps an item until the receiver has acknowledged it. The receiver
acknowledges an item once it has processed it, so an acknowledgement covers all items up to it. A connection begins with
the receiver's position, and the sender continues with the next item. An item that is sent again was never processed, or
is recognised by its number.
"""

from collections import deque
from typing import Generic, TypeVar

_Payload = TypeVar("_Payload")


class StreamLostError(Exception):
    """The stream cannot continue: the other end has lost items that this end no longer keeps."""


class SendWindow(Generic[_Payload]):
    """A sender's unacknowledged items: at most `most_bytes` of them, or one larger item.

    `put_count` items were put, and the receiver has processed the first `acknowledged_count` of them.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, _Payload, int]] = deque()
        self._kept_bytes = 0
        self.put_count = 0
        self._sent = 0
        self.acknowledged_count = 0

    def has_room(self, size: int) -> bool:
        """Whether an item of `size` bytes may be put now."""
        return not self._kept or self._kept_bytes + size <= self._most_bytes

    def put(self, payload: _Payload, size: int) -> int:
        """Takes an item over and returns its number. Raises ValueError without room."""
        if not self.has_room(size):
            raise ValueError(f"an item of {size} bytes does not fit beside {self._kept_bytes} of {self._most_bytes}")
        self.put_count += 1
        self._kept.append((self.put_count, payload, size))
        self._kept_bytes += size
        return self.put_count

    def connected(self, acknowledged: int) -> None:
        """Notes a new connection to a receiver that has processed `acknowledged` items. Raises StreamLostError."""
        before = self.acknowledged_count
        if not before <= acknowledged <= self.put_count:
            raise StreamLostError(f"the receiver stands at item {acknowledged}, and this end at {before}")
        self._let_go(acknowledged)
        self._sent = acknowledged

    @property
    def has_next(self) -> bool:
        """Whether there is an item to send."""
        return self._sent < self.put_count

    @property
    def is_sent(self) -> bool:
        """Whether an item was sent on this connection and is not acknowledged."""
        return self._sent > self.acknowledged_count

    def next(self) -> tuple[int, _Payload] | None:
        """The number and payload of the item to send now, if there is one; it counts as sent on this connection."""
        if self._sent == self.put_count:
            return None
        self._sent += 1
        number, payload, _ = self._kept[self._sent - self.acknowledged_count - 1]
        return number, payload

    def acknowledged(self, number: int) -> None:
        """Notes that the receiver has processed all items up to `number`. Raises StreamLostError if it was not sent."""
        if number > self._sent:
            raise StreamLostError(f"item {number} is acknowledged, and {self._sent} is the last that was sent")
        self._let_go(number)

    def _let_go(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept_bytes -= self._kept.popleft()[2]
        self.acknowledged_count = max(self.acknowledged_count, number)


class ReceiveOrder:
    """A receiver's position: it has processed the first `delivered_count` items.

    Of several connections of a stream, only the newest may deliver.
    """

    def __init__(self) -> None:
        self.delivered_count = 0
        self._connection = 0

    def connect(self) -> int:
        """Begins a connection, which ends all earlier ones; returns what names it."""
        self._connection += 1
        return self._connection

    def is_newest(self, connection: int) -> bool:
        """Whether no other connection has replaced this one."""
        return connection == self._connection

    def is_new(self, connection: int, number: int) -> bool:
        """Returns whether to handle an item; an older one is only acknowledged again.

        Raises StreamLostError for a connection that another has replaced, and for an item before which one is missing.
        """
        if connection != self._connection:
            raise StreamLostError("another connection has replaced this one")
        if number > self.delivered_count + 1:
            raise StreamLostError(f"item {number} came after item {self.delivered_count}")
        return number == self.delivered_count + 1

    def delivered(self) -> int:
        """Notes that the new item is processed; returns the number to acknowledge."""
        self.delivered_count += 1
        return self.delivered_count
