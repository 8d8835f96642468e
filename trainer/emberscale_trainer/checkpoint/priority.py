"""Saves of priority rows between checkpoints, so that a partial recovery forgets less of them (CPR, section 4.2).

A save has at most PRIORITY_SHARE of the rows of each table. They are chosen from those that changed since the last
checkpoint, by what has happened to them since they were last in a save or a checkpoint:

* MFU: those with most pushes. Rows count their pushes; a server notes the counter of each row that was saved, 12 bytes.
* SSU: those that every second push had. A server keeps as many keys as a save takes, and drops others at random.
* SCAR: those whose weights changed most, by the L2 norm. A server notes the weights of each row that was saved.

A checkpoint or save that another server, or the master, did not complete counts for nothing: rows that were in it come
first again.

The paper counts and samples the accesses of samples. A server sees pushes, which have each key of a batch once. Dense
parameters and sketches are in checkpoints only.
"""

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_api.checkpoint import PRIORITY_SHARE, CheckpointFile, id_in
from emberscale_api.job import RecoveryPriority, TableSpec
from emberscale_trainer.checkpoint.work import AbandonedError, Work
from emberscale_trainer.checkpoint.writer import Share, write_rows
from emberscale_trainer.table import (
    Reader,
    RowLayout,
    Snapshot,
    SnapshotAbandonedError,
    TableStore,
    holds_sketches,
    keys_of,
)
from emberscale_trainer.table.snapshot import Lock

SAMPLED_EVERY = 2
"""SSU looks at one of so many pushes (section 5.1)."""

_KEPT_CHUNKS = 64
"""Chunks of noted values, or of sampled keys, that are merged at once."""

_LEAST_ROOM = 1024
"""Records for which there is room beyond those that are kept."""

Keys = NDArray[np.int64]
Records = NDArray[np.uint8]
_Noted = dict[int, tuple[Keys, NDArray[Any]]]
"""By table, keys [n] of rows, and their values [n, width]."""


def has_priority_rows(spec: TableSpec) -> bool:
    """Whether rows of a table are saved by priority: those of embedding tables."""
    return spec.column >= 0 and not holds_sketches(spec)


class SavedValues:
    """What rows of one table were when they were saved last: a value [width] by key."""

    def __init__(self, dtype: type[np.generic], width: int) -> None:
        self._keys: Keys = np.zeros(0, np.int64)
        self._values: NDArray[Any] = np.zeros((0, width), dtype)
        self._later: list[tuple[Keys, NDArray[Any]]] = []

    def __len__(self) -> int:
        """Rows of which a value is known."""
        self._merge()
        return len(self._keys)

    def note(self, keys: Keys, values: NDArray[Any]) -> None:
        """Rows were saved: their keys [n] and values [n, width], which may be overwritten later."""
        self._later.append((keys.copy(), values.copy()))
        if len(self._later) >= _KEPT_CHUNKS:
            self._merge()

    def forget(self, keys: Keys) -> None:
        """The rows of these keys, int64 [n], were retired: they count as never saved."""
        if len(keys):
            self._merge()
            kept = ~np.isin(self._keys, keys)
            self._keys, self._values = self._keys[kept], self._values[kept]

    def of(self, keys: Keys) -> NDArray[Any]:
        """The values of these keys, [n, width]; zeros for rows that were never saved."""
        self._merge()
        found = np.zeros((len(keys), self._values.shape[1]), self._values.dtype)
        if len(self._keys):
            places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            known = self._keys[places] == keys
            found[known] = self._values[places[known]]
        return found

    def _merge(self) -> None:
        if not self._later:
            return
        keys = np.concatenate([self._keys, *(keys for keys, _ in self._later)])[::-1]
        values = np.concatenate([self._values, *(values for _, values in self._later)])[::-1]
        self._keys, last = np.unique(keys, return_index=True)  # the first here is the latest
        self._values, self._later = values[last], []


