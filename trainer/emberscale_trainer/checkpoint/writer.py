"""Writes a snapshot's files; the training goes on meanwhile (Check-N-Run, section 4: decoupled checkpointing)."""

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from emberscale_api.job import TableSpec
from emberscale_trainer.checkpoint.layout import AppliedFile, EpochRuns, PartitionFile, TablePart, ranges_of
from emberscale_trainer.checkpoint.work import Work
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import TableSnapshot

_PART_BYTES = 32 << 20
"""Bytes of records in one file at most: what is kept in memory until the storage has it."""


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written; `path` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Share:
    """One server's part of a checkpoint: who it is, what it owned, and what its rows have seen.

    `parameters` is the length of the dense vector.
    """

    index: int
    owned: Ownership
    applied: AppliedBatches
    parameters: int


def write_snapshot(
    snapshots: Sequence[TableSnapshot], specs: Sequence[TableSpec], share: Share, uri: str, work: Work
) -> list[WrittenFile]:
    """Writes one server's files below the checkpoint's folder `uri`; the dense table is the last of `snapshots`.

    All of it is on disk when this returns, where the folder is local. Raises StorageUnreachableError and
    AbandonedError.
    """
    folder = _Folder(uri, f"ps-{share.index}", work)
    tables = [_write_table(folder, spec, snapshot) for spec, snapshot in zip(specs, snapshots, strict=True)]
    epochs = [EpochRuns(epoch=epoch, runs=share.applied.runs(epoch)) for epoch in share.applied.epochs()]
    folder.write("applied.json", AppliedFile(epochs=epochs).model_dump_json().encode())
    partition = PartitionFile(
        index=share.index,
        buckets=ranges_of(share.owned.buckets),
        pieces=ranges_of(share.owned.pieces),
        tables=tables[:-1],
        dense=tables[-1],
        parameters=share.parameters,
    )
    folder.write("partition.json", partition.model_dump_json(indent=1).encode())
    folder.flush()
    return folder.written


def _write_table(folder: "_Folder", spec: TableSpec, snapshot: TableSnapshot) -> TablePart:
    stem = "dense" if spec.column < 0 else f"table-{spec.number}"
    files, rows = [], 0
    for part, records in enumerate(_parts(snapshot)):
        files.append(folder.write(f"{stem}-{part}.rows", records.data.cast("B")))
        rows += len(records)
    return TablePart(
        name=spec.name,
        files=files,
        rows=rows,
        dimension=spec.dimension,
        optimizer=spec.optimizer.type,
        stride=snapshot.layout.stride,
    )


def _parts(snapshot: TableSnapshot) -> Iterator[NDArray[np.uint8]]:
    return snapshot.chunks(max(1, _PART_BYTES // snapshot.layout.stride))


class _Folder:
    """One server's folder in a checkpoint. Raises StorageUnreachableError and AbandonedError."""

    def __init__(self, uri: str, name: str, work: Work) -> None:
        self._filesystem, root = fsspec.core.url_to_fs(uri)
        self._local = isinstance(self._filesystem, LocalFileSystem)
        self._root, self._name, self._work = root, name, work
        self.written: list[WrittenFile] = []

    def write(self, name: str, content: bytes | memoryview) -> str:
        """Writes a file, whole; returns its name."""
        path = f"{self._root}/{self._name}/{name}"

        def attempt() -> None:
            try:
                self._filesystem.makedirs(f"{self._root}/{self._name}", exist_ok=True)
                with open(path, "wb") if self._local else self._filesystem.open(path, "wb") as file:
                    file.write(content)
                    if self._local:
                        file.flush()
                        os.fsync(file.fileno())
            except FileNotFoundError as error:  # someone has removed the folder: that may pass, too
                raise OSError(str(error)) from error

        self._work.patiently(path, attempt)
        self._work.advance(len(content))
        self.written.append(WrittenFile(f"{self._name}/{name}", len(content), zlib.crc32(content)))
        return name

    def flush(self) -> None:
        """Has the names of the files on disk, too, where the folder is local."""
        if self._local:
            for folder in (Path(self._root, self._name), Path(self._root), Path(self._root).parent):
                self._work.patiently(str(folder), partial(_fsync, folder))


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
