"""Servers that protect each other's rows with parity, over real sockets."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from emberscale_api.job import OptimizerType
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.lag import LagBound
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.parity_group import Group
from emberscale_trainer.server.sending import CopyProgress
from emberscale_trainer.server.withdrawing import Withdrawing
from emberscale_trainer.stream import StreamSender
from emberscale_trainer.table import Reader, TableStore, keys_of
from eventually import eventually, unwrap
from moves import SECONDS, TABLES, Batch, MovingServer, table_of, trained_tables
from snapshots import all_rows, records_of
from waiting import noted_call, wait_at


def tables(min_count: int = 1, ttl_batches: int | None = None) -> TableStore:
    return trained_tables(OptimizerType.ADAM, min_count=min_count, ttl_batches=ttl_batches)


def rows_of(store: TableStore) -> list[dict[int, bytes]]:
    """Returns the rows of each table. The caller holds the lock, if threads may change them."""
    return [
        records_of(store.readers.snapshot(Reader.FLASH, threading.RLock()), number)
        for number in range(len(store.specs))
    ]


class Servers:
    """Servers that protect each other, a twin of each that is never lost, and the actions of a master."""

    def __init__(
        self,
        folder: Path,
        count: int,
        parity: int = 1,
        lag: LagBound | None = None,
        *,
        on_demand: bool = False,
        min_count: int = 1,
        ttl_batches: int | None = None,
    ) -> None:
        """The twins keep rows that are due to leave."""
        self._folder = folder
        self._parity = parity
        self._on_demand = on_demand
        self._empty_tables = partial(tables, min_count, ttl_batches)
        self.lag = lag
        """Of the groups that are formed next."""
        self.made = [MovingServer(index, folder) for index in range(count)]
        self.serving = list(self.made)
        self.table = table_of(1, [server.address for server in self.serving])
        self.stores = [self._empty_tables() for _ in range(count)]
        self.twins = [self._empty_tables() for _ in range(count)]
        self.applied = [AppliedBatches() for _ in range(count)]
        self.random = np.random.default_rng(0)
        self.batches = 0
        self.gone: set[int] = set()
        """Lost servers without a successor."""
        self.adopted_bytes = 0
        """What the servers reported of the last adoption."""
        for server, store in zip(self.serving, self.stores, strict=True):
            server.assign(self.table, store)

    def protect(self) -> None:
        """Forms the group of every server; returns when all rows that have the same batches are protected."""
        for server in self.left:
            server.mover.protect(self.table, server.index, self._parity, self.lag)
        eventually(lambda: all(is_formed(server) for server in self.left), "all rows are where they belong")
        for server in self.left:
            if server.mover.protection.group is not None and server.state.core.is_uniform:
                await_protection(server)

    @property
    def left(self) -> list[MovingServer]:
        """The servers that are not lost."""
        return [server for server in self.serving if server.index not in self.gone]

    def batch(self) -> Batch:
        self.batches += 1
        return Batch(self.random, self.batches - 1)

    def push(self, batch: Batch, *indexes: int) -> list[Status]:
        """Pushes a batch to the given servers, by default to all; the twins apply what their servers do."""
        said = []
        for index in indexes or [server.index for server in self.left]:
            part = batch.part(Ownership.of(self.table, index))
            header = Header(
                Kind.PUSH,
                generation=self.table.generation,
                version=self.table.version,
                batch=batch.number,
                token=1,
                tables=TABLES + 1,
            )
            said.append(self.serving[index].state.push(0, header, *part))
            if said[-1] is Status.OK:
                self.twins[index].push(*part)
                self.applied[index].record(0, batch.number)
        return said

    def successors(self, *lost: int) -> tuple[list[MovingServer], RoutingTable]:
        """Starts processes in the places of lost ones; returns them and the table with them."""
        joined = [MovingServer(index, self._folder, f"ps-{index}-{len(self.made)}") for index in lost]
        self.made += joined
        addresses = [*self.table.servers]
        for one in joined:
            addresses[one.index] = PsAddress(one.index, one.incarnation, one.address, "")
        return joined, replace(self.table, version=self.table.version + 1, servers=tuple(addresses))

    def rebuild(
        self, joined: Sequence[MovingServer], table: RoutingTable, number: int
    ) -> list[Mapping[int, AppliedBatches]]:
        """Rebuilds lost servers; returns, for each survivor, the batches in the rows that it sent."""
        lost = tuple(one.index for one in joined)
        others = [server for server in self.serving if server.index not in lost]
        for server in others:
            self._prepare(server, number, self.table.version, table, lost)
        for one in joined:
            assert self._prepare(one, number, 0, table, lost).joins
            self.stores[one.index] = store = self._empty_tables()
            one.state.stage(number, store)
            assert one.mover.copy(number, SECONDS).ready
        with ThreadPoolExecutor(len(others)) as threads:
            said = [*threads.map(lambda server: server.mover.copy(number, SECONDS), others)]
        assert all(one.ready for one in said)
        return [one.rebuilt for one in said]

    def _prepare(
        self, server: MovingServer, number: int, since: int, table: RoutingTable, lost: tuple[int, ...]
    ) -> Transfer:
        on_demand = self._on_demand and len(lost) == 1
        return server.state.prepare(number, since, table, server.index, lost=lost, on_demand=on_demand)

    def switch(
        self, joined: Sequence[MovingServer], table: RoutingTable, number: int, rest: Mapping[int, AppliedBatches]
    ) -> None:
        """Switches to the table with the successors, and protects it."""
        self.begin_switch(joined, table, number, rest)
        self.protect()

    def begin_switch(
        self, joined: Sequence[MovingServer], table: RoutingTable, number: int, rest: Mapping[int, AppliedBatches]
    ) -> None:
        """Switches to the table with the successors; rows may still be missing."""
        for one in joined:
            self.serving[one.index] = one
        self.table = table
        for server in self.serving:
            self.switch_one(server, number, rest)

    def switch_one(self, server: MovingServer, number: int, rest: Mapping[int, AppliedBatches]) -> None:
        """Switches one server to the table."""
        applied = rest.get(server.index, AppliedBatches())
        server.state.switch(self.table.generation, number, number, applied)
        server.mover.switched(number)
        server.mover.protect(self.table, server.index, self._parity, self.lag)

    def replace(self, *lost: int) -> Mapping[int, AppliedBatches]:
        """Loses servers and rebuilds them; returns the batches in the rows of each."""
        joined, table = self.successors(*lost)
        rebuilt = agreed_on(lost, self.rebuild(joined, table, table.version))
        self.switch(joined, table, table.version, rebuilt)
        return rebuilt

    def adopt(self, *lost: int, meanwhile: Callable[[], None] = lambda: None) -> Mapping[int, AppliedBatches]:
        """Loses servers, whose rows the others adopt; returns the batches in the rows of each.

        Calls `meanwhile` as soon as they serve the rows.
        """
        before, number = self.table, self.table.version + 1
        after, said = self.copy_to_survivors(number, *lost)
        self.adopted_bytes = sum(one.copied_bytes for one in said)
        rebuilt = agreed_on(lost, [one.rebuilt for one in said])
        records = [(Ownership.of(before, index), rebuilt[index]) for index in lost]
        for server in self.left:
            server.state.switch(before.generation, number, number, AppliedBatches(), None, records)
            self._give_to_twin(server.index, lost, after)
        self.table = after
        for server in self.left:
            server.mover.switched(number)
            server.mover.protect(after, server.index, self._parity, self.lag)
        meanwhile()
        self.protect()
        return rebuilt

    def without(self, *lost: int) -> RoutingTable:
        """Returns the next table, in which the others own what these servers do."""
        before = self.table
        others = cycle(server.index for server in self.left if server.index not in lost)
        return replace(
            before,
            version=before.version + 1,
            bucket_owners=tuple(next(others) if owner in lost else owner for owner in before.bucket_owners),
            piece_owners=tuple(next(others) if owner in lost else owner for owner in before.piece_owners),
        )

    def copy_to_survivors(self, number: int, *lost: int) -> tuple[RoutingTable, list[CopyProgress]]:
        """Loses servers, and rebuilds them for the others by a move of this number, which is left before its switch.

        Returns the table of the move, and what each of the others reports.
        """
        before, after = self.table, self.without(*lost)
        self.gone |= {*lost}
        for server in self.left:
            self._prepare(server, number, before.version, after, lost)
            assert server.state.prepared(number, SECONDS)
        with ThreadPoolExecutor(len(self.left)) as threads:
            said = [*threads.map(lambda server: server.mover.copy(number, SECONDS), self.left)]
        assert all(one.ready for one in said)
        return after, said

    def _give_to_twin(self, index: int, lost: Sequence[int], table: RoutingTable) -> None:
        owned = Ownership.of(table, index)
        for one in lost:
            for number in range(TABLES + 1):
                records = all_rows(self.twins[one], number)
                self.twins[index].load(number, records[owned.among(keys_of(records), number == TABLES)])

    def check(self) -> None:
        """Checks that all rows of servers that are left are those of the twins to the bit."""
        for server in self.left:
            with server.state.lock:
                found = rows_of(self.stores[server.index])
            assert found == rows_of(self.twins[server.index])

    def close(self) -> None:
        for server in self.made:
            with server.state.lock:
                server.state.protect_by(None)  # ends its threads
            server.close()


def is_formed(server: MovingServer) -> bool:
    """Whether the server has begun to protect its rows, once it has them and others have theirs from it."""
    server.mover.look()
    return server.mover._to_protect is None


def agreed_on(lost: Iterable[int], said: Sequence[Mapping[int, AppliedBatches]]) -> Mapping[int, AppliedBatches]:
    """Returns the batches in the rows of lost servers, on which all that held their parity agree."""
    found = {index: [one[index] for one in said if index in one] for index in lost}
    assert all(len({ranges_of(applied) for applied in them}) == 1 for them in found.values())
    return {index: them[0] for index, them in found.items()}


def ranges_of(applied: AppliedBatches) -> tuple[tuple[int, int], ...]:
    return tuple(applied.ranges(0))


@pytest.fixture(params=[False, True], ids=["whole", "on demand"])
def on_demand(request: pytest.FixtureRequest) -> bool:
    """Whether rows of one lost server follow on demand."""
    return bool(request.param)


@pytest.fixture
def make_servers(tmp_path: Path, on_demand: bool) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(count: int, parity: int = 1, lag: LagBound | None = None, **of_tables: int) -> Servers:
        made.append(Servers(tmp_path, count, parity, lag, on_demand=on_demand, **of_tables))
        return made[-1]

    yield make
    for servers in made:
        servers.close()


@pytest.fixture
def push_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set once a push of a thread whose name begins with `pushes` waits for a holder."""
    return noted_call(monkeypatch, StreamSender, "reach", thread="pushes")


def group_of(server: MovingServer) -> Group:
    return unwrap(server.mover.protection.group)


def withdrawing_of(server: MovingServer) -> Withdrawing:
    return unwrap(server.mover._withdrawing)


def await_protection(server: MovingServer) -> None:
    group = group_of(server)
    wait_at(group.changed, lambda: group.core.is_whole)


def await_fill(server: MovingServer) -> None:
    """Waits until all earlier rows are part of an item: later pushes are not."""
    log = group_of(server).log
    eventually(lambda: log.is_whole, "all rows are sent")


def await_refusal(server: MovingServer, holder: int) -> None:
    """Waits until a holder takes no more changes of this server."""
    sender = group_of(server)._senders[holder]
    wait_at(sender._changed, lambda: sender.problem)
