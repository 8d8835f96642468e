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
    """A sender's unacknowledged items: at most `most_bytes` of them, or one larger item."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, _Payload, int]] = deque()
        self._kept_bytes = 0
        self._put = 0
        self._sent = 0
        self._acknowledged = 0

    @property
    def put_count(self) -> int:
        """The number of items that were put."""
        return self._put

    @property
    def acknowledged_count(self) -> int:
        """The number of items, from the first, that the receiver has processed."""
        return self._acknowledged

    def has_room(self, size: int) -> bool:
        """Whether an item of `size` bytes may be put now."""
        return not self._kept or self._kept_bytes + size <= self._most_bytes

    def put(self, payload: _Payload, size: int) -> int:
        """Takes an item over and returns its number. Raises ValueError without room."""
        if not self.has_room(size):
            raise ValueError(f"an item of {size} bytes does not fit beside {self._kept_bytes} of {self._most_bytes}")
        self._put += 1
        self._kept.append((self._put, payload, size))
        self._kept_bytes += size
        return self._put

    def connected(self, acknowledged: int) -> None:
        """Notes a new connection to a receiver that has processed `acknowledged` items. Raises StreamLostError."""
        if not self._acknowledged <= acknowledged <= self._put:
            raise StreamLostError(f"the receiver stands at item {acknowledged}, and this end at {self._acknowledged}")
        self._let_go(acknowledged)
        self._sent = acknowledged

    @property
    def has_next(self) -> bool:
        """Whether there is an item to send."""
        return self._sent < self._put

    @property
    def is_sent(self) -> bool:
        """Whether an item was sent on this connection and is not acknowledged."""
        return self._sent > self._acknowledged

    def next(self) -> tuple[int, _Payload] | None:
        """The number and payload of the item to send now, if there is one; it counts as sent on this connection."""
        if self._sent == self._put:
            return None
        self._sent += 1
        number, payload, _ = self._kept[self._sent - self._acknowledged - 1]
        return number, payload

    def acknowledged(self, number: int) -> None:
        """Notes that the receiver has processed all items up to `number`. Raises StreamLostError if it was not sent."""
        if number > self._sent:
            raise StreamLostError(f"item {number} is acknowledged, and {self._sent} is the last that was sent")
        self._let_go(number)

    def _let_go(self, number: int) -> None:
        while self._kept and self._kept[0][0] <= number:
            self._kept_bytes -= self._kept.popleft()[2]
        self._acknowledged = max(self._acknowledged, number)


class ReceiveOrder:
    """A receiver's position. Of several connections of a stream, only the newest may deliver."""

    def __init__(self) -> None:
        self._delivered = 0
        self._connection = 0

    @property
    def delivered_count(self) -> int:
        """The number of items, from the first, that are processed."""
        return self._delivered

    def connect(self) -> int:
        """Begins a connection, which ends all earlier ones; returns what names it."""
        self._connection += 1
        return self._connection

    def is_new(self, connection: int, number: int) -> bool:
        """Returns whether to handle an item; an older one is only acknowledged again.

        Raises StreamLostError for a connection that another has replaced, and for an item before which one is missing.
        """
        if connection != self._connection:
            raise StreamLostError("another connection has replaced this one")
        if number > self._delivered + 1:
            raise StreamLostError(f"item {number} came after item {self._delivered}")
        return number == self._delivered + 1

    def delivered(self) -> int:
        """Notes that the new item is processed; returns the number to acknowledge."""
        self._delivered += 1
        return self._delivered
