"""Writes a snapshot's files; the training goes on meanwhile (Check-N-Run, section 4: decoupled checkpointing)."""

import io
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import fsspec
import numpy as np

from emberscale_api.job import TableSpec
from emberscale_api.routing import RoutingTable
from emberscale_trainer.checkpoint.layout import (
    AppliedFile,
    DensePart,
    EpochRuns,
    PartitionFile,
    TablePart,
    owned_ranges,
)
from emberscale_trainer.partition import PartitionSnapshot
from emberscale_trainer.table import RowLayout


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written; `path` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    crc32: int


def write_snapshot(
    snapshot: PartitionSnapshot,
    uri: str,
    index: int,
    routing: RoutingTable,
    specs: tuple[TableSpec, ...],
    parameters: int,
) -> list[WrittenFile]:
    """Writes one server's files below the checkpoint's folder `uri`, straight from its segments.

    Commits the snapshot when all is written, or else gives it back. Raises OSError and SnapshotAbandonedError.
    """
    try:
        written = _write(snapshot, uri, index, routing, specs, parameters)
    except BaseException:
        snapshot.tables.give_back()
        raise
    snapshot.tables.commit()
    return written


def _write(
    snapshot: PartitionSnapshot,
    uri: str,
    index: int,
    routing: RoutingTable,
    specs: tuple[TableSpec, ...],
    parameters: int,
) -> list[WrittenFile]:
    filesystem, root = fsspec.core.url_to_fs(uri)
    folder = f"ps-{index}"
    filesystem.makedirs(f"{root}/{folder}", exist_ok=True)
    written: list[WrittenFile] = []

    def write(name: str, chunks: Iterable[memoryview | bytes]) -> str:
        total, crc = 0, 0
        with filesystem.open(f"{root}/{folder}/{name}", "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                total += len(chunk)
                crc = zlib.crc32(chunk, crc)
        written.append(WrittenFile(f"{folder}/{name}", total, crc))
        return name

    tables = []
    for number, spec in enumerate(specs):
        stride = RowLayout.of(spec).stride
        file = write(f"table-{spec.number}.rows", (records.data.cast("B") for records in snapshot.tables.drain(number)))
        tables.append(
            TablePart(
                name=spec.name,
                file=file,
                rows=written[-1].bytes // stride,
                dimension=spec.dimension,
                optimizer=spec.optimizer.type,
                stride=stride,
            )
        )
    dense = {}
    for name, values in snapshot.dense.items():
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        dense[name] = write(f"dense-{name}.npy", [buffer.getvalue()])
    applied = AppliedFile(
        epochs=[EpochRuns(epoch=epoch, runs=snapshot.applied.runs(epoch)) for epoch in snapshot.applied.epochs()]
    )
    write("applied.json", [applied.model_dump_json().encode()])
    start, stop = routing.dense_slice(index, parameters)
    partition = PartitionFile(
        index=index,
        servers=len(routing.servers),
        buckets=owned_ranges(routing.owners, index),
        tables=tables,
        dense=DensePart(start=start, stop=stop, parameters=parameters, files=dense),
    )
    write("partition.json", [partition.model_dump_json(indent=1).encode()])
    return written
