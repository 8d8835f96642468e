"""Incremental checkpoints: a server's part has all rows, or those that changed since an earlier checkpoint.

The reader's changes are kept until the master names the checkpoint on which the next one builds (`Readers.take`):

* the newest, which is then complete: changes before it are forgotten,
* the one on which the newest builds: the changes in the newest are taken again, whether or not it failed,
* any other, or none: all rows are written, and changes are recorded from then on.

A checkpoint omits rows that are being copied to a server that does not own them yet: the sender's part has them. Once
the server owns them, its next part has all rows.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import TableSpec
from emberscale_trainer.checkpoint.work import AbandonedError, Work
from emberscale_trainer.checkpoint.writer import Link, Seen, Share, write_part
from emberscale_trainer.partition import Ownership
from emberscale_trainer.table import Reader, Snapshot, TableStore
from emberscale_trainer.table.snapshot import Lock


@dataclass(frozen=True, eq=False)
class ChainDraft:
    """A checkpoint to write: the rows as of a barrier, and the link that they build on; None: they are all rows."""

    snapshot: Snapshot
    lock: Lock
    before: Link | None
    tracked: bool


class ChainWriter:
    """Writes one server's part of each checkpoint; `begin` and `write` may be called by different threads."""

    def __init__(self) -> None:
        self._followed: weakref.ref[TableStore] | None = None
        self._since: Link | None = None
        self._newest: Link | None = None

    def begin(self, tables: TableStore, lock: Lock, owned: Ownership, *, tracked: bool, since: str) -> ChainDraft:
        """Takes the rows that changed since the checkpoint `since`, or all rows if the changes are unknown.

        The caller is within the barrier and holds `lock`, which guards the tables. `owned` is what the server owns now.
        With `tracked`, later checkpoints may build on this one. Raises MemoryError.
        """
        readers = tables.readers
        if not tracked or self._followed is None or self._followed() is not tables:
            readers.untrack(Reader.CHECKPOINT)
            self._since = self._newest = None
            self._followed = weakref.ref(tables) if tracked else None
            if tracked:
                readers.track(Reader.CHECKPOINT)
        newest, self._newest = self._newest, None
        if newest is not None and newest.checkpoint == since:
            readers.commit(Reader.CHECKPOINT)
            self._since = newest
        if self._since is not None and (self._since.checkpoint != since or self._since.lacks(owned)):
            self._since = None  # its files may be removed once the next one is complete
        take = readers.snapshot if self._since is None else readers.take
        return ChainDraft(take(Reader.CHECKPOINT, lock), lock, self._since, tracked)

    def write(
        self,
        draft: ChainDraft,
        specs: Sequence[TableSpec],
        share: Share,
        uri: str,
        work: Work,
        weight_bits: int = 0,
        seen: Seen | None = None,
    ) -> list[CheckpointFile]:
        """Writes the server's files below the checkpoint's folder `uri`; returns all files of its part.

        `seen` gets all rows that are written. Otherwise as `write_part`.
        """
        written, link = write_part(draft.snapshot, specs, share, uri, work, weight_bits, draft.before, seen)
        with draft.lock:
            if draft.snapshot.ended:  # a later checkpoint has taken the changes
                raise AbandonedError
            if draft.tracked:
                self._newest = link
            else:
                draft.snapshot.commit()
        return written


def owned_rows(tables: TableStore, owned: Ownership) -> tuple[int, ...]:
    """Returns the number of owned rows of each table; of the dense table, of all rows."""
    last = len(tables.specs) - 1
    return tuple(
        int(tables.bucket_rows(number)[np.ones_like(owned.buckets) if number == last else owned.buckets].sum())
        for number in range(len(tables.specs))
    )
