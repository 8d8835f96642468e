"""What is in a snapshot of embedding tables."""

import numpy as np

from emberscale_trainer.table import Snapshot


def records_of(snapshot: Snapshot, table: int = 0) -> dict[int, bytes]:
    """The records of a table, by their keys."""
    records = [record.tobytes() for chunk in snapshot.read(table) for record in chunk]
    found = {int(np.frombuffer(record, np.int64, 1)[0]): record for record in records}
    assert len(found) == len(records), "a key came twice"
    return found


def all_records_of(snapshot: Snapshot, tables: int) -> dict[tuple[int, int], bytes]:
    """The records of so many tables, by table and key."""
    return {(table, key): record for table in range(tables) for key, record in records_of(snapshot, table).items()}
