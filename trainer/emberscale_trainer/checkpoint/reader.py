"""Loads from a checkpoint what one server owns, however many servers wrote it."""

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import fsspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import TableSpec
from emberscale_api.routing import RoutingTable, buckets_of
from emberscale_trainer.checkpoint.layout import AppliedFile, PartitionFile, TablePart, owned_ranges
from emberscale_trainer.partition import AppliedBatches, DenseState
from emberscale_trainer.table import TableStore

_CHUNK_BYTES = 8 << 20
_Model = TypeVar("_Model", bound=BaseModel)


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
    files = _Files(uri)
    parts = [files.parse(f"ps-{number}/partition.json", PartitionFile) for number in range(files.manifest.ps_count)]
    for part in parts:
        _check_shape(part, specs, parameters, uri)
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
        dense=_load_dense(files, parts, *routing.dense_slice(index, parameters)),
        applied=_load_applied(files, parts),
    )


class _Files:
    """The files of one checkpoint, verified as they are read."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._filesystem, self._root = fsspec.core.url_to_fs(uri)
        try:
            text = self._filesystem.cat_file(f"{self._root}/manifest.json")
        except OSError as error:
            raise DamagedCheckpointError(f"{uri}/manifest.json cannot be read: {error}") from error
        self.manifest = CheckpointManifest.from_json(text, f"{uri}/manifest.json")
        self._listed: dict[str, CheckpointFile] = {file.path: file for file in self.manifest.files}

    def read(self, path: str, consume: Callable[[bytes], None], chunk_bytes: int) -> None:
        """Feeds a file to `consume` in chunks of `chunk_bytes`, then checks its size and checksum."""
        listed = self._listed.get(path)
        if listed is None:
            raise DamagedCheckpointError(f"{self._uri}/{path} is not listed in the manifest")
        total, crc = 0, 0
        try:
            with self._filesystem.open(f"{self._root}/{path}", "rb") as file:
                while chunk := file.read(chunk_bytes):
                    total += len(chunk)
                    crc = zlib.crc32(chunk, crc)
                    if total > listed.bytes:
                        break
                    consume(chunk)
        except OSError as error:
            raise DamagedCheckpointError(f"{self._uri}/{path} cannot be read: {error}") from error
        if total != listed.bytes:
            raise DamagedCheckpointError(
                f"{self._uri}/{path} has not the {listed.bytes} bytes that it was written with"
            )
        if crc != listed.crc32:
            raise DamagedCheckpointError(f"{self._uri}/{path} was altered: its checksum does not match")

    def read_whole(self, path: str) -> bytes:
        """A small file."""
        chunks: list[bytes] = []
        self.read(path, chunks.append, _CHUNK_BYTES)
        return b"".join(chunks)

    def parse(self, path: str, model: type[_Model]) -> _Model:
        """A small JSON file."""
        try:
            return model.model_validate_json(self.read_whole(path))
        except ValidationError as error:
            raise DamagedCheckpointError(f"{self._uri}/{path} does not have the expected form") from error


def _check_shape(part: PartitionFile, specs: tuple[TableSpec, ...], parameters: int, uri: str) -> None:
    held = [(table.name, table.dimension, table.optimizer) for table in part.tables]
    wanted = [(spec.name, spec.dimension, str(spec.optimizer.type)) for spec in specs]
    if held != wanted or part.dense.parameters != parameters:
        raise DamagedCheckpointError(f"{uri} was written by another model: tables or dense parameters differ")


def _load_rows(
    files: _Files, folder: str, table: TablePart, number: int, tables: TableStore, wanted: NDArray[np.bool_] | None
) -> None:
    def insert(chunk: bytes) -> None:
        if len(chunk) % table.stride:
            raise DamagedCheckpointError(f"{folder}/{table.file} ends within a record")
        records = np.frombuffer(chunk, dtype=np.uint8).reshape(-1, table.stride)
        if wanted is not None:
            keys = records[:, :8].copy().view(np.int64).reshape(-1)
            records = np.ascontiguousarray(records[wanted[buckets_of(keys)]])
        tables.load(number, records)

    files.read(f"{folder}/{table.file}", insert, max(1, _CHUNK_BYTES // table.stride) * table.stride)


def _load_dense(files: _Files, parts: list[PartitionFile], start: int, stop: int) -> DenseState:
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


def _load_applied(files: _Files, parts: list[PartitionFile]) -> AppliedBatches:
    """One record for all servers: a cut is consistent, so they agree on what is applied."""
    loaded = [files.parse(f"ps-{part.index}/applied.json", AppliedFile) for part in parts]
    return AppliedBatches.merged(
        [AppliedBatches.from_runs((item.epoch, item.runs) for item in file.epochs) for file in loaded]
    )
