"""A server that may write so many bytes per second to the folder of checkpoints writes no more."""

import threading
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from emberscale_api.job import InitializerSpec, OptimizerSpec, TableSpec
from emberscale_trainer.checkpoint import AbandonedError, ChainWriter, Share, TokenBucket, Work, WriteLimit, owned_rows
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import DensePieces, TableStore
from emberscale_trainer.table.slab import SEGMENT_BYTES
from master_stand_in import owned

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


idle_and_size = st.tuples(st.floats(0, 20), st.integers(0, 20 * MIB))


@given(files=st.lists(idle_and_size, max_size=40), rate=st.integers(MIB, 100 * MIB))
def test_files_that_begin_within_some_time_have_the_bytes_of_that_time_and_of_one_file_at_most(
    files: list[tuple[float, int]], rate: int
) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    begun: list[float] = []
    for idle, size in files:
        clock.now += idle
        clock.now += bucket.take(size, rate)
        begun.append(clock.now)
    sizes = [size for _, size in files]
    for first, since in enumerate(begun):
        for last, total in enumerate(accumulate(sizes[first:]), first):
            assert total - sizes[last] <= rate * (begun[last] - since) * (1 + 1e-9) + 1


@given(files=st.lists(idle_and_size, min_size=1, max_size=40), rate=st.integers(MIB, 100 * MIB))
def test_no_file_waits_longer_than_the_bytes_before_it_take(files: list[tuple[float, int]], rate: int) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    paid = 0.0
    for idle, size in files:
        clock.now += idle
        wait = bucket.take(size, rate)
        assert wait == pytest.approx(max(0.0, paid - clock.now))
        clock.now += wait
        paid = clock.now + size / rate


class TimedWork(Work):
    """Waits on a clock of its own, and notes when each file was written."""

    def __init__(self, rate: int | None) -> None:
        self.clock = Clock()
        super().__init__(limit=None if rate is None else WriteLimit(TokenBucket(self.clock), rate))
        self.files: list[tuple[float, int]] = []

    def await_turn(self, seconds: float) -> float:
        self.clock.now += seconds
        return seconds

    def advance(self, count: int) -> None:
        super().advance(count)
        self.files.append((self.clock.now, count))


@pytest.fixture(scope="module")
def tables() -> TableStore:
    """Some 20 MB of rows."""
    spec = TableSpec(0, "C1", 0, 64, OptimizerSpec(), InitializerSpec(), seed=3)
    tables = TableStore((spec,), DensePieces.of(np.arange(1000, dtype=np.float32), OptimizerSpec()))
    for first in range(0, 70_000, 10_000):
        counts = np.array([10_000, 0], np.uint32)
        gradients = np.ones(tables.values_per_request(counts), np.float32)
        tables.push(counts, np.arange(first, first + 10_000), gradients)
    return tables


def save(tables: TableStore, folder: Path, work: Work, writer: ChainWriter | None = None, since: str = "") -> None:
    """Saves the tables; with a writer, for others to build on."""
    all_of_it, tracked = owned(1, 0), writer is not None
    writer = ChainWriter() if writer is None else writer
    draft = writer.begin(tables, nullcontext(), all_of_it, tracked=tracked, since=since)
    share = Share(0, all_of_it, AppliedBatches(), tables.dense_parameters, owned_rows(tables, all_of_it))
    writer.write(draft, tables.specs, share, str(folder), work)


@pytest.mark.parametrize("rate", [MIB, 3 * MIB, 100 * MIB])
def test_a_save_writes_at_the_rate(tables: TableStore, tmp_path: Path, rate: int) -> None:
    work = TimedWork(rate)
    save(tables, tmp_path / "00000001", work)
    sizes = [size for _, size in work.files]
    assert sum(sizes) == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert work.clock.now == work.waited_seconds == pytest.approx(sum(sizes[:-1]) / rate)
    assert max(sizes) < rate + SEGMENT_BYTES
    gaps = np.diff([at for at, _ in work.files])
    assert gaps.max(initial=0.0) <= 1 + SEGMENT_BYTES / rate, "the master sees progress all the time"


def test_the_keys_of_retired_rows_are_written_at_the_rate_too(tmp_path: Path) -> None:
    """As one file, the keys of 8 million rows would take longer than a master waits for progress."""
    spec = TableSpec(0, "C1", 0, 1, OptimizerSpec(), InitializerSpec(), seed=3)
    tables = TableStore((spec,), DensePieces.of(np.arange(1000, dtype=np.float32), OptimizerSpec()))
    keys = np.arange(400_000)
    tables.push(np.array([len(keys), 0], np.uint32), keys, np.ones(len(keys), np.float32))
    writer, work = ChainWriter(), TimedWork(MIB)
    save(tables, tmp_path / "00000001", Work(), writer)
    tables.retire(0, keys)
    save(tables, tmp_path / "00000002", work, writer, since="00000001")
    files = [file for file in sorted((tmp_path / "00000002").rglob("*")) if file.suffix == ".keys"]
    assert np.array_equal(np.concatenate([np.fromfile(file, np.int64) for file in files]), keys)
    assert max(size for _, size in work.files) < 2 * MIB


def test_a_save_without_a_limit_never_waits(tables: TableStore, tmp_path: Path) -> None:
    work = TimedWork(None)
    save(tables, tmp_path / "00000001", work)
    assert work.clock.now == 0.0
    assert max(size for _, size in work.files) > 16 * MIB


def test_a_save_that_waits_goes_on_at_full_speed_once_its_limit_is_lifted(tables: TableStore, tmp_path: Path) -> None:
    waits = threading.Event()

    class WatchedWork(Work):
        def await_turn(self, seconds: float) -> float:
            waits.set()
            return super().await_turn(seconds)

    bucket = TokenBucket()
    bucket.take(1 << 50, MIB)
    work = WatchedWork(limit=WriteLimit(bucket, MIB))
    writer = threading.Thread(target=save, args=(tables, tmp_path / "00000001", work), daemon=True)
    writer.start()
    assert waits.wait(60)
    work.lift_limit()
    writer.join(60)
    assert not writer.is_alive()
    assert work.moved_bytes == sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())


def test_a_save_that_waits_ends_once_it_is_abandoned(tables: TableStore, tmp_path: Path) -> None:
    bucket = TokenBucket()
    bucket.take(1 << 50, MIB)
    work = Work(limit=WriteLimit(bucket, MIB))
    ended = threading.Event()

    def write() -> None:
        with pytest.raises(AbandonedError):
            save(tables, tmp_path / "00000001", work)
        ended.set()

    threading.Thread(target=write, daemon=True).start()
    work.abandon()
    assert ended.wait(60)
    assert not [*tmp_path.rglob("*.rows")]
