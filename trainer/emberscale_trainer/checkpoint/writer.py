"""Writes a snapshot's files while training continues (Check-N-Run, section 4: decoupled checkpointing)."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from emberscale_api.checkpoint import CheckpointFile, id_in
from emberscale_api.job import TableSpec
from emberscale_trainer.checkpoint.encoding import RowEncoding
from emberscale_trainer.checkpoint.files import RETIRED, AppliedFile, PartitionFile, TablePart
from emberscale_trainer.checkpoint.work import AbandonedError, Work
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import (
    RowLayout,
    Snapshot,
    SnapshotAbandonedError,
    UnquantizableError,
    holds_sketches,
    keys_of,
)
from emberscale_trainer.table.layout import KEY_BYTES

_PART_BYTES = 16 << 20
"""A file of records ends with the chunk that reaches this size: it is kept in memory until the storage has it.

With a limited bandwidth, it ends with the chunk that reaches the bytes of a second, if these are fewer.
"""
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Share:
    """One server's part of a checkpoint: who it is, what it owned, and what its rows have seen.

    `parameters` is the length of the dense vector. Rows of the tables that are not owned are left out: they are on
    the move, or wait to be removed after one. `rows` are those of each table that are owned, for a part that builds on
    earlier files.
    """

    index: int
    owned: Ownership
    applied: AppliedBatches
    parameters: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Link:
    """The rows of one server in a checkpoint, for a later checkpoint that builds on it.

    * `names`: by table, the files in order, as `TablePart.files` has them. `files`: all of them.
    * `left_out`: the buckets and pieces of rows that the server held but did not own yet. No file has these rows.
    """

    checkpoint: str
    names: tuple[tuple[str, ...], ...]
    files: tuple[CheckpointFile, ...]
    left_out: Ownership

    def lacks(self, owned: Ownership) -> bool:
        """Whether the files lack rows that the server now owns, which may not have changed since."""
        return bool((self.left_out.buckets & owned.buckets).any() or (self.left_out.pieces & owned.pieces).any())

    def names_from_later(self, table: int) -> list[str]:
        """The names of the files of a table in the partition file of a later checkpoint."""
        return [name if "/" in name else f"{self.checkpoint}/{name}" for name in self.names[table]]

    def files_from_later(self) -> list[CheckpointFile]:
        """The files as a later checkpoint lists them."""
        return [file.model_copy(update={"checkpoint": file.checkpoint or self.checkpoint}) for file in self.files]


Seen = Callable[[int, TableSpec, NDArray[np.uint8]], None]
"""Gets the number of a table, the table, and rows of it that are written, uint8 [n, stride]."""


def write_part(
    snapshot: Snapshot,
    specs: Sequence[TableSpec],
    share: Share,
    uri: str,
    work: Work,
    weight_bits: int = 0,
    before: Link | None = None,
    seen: Seen | None = None,
) -> tuple[list[CheckpointFile], Link]:
    """Writes what the snapshot holds below the checkpoint's folder `uri`; the dense table is the last of `specs`.

    Returns the files of the server's part, and its rows as a link of a chain. With `before`, the snapshot holds what
    changed since that, and the part is both together. The weights of embedding rows are quantised to `weight_bits`,
    while they are written; 0 leaves them as they are. `seen` gets all rows that are written.

    All of it is on disk when this returns, where the folder is local. The snapshot stays open, unless this fails: then
    it is given back. Raises StorageUnreachableError and AbandonedError, and UnquantizableError for a table with weights
    that are not finite.
    """
    folder = _Folder(uri, f"ps-{share.index}", work)
    left_out = Ownership.of_nothing() if before is None else before.left_out.copy()
    try:
        new = [
            _write_table(folder, snapshot, number, spec, share, left_out, weight_bits, seen)
            for number, spec in enumerate(specs)
        ]
        earlier = [] if before is None else before.files_from_later()
        rows_of_all = [*earlier, *folder.written]
        names, tables = [], []
        for number, (spec, (added, rows)) in enumerate(zip(specs, new, strict=True)):
            names.append((*([] if before is None else before.names_from_later(number)), *added))
            tables.append(TablePart.of(spec, names[-1], rows if before is None else share.rows[number]))
        folder.write("applied.json", AppliedFile.of(share.applied).to_json())
        partition = PartitionFile.of(share.index, share.owned, specs, tables, share.parameters)
        folder.write("partition.json", partition.to_json())
        folder.flush()
    except SnapshotAbandonedError as error:
        raise AbandonedError from error
    except BaseException:
        snapshot.give_back()
        raise
    link = Link(id_in(uri), tuple(names), tuple(rows_of_all), left_out)
    return [*earlier, *folder.written], link


def write_rows(
    uri: str, specs: Sequence[TableSpec], share: Share, chosen: Mapping[int, NDArray[np.uint8]], work: Work
) -> list[CheckpointFile]:
    """Writes some rows of tables, by their numbers, uint8 [n, stride], as a server's part that has no others.

    Weights are stored as float32. Raises StorageUnreachableError and AbandonedError.
    """
    folder = _Folder(uri, f"ps-{share.index}", work)
    tables = []
    for number, spec in enumerate(specs):
        records = chosen.get(number, RowLayout.of(spec).empty(0))
        suffix = RowEncoding.to_write(spec, 0).suffix
        chunks = np.array_split(records, 1 + records.nbytes // _CHUNK_BYTES)
        parts = enumerate(parts_of(chunks, folder.part_bytes))
        names = [folder.write(f"{_stem(spec)}-{part}{suffix}", content) for part, content in parts]
        tables.append(TablePart.of(spec, names, len(records)))
    partition = PartitionFile.of(share.index, share.owned, specs, tables, share.parameters)
    folder.write("partition.json", partition.to_json())
    folder.flush()
    return folder.written


def _owned_rows(
    snapshot: Snapshot, spec: TableSpec, number: int, share: Share, left_out: Ownership, seen: Seen | None
) -> Iterator[NDArray[np.uint8]]:
    """Yields the owned records of a table, uint8 [n, stride]; adds buckets and pieces of the others to `left_out`."""
    for records in snapshot.read(number):
        keys = keys_of(records)
        owned = share.owned.among(keys, dense=spec.column < 0)
        left_out.add(keys[~owned], dense=spec.column < 0)
        mine = records[owned]
        if seen is not None:
            seen(number, spec, mine)
        yield mine


def _write_table(
    folder: "_Folder",
    snapshot: Snapshot,
    number: int,
    spec: TableSpec,
    share: Share,
    left_out: Ownership,
    weight_bits: int,
    seen: Seen | None,
) -> tuple[list[str], int]:
    """Writes the retired keys and the rows of a table; returns the names of the files, and how many rows they hold."""
    stem = _stem(spec)
    encoding = RowEncoding.to_write(spec, weight_bits)
    retired = snapshot.retired[number]
    keys_at_once = _CHUNK_BYTES // KEY_BYTES
    chunks = (retired[first : first + keys_at_once].view(np.uint8) for first in range(0, len(retired), keys_at_once))
    keys = ((RETIRED, content) for content in parts_of(chunks, folder.part_bytes))
    count = 0

    def encoded() -> Iterator[NDArray[np.uint8]]:
        nonlocal count
        for records in _owned_rows(snapshot, spec, number, share, left_out, seen):
            count += len(records)
            yield encoding.encode(records)

    rows = ((encoding.suffix, content) for content in parts_of(encoded(), folder.part_bytes))
    names = []
    try:
        for part, (suffix, content) in enumerate(chain(keys, rows)):
            names.append(folder.write(f"{stem}-{part}{suffix}", content))
    except UnquantizableError as error:
        raise UnquantizableError(
            f"table {spec.name}: {error}; with spec.checkpoint.quantization None it is saved as it is"
        ) from error
    return names, count


def _stem(spec: TableSpec) -> str:
    """Returns the prefix of the names of a table's files."""
    if holds_sketches(spec):
        return f"sketches-{-1 - spec.number}"
    return "dense" if spec.column < 0 else f"table-{spec.number}"


