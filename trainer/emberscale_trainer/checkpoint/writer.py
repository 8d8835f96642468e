"""Writes a cut's files; the training goes on meanwhile (Check-N-Run, section 4: decoupled checkpointing)."""

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
from emberscale_trainer.partition import Cut


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written; `path` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    crc32: int


def write_cut(
    cut: Cut, uri: str, index: int, routing: RoutingTable, specs: tuple[TableSpec, ...], parameters: int
) -> list[WrittenFile]:
    """Writes one server's files below the checkpoint's folder `uri`. Raises OSError."""
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
    for spec, snapshot in zip(specs, cut.tables, strict=True):
        tables.append(
            TablePart(
                name=spec.name,
                file=write(f"table-{spec.number}.rows", (chunk.data.cast("B") for chunk in snapshot.chunks())),
                rows=snapshot.rows,
                dimension=spec.dimension,
                optimizer=spec.optimizer.type,
                stride=snapshot.layout.stride,
            )
        )
    dense = {}
    for name, values in cut.dense.items():
        buffer = io.BytesIO()
        np.save(buffer, values, allow_pickle=False)
        dense[name] = write(f"dense-{name}.npy", [buffer.getvalue()])
    applied = AppliedFile(
        epochs=[EpochRuns(epoch=epoch, runs=cut.applied.runs(epoch)) for epoch in cut.applied.epochs()]
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
