"""Loads from a checkpoint what one server owns, however many servers wrote it."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.job import TableSpec
from emberscale_api.routing import RoutingTable, buckets_of
from emberscale_trainer.checkpoint.files import CheckpointFiles
from emberscale_trainer.checkpoint.layout import AppliedFile, PartitionFile, TablePart, owned_ranges
from emberscale_trainer.partition import AppliedBatches, DenseState
from emberscale_trainer.table import TableStore

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class LoadedPartition:
    """What a checkpoint holds for one server; the rows went into the table store."""

    dense: DenseState
    applied: AppliedBatches


def load_partition(
    uri: str, routing: RoutingTable, index: int, specs: tuple[TableSpec, ...], tables: TableStore, parameters: int
) -> LoadedPartition:
    """Fills `tables` with the rows of the buckets that `routing` gives to server `index`.

    Every file that is read is checked against the manifest. Raises DamagedCheckpointError.
    """
    files = CheckpointFiles(uri)
    parts = files.partitions(specs, parameters)
    mine = owned_ranges(routing.owners, index)
    wanted = np.zeros(len(routing.owners), dtype=np.bool_)
    for first, stop in mine:
        wanted[first:stop] = True
    for part in parts:
        if any(wanted[first:stop].any() for first, stop in part.buckets):
            everything = all(wanted[first:stop].all() for first, stop in part.buckets)
            for number, table in enumerate(part.tables):
                _load_rows(files, f"ps-{part.index}", table, number, tables, None if everything else wanted)
    return LoadedPartition(
        dense=read_dense(files, parts, *routing.dense_slice(index, parameters)),
        applied=_load_applied(files, parts),
    )


def _load_rows(
    files: CheckpointFiles,
    folder: str,
    table: TablePart,
    number: int,
    tables: TableStore,
    wanted: NDArray[np.bool_] | None,
) -> None:
    def insert(records: NDArray[np.uint8]) -> None:
        if wanted is not None:
            keys = records[:, :8].copy().view(np.int64).reshape(-1)
            records = np.ascontiguousarray(records[wanted[buckets_of(keys)]])
        tables.load(number, records)

    read_records(files, folder, table, insert)


def read_records(
    files: CheckpointFiles, folder: str, table: TablePart, consume: Callable[[NDArray[np.uint8]], None]
) -> None:
    """Feeds one server's records of a table to `consume`, some megabytes at a time, as uint8 [n, stride].

    They are checked against the manifest when all are read. Raises DamagedCheckpointError.
    """

    def take(chunk: bytes) -> None:
        if len(chunk) % table.stride:
            raise DamagedCheckpointError(f"{folder}/{table.file} ends within a record")
        consume(np.frombuffer(chunk, dtype=np.uint8).reshape(-1, table.stride))

    files.read(f"{folder}/{table.file}", take, max(1, _CHUNK_BYTES // table.stride) * table.stride)


def read_dense(files: CheckpointFiles, parts: Sequence[PartitionFile], start: int, stop: int) -> DenseState:
    """The slice [start, stop) of the dense vector and of its optimizer's state. Raises DamagedCheckpointError."""
    pieces: dict[str, list[NDArray[np.float32]]] = {}
    for part in parts:
        overlap = slice(max(start, part.dense.start) - part.dense.start, min(stop, part.dense.stop) - part.dense.start)
        for name, file in part.dense.files.items():
            values = np.load(io.BytesIO(files.read_whole(f"ps-{part.index}/{file}")), allow_pickle=False)
            if name == "step":
                pieces.setdefault(name, []).append(values)
            elif overlap.start < overlap.stop:
                pieces.setdefault(name, []).append(values[overlap])
    # The servers step their slices for the same batches, so their step counts are equal.
    return {
        name: (values[0] if name == "step" else np.concatenate(values)).astype(np.float32)
        for name, values in pieces.items()
    }


def _load_applied(files: CheckpointFiles, parts: list[PartitionFile]) -> AppliedBatches:
    """One record for all servers: a cut is consistent, so they agree on what is applied."""
    loaded = [files.parse(f"ps-{part.index}/applied.json", AppliedFile) for part in parts]
    return AppliedBatches.merged(
        [AppliedBatches.from_runs((item.epoch, item.runs) for item in file.epochs) for file in loaded]
    )
