"""What each reader of a store has yet to learn: recorded changes, and the snapshot or scan that it reads."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.table.descriptors import Descriptors
from emberscale_trainer.table.scan import Scan, ScannedTable
from emberscale_trainer.table.slab import Reader, SpareMemory
from emberscale_trainer.table.slots import Slots
from emberscale_trainer.table.snapshot import Changes, Lock, Snapshot, TableShare


class Readers:
    """The readers of one store, each with at most one snapshot or scan at a time. The caller holds the lock."""

    def __init__(self, descriptors: Descriptors, slots: Sequence[Slots], dense: Sequence[bool]) -> None:
        """`slots` are those of each table; `dense` tells which table has the dense pieces."""
        self._descriptors = descriptors
        self._slots = slots
        self._dense = dense
        self._changes: dict[Reader, Changes] = {}
        self._snapshots: dict[Reader, Snapshot] = {}
        self._scans: dict[Reader, Scan] = {}
        self._spare = SpareMemory()

    def track(self, reader: Reader) -> None:
        """Records changes from now on, for `take`; raises ValueError if they are recorded already."""
        if reader in self._changes:
            raise ValueError(f"changes are tracked for {reader.name} already")
        self._changes[reader] = self._new_changes(reader)

    def untrack(self, reader: Reader) -> None:
        """Forgets the recorded changes of a reader, and stops recording; the reader's open snapshot ends.

        Does nothing if none are recorded.
        """
        if reader in self._snapshots:
            self._snapshots.pop(reader).give_back()
        if reader in self._scans:
            self._scans.pop(reader).end()
        if reader in self._changes:
            self._changes.pop(reader).stop()

    def snapshot(self, reader: Reader, lock: Lock) -> Snapshot:
        """Returns a snapshot of all rows. The reader's recorded changes, if tracked, are reset.

        `lock` is re-entrant, and the caller holds it now; the snapshot takes it again briefly, and reads without it.
        The time is proportional to the number of segments, not of rows. A reader has one snapshot at a time: a previous
        one that has not ended is given back. Several readers may have theirs at once. Raises MemoryError, and then the
        reader has lost no change.
        """
        return self._begin(reader, lock, whole=True)

    def take(self, reader: Reader, lock: Lock) -> Snapshot:
        """Returns a snapshot of the rows that changed since the reader's last snapshot, and of the keys retired since.

        Otherwise as `snapshot`. Raises ValueError for a reader whose changes are not tracked.
        """
        if reader not in self._changes:
            raise ValueError(f"no changes are tracked for {reader.name}")
        return self._begin(reader, lock, whole=False)

    def bytes_to_take(self, reader: Reader, earlier: Changes | None = None) -> int:
        """Returns the bytes of the rows that `take` would yield; with `earlier`, after `take_again(reader, earlier)`.

        The reader's changes are tracked. The time is proportional to the number of slots, 64 at once.
        """
        rows = self._changes[reader].rows(earlier)
        return sum(count * slots.layout.stride for count, slots in zip(rows, self._slots, strict=True))

    def take_again(self, reader: Reader, earlier: Changes) -> None:
        """Adds the changes of an earlier snapshot of this reader to those that it takes next. Raises MemoryError."""
        self._changes[reader].merge(earlier)

    def unchanged_bytes(self, reader: Reader, earlier: Changes) -> int:
        """Returns at least the bytes of the rows that changed neither in `earlier` nor since the reader's last take.

        Slots whose row is gone count too.
        """
        changed = self._changes[reader].rows(earlier)
        return sum(
            (sum(slots.used()) - count) * slots.layout.stride for count, slots in zip(changed, self._slots, strict=True)
        )

    def take_unchanged(self, reader: Reader, earlier: Changes) -> None:
        """Adds all rows that did not change in `earlier` to those that the reader takes next. Raises MemoryError."""
        for table, slots in enumerate(self._slots):
            self._changes[reader].add_unchanged(earlier, table, slots.used_bitmap())

    def scan(self, reader: Reader, lock: Lock) -> Scan:
        """Returns a scan of what changed since the reader's last one, or of all rows if it is the first since `track`.

        `lock` as in `snapshot`. Rows that the previous scan has not yielded are lost: a caller that has not read it to
        its end must track anew. A reader with snapshots has no scans. Raises MemoryError, and then the reader has lost
        no change; and ValueError as `take`.
        """
        if reader not in self._changes:
            raise ValueError(f"no changes are tracked for {reader.name}")
        tables = [
            ScannedTable(slots.layout, tuple(slots.segments), slots.used(), dense)
            for slots, dense in zip(self._slots, self._dense, strict=True)
        ]
        before, changes = self._scans.get(reader), self._changes[reader]
        self._changes[reader] = current = self._new_changes(reader)
        try:
            scan = Scan(tables, lock, current, None if before is None else changes, self._descriptors.absent)
        except MemoryError:
            self._record_again(reader, changes)
            raise
        if before is not None:
            before.end()
        self._scans[reader] = scan
        return scan

    def commit(self, reader: Reader) -> None:
        """Ends the reader's snapshot, which it has read, and forgets the changes before it."""
        self._snapshots.pop(reader).commit()

    def abandon(self) -> None:
        """Gives all open snapshots back, and ends scans, so that no read keeps memory of a store that is dropped."""
        for snapshot in self._snapshots.values():
            snapshot.give_back()
        for scan in self._scans.values():
            scan.end()
        self._spare.bound(0)

    @property
    def all_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(slots.rows * slots.layout.stride for slots in self._slots)

    # For the store alone

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the recorded changes."""
        return sum(changes.allocated_bytes for changes in self._changes.values())

    def note_retired(self, table: int, keys: NDArray[np.int64]) -> None:
        """Records that the rows of keys were retired."""
        for changes in self._changes.values():
            changes.retire(table, keys)

    def make_room_to_save(self, table: int, rows: int) -> None:
        """Makes room for the old bytes of rows of a table that are about to change. Raises MemoryError."""
        for snapshot in self._snapshots.values():
            snapshot.make_room(table, rows)

    def make_room_to_record(self, table: int, slots: int) -> None:
        """Makes room to record changes in a table of so many slots. Raises MemoryError."""
        for changes in self._changes.values():
            changes.make_room(table, slots)

    def _begin(self, reader: Reader, lock: Lock, *, whole: bool) -> Snapshot:
        if reader in self._snapshots:
            self._snapshots[reader].give_back()
        if reader in self._scans:
            self._scans.pop(reader).end()
        taken, current = self._changes.get(reader), None
        if taken is not None:
            self._changes[reader] = current = self._new_changes(reader)
        self._spare.bound(self.all_bytes)
        shares: list[TableShare] = []
        try:
            for number, slots in enumerate(self._slots):
                scope = None if whole or taken is None else taken.bitmap(number)
                entry, used = self._descriptors.entry(number, reader), slots.used()
                shares.append(TableShare(entry, slots.layout, slots.segments, used, slots.next, scope, self._spare))
            snapshot = self._snapshots[reader] = Snapshot(shares, lock, taken, current, whole=whole)
        except MemoryError:
            for share in shares:
                share.close()
            if taken is not None:
                self._record_again(reader, taken)
            raise
        return snapshot

    def _new_changes(self, reader: Reader) -> Changes:
        return Changes(self._entries(reader), [slots.count for slots in self._slots])

    def _record_again(self, reader: Reader, changes: Changes) -> None:
        """Goes on with these changes instead of newer ones, in which nothing has been recorded. Needs no memory."""
        changes.record(self._entries(reader))
        self._changes[reader] = changes

    def _entries(self, reader: Reader) -> list[np.void]:
        return [self._descriptors.entry(number, reader) for number in range(len(self._slots))]
