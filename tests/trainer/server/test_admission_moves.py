"""Admission and eviction under moves, checkpoints and restores leave the same rows as on a single server."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from emberscale_api.job import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.job.running import AdmissionCounts
from emberscale_api.routing import BUCKETS, DENSE_PIECES, RoutingTable, piece_length
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.checkpoint import CheckpointFiles, Share, Work, load_partition
from emberscale_trainer.partition import AppliedBatches, Ownership, buckets_of
from emberscale_trainer.server.core import Assignment
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind
from emberscale_trainer.table import DensePieces, Eviction, Reader, TableStore
from examples import examples
from master_stand_in import write_manifest, write_snapshot
from moves import SECONDS, table_of
from snapshots import records_of, snapshot_of

PARAMETERS = 100
ADAGRAD = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.1)
PLAIN = TableSpec(0, "C0", 0, 2, ADAGRAD, InitializerSpec(), seed=0)
TABLES = [
    replace(PLAIN, admission=AdmissionSpec(min_count=2), eviction=EvictionSpec(ttl_batches=5)),
    replace(PLAIN, number=1, name="C1", column=1, admission=AdmissionSpec(min_count=3)),
    replace(PLAIN, number=2, name="C2", column=2, eviction=EvictionSpec(max_rows=2 * BUCKETS, ttl_batches=40)),
    replace(PLAIN, number=3, name="C3", column=3),
]
STORED = 2 + len(TABLES) + 1
KEYS = 6000
ROWS = 2500

Rows = list[dict[int, bytes]]


def tables() -> TableStore:
    return TableStore(TABLES, DensePieces.of(np.zeros(PARAMETERS, np.float32), ADAGRAD))


def batch(seed: int, owned: Ownership) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32]]:
    """Returns counts, keys and gradients of the part of a batch that goes to the owner of `owned`."""
    random = np.random.default_rng(seed)
    counts, named, values = [], [], []
    for _ in TABLES:
        keys = np.unique((KEYS * random.random(ROWS) ** 3).astype(np.int64))
        gradients = random.standard_normal((len(keys), 2)).astype(np.float32)
        mine = owned.buckets[buckets_of(keys)]
        counts.append(int(mine.sum()))
        named.append(keys[mine])
        values.append(gradients[mine].reshape(-1))
    dense = random.standard_normal((DENSE_PIECES, piece_length(PARAMETERS))).astype(np.float32)
    pieces = np.flatnonzero(owned.pieces)
    counts.append(len(pieces))
    named.append(pieces)
    values.append(dense[pieces].reshape(-1))
    return np.array(counts, np.uint32), np.concatenate(named), np.concatenate(values)


def one_server(seeds: list[int]) -> Rows:
    """Returns the rows of a single, undisturbed server that has applied these batches."""
    store = tables()
    eviction = Eviction(store)
    everything = Ownership.of(table_of(1), 0)
    for seed in seeds:
        store.clock += 1
        store.push(*batch(seed, everything))
        for due in eviction.due(store.clock, everything.buckets):
            eviction.sweep(due)
    assert sum(counts.evicted for counts in store.admission_counts().values()) or len(seeds) < 12
    return rows_of(store, everything)


def rows_of(store: TableStore, owned: Ownership) -> Rows:
    """Returns the rows of a store that are owned. The caller holds its lock, if threads may change it."""
    snapshot = store.readers.snapshot(Reader.FLASH, nullcontext())
    found = []
    for table in range(STORED):
        records = records_of(snapshot, table)
        keys = np.array(list(records), np.int64)
        mine = keys[owned.among(keys, dense=table == STORED - 1)].tolist()
        found.append({key: records[key] for key in mine})
    return found


class ServersMachine(RuleBasedStateMachine):
    """Some servers, whose own threads sweep at their own time, and the actions of a master."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.seeds: list[int] = []
        self.barrier = self.checkpoints = self.moves = self.version = 0
        self.saved: tuple[str, list[int]] | None = None
        self.moving: tuple[RoutingTable, list[ServerState]] | None = None
        self.whole = True

    @initialize(servers=st.integers(1, 3))
    def start(self, servers: int) -> None:
        self.begin(servers, 1)

    def begin(self, count: int, generation: int) -> None:
        self.version += 1
        self.table: RoutingTable = table_of(self.version, [""] * count, generation)
        self.servers = [ServerState() for _ in range(count)]
        for index, server in enumerate(self.servers):
            owned, store, applied = Ownership.of(self.table, index), tables(), AppliedBatches()
            if self.saved is not None:
                applied = load_partition(CheckpointFiles(self.saved[0]), owned, store, PARAMETERS)
            wanted = Assignment(generation, self.table.version, "")
            server.assign(wanted)
            assert server.adopt(wanted, store, owned, applied, None)

    @rule(seeds=st.lists(st.integers(0, 50), min_size=1, max_size=6))
    def push(self, seeds: list[int]) -> None:
        for seed in seeds:
            self.seeds.append(seed)
            self.push_last(Status.OK)

    @rule()
    def push_again(self) -> None:
        if self.seeds:
            self.push_last(Status.REPEATED)

    def push_last(self, expected: Status) -> None:
        for index, server in enumerate(self.servers):
            request = batch(self.seeds[-1], Ownership.of(self.table, index))
            header = Header(
                Kind.PUSH,
                generation=self.table.generation,
                version=self.table.version,
                batch=len(self.seeds) - 1,
                token=1,
                tables=len(TABLES) + 1,
            )
            assert server.push(0, header, *request) is expected

    # moves

    @rule(count=st.integers(1, 3))
    def prepare(self, count: int) -> None:
        if self.moving is not None or count == len(self.servers):
            return
        self.version += 1
        wanted = table_of(self.version, [""] * count, self.table.generation)
        everyone = self.servers + [ServerState() for _ in range(count - len(self.servers))]
        self.moves += 1
        for index, server in enumerate(everyone):
            since = self.table.version if index < len(self.servers) else 0
            if server.prepare(self.moves, since, wanted, index).joins:
                server.stage(self.moves, tables())
            assert server.prepared(self.moves, SECONDS)
        self.moving, self.whole = (wanted, everyone), True

    @rule()
    def copy(self) -> None:
        """Runs a round of a move."""
        if self.moving is None:
            return
        everyone = self.moving[1]
        for server in self.servers:
            scan, store = server.moved_rows(self.moves, whole=self.whole)
            given = server.renew_move(self.moves).given()
            for table, layout in enumerate(store.layouts):
                dense, retired = table == STORED - 1, scan.retired[table]
                for peer, owned in given.items():
                    gone = retired[owned.among(retired, dense)]
                    everyone[peer].receive(self.moves, Item(ItemKind.CHANGES, table, layout.empty(0), gone))
                wanted = {peer: owned.pieces if dense else owned.buckets for peer, owned in given.items()}
                for peer, records in scan.read(table, wanted):
                    everyone[peer].receive(self.moves, Item(ItemKind.ROWS, table, records))
            assert not scan.postponed
        self.whole = False

    @rule()
    def switch(self) -> None:
        if self.moving is None:
            return
        wanted, everyone = self.moving
        if self.whole:
            self.copy()
        applied = self.settled()
        generation = self.table.generation
        for server in self.servers:
            server.hand_over(generation, self.barrier, self.moves, SECONDS)
        self.copy()
        for server in everyone:
            server.switch(generation, self.barrier, self.moves, applied)
        self.servers = everyone[: len(wanted.servers)]
        self.table, self.moving = wanted, None

    @rule()
    def abandon(self) -> None:
        if self.moving is not None:
            for server in self.moving[1]:
                server.abandon(self.moves)
            self.moving = None

    def settled(self) -> AppliedBatches:
        self.barrier += 1
        for server in self.servers:
            server.hold(self.table.generation, self.table.version, self.barrier, SECONDS)
        applied = [server.settle(self.table.generation, self.barrier, [], SECONDS, 0) for server in self.servers]
        return applied[0]

    # checkpoints

    @rule()
    def save(self) -> None:
        self.settled()
        self.checkpoints += 1
        folder = Path(self.folder.name, str(self.checkpoints))
        files = []
        for index, server in enumerate(self.servers):
            snapshot, tables, applied = snapshot_of(server, self.table.generation, self.barrier)
            share = Share(index, server.core.owned, applied, PARAMETERS)
            files += write_snapshot(snapshot, tables.specs, share, str(folder), Work())
        self.saved = (write_manifest(folder, files, ps_count=len(self.servers)), list(self.seeds))

    @rule(servers=st.integers(1, 3))
    def restore(self, servers: int) -> None:
        if self.saved is not None:
            self.moving = None
            self.seeds = list(self.saved[1])
            self.begin(servers, self.table.generation + 1)

    @rule()
    def check(self) -> None:
        """Checks that all servers together hold the rows of a single one, to the bit."""
        self.settled()
        together: Rows = [{} for _ in range(STORED)]
        for index, server in enumerate(self.servers):
            snapshot, tables, _ = snapshot_of(server, self.table.generation, self.barrier)
            snapshot.give_back()
            with server.lock:  # a thread may still remove rows that were given away
                found = rows_of(tables, Ownership.of(self.table, index))
            for rows, mine in zip(together, found, strict=True):
                assert not rows.keys() & mine.keys()
                rows |= mine
        assert together == one_server(self.seeds)

    def teardown(self) -> None:
        if self.seeds:
            self.check()
        self.folder.cleanup()


