"""Rows from one parameter server to another: ordered, acknowledged, resumable, and bounded in memory.

* `core`: decides which item is sent, kept, delivered or ignored, as pure state on either side.
* `item`: the items: rows, rows that changed, deltas, and their bytes.
* `opening`: what a sender says to open a connection, and the receiver's answers.
* `sender`: threads that connect, send, and resume at the receiver's position; callers that wait do a part of it.
* `receiver`: the other end, on the data plane.
"""

from emberscale_trainer.stream.core import StreamLostError
from emberscale_trainer.stream.item import NO_RECORDS, Item, ItemKind
from emberscale_trainer.stream.receiver import StreamReceivers
from emberscale_trainer.stream.sender import StreamSender

__all__ = ["NO_RECORDS", "Item", "ItemKind", "StreamLostError", "StreamReceivers", "StreamSender"]
