"""Contents of embedding tables and of their snapshots."""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.server.barrier import Outcome
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.table import Reader, Snapshot, TableStore, keys_of
from emberscale_trainer.table.snapshot import Lock


def records_of(snapshot: Snapshot, table: int = 0) -> dict[int, bytes]:
    """Returns the records of a table, by key."""
    records = [record.tobytes() for chunk in snapshot.read(table) for record in chunk]
    found = {int(np.frombuffer(record, np.int64, 1)[0]): record for record in records}
    assert len(found) == len(records), "a key came twice"
    return found


def all_records_of(snapshot: Snapshot, tables: int) -> dict[tuple[int, int], bytes]:
    """Returns the records of the first `tables` tables, by table and key."""
    return {(table, key): record for table in range(tables) for key, record in records_of(snapshot, table).items()}


def all_rows(store: TableStore, table: int) -> NDArray[np.uint8]:
    """Returns the rows of a table that was never compacted, uint8 [n, stride]."""
    slots = store.slots[table]
    chunks = [slots.records(segment, 0, slots.layout.segment_rows) for segment in range(slots.segments_in_use)]
    return np.concatenate(chunks or [store.layouts[table].empty(0)])


def rows_of_bucket(store: TableStore, table: int, bucket: int) -> NDArray[np.uint8]:
    """Returns the rows of one bucket."""
    rows = all_rows(store, table)
    found: NDArray[np.uint8] = rows[buckets_of(keys_of(rows)) == bucket]
    return found


def snapshot_of(server: ServerState, generation: int, barrier: int) -> tuple[Snapshot, TableStore, AppliedBatches]:
    """Ends a settled barrier; returns a snapshot of all rows at that moment, their tables, and the batches in them."""
    taken: list[tuple[Snapshot, TableStore]] = []

    def take(tables: TableStore, lock: Lock, _: Outcome) -> None:
        taken.append((tables.readers.snapshot(Reader.CHECKPOINT, lock), tables))

    applied = server.snapshot(generation, barrier, take).applied
    return *taken[0], applied