def parts_of(chunks: Iterable[NDArray[np.uint8]], size_bytes: int) -> Iterator[memoryview]:
    """Joins chunks to parts of at least `size_bytes`, but for the last; each part overwrites the one before."""
    part = np.empty(0, np.uint8)
    size = 0
    for chunk in chunks:
        if not size and chunk.nbytes >= size_bytes:
            yield chunk.reshape(-1).data
            continue
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
        self.written: list[CheckpointFile] = []
        self.part_bytes = _PART_BYTES if work.limit is None else min(_PART_BYTES, work.limit.bytes_per_second)

    def write(self, name: str, content: bytes | memoryview) -> str:
        """Writes a file, whole; returns its name."""
        path = f"{self._root}/{self._name}/{name}"

        def attempt() -> None:
            self._work.await_bandwidth(len(content))  # the bytes of an attempt that failed were written, too
            try:
                self._filesystem.makedirs(f"{self._root}/{self._name}", exist_ok=True)
                with open(path, "wb") if self._local else self._filesystem.open(path, "wb") as file:
                    file.write(content)
                    if self._local:
                        file.flush()
                        os.fsync(file.fileno())
            except FileNotFoundError as error:  # the folder was removed, and may come back
                raise OSError(str(error)) from error

        self._work.patiently(path, attempt)
        self._work.advance(len(content))
        self.written.append(
            CheckpointFile(path=f"{self._name}/{name}", bytes=len(content), crc32=zlib_ng.crc32(content))
        )
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
