"""Loads one server's rows from a checkpoint that any number of servers wrote."""

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
from numpy.typing import NDArray

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.checkpoint.choosing import among
from emberscale_trainer.checkpoint.encoding import RowEncoding
from emberscale_trainer.checkpoint.files import RETIRED, AppliedFile, CheckpointFiles, PartitionFile, TablePart
from emberscale_trainer.partition import AppliedBatches, Ownership, buckets_of
from emberscale_trainer.table import TableStore, keys_of
from emberscale_trainer.table.layout import KEY_BYTES

_MOST_THREADS = 3
"""Threads that load tables, each from its own connection: one alone indexes rows more slowly than Redis sends them."""


def load_partition(
    files: CheckpointFiles, owned: Ownership, tables: TableStore, parameters: int, *, anew: bool = False
) -> AppliedBatches:
    """Fills `tables`, the dense one last, with the owned rows; returns the batches that they have seen.

    `parameters` is the length of the dense vector. With `anew`, the rows begin another history: no batch counts as
    applied, dense pieces count one step, which makes them live, and no row was touched since. Every file that is read
    is checked against the manifest. Raises DamagedCheckpointError, StorageUnreachableError and AbandonedError.
    """
    parts = files.partitions(tables.specs, parameters)
    ended = threading.Event()

    def load(number: int) -> None:
        if number == len(tables.specs) - 1:
            loaded = _load_dense(files, parts, owned, tables, anew=anew)
        else:
            loaded = _load(files, parts, owned, tables, number=number, anew=anew)
        for _ in loaded:
            if ended.is_set():
                return

    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "load") as pool:
        loading = [pool.submit(load, number) for number in range(len(tables.specs))]
        try:
            for each in as_completed(loading):
                each.result()
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
    return AppliedBatches() if anew else _load_applied(files, parts)


def load_priority_rows(files: CheckpointFiles, owned: Ownership, tables: TableStore, parameters: int) -> None:
    """Loads a save of priority rows over the rows in `tables` that are owned. Raises as `load_partition`."""
    parts = files.partitions(tables.specs, parameters)
    for number in range(len(tables.specs) - 1):
        for _ in _load(files, parts, owned, tables, number=number, anew=False):
            pass


def _load(
    files: CheckpointFiles,
    parts: Sequence[PartitionFile],
    owned: Ownership,
    tables: TableStore,
    *,
    number: int,
    anew: bool,
) -> Iterator[None]:
    """Loads one embedding table, some rows at a time."""
    for part in parts:
        buckets = part.owned.buckets & owned.buckets
        if not buckets.any():
            continue
        table = part.stored[number]
        share = np.count_nonzero(buckets) / np.count_nonzero(part.owned.buckets)
        tables.expect(number, int(files.most_rows(part, table) * share), buckets)
        for retired, parts_of_file in _read_changes(files, part, table, table.files):
            if len(retired):
                tables.retire(number, retired[buckets[buckets_of(retired)]])
            for records in parts_of_file:
                tables.load(number, _untouched(records, table) if anew and table.evicted else records, buckets)
                yield


def _untouched(records: NDArray[np.uint8], table: TablePart) -> NDArray[np.uint8]:
    """Returns the records, uint8 [n, stride], as if each was last pushed before the first batch."""
    fresh = records.copy()
    table.layout.fields(fresh)["touched"] = 0
    return fresh


def _load_dense(
    files: CheckpointFiles, parts: Sequence[PartitionFile], owned: Ownership, tables: TableStore, *, anew: bool
) -> Iterator[None]:
    """Loads the dense table, some rows at a time."""
    for part in parts:
        pieces = part.owned.pieces & owned.pieces
        if not pieces.any():
            continue
        for records in _read_rows(files, part, part.dense):
            mine = records[pieces[_pieces(records, part)]]
            if anew:
                part.dense.layout.fields(mine)["pushes"] = 1
            tables.load(len(tables.specs) - 1, mine)
            yield


