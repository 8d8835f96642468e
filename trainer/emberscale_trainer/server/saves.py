"""Saves of a server's rows: checkpoints, flash checkpoints, and priority rows between them.

The snapshot is taken at once, and written in a thread of its own. There is one save of each kind at a time: a later one
abandons the earlier one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError, id_in, is_flash, is_priority
from emberscale_api.job import RecoveryPriority, TableSpec
from emberscale_trainer.checkpoint import (
    ChainDraft,
    ChainWriter,
    CheckpointFiles,
    FlashFiles,
    FlashUnusableError,
    FlashWriter,
    PriorityWriter,
    Share,
    TokenBucket,
    Work,
    WriteLimit,
    owned_rows,
)
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.server.background import Background
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.table import TableStore, trim_heap
from emberscale_trainer.table.snapshot import Lock


@dataclass(frozen=True)
class FlashStore:
    """The location of the job's flash checkpoints."""

    url: str
    job_uid: str


@dataclass(frozen=True)
class SaveRequest:
    """A save, as the master asks for it in a barrier of a generation.

    * `uri`: the folder, whose name tells priority rows from a checkpoint, or the id of a flash checkpoint.
    * `tracked`: a later checkpoint may build on this one.
    * `since`: the id of the checkpoint to build on, or with which priority rows count as saved; empty: all rows.
    * `weight_bits`: bits of a quantised weight; 0: float32.
    * `flash_bytes`: what this server may have in Redis.
    * `bytes_per_second`: that the server may write to the folder; 0: no limit.
    """

    generation: int
    barrier: int
    uri: str
    tracked: bool
    since: str
    weight_bits: int
    flash_bytes: int
    bytes_per_second: int


class _SaveKind(Enum):
    PERSISTENT = auto()
    FLASH = auto()
    PRIORITY = auto()


def _kind_of(uri: str) -> _SaveKind:
    if is_flash(uri):
        return _SaveKind.FLASH
    return _SaveKind.PRIORITY if is_priority(id_in(uri)) else _SaveKind.PERSISTENT


@dataclass(frozen=True)
class _Save:
    """A snapshot of a barrier of a generation, which is being written or already written."""

    generation: int
    barrier: int
    background: Background[list[CheckpointFile]]


_Write = Callable[[Sequence[TableSpec], Share, Work], list[CheckpointFile]]
"""Writes these tables' rows of a snapshot."""


class Saves:
    """The saves of one server. `flash` is None without a Redis for flash checkpoints."""

    def __init__(self, index: int, incarnation: str, metrics: ServerMetrics, flash: FlashStore | None) -> None:
        self._index = index
        self._metrics = metrics
        self._flash = flash
        self._flash_writer = None if flash is None else FlashWriter(flash.url, flash.job_uid, incarnation)
        self._chain_writer = ChainWriter()
        self._priority = PriorityWriter(RecoveryPriority.NONE)
        self._bucket = TokenBucket()
        self._under_way: dict[_SaveKind, _Save] = {}

    def prioritise(self, priority: RecoveryPriority) -> PriorityWriter:
        """Sets which rows later saves of priority rows choose; returns what has to watch pushes for that."""
        self._priority = PriorityWriter(priority)
        return self._priority

    def files(self, checkpoint: str, work: Work) -> CheckpointFiles:
        """Returns the files of a checkpoint or a flash checkpoint, to be read as part of `work`."""
        if not is_flash(checkpoint):
            return CheckpointFiles(checkpoint, work)
        if self._flash is None:
            raise DamagedCheckpointError(f"{checkpoint}: this server knows of no Redis for flash checkpoints")
        return FlashFiles(self._flash.url, self._flash.job_uid, checkpoint, work)

    def begin(
        self, request: SaveRequest, tables: TableStore, lock: Lock, owned: Ownership, applied: AppliedBatches
    ) -> None:
        """Takes a snapshot, before any other push, and begins to write it. Raises FlashUnusableError."""
        write_share = self._snapshot(request, tables, lock, owned)
        specs, kind = tables.specs, _kind_of(request.uri)
        share = Share(self._index, owned, applied, tables.dense_parameters, owned_rows(tables, owned))
        earlier = self._under_way.pop(kind, None)
        if earlier is not None:
            earlier.background.abandon()

        def write(work: Work) -> list[CheckpointFile]:
            began = time.monotonic()
            files = write_share(specs, share, work)
            self._metrics.checkpoint_written(time.monotonic() - began, work.moved_bytes)
            return files

        limit = WriteLimit(self._bucket, request.bytes_per_second) if request.bytes_per_second else None
        self._under_way[kind] = _Save(request.generation, request.barrier, Background("save", write, Work(limit=limit)))

    def of(self, generation: int, barrier: int) -> Background[list[CheckpointFile]] | None:
        """Returns the save of a barrier's snapshot; None if there is none."""
        wanted = (generation, barrier)
        saves = [*self._under_way.values()]
        return next((one.background for one in saves if (one.generation, one.barrier) == wanted), None)

    def abandon(self) -> None:
        """Abandons all saves."""
        for save in [*self._under_way.values()]:
            save.background.abandon()
        self._under_way = {}

    def _snapshot(self, request: SaveRequest, tables: TableStore, lock: Lock, owned: Ownership) -> _Write:
        """Takes the snapshot; returns the function that writes it."""
        kind = _kind_of(request.uri)
        if kind is _SaveKind.PRIORITY:
            priority = self._priority
            rows = priority.begin(tables, lock, request.since)
            return lambda specs, share, work: priority.write(rows, specs, share, request.uri, work)
        if kind is _SaveKind.PERSISTENT:
            draft = self._chain_writer.begin(tables, lock, owned, tracked=request.tracked, since=request.since)
            self._priority.checkpoint_begins(tables, request.uri, whole=draft.before is None)
            return partial(self._write_chain, draft, request)
        writer = self._flash_writer
        if writer is None:
            raise FlashUnusableError("this parameter server knows of no Redis for flash checkpoints")
        begun = writer.begin(tables, lock, request.flash_bytes)
        return lambda _, share, work: writer.write(begun, request.uri, share, work)

    def _write_chain(
        self, draft: ChainDraft, request: SaveRequest, specs: Sequence[TableSpec], share: Share, work: Work
    ) -> list[CheckpointFile]:
        priority = self._priority
        priority.forget(draft.snapshot.retired)
        files = self._chain_writer.write(draft, specs, share, request.uri, work, request.weight_bits, priority.note)
        trim_heap()
        return files
