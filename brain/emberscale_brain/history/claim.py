"""Which brain a database belongs to: the one that claimed it last."""

import os
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from emberscale_brain.history.tables import ClaimRow

_THE_ONE = 1


class ClaimLostError(Exception):
    """Another brain has claimed the database since; the text says which. Trying again does not help."""


class Claim:
    """One brain's. `insert` is that of the database's dialect.

    It ends with the next one and not with time: a brain that was killed leaves nothing that its successor waits for.
    """

    def __init__(self, insert: Callable[[Any], Any]) -> None:
        self._insert = insert
        self._row = {
            "id": _THE_ONE,
            "token": uuid4().hex,
            "holder": f"process {os.getpid()} on {socket.gethostname()}",
            "begun_at": time.time(),
        }
        self._committed = False

    def hold(self, session: Session) -> None:
        """Takes the claim, the first time; then makes sure that it still has it. Raises ClaimLostError.

        The row stays locked until the transaction ends: who claims the database next reads all that was written.
        """
        mine = ClaimRow.token == self._row["token"] if self._committed else None
        statement = self._insert(ClaimRow).values(**self._row)
        statement = statement.on_conflict_do_update(index_elements=["id"], set_=self._row, where=mine)
        if session.execute(statement.returning(ClaimRow.id)).first() is None:
            other = session.scalars(select(ClaimRow)).one()
            begun = datetime.fromtimestamp(other.begun_at, UTC).isoformat(timespec="seconds")
            raise ClaimLostError(
                f"another brain has the database now, {other.holder}, begun at {begun}: "
                "end one of the two, or give each a database of its own"
            )

    def committed(self) -> None:
        """A transaction that holds it has ended well."""
        self._committed = True
