"""Writes a snapshot's files; the training goes on meanwhile (Check-N-Run, section 4: decoupled checkpointing)."""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from emberscale_api.job import TableSpec
from emberscale_trainer.checkpoint.files import AppliedFile, EpochRuns, PartitionFile, TablePart
from emberscale_trainer.checkpoint.work import AbandonedError, Work
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import Snapshot, SnapshotAbandonedError, holds_sketches, keys_of

_PART_BYTES = 16 << 20
"""A file of records ends with the chunk that reaches this size: it is kept in memory until the storage has it."""


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was written; `path` is relative to the checkpoint's folder."""

    path: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Share:
    """One server's part of a checkpoint: who it is, what it owned, and what its rows have seen.

    `parameters` is the length of the dense vector. Rows of the tables that are not owned are left out: they are on
    the move, or wait to be removed after one.
    """

    index: int
    owned: Ownership
    applied: AppliedBatches
    parameters: int


def write_snapshot(
    snapshot: Snapshot, specs: Sequence[TableSpec], share: Share, uri: str, work: Work
) -> list[WrittenFile]:
    """Writes one server's files below the checkpoint's folder `uri`; the dense table is the last of `specs`.

    All of it is on disk when this returns, where the folder is local. Commits the snapshot then, or else gives it
    back. Raises StorageUnreachableError and AbandonedError.
    """
    try:
        written = _write(snapshot, specs, share, _Folder(uri, f"ps-{share.index}", work))
        snapshot.commit()
    except SnapshotAbandonedError as error:
        raise AbandonedError from error
    except BaseException:
        snapshot.give_back()
        raise
    return written


def _write(snapshot: Snapshot, specs: Sequence[TableSpec], share: Share, folder: "_Folder") -> list[WrittenFile]:
    tables = [
        _write_table(folder, spec, _owned_rows(snapshot, spec, number, share)) for number, spec in enumerate(specs)
    ]
    epochs = [EpochRuns(epoch=epoch, runs=share.applied.runs(epoch)) for epoch in share.applied.epochs()]
    folder.write("applied.json", AppliedFile(epochs=epochs).model_dump_json().encode())
    partition = PartitionFile.of(share.index, share.owned, specs, tables, share.parameters)
    folder.write("partition.json", partition.to_json())
    folder.flush()
    return folder.written


def _owned_rows(snapshot: Snapshot, spec: TableSpec, number: int, share: Share) -> Iterator[NDArray[np.uint8]]:
    """The records of a table that belong in the checkpoint, uint8 [n, stride]."""
    for records in snapshot.read(number):
        yield records[share.owned.among(keys_of(records), dense=spec.column < 0)]


def _write_table(folder: "_Folder", spec: TableSpec, chunks: Iterable[NDArray[np.uint8]]) -> TablePart:
    stem = "dense" if spec.column < 0 else f"table-{spec.number}"
    if holds_sketches(spec):
        stem = f"sketches-{-1 - spec.number}"
    files, size = [], 0
    for part, content in enumerate(parts_of(chunks, _PART_BYTES)):
        files.append(folder.write(f"{stem}-{part}.rows", content))
        size += len(content)
    return TablePart.of(spec, files, size)


def parts_of(chunks: Iterable[NDArray[np.uint8]], size_bytes: int) -> Iterator[memoryview]:
    """The records of some chunks each, uint8 [n, stride], `size_bytes` or more; the next overwrites each."""
    part = np.empty(0, np.uint8)
    size = 0
    for chunk in chunks:
        if size + chunk.nbytes > len(part):
            grown = np.empty(max(size + chunk.nbytes, size_bytes + chunk.nbytes), np.uint8)
            grown[:size] = part[:size]
            part = grown
        part[size : size + chunk.nbytes] = chunk.reshape(-1)
        size += chunk.nbytes
        if size >= size_bytes:
            yield part.data[:size]
            size = 0
    if size:
        yield part.data[:size]


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
        """Flushes a local folder itself, so that the names of its files are on disk, too."""
        if self._local:
            for folder in (Path(self._root, self._name), Path(self._root), Path(self._root).parent):
                self._work.patiently(str(folder), partial(_fsync, folder))


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
