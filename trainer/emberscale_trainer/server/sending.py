"""Sends rows to other servers and reports the progress: the common part of a move and a rebuild."""

import ssl
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.moves import Transfer, stream_of
from emberscale_trainer.stream import Item, StreamSender

STALLED_SECONDS = 30.0
"""The longest time without progress of a receiver."""
_WINDOW_BYTES = 8 << 20
"""The rows under way to a receiver: a fraction of `memory_reserve`, since rows leave a server that has little else."""


@dataclass(frozen=True)
class CopyProgress:
    """A server's progress with the rows that it gives away.

    * `ready`: what remains fits into a barrier; in a rebuild, all rows are sent, or follow on demand.
    * `copied_bytes`: what was sent, and in a rebuild also what the server adopted of the rows that it rebuilt itself;
      rows that follow on demand count once their keys are sent.
    * `rounds`: the finished rounds. In a rebuild, the pieces of its own rows that the server took out of the parity,
      and of parity that it sent to other holders.
    * `rebuilt`: in a rebuild that is ready, the batches in the rows of each lost server of which this one held parity,
      by its index.
    """

    ready: bool
    copied_bytes: int = 0
    rounds: int = 0
    rebuilt: Mapping[int, AppliedBatches] = field(default_factory=dict)


class RowSending:
    """The streams of one move from this server to `peers`, by index. Subclasses send in their own threads.

    `name` precedes the number of the move in errors.
    """

    def __init__(
        self, name: str, transfer: Transfer, peers: Iterable[int], token: str, context: ssl.SSLContext | None
    ) -> None:
        self.move = transfer.number
        self._name = name
        stream, table = stream_of(transfer.number, transfer.index), transfer.table
        self._senders = {
            peer: StreamSender(
                table.servers[peer].data,
                table.servers[peer].incarnation,
                token,
                stream,
                table.generation,
                context,
                _WINDOW_BYTES,
            )
            for peer in peers
        }
        self._changed = threading.Condition()
        self._progress = CopyProgress(ready=False)
        self._problem = ""
        self._closed = threading.Event()

    def progress(self, wait_seconds: float) -> CopyProgress:
        """Returns the progress, once it is ready or after the wait. Raises NotHeldError if it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress.ready or self._problem, wait_seconds)
            self._check()
            return self._progress

    def close(self, why: str) -> None:
        """Ends the streams and, soon, the thread; calls that wait fail."""
        self._fail(why)  # first, as the thread would name a vaguer problem
        self._closed.set()
        for sender in self._senders.values():
            sender.close()

    def _check(self) -> None:
        if self._problem:
            raise NotHeldError(f"{self._name} {self.move} has failed here: {self._problem}")

    def _fail(self, problem: str) -> None:
        """Fails the sending; the first problem counts."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def _put(self, peer: int, item: Item) -> None:
        self._senders[peer].put(item, STALLED_SECONDS)
        self._count(item.nbytes)

    def _count(self, nbytes: int) -> None:
        """Counts bytes that were sent, or kept here, as progress."""
        with self._changed:
            self._progress = replace(self._progress, copied_bytes=self._progress.copied_bytes + nbytes)

    def _flush(self) -> None:
        """Waits until the receivers have all items. Raises TimeoutError and StreamLostError."""
        for sender in self._senders.values():
            sender.flush(STALLED_SECONDS)
