"""Flash checkpoints: a server's rows in Redis, as a base of all rows and increments of what changed since.

emberscale:<uid>:flash:manifest                          by the master, last; only of the newest checkpoint
emberscale:<uid>:flash:<checkpoint>/ps-<i>/*.json        what the server held, and how often each batch was applied
emberscale:<uid>:flash:ps-<i>/<incarnation>-<n>.rows     records of a table, as they lie in its slab
emberscale:<uid>:flash:ps-<i>/<incarnation>-<n>.keys     keys of rows that were retired since the part before

A server begins a new base when the increments outweigh the old one. Nothing is compressed: on trained rows, zstd at
level 1 saves an eighth, at less than half the speed at which Redis takes them, and LZ4 saves nothing.
"""

import hashlib
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, CheckpointManifest, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_trainer.checkpoint.ahead import ahead
from emberscale_trainer.checkpoint.files import (
    RETIRED,
    AppliedFile,
    CheckpointFiles,
    EpochRuns,
    PartitionFile,
    TablePart,
)
from emberscale_trainer.checkpoint.flash_redis import Command, FlashRedis, FlashUnusableError, RedisFullError
from emberscale_trainer.checkpoint.work import AbandonedError, Work
from emberscale_trainer.checkpoint.writer import Share, WrittenFile, parts_of
from emberscale_trainer.table import Reader, Snapshot, SnapshotAbandonedError, TableStore
from emberscale_trainer.table.snapshot import Lock

CHUNK_BYTES = 4 << 20
"""A value in Redis ends with the chunk of records that reaches this size."""
_ROOM_FOR_INCREMENT = 1.25
_READY_FILES = 3


