"""Parameter servers that move rows between them, over real sockets and without a master."""

import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, piece_length
from emberscale_trainer.partition import AppliedBatches, Ownership, buckets_of
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import DensePieces, TableStore, keys_of
from emberscale_trainer.transport import listen
from eventually import eventually
from master_stand_in import spread_evenly
from snapshots import all_rows

TOKEN = "secret"
SECONDS = 60.0
TABLES, KEYS = 2, 3000
_PARAMETERS = 500
EVERYTHING = Ownership(np.ones(BUCKETS, dtype=np.bool_), np.ones(DENSE_PIECES, dtype=np.bool_))


def table_of(version: int, addresses: Sequence[str] = ("",), generation: int = 1) -> RoutingTable:
    """Returns a routing table that spreads everything evenly over servers at these data-plane addresses."""
    servers = tuple(PsAddress(index, f"ps-{index}", address, "") for index, address in enumerate(addresses))
    count = len(servers)
    return RoutingTable(generation, version, servers, spread_evenly(BUCKETS, count), spread_evenly(DENSE_PIECES, count))


def table_that_owns(owned: Ownership, version: int, generation: int = 1) -> RoutingTable:
    """Returns a routing table of two servers in which server 0 owns exactly this."""
    servers = tuple(PsAddress(index, f"ps-{index}", "", "") for index in range(2))
    buckets, pieces = (~owned.buckets).astype(int).tolist(), (~owned.pieces).astype(int).tolist()
    return RoutingTable(generation, version, servers, tuple(buckets), tuple(pieces))


def trained_tables(optimizer: OptimizerType, *, min_count: int = 1, ttl_batches: int | None = None) -> TableStore:
    """Returns empty tables with dense pieces; the push of this number gives a key its row, which may leave again."""
    rule = OptimizerSpec(type=optimizer, learning_rate=0.1)
    coming, leaving = AdmissionSpec(min_count=min_count), EvictionSpec(ttl_batches=ttl_batches)
    specs = [
        TableSpec(number, f"C{number}", number, 4, rule, InitializerSpec(), 0, admission=coming, eviction=leaving)
        for number in range(TABLES)
    ]
    return TableStore(specs, DensePieces.of(np.zeros(_PARAMETERS, dtype=np.float32), rule))


def rows_in(tables: TableStore, buckets: NDArray[np.bool_]) -> int:
    """Returns the number of rows in these buckets of all embedding tables."""
    return sum(int(tables.bucket_rows(table)[buckets].sum()) for table in range(len(tables.specs) - 1))


def await_removal(tables: TableStore, owned: Ownership) -> None:
    """Waits until the tables have no embedding rows but those that are owned."""
    eventually(lambda: not rows_in(tables, ~owned.buckets))


class Batch:
    """The gradients of one batch, and each server's part of them."""

    def __init__(self, random: np.random.Generator, number: int, rows: int = 100) -> None:
        self.number = number
        self._keys = [np.sort(random.choice(KEYS, rows, replace=False)).astype(np.int64) for _ in range(TABLES)]
        self._gradients = [random.standard_normal((rows, 4)).astype(np.float32) for _ in range(TABLES)]
        self._dense = random.standard_normal((DENSE_PIECES, piece_length(_PARAMETERS))).astype(np.float32)

    def part(self, owned: Ownership) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32]]:
        """Returns counts, keys and gradients of the owned part, as `TableStore.push` takes them."""
        masks = [owned.buckets[buckets_of(named)] for named in self._keys]
        counts = np.array([*(int(mask.sum()) for mask in masks), int(owned.pieces.sum())], np.uint32)
        pieces = np.flatnonzero(owned.pieces).astype(np.int64)
        keys = np.concatenate([*(named[mask] for named, mask in zip(self._keys, masks, strict=True)), pieces])
        values = [part[mask].reshape(-1) for part, mask in zip(self._gradients, masks, strict=True)]
        return counts, keys, np.concatenate([*values, self._dense[owned.pieces].reshape(-1)])


class Gate:
    """A protector of rows. The removal of rows stops after the first until the gate is open."""

    def __init__(self) -> None:
        self.stopped, self.open = threading.Event(), threading.Event()

    def pushed(self, epoch: int, batch: int) -> None:
        """Keeps nothing."""

    def await_pushes(self) -> None:
        """Has no holders."""

    def end(self) -> None:
        """Keeps nothing."""

    def catch_up(self) -> None:
        """Waits until the gate is open."""
        self.stopped.set()
        assert self.open.wait(SECONDS)

    def presume_lost(self, servers: Collection[int]) -> None:
        """Waits for no server."""


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
        """Serves these tables as a new generation."""
        wanted = Assignment(table.generation, table.version, "")
        self.state.assign(wanted)
        assert self.state.adopt(wanted, tables, Ownership.of(table, self.index), AppliedBatches(), None)

    def rows(self, tables: TableStore, buckets: NDArray[np.bool_]) -> dict[tuple[int, bytes], bytes]:
        """Returns the records of these buckets in each embedding table, by table and key."""
        return {
            (table, record.tobytes()[:8]): record.tobytes()
            for table in range(len(tables.specs) - 1)
            for rows in [all_rows(tables, table)]
            for record in rows[buckets[buckets_of(keys_of(rows))]]
        }

    def close(self) -> None:
        with suppress(OSError):  # closed already
            self.listener.shutdown(socket.SHUT_RDWR)  # else the thread that accepts would wait for ever
        self.listener.close()
