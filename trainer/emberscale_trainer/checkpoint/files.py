"""The files of one checkpoint, verified as they are read."""

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import fsspec
from pydantic import BaseModel, ValidationError

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import TableSpec
from emberscale_trainer.checkpoint.layout import PartitionFile

_CHUNK_BYTES = 8 << 20
_Model = TypeVar("_Model", bound=BaseModel)


class CheckpointFiles:
    """A checkpoint's manifest, and what it lists. All methods raise DamagedCheckpointError."""

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

    def partitions(self, specs: Sequence[TableSpec], parameters: int) -> list[PartitionFile]:
        """What each server held, which must be of these tables and of `parameters` dense parameters."""
        wanted = [(spec.name, spec.dimension, str(spec.optimizer.type)) for spec in specs]
        parts = [self.parse(f"ps-{index}/partition.json", PartitionFile) for index in range(self.manifest.ps_count)]
        for part in parts:
            held = [(table.name, table.dimension, table.optimizer) for table in part.tables]
            if held != wanted or part.dense.parameters != parameters:
                raise DamagedCheckpointError(
                    f"{self._uri} was written by another model: tables or dense parameters differ"
                )
        return parts
