"""Flash checkpoints: a server's rows in Redis, as a base of all rows and increments of later changes.

emberscale:<uid>:flash:manifest                          by the master, last; only of the newest checkpoint
emberscale:<uid>:flash:<checkpoint>/ps-<i>/*.json        what the server held, and how often each batch was applied
emberscale:<uid>:flash:ps-<i>/<incarnation>-<n>.rows     records of a table, as they lie in its slab
emberscale:<uid>:flash:ps-<i>/<incarnation>-<n>.keys     keys of rows that were retired since the part before
emberscale:<uid>:flash:ps-<i>/inventory                  the keys of all of the server's files that may be there

An increment has the rows that changed since the one before it. If nearly all rows of the increments so far have changed
again, it has the rows that changed since the base and replaces them: a hot set that changes between all checkpoints is
in Redis once, and the base stays. When the chain takes twice the bytes of all rows, the base goes. The next increment
also has the rows that no other has, so that it and they are complete without the base; a server begins a new base if
that writes fewer bytes for each that may follow.

Nothing is compressed: on trained rows, zstd at level 1 saves an eighth, at less than half the speed at which Redis
takes them, and LZ4 saves nothing.
"""

import hashlib
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, CheckpointFile, CheckpointManifest, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_api.job import TableSpec
from emberscale_api.readable import bytes_text
from emberscale_trainer.checkpoint.files import (
    RETIRED,
    AppliedFile,
    CheckpointFiles,
    PartitionFile,
    TablePart,
)
from emberscale_trainer.checkpoint.flash_inventory import FlashInventory
from emberscale_trainer.checkpoint.flash_redis import FlashRedis, FlashUnusableError, RedisFullError
from emberscale_trainer.checkpoint.work import AbandonedError, Work, ahead
from emberscale_trainer.checkpoint.writer import Share, parts_of
from emberscale_trainer.table import Reader, Snapshot, SnapshotAbandonedError, TableStore
from emberscale_trainer.table.layout import KEY_BYTES
from emberscale_trainer.table.readers import Readers
from emberscale_trainer.table.snapshot import Changes, Lock

CHUNK_BYTES = 1 << 20
"""A value in Redis ends with the chunk of records that reaches this size."""
_ROOM_FOR_INCREMENT = 1.25
_MOST_COPIES = 2
"""How many times the bytes of all rows a chain may take before its base goes."""
_WORTH_ONE_BYTE = 4
"""The bytes of replaced increments for which one more byte is written; a new base writes a byte for each."""
_MOST_INCREMENTS = 100
"""The most increments after a base, which may be as many: each adds files to the manifest, however few rows change."""
_NOTED_FOR_EACH_FILE = 2
"""The most names that the inventory gains for each file of the chain before it is swept of those that were replaced."""
_READY_FILES = 3


@dataclass(frozen=True)
class _Chain:
    """The rows of one server in Redis: a base and its increments.

    * `files`: by table, the names of files in order. `written`: the same files by path.
    * `increments`: the number of increments. `changes`: what they have; None if there are none. Rows that are not among
      these are in the base.
    * `base`: the base alone; None: the chain is that.
    """

    files: tuple[tuple[str, ...], ...]
    written: dict[str, CheckpointFile] = field(default_factory=dict)
    increments: int = 0
    changes: Changes | None = None
    base: "_Chain | None" = None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.written.values())

    @property
    def increment_bytes(self) -> int:
        return 0 if self.base is None else self.bytes - self.base.bytes

    def without(self, base: "_Chain") -> "_Chain":
        """Returns the increments alone, as the base of others."""
        return _Chain(
            tuple(files[len(old) :] for files, old in zip(self.files, base.files, strict=True)),
            {path: file for path, file in self.written.items() if path not in base.written},
        )

    def followed_by(
        self, names: Sequence[tuple[str, ...]], written: Iterable[CheckpointFile], changes: Changes | None
    ) -> "_Chain":
        """Returns the chain with one more increment, of files with these names by table."""
        return _Chain(
            tuple((*files, *new) for files, new in zip(self.files, names, strict=True)),
            {**self.written, **{file.path: file for file in written}},
            self.increments + 1,
            changes,
            self if self.base is None else self.base,
        )


