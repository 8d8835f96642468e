"""Saves of priority rows between checkpoints, so that a partial recovery forgets less of them (CPR, section 4.2).

A save has at most PRIORITY_SHARE of the rows of each table. They are chosen from those that changed since the last
checkpoint, by what has happened to them since they were last in a save or a checkpoint:

* MFU: those with most pushes. Rows count their pushes; a server notes the counter of each row that was saved, 12 bytes.
* SSU: those that every second push had. A server keeps as many keys as a save takes, and drops others at random.
* SCAR: those whose weights changed most, by the L2 norm. A server notes the weights of each row that was saved.

A checkpoint or save that another server, or the master, did not complete counts for nothing. With MFU and SCAR, rows
that were in it come first again. SSU begins another sample with each checkpoint and save, completed or not, so these
rows have to be sampled anew.

The paper counts and samples the accesses of samples. A server sees pushes, which have each key of a batch once. Dense
parameters and sketches are in checkpoints only.
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emberscale_api.checkpoint import PRIORITY_SHARE, CheckpointFile, id_in
from emberscale_api.job import RecoveryPriority, TableSpec
from emberscale_trainer.checkpoint.choosing import First, Keys, Records, SampledKeys, SavedValues, among
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
"""SSU samples one push out of this number (section 5.1)."""

_NOTING = (RecoveryPriority.MFU, RecoveryPriority.SCAR)
"""The priorities that compare rows with their values when last saved."""

PushWatch = Callable[[TableStore, NDArray[np.uint32], Keys], None]
"""Gets the tables, and the counts and keys of a push, as `PriorityWriter.watch` says."""

_Noted = dict[int, tuple[Keys, NDArray[Any]]]
"""By table, keys [n] of rows, and their values [n, width]."""


def has_priority_rows(spec: TableSpec) -> bool:
    """Whether rows of a table are saved by priority, as those of embedding tables are."""
    return spec.column >= 0 and not holds_sketches(spec)


class PriorityWriter:
    """One server's saves of priority rows. Without a priority it tracks nothing.

    `checkpoint_begins`, `watch` and `begin` are called under the lock of the tables, the others by any thread.
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
        self._requested: list[tuple[int, TableSpec]] = []
        self._pushes = 0

    def checkpoint_begins(self, tables: TableStore, uri: str, *, whole: bool) -> None:
        """Notes a checkpoint that saves the present rows: later changes are candidates for saves.

        `uri` is the checkpoint's folder. `whole`: it has all rows; else those that changed.
        """
        if self._priority is RecoveryPriority.NONE:
            return
        self._follow(tables)
        tables.readers.untrack(Reader.PRIORITY)
        tables.readers.track(Reader.PRIORITY)
        self._counts, self._written, self._sampled = id_in(uri), ("", {}), {}
        if whole:
            self._saved, self._completed = {}, {}

    def _follow(self, tables: TableStore) -> None:
        if self._followed is None or self._followed() is not tables:
            self._followed = weakref.ref(tables)
            self._requested = [(number, spec) for number, spec in enumerate(tables.specs) if has_priority_rows(spec)]
            self._saved, self._sampled = {}, {}

    def note(self, number: int, spec: TableSpec, records: Records) -> None:
        """Notes that rows of a table, uint8 [n, stride], are in the files of the checkpoint that began last."""
        if self._priority not in _NOTING or not has_priority_rows(spec):
            return
        with self._turn:
            self._values(number, spec).note(keys_of(records), self._value(spec, records))

    def forget(self, retired: Sequence[Keys]) -> None:
        """Notes the keys, int64 [n] by table, of rows that were retired before the checkpoint that begins."""
        with self._turn:
            for number, saved in self._saved.items():
                saved.forget(retired[number])

    @property
    def watch(self) -> PushWatch | None:
        """Must be called at each push with its keys, int64 [n], `counts` of them for each table of a request in turn.

        None if pushes do not matter.
        """
        return self._pushed if self._priority is RecoveryPriority.SSU else None

    def _pushed(self, tables: TableStore, counts: NDArray[np.uint32], keys: Keys) -> None:
        self._pushes += 1
        if self._pushes % SAMPLED_EVERY:
            return
        self._follow(tables)
        first = 0
        for (number, spec), count in zip(self._requested, counts.tolist(), strict=False):  # the dense table is the last
            if count:
                sampled = self._sampled.setdefault(number, SampledKeys(spec.seed))
                if sampled.add(keys[first : first + count]):
                    sampled.keep(_most(tables.rows()[spec.name]))
            first += count

    def begin(self, tables: TableStore, lock: Lock, since: str) -> Snapshot:
        """Takes the rows that changed since the last checkpoint; all rows if the server has taken part in none.

        `since` is the id of the last completed checkpoint or save: nothing written after it counts. If a later
        checkpoint was not completed, all rows may have changed. The caller is within a barrier. Raises MemoryError.
        """
        self._follow(tables)
        self._count(tables, since)
        try:
            return tables.readers.take(Reader.PRIORITY, lock)
        except ValueError:
            return tables.readers.snapshot(Reader.PRIORITY, lock)

    def _count(self, tables: TableStore, since: str) -> None:
        """Counts rows as saved as of `since`."""
        (save, noted), self._written = self._written, ("", {})
        if save == since:
            self._completed = noted
        elif self._counts != since:
            self._saved, self._completed = {}, {}
            tables.readers.untrack(Reader.PRIORITY)
        self._counts = since

    def write(
        self, snapshot: Snapshot, specs: Sequence[TableSpec], share: Share, uri: str, work: Work
    ) -> list[CheckpointFile]:
        """Writes the rows of highest priority below the folder `uri`, with weights as float32; returns the files.

        Gives back the changes of the snapshot: a row that is omitted now may have priority next time. Raises
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
                    chosen[number] = self._chosen(snapshot, number, spec, share, work)
        except SnapshotAbandonedError as error:
            raise AbandonedError from error
        finally:
            snapshot.give_back()
        written = write_rows(uri, specs, share, chosen, work)
        noted: _Noted = {}
        if self._priority in _NOTING:
            for number, records in chosen.items():
                noted[number] = keys_of(records).copy(), self._value(specs[number], records).copy()
        self._written = (id_in(uri), noted)
        return written

    def _chosen(self, snapshot: Snapshot, number: int, spec: TableSpec, share: Share, work: Work) -> Records:
        """Returns the rows of one table with the highest priority, uint8 [n, stride]."""
        most = _most(share.rows[number])
        first = First(most, RowLayout.of(spec))
        sampled = self._sampled.pop(number).take(most) if number in self._sampled else np.zeros(0, np.int64)
        for records in snapshot.read(number):
            owned = records[share.owned.among(keys_of(records), dense=False)]
            first.add(owned, self._scores(number, spec, owned, sampled))
            work.examine(len(records))
        return first.records()

    def _scores(self, number: int, spec: TableSpec, records: Records, sampled: Keys) -> NDArray[np.float64]:
        """Returns a score of the changes to rows since they were saved, float64 [n]; 0: no change."""
        keys = keys_of(records)
        if self._priority is RecoveryPriority.SSU:
            return among(keys, sampled).astype(np.float64)
        with self._turn:
            saved = self._values(number, spec).of(keys)
        now = self._value(spec, records)
        if self._priority is RecoveryPriority.SCAR:
            changes: NDArray[np.float64] = np.sqrt(np.square(now.astype(np.float64) - saved).sum(1))
            return changes
        pushes, before = now[:, 0].astype(np.float64), saved[:, 0].astype(np.float64)
        return np.where(pushes < before, pushes, pushes - before)  # fewer: a new row under the key of a retired one

    def _values(self, number: int, spec: TableSpec) -> SavedValues:
        if number not in self._saved:
            is_scar = self._priority is RecoveryPriority.SCAR
            self._saved[number] = SavedValues(*((np.float32, spec.dimension) if is_scar else (np.uint32, 1)))
        return self._saved[number]

    def _value(self, spec: TableSpec, records: Records) -> NDArray[Any]:
        """Returns the values that decide the priority, [n, width]: weights, or numbers of pushes."""
        fields = RowLayout.of(spec).fields(np.ascontiguousarray(records))
        if self._priority is RecoveryPriority.SCAR:
            weights: NDArray[Any] = fields["weights"]
            return weights
        return fields["pushes"].reshape(-1, 1)


def _most(rows: int) -> int:
    """Returns the largest number of rows of a table in one save."""
    return math.ceil(PRIORITY_SHARE * rows)
