"""A parameter server's rows and its flash checkpoints of them, in a real Redis."""

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.compatibility import FlashKeys
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.checkpoint import (
    CheckpointFiles,
    FlashFiles,
    FlashWriter,
    Share,
    Work,
    load_partition,
    owned_rows,
)
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import checkpoint_manifest, owned
from redis_process import FlashServer
from snapshots import all_records_of

SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, OptimizerSpec(type=OptimizerType.ADAM), InitializerSpec(), seed=3),
)
INITIAL = np.arange(1000, dtype=np.float32)
DENSE = DensePieces.of(INITIAL, OptimizerSpec(type=OptimizerType.ADAM))
ROOM = 1 << 30
UID = "job"

Contents = dict[tuple[int, int], bytes]


class Trained:
    """A parameter server's rows and its writer of flash checkpoints."""

    def __init__(
        self, url: str, index: int = 0, servers: int = 1, room: int = ROOM, incarnation: str = "1-b43dc3c07b38"
    ) -> None:
        self.url, self.room = url, room
        self.lock = threading.RLock()
        self.tables = TableStore(SPECS, DENSE)
        self.writer = FlashWriter(url, UID, incarnation)
        self.share = Share(index, owned(servers, index), AppliedBatches(), len(INITIAL))

    def push(self, keys: list[int]) -> None:
        """Applies a batch with these keys in both tables, and all dense pieces, as far as the server owns them."""
        distinct = np.unique(np.array(keys, dtype=np.int64))
        mine = distinct[self.share.owned.buckets[buckets_of(distinct)]]
        pieces = np.flatnonzero(self.share.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], dtype=np.uint32)
        gradients = np.ones(self.tables.values_per_request(counts), dtype=np.float32)
        with self.lock:
            self.tables.push(counts, np.concatenate([mine, mine, pieces]), gradients)

    def save(self, checkpoint: str, work: Work | None = None) -> list[CheckpointFile]:
        """Writes a flash checkpoint; the manifest is left to `complete`."""
        with self.lock:
            draft = self.writer.begin(self.tables, self.lock, self.room)
            share = replace(self.share, rows=owned_rows(self.tables, self.share.owned))
        return self.writer.write(draft, checkpoint, share, Work() if work is None else work)

    def contents(self) -> Contents:
        """Returns all rows, by table and key."""
        with self.lock:
            snapshot = self.tables.readers.snapshot(Reader.CHECKPOINT, self.lock)
        return all_records_of(snapshot, len(SPECS) + 1)


def complete(server: FlashServer, checkpoint: str, servers: int, files: list[CheckpointFile]) -> None:
    """Writes the manifest of a checkpoint of these files."""
    manifest = checkpoint_manifest(files, id=checkpoint, job_uid=UID, ps_count=servers)
    server.client.set(FlashKeys.of(UID).manifest, manifest.to_json())


def restored(files: CheckpointFiles, servers: int = 1, index: int = 0) -> Contents:
    """Returns the rows that one of several servers loads."""
    tables = TableStore(SPECS, DENSE)
    load_partition(files, owned(servers, index), tables, len(INITIAL))
    return all_records_of(tables.readers.snapshot(Reader.CHECKPOINT, threading.RLock()), len(SPECS) + 1)


def restored_once_complete(server: FlashServer, checkpoint: str, files: list[CheckpointFile]) -> Contents:
    """Completes a checkpoint of one server's files; returns the rows that it restores."""
    complete(server, checkpoint, 1, files)
    return restored(flash(server, checkpoint))


class KilledError(BaseException):
    """The process is killed; a BaseException, so that no handler of errors runs."""


class Interrupted(Work):
    """Calls `happens` after `files` files."""

    def __init__(self, files: int, happens: Callable[[], object]) -> None:
        super().__init__()
        self._left, self._happens = files, happens

    def advance(self, count: int) -> None:
        super().advance(count)
        self._left -= 1
        if self._left == 0:
            self._happens()


def kill() -> None:
    """Kills the process, for `Interrupted`."""
    raise KilledError


def files_in(server: FlashServer) -> set[str]:
    """Returns the keys of all files of rows, retired keys and documents."""
    keys = {key.decode() for key in server.client.scan_iter()}
    return {key for key in keys if key.endswith((".rows", ".keys", ".json"))}


def rows_files(files: list[CheckpointFile]) -> set[str]:
    """Returns the paths of the files with rows."""
    return {file.path for file in files if file.path.endswith(".rows")}


def files_of(checkpoint: str, files: list[CheckpointFile]) -> set[str]:
    """Returns the keys of these files of a checkpoint."""
    return {FlashKeys.of(UID).of_file(checkpoint, file.path) for file in files}


def flash(server: FlashServer, checkpoint: str) -> FlashFiles:
    """Opens the flash checkpoint in a Redis."""
    return FlashFiles(server.url, UID, checkpoint, Work())