@dataclass(frozen=True)
class _Chain:
    """What Redis holds of one server: a base and its increments.

    * `files`: by table, the names of files in order. `written`: the same by path.
    * `base_bytes`: of the base alone.
    """

    files: tuple[tuple[str, ...], ...]
    written: dict[str, WrittenFile] = field(default_factory=dict)
    base_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Of base and increments together."""
        return sum(file.bytes for file in self.written.values())


@dataclass(frozen=True, eq=False)
class FlashDraft:
    """A flash checkpoint that is to be written: the rows as of a barrier, and the chain that they continue."""

    snapshot: Snapshot
    tables: TableStore
    lock: Lock
    before: _Chain | None
    all_bytes: int
    limit: int


class FlashWriter:
    """Writes one server's part of each flash checkpoint; `begin` and `write` may be called by different threads."""

    def __init__(self, url: str, job_uid: str, incarnation: str) -> None:
        self._url = url
        self._keys = FlashKeys.of(job_uid)
        self._stem = hashlib.sha256(incarnation.encode()).hexdigest()[:12]
        self._number = 0
        self._writing = threading.Lock()
        self._followed: weakref.ref[TableStore] | None = None
        self._chain: _Chain | None = None
        self._superseded: tuple[str, ...] = ()

    def begin(self, tables: TableStore, lock: Lock, limit: int) -> FlashDraft:
        """Takes the rows that changed since the last flash checkpoint, or all of them where a new base is due.

        To be called within the barrier, under `lock`, which guards the tables. `limit` is how many bytes this server
        may have in Redis. Raises MemoryError.
        """
        followed, before = None if self._followed is None else self._followed(), self._chain
        rows = tables.rows()
        sizes = [
            rows[spec.name] * layout.stride
            for spec, layout in zip(tables.specs, tables.layouts, strict=True)
            if spec.name in rows
        ]
        if followed is tables and before is not None and _may_grow(before, limit):
            return FlashDraft(tables.take(Reader.FLASH, lock), tables, lock, before, sum(sizes), limit)
        if before is not None:
            self._superseded += tuple(self._keys.of_file("", path) for path in before.written)
        self._chain = None
        tables.untrack(Reader.FLASH)
        tables.track(Reader.FLASH)
        self._followed = weakref.ref(tables)
        return FlashDraft(tables.snapshot(Reader.FLASH, lock), tables, lock, None, sum(sizes), limit)

    def write(self, draft: FlashDraft, checkpoint: str, share: Share, work: Work) -> list[WrittenFile]:
        """Writes what the draft holds, and returns all files that this server's part consists of.

        Raises FlashUnusableError and AbandonedError.
        """
        with self._writing, FlashRedis(self._url) as redis:
            try:
                written = self._write(redis, draft, checkpoint, share, work)
            except SnapshotAbandonedError as error:
                raise AbandonedError from error
            except RedisFullError:
                self._drop(redis, draft)
                raise
            finally:
                draft.snapshot.give_back()
            return written

    def _write(
        self, redis: FlashRedis, draft: FlashDraft, checkpoint: str, share: Share, work: Work
    ) -> list[WrittenFile]:
        if draft.before is None:
            self._make_room(redis, draft)
        else:
            self._renew(redis, draft, draft.before)
        specs = draft.tables.specs
        link = _Link(self, redis, share.index, work)
        names = []
        for number in range(len(specs)):
            retired = draft.snapshot.retired[number]
            keys = [retired.view(np.uint8).data] if len(retired) else []
            rows = parts_of(draft.snapshot.drain(number), CHUNK_BYTES)
            names.append(link.write(chain(((RETIRED, key) for key in keys), ((".rows", row) for row in rows))))
        link.flush()
        before = draft.before or _Chain(((),) * len(specs))
        size = sum(file.bytes for file in link.written)
        after = replace(
            before,
            files=tuple((*old, *new) for old, new in zip(before.files, names, strict=True)),
            written={**before.written, **{file.path: file for file in link.written}},
            base_bytes=size if draft.before is None else before.base_bytes,
        )
        documents = link.documents(checkpoint, _documents(draft.tables, after, share))
        with draft.lock:
            draft.snapshot.commit()
            self._chain = after
            if draft.before is None:
                self._superseded = ()  # the master removes what its next manifest does not list
        return [*after.written.values(), *documents]

    def next_name(self, suffix: str) -> str:
        """A name that no file of this job has had."""
        self._number += 1
        return f"{self._stem}-{self._number:08d}{suffix}"

    def key_of(self, checkpoint: str, path: str) -> str:
        """The key of a file."""
        return self._keys.of_file(checkpoint, path)

    def _renew(self, redis: FlashRedis, draft: FlashDraft, before: _Chain) -> None:
        """Has Redis keep the chain for longer, which tells whether it still has all of it."""
        keys = [self._keys.of_file("", path) for path in before.written]
        found = redis.pipelined(("EXPIRE", key, FLASH_KEPT_SECONDS) for key in keys)
        missing = sum(answer == 0 for answer in found)
        if missing:
            self._forget(draft)
            raise FlashUnusableError(f"Redis has lost {missing} of {len(keys)} chunks; the next one begins anew")

    def _make_room(self, redis: FlashRedis, draft: FlashDraft) -> None:
        """Removes what a base replaces, before it is complete, where both together would be too large."""
        if draft.all_bytes > draft.limit:
            raise FlashUnusableError(
                f"the rows take {draft.all_bytes >> 20} MiB here, and spec.checkpoint.flash.maxBytes gives each server "
                f"{draft.limit >> 20}: raise it"
            )
        old = self._superseded
        if old and sum(redis.pipelined(("STRLEN", key) for key in old)) + draft.all_bytes > draft.limit:
            redis.remove(old)

    def _drop(self, redis: FlashRedis, draft: FlashDraft) -> None:
        """Redis is full: gives back all that this server has there, since the next base needs the room."""
        known = draft.before.written if draft.before is not None else {}
        with suppress(FlashUnusableError):
            redis.remove([*(self._keys.of_file("", path) for path in known), *self._superseded])
        self._forget(draft)

    def _forget(self, draft: FlashDraft) -> None:
        with draft.lock:
            if self._chain is draft.before:
                self._chain = None


