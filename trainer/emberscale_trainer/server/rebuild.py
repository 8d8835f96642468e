"""Sends the rebuilt rows of lost servers to their new owners: their successors, or the servers that are left.

A server that is left may own some of the rows that it rebuilds itself; these need no stream.
"""

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from emberscale_trainer.parity import SourceOverError
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.barrier import NotHeldError
from emberscale_trainer.server.moves import Transfer, new_owners
from emberscale_trainer.server.parity_group import Group, chosen
from emberscale_trainer.server.sending import CopyProgress, RowSending
from emberscale_trainer.stream import Item, ItemKind, StreamLostError
from emberscale_trainer.table import keys_of

_log = structlog.get_logger()


class Rebuild(RowSending):
    """One server's part in the rebuild of lost ones, in a thread that ends with it."""

    def __init__(
        self,
        group: Group,
        transfer: Transfer,
        receive: Callable[[Item], None],
        token: str,
        context: ssl.SSLContext | None,
    ) -> None:
        """`transfer` names the lost servers of the group, and their rows' new owners; `receive` takes this server's."""
        if not transfer.lost or not set(transfer.lost) <= set(group.members):
            raise NotHeldError("the lost servers are not of this group")
        self._owned = {lost: new_owners(Ownership.of(group.table, lost), transfer.table) for lost in transfer.lost}
        peers = {peer for owned in self._owned.values() for peer in owned}
        super().__init__("the rebuild of move", transfer, peers - {transfer.index}, token, context)
        self._me, self._receive = transfer.index, receive
        self._group: Group | None = group  # released at the end: old parity takes as much memory as new
        self._pieces = 0
        threading.Thread(target=self._run, args=(group,), name="rebuild", daemon=True).start()

    def progress(self, wait_seconds: float) -> CopyProgress:
        """As `RowSending.progress`; it is ready once all rows are sent."""
        progress, group = super().progress(wait_seconds), self._group
        return replace(progress, rounds=self._pieces if group is None else group.rebuild_pieces)

    def _run(self, group: Group) -> None:
        try:
            self._rebuild(group)
        finally:
            self._pieces, self._group = group.rebuild_pieces, None
            for sender in self._senders.values():
                sender.close()

    def _rebuild(self, group: Group) -> None:
        began = time.monotonic()
        try:
            members = {group.members.index(lost): lost for lost in self._owned}
            found = group.rebuild(frozenset(members))
            rows = sum(self._send(group, member, lost) for member, lost in members.items())
            self._flush()
        except (NotHeldError, StreamLostError, SourceOverError, TimeoutError, MemoryError, ValueError) as error:
            if not self._closed.is_set():
                _log.warning("rebuild_failed", move=self.move, problem=str(error))
            self._fail(str(error))
            return
        except BaseException as error:
            self._fail(repr(error))
            raise
        with self._changed:
            self._progress = replace(self._progress, ready=True, rebuilt={members[one]: found[one] for one in found})
            self._changed.notify_all()
        _log.info("rows_rebuilt", move=self.move, rows=rows, seconds=round(time.monotonic() - began, 3))

    def _send(self, group: Group, member: int, lost: int) -> int:
        """Sends the rows that a lost server owned. The parity may have more, left by an earlier or failed move."""
        rows = 0
        for table, is_dense, found in group.rest(member):
            for peer, owned in self._owned[lost].items():
                records = chosen(found, owned.among(keys_of(found), is_dense))
                if len(records):
                    self._give(peer, Item(ItemKind.ROWS, table, records))
                    rows += len(records)
        return rows

    def _give(self, peer: int, item: Item) -> None:
        if peer == self._me:
            self._receive(item)
            self._count(item)
        else:
            self._put(peer, item)
