"""Copies rows to another server while they change here: rows that change meanwhile are left for the next scan.

A snapshot is of one moment, and each push pays for that: it saves the old bytes of rows that the read has not passed.
Repeated copies, until nothing changes any more, do not need a single moment. A *scan* yields the rows that have not
changed since it began, and the next scan yields the others. Pushes save nothing for a scan; a row that changes all the
time is copied only when the changes end.

The scan copies rows without the caller's lock. It then takes the lock briefly, to see which of them have changed since
it began, and drops their copies, which may be torn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.table import kernels
from emberscale_trainer.table.layout import RowLayout
from emberscale_trainer.table.slab import Segment
from emberscale_trainer.table.snapshot import Changes, Lock, Records, SnapshotAbandonedError

CHUNK_BYTES = 1 << 20
"""The approximate bytes of slots that are read at a time, so that a chunk is still in the cache when it is sent."""


class ScannedTable(NamedTuple):
    """One table as of the beginning of the scan: `used_rows` slots of each of its segments hold or held a row.

    `dense`: keys are numbers of dense pieces.
    """

    layout: RowLayout
    segments: Sequence[Segment]
    used_rows: Sequence[int]
    dense: bool


class Scan:
    """The rows of a reader that have not changed since the scan began: of all rows, or of those changed before it.

    Rows that change meanwhile belong to the reader's next scan, and `postponed` counts them. Once `postponed` is 0, and
    nothing has changed since, all scans together have yielded every row as it is now.
    """

    def __init__(
        self,
        tables: Sequence[ScannedTable],
        lock: Lock,
        changes: Changes,
        scope: Changes | None,
        absent: Callable[[int, NDArray[np.int64]], NDArray[np.int64]],
    ) -> None:
        """`changes` records changes from now on. `scope` has the earlier changes; None: the scan is of all rows.

        `absent` returns those keys of a table that have no row.
        """
        self._tables = tables
        self._lock = lock
        self._changes = changes
        self._scope = scope
        self._ended = False
        self.postponed = 0
        """The number of rows in the scan that changed before it reached them."""
        nothing = [np.zeros(0, np.int64) for _ in tables]
        retired = nothing if scope is None else scope.retired_keys()
        self.retired = tuple(absent(table, keys) for table, keys in enumerate(retired))
        """By table, the keys whose rows were retired: int64[]. Apply them before the records. Keys that have a row
        again are left out: that row is in this scan, an earlier one or the next."""

    def read(self, table: int, wanted: Mapping[int, NDArray[np.bool_]]) -> Iterator[tuple[int, Records]]:
        """Yields (receiver, rows of a table), as `uint8[n, stride]`, which the caller then owns.

        `wanted`: by receiver, its buckets (of a dense table, its pieces): bool[]; each bucket has at most one receiver.
        Call it without the lock. Raises SnapshotAbandonedError.
        """
        scanned = self._tables[table]
        stride, pushes = scanned.layout.stride, scanned.layout.pushes_offset
        step = max(8, CHUNK_BYTES // stride // 8 * 8)  # slots at a time, whole bytes of a bitmap
        chunks = {whom: _Chunk(scanned.layout, step, np.ascontiguousarray(owned)) for whom, owned in wanted.items()}
        skipped = np.zeros(1, np.int64)
        changed = self._changes.bitmap(table)  # perhaps no longer the one in use: then the check below knows of more
        for segment, first, count in self._steps(table, step):
            byte = (segment << scanned.layout.slot_bits) + first >> 3
            scope = 0 if self._scope is None else address_of(self._scope.bitmap(table)) + byte
            start = scanned.segments[segment].address + first * stride
            for chunk in chunks.values():
                chunk.copied = kernels.read_wanted(
                    start,
                    count,
                    stride,
                    pushes,
                    scope,
                    address_of(changed) + byte,
                    address_of(chunk.wanted),
                    scanned.dense,
                    chunk.end,
                    address_of(chunk.places),
                    address_of(skipped),
                )
            if not any(chunk.copied for chunk in chunks.values()):
                continue
            with self._lock:
                self._check_open()
                # not by numpy, which releases the interpreter for this, and then waits for it while it holds the lock
                late = self._changes.bitmap(table).data[byte : byte + (count + 7 >> 3)].tobytes()
            dropped = address_of(np.frombuffer(late, np.uint8))
            for whom, chunk in chunks.items():
                left = kernels.drop_records(chunk.end, chunk.copied, stride, address_of(chunk.places), dropped)
                self.postponed += chunk.copied - left
                chunk.filled += left
                if chunk.filled >= step:  # there may be no room for what comes next
                    yield whom, chunk.taken()
        for whom, chunk in chunks.items():
            if chunk.filled:
                yield whom, chunk.taken()
        self.postponed += int(skipped[0])

    def end(self) -> None:
        """Ends the scan; the caller holds the lock. A read under way raises SnapshotAbandonedError."""
        self._ended = True

    def _steps(self, table: int, step: int) -> Iterator[tuple[int, int, int]]:
        """Yields segment, first slot and number of slots of each step with rows in scope."""
        scanned = self._tables[table]
        for segment, used in enumerate(scanned.used_rows):
            for first in range(0, used, step):
                count = min(step, used - first)
                if self._scope is not None:
                    byte = (segment << scanned.layout.slot_bits) + first >> 3
                    if not self._scope.bitmap(table)[byte : byte + (count + 7 >> 3)].any():
                        continue
                yield segment, first, count

    def _check_open(self) -> None:
        if self._ended:
            raise SnapshotAbandonedError("the scan has ended, or its reader has begun another")


class _Chunk:
    """Room for the rows of one receiver: `filled` are complete, `copied` more have yet to be checked."""

    def __init__(self, layout: RowLayout, step: int, wanted: NDArray[np.bool_]) -> None:
        self._shape = (2 * step, layout.stride)
        self._records = np.empty(self._shape, np.uint8)
        self.wanted = wanted
        self.places = np.empty(step, np.uint32)
        self.filled = self.copied = 0

    @property
    def end(self) -> int:
        """The address behind the complete rows."""
        return address_of(self._records) + self.filled * self._shape[1]

    def taken(self) -> Records:
        """Returns the complete rows; later ones get new memory."""
        taken, self._records = self._records[: self.filled], np.empty(self._shape, np.uint8)
        self.filled = 0
        return taken