@dataclass(frozen=True, eq=False)
class FlashDraft:
    """A flash checkpoint to write: the rows as of a barrier.

    `before` is the writer's chain, `continued` the part of it that the rows continue: all, the base alone, or the
    increments alone. None: a new base.
    """

    snapshot: Snapshot
    tables: TableStore
    lock: Lock
    before: _Chain | None
    continued: _Chain | None
    all_bytes: int
    limit: int


class FlashWriter:
    """Writes one server's part of each flash checkpoint; `begin` and `write` may be called by different threads."""

    def __init__(self, url: str, job_uid: str, incarnation: str) -> None:
        self._url = url
        self._keys = FlashKeys.of(job_uid)
        stem = hashlib.sha256(incarnation.encode()).hexdigest()[:12]
        self._stems = (f"{stem}-{number:08d}" for number in count(1))  # names that no file of this job has had
        self._writing = threading.Lock()
        self._followed: weakref.ref[TableStore] | None = None
        self._chain: _Chain | None = None
        self._unclean = False
        self._noted = 0
        self._replaced_bytes = 0  # since the last sweep; the master removes only what a manifest named
        self._kept_bytes = 0  # that sweep kept them for a manifest, and the chain no longer has them

    def begin(self, tables: TableStore, lock: Lock, limit: int) -> FlashDraft:
        """Takes the rows that changed since the last flash checkpoint, or all rows if a new base is due.

        The caller is within the barrier and holds `lock`, which guards the tables. `limit` is the number of bytes that
        this server may keep in Redis. Raises MemoryError.
        """
        readers = tables.readers
        followed, before = None if self._followed is None else self._followed(), self._chain
        all_bytes = readers.all_bytes
        if followed is tables and before is not None:
            continued = _continued(readers, before, all_bytes, limit - self._kept_bytes)
            if continued is not None:
                return FlashDraft(readers.take(Reader.FLASH, lock), tables, lock, before, continued, all_bytes, limit)
        self._chain = None
        readers.untrack(Reader.FLASH)
        readers.track(Reader.FLASH)
        self._followed = weakref.ref(tables)
        return FlashDraft(readers.snapshot(Reader.FLASH, lock), tables, lock, None, None, all_bytes, limit)

    def write(self, draft: FlashDraft, checkpoint: str, share: Share, work: Work) -> list[CheckpointFile]:
        """Writes the draft, and returns all files of this server's part; `share.rows` are those when it was begun.

        Raises FlashUnusableError and AbandonedError.
        """
        try:
            with self._writing, FlashRedis(self._url) as redis:
                link = _ChainLink(redis, self._keys, f"ps-{share.index}", work)
                try:
                    return self._write(link, draft, checkpoint, share)
                except AbandonedError:
                    link.undo()
                    raise
                except RedisFullError:
                    link.undo()
                    self._make_room_again(link.inventory, draft)
                    raise
        except SnapshotAbandonedError as error:
            raise AbandonedError from error
        finally:
            draft.snapshot.give_back()  # an open one saves the old bytes of all rows that change

    def _write(self, link: "_ChainLink", draft: FlashDraft, checkpoint: str, share: Share) -> list[CheckpointFile]:
        if draft.snapshot.ended:  # a later draft may have been written, and its files have no manifest yet
            raise AbandonedError
        if draft.before is None:
            self._replaced_bytes = self._make_room(link.inventory, draft)
            self._noted = self._kept_bytes = 0
        else:
            self._renew(link, draft, draft.before)
        self._unclean = True
        names = link.write_rows(draft.snapshot, len(draft.tables.specs), self._stems)
        if draft.continued is None:
            after = _Chain(tuple(names), {file.path: file for file in link.written})
        else:
            taken = draft.snapshot.changes  # as they are: a later draft may take them back at any time
            changes = None if taken is None else taken.joined(draft.continued.changes)
            after = draft.continued.followed_by(names, link.written, changes)
        documents = link.documents(checkpoint, _documents(draft.tables.specs, after, share))
        with draft.lock:
            draft.snapshot.commit()
            self._chain = after
        self._unclean = False
        self._noted += len(link.written)
        if draft.before is not None and draft.continued is not None:
            self._replaced_bytes += draft.before.bytes - draft.continued.bytes
        return [*after.written.values(), *documents]

    def _renew(self, link: "_ChainLink", draft: FlashDraft, before: _Chain) -> None:
        """Renews the expiry of the chain in Redis, which reveals whether Redis still has all of it."""
        keys = [self._keys.of_file("", path) for path in before.written]
        found = link.redis.pipelined(("EXPIRE", key, FLASH_KEPT_SECONDS) for key in keys)
        missing = sum(answer == 0 for answer in found)
        if missing:
            self._forget(draft)
            raise FlashUnusableError(f"Redis has lost {missing} of {len(keys)} chunks; the next one begins anew")
        is_full = before.bytes * _ROOM_FOR_INCREMENT + self._replaced_bytes > draft.limit
        has_many = self._noted > _NOTED_FOR_EACH_FILE * (len(keys) + _MOST_INCREMENTS)
        if self._unclean or self._kept_bytes or is_full or has_many:
            self._kept_bytes = link.inventory.sweep(keys)
            self._noted = self._replaced_bytes = 0

    def _make_room(self, inventory: FlashInventory, draft: FlashDraft) -> int:
        """Removes what no checkpoint needs, and also the old base if it does not fit beside the new one.

        Returns the bytes that are left.
        """
        if draft.all_bytes > draft.limit:
            raise FlashUnusableError(
                f"the rows take {bytes_text(draft.all_bytes)} here, and spec.checkpoint.flash.maxBytes gives each "
                f"server {bytes_text(draft.limit)}: raise it"
            )
        kept = inventory.sweep()
        if kept + draft.all_bytes <= draft.limit:
            return kept
        inventory.clear()
        return 0

    def _make_room_again(self, inventory: FlashInventory, draft: FlashDraft) -> None:
        """Handles a full Redis: the next checkpoint is a base. If this one was a base, removes the old chain."""
        self._forget(draft)
        if draft.before is None:
            with suppress(FlashUnusableError):
                inventory.clear()

    def _forget(self, draft: FlashDraft) -> None:
        with draft.lock:
            if self._chain is draft.before:
                self._chain = None


