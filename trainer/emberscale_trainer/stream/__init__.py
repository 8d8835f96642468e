"""Rows from one parameter server to another: ordered, acknowledged, resumable, and bounded in memory.

* `core`: decides which item is sent, kept, delivered or ignored, as pure state on either side.
* `item`: the items: rows, rows that changed, deltas, and their bytes.
* `sender`: a thread that connects, sends, and resumes at the receiver's position.
* `receiver`: the other end, on the data plane.
"""

from emberscale_trainer.stream.core import StreamLostError
from emberscale_trainer.stream.item import NO_RECORDS, Item, ItemKind
from emberscale_trainer.stream.receiver import StreamReceivers
from emberscale_trainer.stream.sender import StreamSender

__all__ = ["NO_RECORDS", "Item", "ItemKind", "StreamLostError", "StreamReceivers", "StreamSender"]
