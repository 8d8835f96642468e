"""TableStore against dicts of rows, under any sequence of calls: its rows, and what its readers get."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from buckets import bucket_of
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table import Reader, Snapshot, SnapshotAbandonedError, TableStore
from examples import examples

RATE = np.float32(0.1)
WIDE = 2048
"""So wide that a segment holds about 500 rows, and a read covers several segments."""

# few keys, so that calls hit the same rows; some of them in one bucket
SHARED_BUCKET = [key for key in range(20_000) if bucket_of(key) == 5][:12]
KEYS = st.one_of(st.sampled_from(SHARED_BUCKET), st.integers(-20, 20))
REQUEST = st.tuples(st.lists(KEYS, max_size=8), st.lists(KEYS, max_size=8))
READERS = st.sampled_from([Reader.CHECKPOINT, Reader.MOVE])
TABLES = range(2)

Rows = dict[int, bytes]


def specs() -> list[TableSpec]:
    optimizer = OptimizerSpec(type=OptimizerType.SGD, learning_rate=float(RATE))
    return [TableSpec(n, f"C{n}", n, size, optimizer, InitializerSpec(), seed=7) for n, size in enumerate((3, WIDE))]


class Book:
    """The expected knowledge of a reader, and its open snapshot."""

    def __init__(self) -> None:
        self.tracked = False
        self.tracked_at_begin = False
        """Changes have been tracked without a gap since before the open snapshot began."""
        self.told: list[Rows] | None = None
        """The rows that the reader can assemble from what it committed; None before its first full snapshot."""
        self.taken: list[Rows] = [{}, {}]
        """The rows as of the open snapshot."""
        self.snapshot: Snapshot | None = None
        self.whole = False
        self.reads: list[Iterator[Any]] = []
        self.got: list[Rows] = [{}, {}]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = TableStore(specs())
        self.rows: list[Rows] = [{}, {}]
        self.books = {reader: Book() for reader in (Reader.CHECKPOINT, Reader.MOVE)}

    @initialize(rows=st.integers(0, 1200))
    def begin(self, rows: int) -> None:
        """Fills several segments with rows, and leaves holes among them."""
        self.push(([], list(range(1000, 1000 + rows))), 1)
        self.retire(1, list(range(1000, 1000 + rows, 7)))

    # changes of rows

    @rule(request=REQUEST, seed=st.integers(0, 2**32 - 1))
    def push(self, request: tuple[list[int], list[int]], seed: int) -> None:
        counts = np.array([len(keys) for keys in request], np.uint32)
        keys = np.array([key for table in request for key in table], np.int64)
        gradients = np.random.default_rng(seed).standard_normal(self.store.values_per_request(counts), np.float32)
        before = self.pulled(counts, keys)
        self.store.push(counts, keys, gradients)
        first = 0
        for table, keys_of_table in enumerate(request):
            size = self.store.specs[table].dimension
            for key in keys_of_table:
                values = slice(first, first + size)
                layout = self.store.layouts[table]
                record = bytearray(self.rows[table].get(key, bytes(layout.stride)))
                fields = np.frombuffer(record, layout.dtype)[0]
                if not fields["pushes"]:
                    fields["key"], fields["weights"] = key, before[values]
                fields["weights"] -= RATE * gradients[values]
                fields["pushes"] += 1
                self.rows[table][key] = bytes(record)
                first += size

    @rule(table=st.sampled_from(TABLES), first=st.integers(990, 2200), seed=st.integers(0, 2**32 - 1))
    def push_many(self, table: int, first: int, seed: int) -> None:
        keys = list(range(first, first + 100))
        self.push((keys, []) if table == 0 else ([], keys), seed)

    @rule(request=REQUEST, pushes=st.integers(1, 9))
    def load(self, request: tuple[list[int], list[int]], pushes: int) -> None:
        for table, keys in enumerate(request):
            layout = self.store.layouts[table]
            records = layout.empty(len(keys))
            fields = layout.fields(records)
            fields["key"], fields["weights"], fields["pushes"] = keys, pushes / 8, pushes
            self.store.load(table, records)
            self.rows[table] |= {key: record.tobytes() for key, record in zip(keys, records, strict=True)}

    @rule(table=st.sampled_from(TABLES), keys=st.lists(st.one_of(KEYS, st.integers(1000, 2200)), max_size=6))
    def retire(self, table: int, keys: list[int]) -> None:
        there = {key for key in keys if self.rows[table].pop(key, None) is not None}
        assert self.store.retire(table, np.array(keys, np.int64)) == len(there)

    @rule(key=KEYS)
    def remove_bucket(self, key: int) -> None:
        for table, rows in enumerate(self.rows):
            gone = [other for other in rows if bucket_of(other) == bucket_of(key)]
            assert self.store.remove_bucket(table, bucket_of(key)) == len(gone)
            for other in gone:
                del rows[other]

    # calls of readers

    @rule(reader=READERS)
    def track(self, reader: Reader) -> None:
        book = self.books[reader]
        if book.tracked:
            self.store.readers.untrack(reader)
            book.told, book.tracked_at_begin = None, False
            if book.snapshot is not None:
                with pytest.raises(SnapshotAbandonedError):
                    book.snapshot.commit()
                book.snapshot = None
        else:
            self.store.readers.track(reader)
        book.tracked = not book.tracked

    @rule(reader=READERS)
    def begin_snapshot(self, reader: Reader) -> None:
        self.begin_reading(reader, whole=True)

    @rule(reader=READERS)
    def take(self, reader: Reader) -> None:
        if self.books[reader].tracked and self.books[reader].told is not None:
            self.begin_reading(reader, whole=False)
        elif not self.books[reader].tracked:
            with pytest.raises(ValueError, match="no changes are tracked"):
                self.store.readers.take(reader, nullcontext())

    def begin_reading(self, reader: Reader, *, whole: bool) -> None:
        book = self.books[reader]
        superseded = book.snapshot
        book.snapshot = (self.store.readers.snapshot if whole else self.store.readers.take)(reader, nullcontext())
        if superseded is not None:
            with pytest.raises(SnapshotAbandonedError):
                superseded.commit()
            superseded.give_back()  # has no effect
        book.tracked_at_begin = book.tracked
        book.whole, book.taken, book.got = whole, [dict(rows) for rows in self.rows], [{}, {}]
        book.reads = [book.snapshot.read(table) for table in TABLES]

    @rule(reader=READERS, table=st.sampled_from(TABLES), steps=st.integers(1, 3))
    def read(self, reader: Reader, table: int, steps: int) -> None:
        book = self.books[reader]
        for _ in range(steps if book.snapshot is not None else 0):
            for records in [chunk.copy() for chunk in [next(book.reads[table], None)] if chunk is not None]:
                for record in records:
                    key = int(record[:8].view(np.int64)[0])
                    assert key not in book.got[table], "a row came twice"
                    book.got[table][key] = record.tobytes()

    @rule(reader=READERS)
    def commit(self, reader: Reader) -> None:
        book = self.books[reader]
        if book.snapshot is None:
            return
        for table in TABLES:
            self.read(reader, table, 100)
        book.snapshot.commit()
        if book.whole:
            assert book.got == book.taken
            assert not any(len(keys) for keys in book.snapshot.retired)
        elif book.told is not None:
            for told, got, keys in zip(book.told, book.got, book.snapshot.retired, strict=True):
                for key in keys.tolist():
                    told.pop(key, None)
                told |= got
            assert book.told == book.taken
        book.told = book.taken if book.tracked_at_begin else None
        book.snapshot = None

    @rule(reader=READERS)
    def give_back(self, reader: Reader) -> None:
        book = self.books[reader]
        if book.snapshot is not None:
            book.snapshot.give_back()
            with pytest.raises(SnapshotAbandonedError):
                list(book.snapshot.read(0))
            book.snapshot = None

    # checks

    def pulled(self, counts: Any, keys: Any) -> Any:
        out = np.empty(self.store.values_per_request(counts), np.float32)
        self.store.pull(counts, keys, out)
        return out

    @invariant()
    def counts_rows(self) -> None:
        assert list(self.store.rows().values()) == [len(rows) for rows in self.rows]

    def teardown(self) -> None:
        """Checks that all rows are there, and that every reader can assemble what it should know."""
        snapshot = self.store.readers.snapshot(Reader.FLASH, nullcontext())
        for table, rows in enumerate(self.rows):
            assert {r[:8].tobytes(): r.tobytes() for c in snapshot.read(table) for r in c} == {
                record[:8]: record for record in rows.values()
            }
        for reader in self.books:
            self.commit(reader)
            self.take(reader)
            self.commit(reader)


def test_a_store_and_its_readers_behave_like_dicts_of_rows() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
    )
