"""The files of one parameter server in a checkpoint, verified as they are read.

<checkpoint>/manifest.json                by the master, last; lists every file with its size and checksum
<checkpoint>/ps-<i>/partition.json        what the server held
<checkpoint>/ps-<i>/table-<n>-<part>.rows records of table n, as they lie in its slab
<checkpoint>/ps-<i>/table-<n>-<part>.b4   the same with weights as codes of 4 bits, or as many as the name says
<checkpoint>/ps-<i>/sketches-<n>-<part>.rows the sketches of table n, which say what keys without a row have counted
<checkpoint>/ps-<i>/dense-<part>.rows     the same of the dense table, whose keys are the numbers of pieces
<checkpoint>/ps-<i>/table-<n>-<part>.keys keys of rows that were retired since the checkpoint on which it builds
<checkpoint>/ps-<i>/applied.json          how often each batch was applied

A checkpoint that builds on earlier ones also lists their files, which stay in their folders.
"""

from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import fsspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from zlib_ng import zlib_ng

from emberscale_api.checkpoint import MANIFEST_NAME, CheckpointFile, CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import OptimizerType, TableSpec
from emberscale_trainer.checkpoint.work import Work, each_ahead
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import RowLayout, holds_sketches
from emberscale_trainer.table.layout import state_floats

RETIRED = ".keys"

_LEAST_ROW_BYTES = 7
"""The fewest bytes of a row: key, codes and pushes of one byte each, and a range of two float16 (see `packed`)."""

_READY_FILES = 2
"""Files that are read and checked, each by its own thread, while an earlier one is in use."""


class _FilePart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TablePart(_FilePart):
    """One table's share on one server.

    * `files`: in the server's folder, or `<earlier checkpoint>/<name>` in its folder there. They hold whole records,
      in any order. Rows of later files replace those of earlier ones, and a file that ends with RETIRED holds the keys
      of rows, int64 each, that were retired before its successors were written.
    * `rows`: the number of rows that result from all files.
    * `stride`: the bytes of a record in memory.
    * `evicted`: whether the table has eviction, so that each row says when it was last touched.
    """

    name: str
    files: list[str]
    rows: int
    dimension: int
    optimizer: OptimizerType
    stride: int
    evicted: bool = False

    @classmethod
    def of(cls, spec: TableSpec, files: Sequence[str], rows: int) -> "TablePart":
        """Returns the share of a table in these files."""
        return cls(
            name=spec.name,
            files=list(files),
            rows=rows,
            dimension=spec.dimension,
            optimizer=spec.optimizer.type,
            stride=RowLayout.of(spec).stride,
            evicted=spec.eviction.removes_rows,
        )

    @property
    def layout(self) -> RowLayout:
        """The layout of the records."""
        return RowLayout(self.dimension, state_floats(self.optimizer, self.dimension), self.evicted)


class PartitionFile(_FilePart):
    """The content of partition.json.

    * `buckets`, `pieces`: [first, stop) ranges of what the server owned.
    * `tables`: the embedding tables, in the order used on the wire. `sketches`: of those with admission.
    * `parameters`: floats of the dense vector, over all servers.
    """

    index: int
    buckets: list[tuple[int, int]]
    pieces: list[tuple[int, int]]
    tables: list[TablePart]
    dense: TablePart
    parameters: int = Field(ge=1)
    sketches: list[TablePart] = []

    @classmethod
    def of(
        cls, index: int, owned: Ownership, specs: Sequence[TableSpec], stored: Sequence[TablePart], parameters: int
    ) -> "PartitionFile":
        """Returns the partition of a server; `specs` and `stored` have its tables in their order."""
        sketches = sum(map(holds_sketches, specs))
        return cls(
            index=index,
            buckets=ranges_of(owned.buckets),
            pieces=ranges_of(owned.pieces),
            tables=list(stored[sketches:-1]),
            dense=stored[-1],
            parameters=parameters,
            sketches=list(stored[:sketches]),
        )

    def to_json(self) -> bytes:
        """Returns the file without the fields of features that are off, which the previous version does not know."""
        return self.model_dump_json(indent=1, exclude_defaults=True).encode()

    @property
    def owned(self) -> Ownership:
        """What the server owned: the inverse of `ranges_of`."""
        owned = Ownership.of_nothing()
        for ranges, mine in ((self.buckets, owned.buckets), (self.pieces, owned.pieces)):
            for first, stop in ranges:
                mine[first:stop] = True
        return owned

    @property
    def stored(self) -> tuple[TablePart, ...]:
        """All tables in the order of a store's."""
        return (*self.sketches, *self.tables, self.dense)

    def key_of(self, name: str) -> str:
        """The key, as `CheckpointFile.key`, of one of a table's files."""
        earlier, slash, name = name.rpartition("/")
        return f"{earlier}{slash}ps-{self.index}/{name}"