class SampledKeys:
    """Keys of a sample of the pushes to one table: as many distinct ones as may be saved (CPR-SSU)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._listed: Keys = np.zeros(0, np.int64)
        self._later: list[Keys] = []

    def add(self, keys: Keys, most: int) -> None:
        """A push had these keys, int64 [n]; `most` are kept."""
        self._later.append(keys.copy())
        if len(self._later) >= _KEPT_CHUNKS:
            self._listed = self._kept(most)

    def take(self, most: int) -> Keys:
        """The kept keys, ascending; the list begins anew."""
        taken, self._listed = self._kept(most), np.zeros(0, np.int64)
        return taken

    def _kept(self, most: int) -> Keys:
        listed, self._later = np.unique(np.concatenate([self._listed, *self._later])), []
        return listed if len(listed) <= most else np.sort(self._random.choice(listed, most, replace=False))


class First:
    """The records with the highest positive scores, of chunks that come one after another.

    They take the memory of `most` records, and an eighth more.
    """

    def __init__(self, most: int, layout: RowLayout) -> None:
        self._most = most
        room = most + max(_LEAST_ROOM, most // 8)
        self._records, self._scores = layout.empty(room), np.zeros(room, np.float64)
        self._count = 0

    def add(self, records: Records, scores: NDArray[np.float64]) -> None:
        """Records, uint8 [n, stride], which may be overwritten later, and their scores, float64 [n]."""
        room = len(self._scores)
        chosen = np.flatnonzero(scores > 0)
        while len(chosen):
            if self._count == room:
                self._reduce()
            some, chosen = np.split(chosen, [room - self._count])
            end = self._count + len(some)
            self._records[self._count : end], self._scores[self._count : end] = records[some], scores[some]
            self._count = end

    def _reduce(self) -> None:
        """Moves the best ones to the front, without a copy of all."""
        most, count = self._most, self._count
        if count <= most:
            return
        best = np.argpartition(self._scores[:count], count - most - 1)[count - most :]
        is_kept = np.zeros(count, np.bool_)
        is_kept[best] = True
        places, late = np.flatnonzero(~is_kept[:most]), most + np.flatnonzero(is_kept[most:])
        self._records[places], self._scores[places] = self._records[late], self._scores[late]
        self._count = most

    def records(self) -> Records:
        """Those with the highest scores, in no particular order."""
        self._reduce()
        return self._records[: self._count]


class PriorityWriter:
    """One server's saves of priority rows.

    `checkpoint_begins`, `pushed` and `begin` are called under the lock of the tables, the others by any thread.
    """

    def __init__(self, priority: RecoveryPriority) -> None:
        self._priority = priority
        self._turn = threading.Lock()
        self._followed: weakref.ref[TableStore] | None = None
        self._counts = ""
        self._written: tuple[str, _Noted] = ("", {})
        self._completed: _Noted = {}
        self._saved: dict[int, SavedValues] = {}
        self._sampled: dict[int, SampledKeys] = {}
        self._pushes = 0

    def checkpoint_begins(self, tables: TableStore, uri: str, *, whole: bool) -> None:
        """All rows, or else all that changed, are saved as they are now: what changes from now on can be chosen.

        `uri` is the checkpoint's folder, below which they will be.
        """
        if self._priority is RecoveryPriority.NONE:
            return
        self._follow(tables)
        tables.untrack(Reader.PRIORITY)
        tables.track(Reader.PRIORITY)
        self._counts, self._written, self._sampled = id_in(uri), ("", {}), {}
        if whole:
            self._saved, self._completed = {}, {}

    def _follow(self, tables: TableStore) -> None:
        if self._followed is None or self._followed() is not tables:
            self._followed = weakref.ref(tables)
            self._saved, self._sampled = {}, {}

    def note(self, number: int, spec: TableSpec, records: Records) -> None:
        """Rows of a table, uint8 [n, stride], are in the files of the checkpoint that began last."""
        if self._priority in (RecoveryPriority.NONE, RecoveryPriority.SSU) or not has_priority_rows(spec):
            return
        with self._turn:
            self._values(number, spec).note(keys_of(records), self._value(spec, records))

    def forget(self, retired: Sequence[Keys]) -> None:
        """Rows were retired before the checkpoint that begins: their keys, int64 [n], by table."""
        with self._turn:
            for number, saved in self._saved.items():
                saved.forget(retired[number])

    def pushed(self, tables: TableStore, counts: NDArray[np.uint32], keys: Keys) -> None:
        """A push had these keys, int64 [n], `counts` of them for each table of a request in turn."""
        if self._priority is not RecoveryPriority.SSU:
            return
        self._pushes += 1
        if self._pushes % SAMPLED_EVERY:
            return
        self._follow(tables)
        first = 0
        embeddings = [(number, spec) for number, spec in enumerate(tables.specs) if has_priority_rows(spec)]
        rows = tables.rows()
        for (number, spec), count in zip(embeddings, counts.tolist(), strict=False):  # the dense table is the last
            if count:
                sampled = self._sampled.setdefault(number, SampledKeys(spec.seed))
                sampled.add(keys[first : first + count], _most(rows[spec.name]))
            first += count

    def begin(self, tables: TableStore, lock: Lock, since: str) -> Snapshot:
        """The rows that changed since the last checkpoint; all, of a server that has taken part in none.

        `since` is the id of the checkpoint or save that was completed last: nothing else that was written after it
        counts, and where a checkpoint did not, all rows may have changed. To be called within a barrier. Raises
        MemoryError.
        """
        self._follow(tables)
        self._count(tables, since)
        try:
            return tables.take(Reader.PRIORITY, lock)
        except ValueError:
            return tables.snapshot(Reader.PRIORITY, lock)

    def _count(self, tables: TableStore, since: str) -> None:
        """Rows count as saved as of `since`."""
        (save, noted), self._written = self._written, ("", {})
        if save == since:
            self._completed = noted
        elif self._counts != since:
            self._saved, self._completed = {}, {}
            tables.untrack(Reader.PRIORITY)
        self._counts = since

    def write(
        self, snapshot: Snapshot, specs: Sequence[TableSpec], share: Share, uri: str, work: Work
    ) -> list[CheckpointFile]:
        """Writes the rows that come first below the folder `uri`, with weights as float32; returns the files.

        What the snapshot took is given back: a row that is left out now may come first next time. Raises
        StorageUnreachableError and AbandonedError.
        """
        completed, self._completed = self._completed, {}
        with self._turn:
            for number, (keys, values) in completed.items():
                self._values(number, specs[number]).note(keys, values)
        chosen: dict[int, Records] = {}
        try:
            for number, spec in enumerate(specs):
                if has_priority_rows(spec):
                    chosen[number] = self._chosen(snapshot, number, spec, share)
        except SnapshotAbandonedError as error:
            raise AbandonedError from error
        finally:
            snapshot.give_back()
        written = write_rows(uri, specs, share, chosen, work)
        noted: _Noted = {}
        if self._priority is not RecoveryPriority.SSU:
            for number, records in chosen.items():
                noted[number] = keys_of(records).copy(), self._value(specs[number], records).copy()
        self._written = (id_in(uri), noted)
        return written

    def _chosen(self, snapshot: Snapshot, number: int, spec: TableSpec, share: Share) -> Records:
        """The rows of one table that come first, uint8 [n, stride]."""
        most = _most(share.rows[number])
        first = First(most, RowLayout.of(spec))
        sampled = self._sampled.pop(number).take(most) if number in self._sampled else np.zeros(0, np.int64)
        for records in snapshot.read(number):
            owned = records[share.owned.among(keys_of(records), dense=False)]
            first.add(owned, self._scores(number, spec, owned, sampled))
        return first.records()

    def _scores(self, number: int, spec: TableSpec, records: Records, sampled: Keys) -> NDArray[np.float64]:
        """How much has happened to rows since they were saved, float64 [n]; 0: nothing."""
        keys = keys_of(records)
        if self._priority is RecoveryPriority.SSU:
            return np.isin(keys, sampled).astype(np.float64)
        with self._turn:
            saved = self._values(number, spec).of(keys)
        now = self._value(spec, records)
        if self._priority is RecoveryPriority.SCAR:
            changes: NDArray[np.float64] = np.sqrt(np.square(now.astype(np.float64) - saved).sum(1))
            return changes
        pushes, before = now[:, 0].astype(np.float64), saved[:, 0].astype(np.float64)
        return np.where(pushes < before, pushes, pushes - before)  # fewer: the row was retired, and is a new one

    def _values(self, number: int, spec: TableSpec) -> SavedValues:
        if number not in self._saved:
            is_scar = self._priority is RecoveryPriority.SCAR
            self._saved[number] = SavedValues(*((np.float32, spec.dimension) if is_scar else (np.uint32, 1)))
        return self._saved[number]

    def _value(self, spec: TableSpec, records: Records) -> NDArray[Any]:
        """What decides about rows, [n, width]: their weights, or how often they were pushed."""
        fields = RowLayout.of(spec).fields(np.ascontiguousarray(records))
        if self._priority is RecoveryPriority.SCAR:
            weights: NDArray[Any] = fields["weights"]
            return weights
        return fields["pushes"].reshape(-1, 1)


def _most(rows: int) -> int:
    """The most rows of a table in one save."""
    return math.ceil(PRIORITY_SHARE * rows)
