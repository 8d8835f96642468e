"""Sends the rows of lost servers, as their group has rebuilt them, to the processes that take their places."""

import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import structlog

from emberscale_trainer.parity import SourceOverError
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.moves import Transfer, stream_of
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamSender
from emberscale_trainer.table import keys_of

log = structlog.get_logger()

_STALLED_SECONDS = 30.0


@dataclass(frozen=True)
class RebuildProgress:
    """How far a server is.

    * `pieces`: of its own rows, taken out of the parity, and of parity, sent to other holders.
    * `sent_bytes`: of the lost servers' rows.
    * `applied`: once all rows are sent, the batches in those of each lost server, by its index.
    """

    pieces: int = 0
    sent_bytes: int = 0
    applied: Mapping[int, AppliedBatches] = field(default_factory=dict)


class Rebuild:
    """One server's part in the rebuild of lost ones, in a thread that ends with it."""

    def __init__(
        self, state: ServerState, group: Group, transfer: Transfer, token: str, context: ssl.SSLContext | None
    ) -> None:
        """`transfer` names the lost servers, which are of the group, and the table with their successors."""
        if not transfer.lost or not set(transfer.lost) <= set(group.members):
            raise NotHeldError("the lost servers are not of this group")
        self.move = transfer.number
        self._state = state
        self._group = group
        self._owned = {lost: Ownership.of(transfer.table, lost) for lost in transfer.lost}
        self._changed = threading.Condition()
        self._progress = RebuildProgress()
        self._problem = ""
        self._closed = False
        stream, generation = stream_of(transfer.number, transfer.index), transfer.table.generation
        successors = {lost: transfer.table.servers[lost] for lost in transfer.lost}
        self._senders = {
            lost: StreamSender(one.data, one.incarnation, token, stream, generation, context)
            for lost, one in successors.items()
        }
        threading.Thread(target=self._run, name="rebuild", daemon=True).start()

    def progress(self, wait_seconds: float) -> RebuildProgress:
        """Returns the progress, once all is sent or after the wait. Raises NotHeldError if it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress.applied or self._problem, wait_seconds)
            if self._problem:
                raise NotHeldError(f"the rebuild of move {self.move} has failed here: {self._problem}")
            return replace(self._progress, pieces=self._group.rebuild_pieces)

    def close(self) -> None:
        """Ends the streams and, soon, the thread; calls that wait fail."""
        self._closed = True
        for sender in self._senders.values():
            sender.close()
        self._fail("it is over")

    def _fail(self, problem: str) -> None:
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            members = {self._group.members.index(lost): lost for lost in self._owned}
            found = self._group.rebuild(frozenset(members))
            rows = sum(self._send(member, lost) for member, lost in members.items())
            for sender in self._senders.values():
                sender.flush(_STALLED_SECONDS)
        except (NotHeldError, StreamLostError, SourceOverError, TimeoutError, MemoryError, ValueError) as error:
            if not self._closed:
                log.warning("rebuild_failed", move=self.move, problem=str(error))
            self._fail(str(error))
            return
        except BaseException as error:
            self._fail(repr(error))
            raise
        with self._changed:
            self._progress = replace(self._progress, applied={members[one]: found[one] for one in found})
            self._changed.notify_all()
        log.info("rows_rebuilt", move=self.move, rows=rows, seconds=round(time.monotonic() - began, 3))

    def _send(self, member: int, lost: int) -> int:
        """Sends what a lost server owned; it may have had more rows, of a move before or one that came to nothing."""
        rows = 0
        for table, is_dense, found in self._group.rest(member):
            records = found[self._owned[lost].among(keys_of(found), is_dense)]
            if not len(records):
                continue
            item = Item(ItemKind.ROWS, table, records)
            self._senders[lost].put(item, _STALLED_SECONDS)
            rows += len(records)
            with self._changed:
                self._progress = replace(self._progress, sent_bytes=self._progress.sent_bytes + item.nbytes)
        return rows