class EpochRuns(_FilePart):
    """Batches of one epoch as `(first, stop, times)`; batches in no run were applied zero times."""

    epoch: int
    runs: list[tuple[int, int, int]]


class AppliedFile(_FilePart):
    """The content of applied.json."""

    epochs: list[EpochRuns]

    @classmethod
    def of(cls, applied: AppliedBatches) -> "AppliedFile":
        """The batches that a server has applied."""
        return cls(epochs=[EpochRuns(epoch=epoch, runs=applied.runs(epoch)) for epoch in applied.epochs()])

    def to_json(self) -> bytes:
        """Returns the file."""
        return self.model_dump_json().encode()


def ranges_of(owned: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns where bool [n] is true, as ascending [first, stop) ranges."""
    edges = np.flatnonzero(np.diff(owned, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _beside(folder: str, file: CheckpointFile) -> str:
    """The place of a file that the checkpoint in `folder` lists."""
    return f"{folder.rpartition('/')[0] if file.checkpoint else folder}/{file.key}"


def _read_some(file: Any, target: memoryview) -> int:
    """Reads at most as many bytes as the target has; returns how many, 0 at the end of the file."""
    if hasattr(file, "readinto"):
        count: int = file.readinto(target)
        return count
    content: bytes = file.read(len(target))
    target[: len(content)] = content
    return len(content)


_Model = TypeVar("_Model", bound=BaseModel)


class _Buffers:
    """Memory that the contents of files take in turn: fresh memory costs more than reading into it. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns at least `size` bytes with any content."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        return buffer if len(buffer) >= size else np.empty(size, np.uint8)

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Lets the next content take this memory."""
        self._free.append(buffer)


class CheckpointFiles:
    """A checkpoint's manifest, and the files that it lists.

    All methods raise DamagedCheckpointError if a file is not as it was written, and StorageUnreachableError if the
    storage does not answer.
    """

    def __init__(self, uri: str, work: Work | None = None) -> None:
        self._uri = uri
        self._work = Work() if work is None else work
        self._buffers = _Buffers()
        self._filesystem, root = fsspec.core.url_to_fs(uri)
        self._root = root.rstrip("/")
        name = f"{uri}/{MANIFEST_NAME}"
        try:
            text = self._work.patiently(name, lambda: self._filesystem.cat_file(f"{self._root}/{MANIFEST_NAME}"))
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{name} is missing") from error
        self.manifest = CheckpointManifest.from_json(text, name)

    @cached_property
    def _listed(self) -> dict[str, CheckpointFile]:
        return {file.key: file for file in self.manifest.files}

    def read(self, key: str) -> bytes:
        """Returns the content of a file, whose size and checksum are those of the manifest."""
        buffer, size = self._verified(key)
        content = buffer[:size].tobytes()
        self._buffers.give_back(buffer)
        return content

    def read_all(self, keys: Sequence[str]) -> Generator[NDArray[np.uint8], None, None]:
        """Yields the contents of several files in order, each as `read` returns it; reads and checks others ahead.

        Each is valid until the next is asked for: its memory is used again.
        """
        for buffer, size in each_ahead(self._verified, keys, _READY_FILES):
            yield buffer[:size]
            self._buffers.give_back(buffer)

    def _verified(self, key: str) -> tuple[NDArray[np.uint8], int]:
        """Returns a buffer that begins with the content of a file, and the bytes of the content."""
        listed = self._entry(key)
        name = self._name(listed)
        buffer = self._buffers.take(listed.bytes + 1)
        try:
            size = self._work.patiently(name, lambda: self._read(listed, buffer))
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{name} is missing", name) from error
        self._check(key, buffer[:size])
        return buffer, size

    def _entry(self, key: str) -> CheckpointFile:
        listed = self._listed.get(key)
        if listed is None:
            raise DamagedCheckpointError(f"{self._uri}/{key} is not listed in the manifest")
        return listed

    def _name(self, listed: CheckpointFile) -> str:
        """Returns the name of a file in errors."""
        return _beside(self._uri.rstrip("/"), listed)

    def _check(self, key: str, content: bytes | NDArray[np.uint8]) -> None:
        listed = self._entry(key)
        name = self._name(listed)
        if len(content) != listed.bytes:
            raise DamagedCheckpointError(f"{name} does not have the {listed.bytes} bytes it was written with", name)
        if zlib_ng.crc32(content) != listed.crc32:
            raise DamagedCheckpointError(f"{name} was altered: its checksum does not match", name)

    def _read(self, listed: CheckpointFile, buffer: NDArray[np.uint8]) -> int:
        """Reads a file, or its first bytes if it is longer than listed; returns how many. Raises OSError."""
        target, size = buffer.data[: listed.bytes + 1], 0
        try:
            with self._filesystem.open(_beside(self._root, listed), "rb") as file:
                while size < len(target) and (count := _read_some(file, target[size:])):
                    size += count
        except FileNotFoundError as error:
            if self._filesystem.exists(f"{self._root}/{MANIFEST_NAME}"):
                raise
            beside = self._filesystem.glob(f"{self._root.rpartition('/')[0]}/[0-9]*/{MANIFEST_NAME}")
            if any(manifest > f"{self._root}/{MANIFEST_NAME}" for manifest in beside):  # jobs keep the newest
                raise DamagedCheckpointError(f"{self._uri} was removed while it was read") from error
            raise OSError("the checkpoint's folder is missing") from error  # a volume may disappear and come back
        self._work.advance(size)
        return size

    def most_rows(self, part: PartitionFile, table: TablePart) -> int:
        """Returns the rows that one server's part counts of a table, or those that its files have room for if fewer."""
        listed = sum(self._entry(part.key_of(name)).bytes for name in table.files)
        return min(table.rows, listed // _LEAST_ROW_BYTES)

    def parse(self, key: str, model: type[_Model]) -> _Model:
        """Returns the content of a JSON file. Raises DamagedCheckpointError."""
        try:
            return model.model_validate_json(self.read(key))
        except ValidationError as error:
            raise DamagedCheckpointError(f"{self._uri}/{key} does not have the expected form") from error

    def partitions(self, specs: Sequence[TableSpec], parameters: int) -> list[PartitionFile]:
        """Returns what each server held. It must match the tables, the dense one last, and the number of parameters."""
        wanted = [(spec.dimension, spec.optimizer.type, spec.eviction.removes_rows) for spec in specs]
        names = [spec.name for spec in specs[:-1]]
        parts = [self.parse(f"ps-{index}/partition.json", PartitionFile) for index in self.manifest.servers]
        for part in parts:
            held = [(table.dimension, table.optimizer, table.evicted) for table in part.stored]
            if held != wanted or [table.name for table in part.stored[:-1]] != names or part.parameters != parameters:
                raise DamagedCheckpointError(
                    f"{self._uri} was written by another model: tables or dense parameters differ"
                )
            for table in part.stored:
                if table.stride != table.layout.stride:
                    raise DamagedCheckpointError(f"{self._uri}: the records of table {table.name} have another layout")
        return parts