class _ChainLink:
    """The part of a chain that one checkpoint adds."""

    def __init__(self, redis: FlashRedis, keys: FlashKeys, folder: str, work: Work) -> None:
        self.redis = redis
        self.inventory = FlashInventory(redis, keys, folder)
        self.written: list[CheckpointFile] = []
        self._keys = keys
        self._folder = folder
        self._work = work
        self._sent: list[str] = []

    def write_rows(self, snapshot: Snapshot, tables: int, stems: Iterator[str]) -> list[tuple[str, ...]]:
        """Writes retired keys and rows to files, each named by the next of `stems`; returns the names by table."""
        names = []
        for number in range(tables):
            first, retired = len(self.written), snapshot.retired[number]
            for keys in range(0, len(retired), CHUNK_BYTES // KEY_BYTES):
                some = retired[keys : keys + CHUNK_BYTES // KEY_BYTES]
                self._send("", f"{next(stems)}{RETIRED}", some.view(np.uint8).data)
            for rows in parts_of(snapshot.read(number), CHUNK_BYTES):
                self._send("", f"{next(stems)}.rows", rows)
            names.append(tuple(file.path.partition("/")[2] for file in self.written[first:]))
        self.redis.flush()
        return names

    def documents(self, checkpoint: str, documents: Iterable[tuple[str, bytes]]) -> list[CheckpointFile]:
        """Writes the JSON files of a checkpoint."""
        first = len(self.written)
        for name, content in documents:
            self._send(checkpoint, name, memoryview(content))
        self.redis.flush()
        return self.written[first:]

    def _send(self, checkpoint: str, name: str, content: memoryview) -> None:
        """Sends a file. The content may be overwritten once this has returned."""
        path = f"{self._folder}/{name}"
        key = self._keys.of_file(checkpoint, path)
        file = CheckpointFile(path=path, bytes=content.nbytes, crc32=zlib_ng.crc32(content))
        self._sent.append(key)
        self.inventory.note(key)
        self.redis.send(("SET", key, content, "EX", FLASH_KEPT_SECONDS))
        self._work.advance(content.nbytes)
        self.written.append(file)

    def undo(self) -> None:
        """Removes the files that Redis accepted. After a broken connection, the next checkpoint sweeps instead."""
        with suppress(FlashUnusableError):
            self.inventory.remove(self._sent)


def _continued(readers: Readers, before: _Chain, all_bytes: int, limit: int) -> _Chain | None:
    """Returns the part of a chain that the next increment continues, or None if a new base is worth more.

    The reader takes the rows for that part next. Raises MemoryError.
    """
    base, changes = before.base, before.changes
    fits = before.bytes * _ROOM_FOR_INCREMENT <= limit
    if fits and before.increments < _MOST_INCREMENTS and before.bytes <= _MOST_COPIES * all_bytes:
        if base is None or changes is None or not _replaces(readers, before, changes):
            return before
        readers.take_again(Reader.FLASH, changes)
        return base
    if base is None or changes is None:
        return None
    more = readers.bytes_to_take(Reader.FLASH) + readers.unchanged_bytes(Reader.FLASH, changes)
    after = before.increment_bytes + more
    leaves_room = max(before.bytes + more, after * _ROOM_FOR_INCREMENT) <= limit
    # a new base costs a byte for each byte of increments that may follow it; this must not cost more
    if not leaves_room or more > _MOST_COPIES * all_bytes - after:
        return None
    readers.take_unchanged(Reader.FLASH, changes)
    return before.without(base)


def _replaces(readers: Readers, before: _Chain, changes: Changes) -> bool:
    """Whether the next increment replaces those of the chain, which have these changes."""
    both = readers.bytes_to_take(Reader.FLASH, changes)
    more = both - readers.bytes_to_take(Reader.FLASH) + changes.retired_bytes()
    return _WORTH_ONE_BYTE * more <= before.increment_bytes


def _documents(specs: Sequence[TableSpec], after: _Chain, share: Share) -> list[tuple[str, bytes]]:
    parts = [TablePart.of(*one) for one in zip(specs, after.files, share.rows, strict=True)]
    partition = PartitionFile.of(share.index, share.owned, specs, parts, share.parameters)
    return [("partition.json", partition.to_json()), ("applied.json", AppliedFile.of(share.applied).to_json())]


class FlashFiles(CheckpointFiles):
    """As CheckpointFiles, in Redis. Unreadable files count as damaged, so that the next tier is tried."""

    def __init__(self, url: str, job_uid: str, checkpoint: str, work: Work) -> None:
        self._uri = checkpoint
        self._work = work
        self._redis_url = url
        self._keys = FlashKeys.of(job_uid)
        [text] = self._fetched([self._keys.manifest])
        self.manifest = CheckpointManifest.from_json(text, checkpoint)
        if self.manifest.id != checkpoint:
            raise DamagedCheckpointError(f"{checkpoint} was replaced by {self.manifest.id}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Checks that all chunks of all servers exist before any rows are loaded."""
        files = self.manifest.files
        keys = [self._keys.of_file(self._uri, file.path) for file in files]
        try:
            with FlashRedis(self._redis_url) as redis:
                sizes = [*redis.pipelined(("STRLEN", key) for key in keys)]
        except FlashUnusableError as error:
            raise DamagedCheckpointError(f"{self._uri}: {error}") from error
        lost = [key for key, file, size in zip(keys, files, sizes, strict=True) if size < file.bytes]
        if lost:
            raise DamagedCheckpointError(
                f"{self._uri}: Redis has lost {len(lost)} of {len(keys)} chunks, first {lost[0]}"
            )

    def read(self, path: str) -> bytes:
        """As CheckpointFiles."""
        self._entry(path)
        [content] = self._checked([path])
        return content

    def read_all(self, paths: Sequence[str]) -> Generator[NDArray[np.uint8], None, None]:
        """As CheckpointFiles, with several requests under way, and the next files ready while one is used."""
        for path in paths:
            self._entry(path)
        for content in ahead(self._checked(paths), _READY_FILES):
            yield np.frombuffer(content, np.uint8)

    def _checked(self, paths: Sequence[str]) -> Iterator[bytes]:
        contents = self._fetched([self._keys.of_file(self._uri, path) for path in paths])
        for path, content in zip(paths, contents, strict=True):
            self._check(path, content)
            yield content

    def _fetched(self, keys: Sequence[str]) -> Iterator[bytes]:
        try:
            with FlashRedis(self._redis_url) as redis:
                for key, content in zip(keys, redis.pipelined(("GET", key) for key in keys), strict=True):
                    if not isinstance(content, bytes):
                        raise DamagedCheckpointError(f"{self._uri}: Redis has lost {key}")
                    self._work.advance(len(content))
                    yield content
        except FlashUnusableError as error:
            raise DamagedCheckpointError(f"{self._uri}: {error}") from error
