"""All tables of one parameter server."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import TableSpec
from emberscale_api.job.running import AdmissionCounts
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_trainer.jit import warm_up
from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.table import kernels
from emberscale_trainer.table.admission import with_sketches
from emberscale_trainer.table.deltas import DELTA_BYTES, DeltaLog
from emberscale_trainer.table.dense import DensePieces
from emberscale_trainer.table.descriptors import Descriptors
from emberscale_trainer.table.layout import RowLayout, keys_of
from emberscale_trainer.table.readers import Readers
from emberscale_trainer.table.slab import MAX_SLOTS
from emberscale_trainer.table.slots import Slots
from emberscale_trainer.table.snapshot import Records

_UINT32, _INT64, _FLOAT32 = np.dtype("<u4"), np.dtype("<i8"), np.dtype("<f4")

_ALL_BUCKETS = np.ones(BUCKETS, np.bool_)


class TableStore:
    """Dynamic embedding tables with fused optimizers; `specs[i]` is table i of every request.

    With `dense`, one more table follows: its keys are the numbers of dense pieces, its rows their parameters.

    The first push of a key makes its row; in a table with `admission`, the push that makes it frequent enough.
    `specs` also has the tables of the sketches, ahead of those of requests. Requests name keys table by table:
    `counts: uint32[tables]` says how many of `keys: int64[n]` belong to each table, in order; weights and gradients are
    float32, row after row in the order of the keys. Buffers may be read-only and need no alignment. The same requests
    in the same order give the same bytes.

    `readers` copy the rows, and learn of changes. Not thread-safe: callers hold one lock around calls. Kernels run
    without the interpreter's lock.
    """

    def __init__(self, specs: Sequence[TableSpec], dense: DensePieces | None = None) -> None:
        warm_up()
        embeddings = with_sketches(specs)
        self.specs = embeddings if dense is None else (*embeddings, dense.table(len(specs)))
        self.layouts = tuple(RowLayout.of(spec) for spec in self.specs)
        self._first = len(embeddings) - len(specs)
        self._embeddings = range(self._first, len(embeddings))
        self._sketches = self._numbers_of_sketches()
        self._descriptors = Descriptors(self.specs, self.layouts, self._sketches, dense)
        self._dense = dense
        self._evicted = [0] * len(self.specs)
        self.slots = tuple(Slots(*one) for one in zip(self._descriptors.tables, self.layouts, strict=True))
        self._log: DeltaLog | None = None
        self.readers = Readers(self._descriptors, self.slots, [spec.column < 0 for spec in self.specs])
        self._scratch = np.zeros(kernels.SCRATCH_BYTES, np.uint8)
        self._requested_address = self._descriptors.address(self._first)
        self._scratch_address = address_of(self._scratch)
        self._dimensions = np.array([spec.dimension for spec in self.specs[self._first :]], np.int64)
        self._floats = np.array([layout.floats for layout in self.layouts[self._first :]], np.int64)
        self._delta_bytes = self._bytes_of_deltas()

    def _numbers_of_sketches(self) -> dict[int, int]:
        """Returns the number of the sketches' table, by the number of the table with admission."""
        owners = [number for number in self._embeddings if self.specs[number].admission.min_count > 1]
        return {number: sketches for sketches, number in enumerate(owners)}

    def _bytes_of_deltas(self) -> NDArray[np.int64]:
        """The most bytes that one key of each table of requests adds to a log: int64[tables]."""
        sizes = [DELTA_BYTES + layout.stride for layout in self.layouts]
        numbers = range(self._first, len(self.specs))
        return np.array([sizes[one] + (sizes[self._sketches[one]] if one in self._sketches else 0) for one in numbers])

    @property
    def clock(self) -> int:
        """The number of the batch that is pushed next, counted over all batches that the server applies.

        Rows of tables with eviction note it. The caller sets it; nothing else depends on it.
        """
        return int(self._descriptors.clock[0])

    @clock.setter
    def clock(self, batches: int) -> None:
        self._descriptors.clock[0] = batches

    @property
    def dense_parameters(self) -> int:
        """Floats of the flat dense vector; 0 without one."""
        return 0 if self._dense is None else self._dense.parameters

    @property
    def takes_changes(self) -> bool:
        """Whether separate workers' changes of rows add up: only without admission, and by additive rules."""
        requested = self.specs[self._first :]
        return not self._sketches and all(spec.optimizer.type.is_additive for spec in requested)

    def values_per_request(self, counts: NDArray[np.uint32], *, state: bool = False) -> int:
        """The float32 numbers in the answer to a pull of `counts` keys. Raises ValueError for another shape."""
        if counts.shape != self._dimensions.shape:
            raise ValueError(f"counts has the shape {counts.shape} for {len(self._dimensions)} tables")
        return int(self._sizes(state) @ counts)

    def named_by(
        self, counts: NDArray[np.uint32], keys: NDArray[np.int64]
    ) -> Iterator[tuple[int, int | None, NDArray[np.int64]]]:
        """Yields the number of each table of a request, that of its sketches, if any, and its keys: int64[n].

        The request may be one that does not fit.
        """
        first = 0
        for table, count in zip(range(self._first, len(self.specs)), counts.tolist(), strict=False):
            yield table, self._sketches.get(table), keys[first : first + count]
            first += count

    def pull(
        self,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        out: NDArray[np.float32],
        *,
        state: bool = False,
    ) -> None:
        """Writes the weights of the keys to `out: float32[values_per_request(counts, state=state)]`.

        With `state`, the state of the optimizer follows each key's weights. A key without a row gets the initial values
        of its row; the store does not change. Raises ValueError for arrays of the wrong type, size or layout.
        """
        self._check(counts, keys, out, "out")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        addresses = (address_of(counts), address_of(keys), len(keys), address_of(out), len(out), int(state))
        if kernels.pull(self._requested_address, len(counts), *addresses, self._scratch_address) == kernels.MISMATCH:
            raise self._mismatch(state)

    def part_of(
        self,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        gradients: NDArray[np.float32],
        chosen: NDArray[np.bool_],
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.float32]]:
        """Returns the arguments of a `push` of the `chosen: bool[n]` ones of these keys; `reserve` has checked them."""
        tables = np.repeat(np.arange(len(counts)), counts)
        kept = np.repeat(chosen, self._dimensions[tables])
        return np.bincount(tables[chosen], minlength=len(counts)).astype(np.uint32), keys[chosen], gradients[kept]

    def reserve(
        self,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        gradients: NDArray[np.float32],
        *,
        changes_of: int = 0,
    ) -> Callable[[], None]:
        """Reserves all that a `push` with these arguments needs, as if all keys were new; no row changes.

        Returns that push, which must come before any other change. It can then fail only for the memory of an index: a
        MemoryError leaves it half done, and the store must not be used any more.

        Raises ValueError for arrays of the wrong type, size or layout, for changes if a table does not take them (see
        `takes_changes`), and MemoryError.
        """
        self._check(counts, keys, gradients, "changes" if changes_of else "gradients")
        if changes_of and not self.takes_changes:
            raise ValueError("changes do not add up in these tables: one has admission, or its rule is not additive")
        sizes = (len(keys), len(gradients), changes_of)
        while True:
            table = kernels.lacking(self._requested_address, len(counts), address_of(counts), *sizes)
            if table == kernels.NONE:
                break
            if table == kernels.MISMATCH:
                raise self._mismatch(changes_of > 0)
            rows, number = int(counts[table]), self._first + table
            self._make_room(number, rows, rows)
            if number in self._sketches:
                self._make_room(self._sketches[number], min(rows, BUCKETS), min(rows, BUCKETS))
        if self._log is not None:
            self._log.make_room(int(self._delta_bytes @ counts))

        def push() -> None:
            arrays = (address_of(counts), address_of(keys), len(keys), address_of(gradients), len(gradients))
            done = kernels.push(self._requested_address, len(counts), *arrays, changes_of, self._scratch_address)
            if done == kernels.NO_MEMORY:
                raise MemoryError("no memory for the index of the embedding rows")

        return push

    def push(
        self,
        counts: NDArray[np.uint32],
        keys: NDArray[np.int64],
        gradients: NDArray[np.float32],
        *,
        changes_of: int = 0,
    ) -> None:
        """Steps the rows of the keys by `gradients: float32[values_per_request(counts)]`, making missing rows first.

        With `changes_of`, `gradients` are the changes of weights and state by that many batches,
        `float32[values_per_request(counts, state=True)]`, and are added. They count as one push of a row, and as one
        push of a dense piece for each batch.

        The keys of one table are normally distinct; repeated ones are stepped one after another. Raises as `reserve`
        does, and then has done nothing, and as the push that it returns.
        """
        self.reserve(counts, keys, gradients, changes_of=changes_of)()

    def load(self, table: int, records: Records, buckets: NDArray[np.bool_] | None = None) -> None:
        """Puts `records: uint8[n, stride]` of a table's RowLayout into it; they replace the rows of equal keys.

        Of several records with one key the last stays; records outside of `buckets: bool[BUCKETS]` are left out.
        Raises ValueError, and then has done nothing, for another shape or type, for records without pushes, which are
        not rows, and for dense pieces that do not exist. Different tables may be loaded at the same time.
        """
        descriptor, stride = self._descriptors.address(table), self.layouts[table].stride
        if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != stride:
            raise ValueError(f"records of table {table} are uint8[n, {stride}], not {records.dtype}{records.shape}")
        records = np.ascontiguousarray(records)
        if len(records) and not self.layouts[table].fields(records)["pushes"].all():
            raise ValueError(f"a record of table {table} counts no pushes, so it is not a row")
        if self.specs[table].column < 0 and ((pieces := keys_of(records)) != pieces % DENSE_PIECES).any():
            raise ValueError(f"table {table} has the dense pieces below {DENSE_PIECES}, not all of {pieces.tolist()}")
        self._make_room(table, len(records), len(records))
        scratch = np.empty(kernels.SCRATCH_BYTES, np.uint8)  # of its own: tables may be loaded at the same time
        wanted = _ALL_BUCKETS if buckets is None else np.ascontiguousarray(buckets, np.bool_)
        arrays = (address_of(records), len(records), address_of(wanted), address_of(scratch))
        if kernels.load(descriptor, *arrays) == kernels.NO_MEMORY:
            raise MemoryError("no memory for the index of the embedding rows")

    def expect(self, table: int, rows: int, buckets: NDArray[np.bool_]) -> None:
        """Prepares the index of a table for about `rows` rows in its `buckets: bool[BUCKETS]`, those there included.

        The index then does not grow while they are loaded. Raises MemoryError.
        """
        each = min(rows, MAX_SLOTS) // max(1, int(np.count_nonzero(buckets)))
        wanted = np.ascontiguousarray(buckets, np.bool_)
        descriptor = self._descriptors.address(table)
        if each and kernels.make_room_in(descriptor, address_of(wanted), each) == kernels.NO_MEMORY:
            raise MemoryError("no memory for the index of the embedding rows")

    def rows(self, buckets: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """Rows of each embedding table, by its name: in these buckets, bool [BUCKETS], or in all."""
        if buckets is None:
            return {self.specs[number].name: self.slots[number].rows for number in self._embeddings}
        return {self.specs[number].name: int(self.bucket_rows(number)[buckets].sum()) for number in self._embeddings}

    def admission_counts(self) -> dict[str, AdmissionCounts]:
        """The counts of keys and rows of each embedding table with admission or eviction, by its name."""
        counts = {}
        for number in self._embeddings:
            spec, table = self.specs[number], self._descriptors.tables[number]
            if number in self._sketches or spec.eviction.removes_rows:
                counts[spec.name] = AdmissionCounts(
                    int(table["admitted"]), int(table["refused"]), self._evicted[number]
                )
        return counts

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that rows, indexes and recorded changes take: touched memory, not reserved memory.

        The old bytes that an open snapshot saves are not counted, nor is the memory that is kept for the next.
        """
        rows = sum(slots.allocated_bytes for slots in self.slots)
        return self._descriptors.index_bytes + rows + self.readers.allocated_bytes

    def log_deltas(self, lanes: int, lane_of: Callable[[int, int], int], *, merges: bool = False) -> DeltaLog:
        """Logs changes from now on, until the log is stopped; stops an earlier log. `merges` is as in `DeltaLog`."""
        if self._log is not None:
            self._log.stop()
        self._log = DeltaLog(
            self._descriptors.tables, [slots.segments for slots in self.slots], lanes, lane_of, merges=merges
        )
        return self._log

    def remove_bucket(self, table: int, bucket: int) -> int:
        """Retires the rows of a bucket; returns how many there were. Their slots are used again."""
        keys = self._bucket_slots(table, bucket)
        self._make_room_to_retire(table, len(keys))
        retired = kernels.retire_bucket(self._descriptors.address(table), bucket, address_of(keys))
        self.readers.note_retired(table, keys)
        return retired

    def retire(self, table: int, keys: NDArray[np.int64]) -> int:
        """Retires the rows of keys, `int64[n]`; returns how many had one. Their slots are used again."""
        descriptor = self._descriptors.address(table)
        keys = np.ascontiguousarray(keys, np.int64)
        retired = np.empty_like(keys)
        self._make_room_to_retire(table, len(keys))
        count = kernels.retire(descriptor, address_of(keys), len(keys), address_of(retired))
        self.readers.note_retired(table, retired[:count])
        return count

    def evict(self, table: int, keys: NDArray[np.int64]) -> int:
        """As `retire`, and counts the rows as evicted."""
        evicted = self.retire(table, keys)
        self._evicted[table] += evicted
        return evicted

    def bucket_rows(self, table: int) -> NDArray[np.uint32]:
        """Rows of each bucket, a view: uint32 [BUCKETS]."""
        rows: NDArray[np.uint32] = self._descriptors.bucket_rows[table]
        return rows

    def marks_of_buckets(self, table: int, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns key, pushes and `touched` of rows, bucket by bucket, in no order within a bucket: int64 [rows, 3].

        The table must have eviction.
        """
        rows = int(self._descriptors.bucket_rows[table, buckets].sum())
        slots, marks = np.empty(rows, np.int64), np.empty((rows, 3), np.int64)
        arrays = (address_of(buckets), len(buckets), address_of(slots), address_of(marks))
        kernels.read_marks(self._descriptors.address(table), *arrays)
        return marks

    def relocate(self, table: int, records: Records, deferred: int) -> int:
        """Moves rows, `uint8[n, stride]`, into free slots, except the first `deferred` of the list.

        Returns how many slots are deferred then, including those that the rows leave. Raises MemoryError, and then has
        done nothing; after a RuntimeError rows are lost.
        """
        rows, slots = len(records), self.slots[table]
        self._make_room(table, 0, 2 * rows)
        deferred = min(deferred, len(slots.free))
        self.retire(table, keys_of(records))
        deferred = slots.defer_last(rows, deferred)
        try:
            self.load(table, records)
        except MemoryError as error:
            raise RuntimeError("rows that were to move into other slots are lost") from error
        return deferred

    def _make_room_to_retire(self, table: int, rows: int) -> None:
        self._make_room(table, 0, rows)
        self.slots[table].make_room_to_free(rows)

    def _bucket_slots(self, table: int, bucket: int) -> NDArray[np.int64]:
        """Allocates room for the slots of a bucket. Raises IndexError for a table or a bucket that does not exist."""
        self._descriptors.address(table)
        if not 0 <= bucket < BUCKETS:
            raise IndexError(f"there is no bucket {bucket}, only {BUCKETS} of them")
        return np.empty(self._descriptors.bucket_rows[table, bucket], np.int64)

    def _check(
        self, counts: NDArray[np.uint32], keys: NDArray[np.int64], values: NDArray[np.float32], values_name: str
    ) -> None:
        for name, array, dtype in (
            ("counts", counts, _UINT32),
            ("keys", keys, _INT64),
            (values_name, values, _FLOAT32),
        ):
            if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be a contiguous vector of {dtype}, not {array.dtype}{array.shape}")
        if len(counts) != len(self._dimensions):
            raise ValueError(f"counts has {len(counts)} entries for {len(self._dimensions)} tables")

    def _sizes(self, state: bool) -> NDArray[np.int64]:
        """Floats of a row of each table of requests."""
        return self._floats if state else self._dimensions

    def _mismatch(self, state: bool) -> ValueError:
        sizes = self._sizes(state).tolist()
        return ValueError(f"the counts do not add up to the keys and values: the tables' dimensions are {sizes}")

    def _make_room(self, table: int, new: int, changed: int) -> None:
        """Makes room for `new` new rows of a table, and for `changed` changes. Raises MemoryError."""
        while kernels.room(self._descriptors.address(table)) < new:
            self._add_segment(table)
        self.readers.make_room_to_save(table, changed)
        if self._log is not None:
            self._log.make_room(changed * (DELTA_BYTES + self.layouts[table].stride))

    def _add_segment(self, table: int) -> None:
        slots = self.slots[table]
        room = (len(slots.segments) + 1) << slots.layout.slot_bits
        if room > MAX_SLOTS:
            raise MemoryError(f"table {self.specs[table].name} has as many rows as a table can have")
        self.readers.make_room_to_record(table, room)
        if self._log is not None:  # first: without memory for it, the segment would be used without being logged
            self._log.add_segments(table, len(slots.segments) + 1)
        slots.add_segment()