def test_rows_do_not_depend_on_moves_checkpoints_and_restores() -> None:
    run_state_machine_as_test(
        ServersMachine, settings=settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
    )


def evicted(servers: list[ServerState]) -> int:
    count = 0
    for server in servers:
        with server.lock:  # figures are stale while another thread holds it
            count += sum(counts.evicted for counts in server.figures().admission.values())
    return count


def test_a_server_evicts_no_row_that_it_has_received_and_does_not_own_yet() -> None:
    machine = ServersMachine()
    machine.start(servers=3)
    machine.push([*range(10)])
    machine.prepare(count=2)
    machine.copy()
    gained = [server.renew_move(machine.moves).gained for server in machine.servers[:2]]
    stores = [server.tables for server in machine.servers[:2]]
    received = []
    for server, store, owned in zip(machine.servers[:2], stores, gained, strict=True):
        with server.lock:  # a thread still sweeps what the last batch has made due
            received.append(rows_of(store, owned))
    assert all(rows[0] and rows[2] for rows in received), "both tables that evict have been copied"
    machine.push([10 + seed % 40 for seed in range(60)])  # far beyond the time to live of the copied rows
    machine.settled()
    for server, store, owned, before in zip(machine.servers[:2], stores, gained, received, strict=True):
        with server.lock:
            assert rows_of(store, owned) == before
    everyone = list(machine.servers)
    machine.switch()
    machine.check()
    whole = ServersMachine()
    whole.start(servers=1)
    whole.push(machine.seeds)
    whole.check()
    assert evicted(everyone) == evicted(whole.servers)
    for one in (machine, whole):
        one.folder.cleanup()


def test_admission_is_counted_over_a_roll_back() -> None:
    """Counts never fall, even if those after a roll-back pass the old ones between two reports."""
    server, keys = ServerState(), 2 + np.arange(4)
    owned = Ownership.of(table_of(1), 0)
    for generation, pushes in ((1, 2), (2, 3)):
        wanted, store = Assignment(generation, 1, ""), tables()
        server.assign(wanted)
        assert server.adopt(wanted, store, owned, AppliedBatches(), None)
        for _ in range(pushes):
            counts = np.array([len(keys), *[0] * len(TABLES)], np.uint32)
            store.push(counts, keys, np.ones(2 * len(keys), np.float32))
    assert server.figures().admission["C0"] == AdmissionCounts(admitted=8, refused=8)
    server.assign(Assignment(3, 1, ""))
    assert server.figures().admission["C0"] == AdmissionCounts(admitted=8, refused=8)
