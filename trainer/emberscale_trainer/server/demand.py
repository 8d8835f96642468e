"""Asks the servers that rebuild rows for those that requests wait for, before others."""

import ssl
import threading
from collections.abc import Callable

import numpy as np
import structlog
from numpy.typing import NDArray

from emberscale_trainer.server.missing import MissingRows
from emberscale_trainer.server.moves import wants_stream
from emberscale_trainer.server.sending import STALLED_SECONDS
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import NO_RECORDS, Item, ItemKind, StreamLostError, StreamSender

_log = structlog.get_logger()


class RowDemand:
    """One server's requests for missing rows, in a thread that ends once none are missing."""

    def __init__(
        self,
        state: ServerState,
        missing: MissingRows,
        want: Callable[[NDArray[np.int64]], None] | None,
        token: str,
        context: ssl.SSLContext | None,
    ) -> None:
        """`want` asks this server itself, if it takes part in the rebuild."""
        transfer = missing.transfer
        self.move = transfer.number
        self._state = state
        self._want = want
        self._senders = [
            StreamSender(
                server.data,
                server.incarnation,
                token,
                wants_stream(transfer.number, transfer.index),
                transfer.table.generation,
                context,
            )
            for server in transfer.table.owners
            if server.index != transfer.index and server.index not in transfer.lost
        ]
        threading.Thread(target=self._run, args=(missing,), name="demand", daemon=True).start()

    def _run(self, missing: MissingRows) -> None:
        try:
            while (places := self._state.await_wanted(missing)) is not None:
                if self._want is not None:
                    self._want(places)
                self._senders = [sender for sender in self._senders if self._asks(sender, places)]
        finally:
            for sender in self._senders:
                sender.close()

    def _asks(self, sender: StreamSender, places: NDArray[np.int64]) -> bool:
        """Asks one server; returns whether to go on: one that has sent all its rows takes no more of this."""
        try:
            sender.put(Item(ItemKind.WANTED, 0, NO_RECORDS, places), STALLED_SECONDS)
        except (StreamLostError, TimeoutError) as error:  # all rows come in time, also those that nobody asks for
            _log.warning("rows_not_asked_for", move=self.move, problem=str(error))
            sender.close()
            return False
        return True