def read_records(files: CheckpointFiles, part: PartitionFile, table: TablePart) -> Iterator[NDArray[np.uint8]]:
    """One server's rows of a table, some megabytes at a time, as uint8 [n, stride]: each row once, as it was last.

    The next may overwrite each. Raises as CheckpointFiles does.
    """
    if not any("/" in name for name in table.files):
        yield from _read_rows(files, part, table)
        return
    seen = np.zeros(0, np.int64)  # sorted: keys whose rows in older files are outdated
    owned = part.owned
    for retired, parts_of_file in _read_changes(files, part, table, table.files[::-1]):
        found = [retired.copy()]
        for records in parts_of_file:
            keys = keys_of(records).copy()
            fresh = ~among(keys, seen)
            if table is not part.dense:  # not owned ones were given away after an earlier checkpoint
                fresh &= owned.among(keys, dense=False)
            if fresh.any():
                yield records[fresh]
            found.append(keys)
        seen = np.union1d(seen, np.concatenate(found))


def _read_rows(files: CheckpointFiles, part: PartitionFile, table: TablePart) -> Iterator[NDArray[np.uint8]]:
    """Yields the records of a table's files in their order, as `_read_changes` does."""
    for _, parts_of_file in _read_changes(files, part, table, table.files):
        yield from parts_of_file


def _read_changes(
    files: CheckpointFiles, part: PartitionFile, table: TablePart, names: Sequence[str]
) -> Iterator[tuple[NDArray[np.int64], Iterator[NDArray[np.uint8]]]]:
    """Yields the contents of a table's files, in their order: keys to retire, int64 [n], or records.

    The records of a file come in parts, uint8 [n, stride], and the next part or file may overwrite each.
    """
    keys = [part.key_of(name) for name in names]
    for key, content in zip(keys, files.read_all(keys), strict=True):
        if not key.endswith(RETIRED):
            yield np.zeros(0, np.int64), RowEncoding.of_file(table.layout, key).decode(content, key)
        elif len(content) % KEY_BYTES:
            raise DamagedCheckpointError(f"{key} ends within a key")
        else:
            yield content.view(np.int64), iter(())


def read_dense(
    files: CheckpointFiles, parts: Sequence[PartitionFile], initial: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Returns the dense vector, float32 [parameters]; pieces without a step come from `initial`, of the same shape.

    Raises as CheckpointFiles does.
    """
    length = piece_length(len(initial))
    values = np.zeros((DENSE_PIECES, length), dtype=np.float32)
    values.reshape(-1)[: len(initial)] = initial
    for part in parts:
        for records in read_records(files, part, part.dense):
            values[_pieces(records, part)] = part.dense.layout.fields(records)["weights"]
    return values.reshape(-1)[: len(initial)]


def server_history(files: CheckpointFiles, index: int) -> tuple[dict[int, list[tuple[int, int, int]]], dict[int, int]]:
    """Returns the runs of batches that a server applied, by epoch, and the steps of its dense pieces with parameters.

    The rows themselves count the steps, independently of the record of batches. Raises as CheckpointFiles does.
    """
    part = files.parse(f"ps-{index}/partition.json", PartitionFile)
    last = -(-part.parameters // piece_length(part.parameters))
    steps = {piece: 0 for first, stop in part.pieces for piece in range(first, min(stop, last))}
    for records in read_records(files, part, part.dense):
        pushes = part.dense.layout.fields(records)["pushes"]
        steps |= dict(zip(_pieces(records, part).tolist(), pushes.tolist(), strict=True))
    applied = files.parse(f"ps-{index}/applied.json", AppliedFile)
    return {item.epoch: item.runs for item in applied.epochs}, steps


def _pieces(records: NDArray[np.uint8], part: PartitionFile) -> NDArray[np.int64]:
    pieces = keys_of(records)
    if len(pieces) and not 0 <= int(pieces.min()) <= int(pieces.max()) < DENSE_PIECES:
        raise DamagedCheckpointError(f"ps-{part.index}/{part.dense.files} holds dense pieces that do not exist")
    return pieces


def _load_applied(files: CheckpointFiles, parts: Sequence[PartitionFile]) -> AppliedBatches:
    """Returns one record for all servers: they agree on it, since a snapshot is taken at a barrier."""
    loaded = [files.parse(f"ps-{part.index}/applied.json", AppliedFile) for part in parts]
    return AppliedBatches.merged(
        [AppliedBatches.from_runs((item.epoch, item.runs) for item in file.epochs) for file in loaded]
    )