class _Link:
    """The part of a chain that one checkpoint adds."""

    def __init__(self, writer: FlashWriter, redis: FlashRedis, index: int, work: Work) -> None:
        self._writer, self._redis, self._work = writer, redis, work
        self._folder = f"ps-{index}"
        self.written: list[WrittenFile] = []

    def write(self, contents: Iterable[tuple[str, memoryview]]) -> tuple[str, ...]:
        """Sends files, each with the end of its name; returns the names. The next content may overwrite each."""
        first = len(self.written)
        for suffix, content in contents:
            self._send("", f"{self._folder}/{self._writer.next_name(suffix)}", content)
        return tuple(file.path.partition("/")[2] for file in self.written[first:])

    def documents(self, checkpoint: str, documents: Iterable[tuple[str, bytes]]) -> list[WrittenFile]:
        """Writes the JSON files of a checkpoint."""
        first = len(self.written)
        for name, content in documents:
            self._send(checkpoint, f"{self._folder}/{name}", memoryview(content))
        self.flush()
        return self.written[first:]

    def flush(self) -> None:
        """Waits until Redis has everything; on failure, removes what it has."""
        try:
            self._redis.flush()
        except FlashUnusableError:
            self._undo()
            raise

    def _send(self, checkpoint: str, path: str, content: memoryview) -> None:
        key = self._writer.key_of(checkpoint, path)
        file = WrittenFile(path, content.nbytes, zlib.crc32(content))
        try:
            self._redis.send(("SET", key, content, "EX", FLASH_KEPT_SECONDS))
            self._work.advance(content.nbytes)
        except (FlashUnusableError, AbandonedError):
            self._undo()
            raise
        self.written.append(file)

    def _undo(self) -> None:
        with suppress(FlashUnusableError):
            self._redis.remove([self._writer.key_of("", file.path) for file in self.written])


def _may_grow(before: _Chain, limit: int) -> bool:
    """Whether another increment is worth more than a new base, and fits."""
    increments = before.bytes - before.base_bytes
    return increments <= before.base_bytes and before.bytes * _ROOM_FOR_INCREMENT <= limit


def _documents(tables: TableStore, after: _Chain, share: Share) -> list[tuple[str, bytes]]:
    parts = []
    for spec, names in zip(tables.specs, after.files, strict=True):
        sizes = [after.written[f"ps-{share.index}/{name}"].bytes for name in names if not name.endswith(RETIRED)]
        parts.append(TablePart.of(spec, names, sum(sizes)))
    partition = PartitionFile.of(share.index, share.owned, tables.specs, parts, share.parameters)
    epochs = [EpochRuns(epoch=epoch, runs=share.applied.runs(epoch)) for epoch in share.applied.epochs()]
    applied = AppliedFile(epochs=epochs)
    return [
        ("partition.json", partition.to_json()),
        ("applied.json", applied.model_dump_json().encode()),
    ]


class FlashFiles(CheckpointFiles):
    """As CheckpointFiles, in Redis. What cannot be read counts as damaged: the next tier is a better place to ask."""

    def __init__(self, url: str, job_uid: str, checkpoint: str, work: Work) -> None:
        self._uri = checkpoint
        self._work = work
        self._redis_url = url
        self._keys = FlashKeys.of(job_uid)
        [text] = self._fetched([self._keys.manifest])
        self.manifest = CheckpointManifest.from_json(text, checkpoint)
        if self.manifest.id != checkpoint:
            raise DamagedCheckpointError(f"{checkpoint} was replaced by {self.manifest.id}")

    def read(self, path: str) -> bytes:
        """As CheckpointFiles."""
        [content] = self.read_all([path])
        return content

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes]:
        """As CheckpointFiles, with several requests under way, and the next files ready while one is used."""
        for path in paths:
            self._entry(path)
        yield from ahead(self._checked(paths), _READY_FILES)

    def _checked(self, paths: Sequence[str]) -> Iterator[bytes]:
        contents = self._fetched([self._keys.of_file(self._uri, path) for path in paths])
        for path, content in zip(paths, contents, strict=True):
            self._check(path, content)
            yield content

    def _fetched(self, keys: Sequence[str]) -> Iterator[bytes]:
        try:
            with FlashRedis(self._redis_url) as redis:
                for key, content in zip(keys, redis.pipelined(_gets(keys)), strict=True):
                    if not isinstance(content, bytes):
                        raise DamagedCheckpointError(f"{self._uri}: Redis has lost {key}")
                    self._work.advance(len(content))
                    yield content
        except FlashUnusableError as error:
            raise DamagedCheckpointError(f"{self._uri}: {error}") from error


def _gets(keys: Iterable[str]) -> Iterator[Command]:
    for key in keys:
        yield ("GET", key)
