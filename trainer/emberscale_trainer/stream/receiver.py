"""The receiving ends of row streams, on the data plane of a parameter server."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from emberscale_api.wire import Header, Kind, Status, WireError
from emberscale_trainer.stream.core import ReceiveOrder, StreamLostError
from emberscale_trainer.stream.item import Item
from emberscale_trainer.transport import Connection, ConnectionLostError

_MOST_STREAMS = 4096

Deliver = Callable[[Item], None]
"""Handles an item; its arrays are valid during the call. Raises ValueError to refuse the stream."""

Accept = Callable[[int, int], Deliver]
"""Returns the handler for the items of a stream of a generation. Raises StreamLostError for an unexpected stream."""


class _Incoming:
    """The position of one stream. The lock is held while an item is handled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.order = ReceiveOrder()


class StreamReceivers:
    """All incoming streams. A stream keeps its position when its connection breaks.

    A stream that is no longer accepted, of which items were processed, is refused with its next item: its sender learns
    of the others first, as if the connection had not broken.

    With more than `_MOST_STREAMS`, the one that was opened least recently is forgotten.
    """

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._lock = threading.Lock()
        self._streams: OrderedDict[tuple[int, int], _Incoming] = OrderedDict()

    def serve(self, connection: Connection, opened: Header) -> None:
        """Takes the items of a stream from a connection whose last request was OPEN; never returns.

        Raises ConnectionLostError, StreamLostError, and WireError or ValueError for malformed items.
        """
        stream = opened.shard
        try:
            deliver = self._accept(stream, opened.generation)
        except StreamLostError as error:
            if not self._has_items_of(stream, opened.generation):
                raise
            deliver = partial(_refuse, error)
        incoming = self._incoming(stream, opened.generation)
        with incoming.lock:  # an earlier connection's item has been handled by now, or never will be
            mine = incoming.order.connect()
            stands_at = incoming.order.delivered_count
        connection.send(Header(Status.OK, batch=stands_at))
        while True:
            header, payload = connection.receive()
            if header.kind != Kind.ITEM:
                raise WireError(f"a request of kind {header.kind} within a stream")
            with incoming.lock:
                if not incoming.order.is_newest(mine):  # perhaps by one that broke before: the sender connects again
                    raise ConnectionLostError("another connection has replaced this one")
                if incoming.order.is_new(mine, header.batch):
                    deliver(Item.parse(payload))
                    incoming.order.delivered()
                stands_at = incoming.order.delivered_count
            connection.send(Header(Status.OK, batch=stands_at))

    def _has_items_of(self, stream: int, generation: int) -> bool:
        with self._lock:
            incoming = self._streams.get((stream, generation))
        return incoming is not None and incoming.order.delivered_count > 0

    def _incoming(self, stream: int, generation: int) -> _Incoming:
        name = (stream, generation)  # numbers of moves and versions may begin again in a new history
        with self._lock:
            incoming = self._streams.setdefault(name, _Incoming())
            self._streams.move_to_end(name)
            if len(self._streams) > _MOST_STREAMS:
                self._streams.popitem(last=False)
            return incoming


def _refuse(error: StreamLostError, item: Item) -> None:
    raise error


def refuse_all(stream: int, generation: int) -> Deliver:
    """Accepts no stream."""
    raise StreamLostError(f"stream {stream} of generation {generation} is not expected here")
