"""Parameter servers that move rows among them, over real sockets and without a master."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, buckets_of
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import TableStore, keys_of
from emberscale_trainer.transport import listen
from master_stand_in import spread_evenly
from snapshots import all_rows

TOKEN = "secret"
SECONDS = 60.0
EVERYTHING = Ownership(np.ones(BUCKETS, dtype=np.bool_), np.ones(DENSE_PIECES, dtype=np.bool_))


def table_of(version: int, addresses: Sequence[str] = ("",), generation: int = 1) -> RoutingTable:
    """A table that spreads everything evenly over servers at these addresses of the data plane."""
    servers = tuple(PsAddress(index, f"ps-{index}", address, "") for index, address in enumerate(addresses))
    count = len(servers)
    return RoutingTable(generation, version, servers, spread_evenly(BUCKETS, count), spread_evenly(DENSE_PIECES, count))


def table_that_owns(owned: Ownership, version: int, generation: int = 1) -> RoutingTable:
    """A table of two servers, of which server 0 owns this."""
    servers = tuple(PsAddress(index, f"ps-{index}", "", "") for index in range(2))
    buckets, pieces = (~owned.buckets).astype(int).tolist(), (~owned.pieces).astype(int).tolist()
    return RoutingTable(generation, version, servers, tuple(buckets), tuple(pieces))


class MovingServer:
    """One server on a Unix socket."""

    def __init__(self, index: int, folder: Path, incarnation: str = "") -> None:
        self.index = index
        self.incarnation = incarnation or f"ps-{index}"
        self.state = ServerState()
        self.mover = RowMover(self.state, TOKEN)
        self.listener, self.address = listen(f"unix://{folder}/{self.incarnation}.sock")
        DataPlane(self.listener, self.state, TOKEN, self.incarnation, streams=self.mover.streams).start()

    def assign(self, table: RoutingTable, tables: TableStore) -> None:
        """Serves these tables, as a new generation."""
        wanted = Assignment(table.generation, table.version, "")
        self.state.assign(wanted)
        assert self.state.adopt(wanted, tables, Ownership.of(table, self.index), AppliedBatches(), None)

    def rows(self, tables: TableStore, buckets: NDArray[np.bool_]) -> dict[tuple[int, bytes], bytes]:
        """The records of some buckets of each embedding table, by table and key."""
        return {
            (table, record.tobytes()[:8]): record.tobytes()
            for table in range(len(tables.specs) - 1)
            for rows in [all_rows(tables, table)]
            for record in rows[buckets[buckets_of(keys_of(rows))]]
        }

    def close(self) -> None:
        self.listener.close()
