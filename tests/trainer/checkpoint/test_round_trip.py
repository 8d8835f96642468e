"""A snapshot that some servers write, and as many, more or fewer load."""

import errno
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self

import hypothesis.strategies as st
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings

from buckets import bucket_of
from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError
from emberscale_api.job import EvictionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import DENSE_PIECES
from emberscale_trainer.checkpoint import (
    AbandonedError,
    CheckpointFiles,
    Share,
    StorageUnreachableError,
    Work,
    load_partition,
    read_dense,
    server_history,
    work,
    writer,
)
from emberscale_trainer.jit.memory import address_of
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_manifest, write_snapshot
from snapshots import all_records_of, records_of

ADAM = OptimizerSpec(type=OptimizerType.ADAM, learning_rate=0.1)
SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, ADAM, InitializerSpec(), seed=3),
)
INITIAL = np.arange(1000, dtype=np.float32)
DENSE = DensePieces.of(INITIAL, ADAM)

IMPATIENT = Work(missing_seconds=0)

Contents = dict[tuple[int, int], bytes]


def store() -> TableStore:
    return TableStore(SPECS, DENSE)


def trained(servers: int, keys: list[int]) -> list[tuple[TableStore, Share]]:
    """Returns the rows of `servers` servers after two batches over `keys` and all dense pieces."""
    distinct = np.unique(np.array(keys, dtype=np.int64))
    partitions = []
    for index in range(servers):
        share = Share(index, owned(servers, index), AppliedBatches(), len(INITIAL))
        tables = store()
        mine = distinct[share.owned.buckets[buckets_of(distinct)]]
        pieces = np.flatnonzero(share.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], dtype=np.uint32)
        for batch in range(2):
            gradients = np.full(tables.values_per_request(counts), batch + 1, dtype=np.float32)
            tables.push(counts, np.concatenate([mine, mine, pieces]), gradients)
            share.applied.record(0, batch)
        partitions.append((tables, share))
    return partitions


def save(partitions: list[tuple[TableStore, Share]], folder: Path, progress: Work | None = None) -> str:
    """Writes a checkpoint as the servers and the master do together."""
    files: list[CheckpointFile] = []
    for tables, share in partitions:
        snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        written = write_snapshot(snapshot, tables.specs, share, str(folder), progress or Work())
        files += written
    return write_manifest(folder, files, ps_count=len(partitions))


def contents(tables: TableStore) -> Contents:
    """Returns every record by table and key."""
    return all_records_of(tables.readers.snapshot(Reader.CHECKPOINT, nullcontext()), len(tables.specs))


def load(uri: str, servers: int = 1, index: int = 0, progress: Work | None = None) -> tuple[Contents, AppliedBatches]:
    tables = store()
    applied = load_partition(CheckpointFiles(uri, progress or IMPATIENT), owned(servers, index), tables, len(INITIAL))
    return contents(tables), applied


@settings(max_examples=20)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_every_row_and_parameter_comes_back_with_any_number_of_servers(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], writers: int, readers: int
) -> None:
    partitions = trained(writers, keys)
    uri = save(partitions, tmp_path_factory.mktemp("checkpoint"))
    rows: Contents = {}
    for index in range(readers):
        mine, applied = load(uri, readers, index)
        assert not rows.keys() & mine.keys()
        share = owned(readers, index)
        assert all(share.pieces[key] if table == 2 else share.buckets[bucket_of(key)] for table, key in mine)
        rows |= mine
        assert applied.ranges(0) == [(0, 2)]
    assert rows == {key: record for tables, _ in partitions for key, record in contents(tables).items()}


def test_another_history_begins_with_the_same_rows_and_no_batch(tmp_path: Path) -> None:
    """Dense pieces count one step, since a live row must; the audit relies on this."""
    partitions = trained(2, list(range(50)))
    uri, tables = save(partitions, tmp_path), store()
    applied = load_partition(CheckpointFiles(uri, IMPATIENT), owned(1, 0), tables, len(INITIAL), anew=True)
    assert applied.epochs() == []
    before = {key: record for held, _ in partitions for key, record in contents(held).items()}
    after, dense = contents(tables), len(tables.specs) - 1
    assert {key: record for key, record in after.items() if key[0] != dense} == {
        key: record for key, record in before.items() if key[0] != dense
    }
    layout = tables.layouts[dense]
    for key in [key for key in before if key[0] == dense]:
        was, now = (layout.fields(np.frombuffer(held[key], np.uint8).reshape(1, -1)) for held in (before, after))
        assert (was["pushes"].item(), now["pushes"].item()) == (2, 1)
        assert np.array_equal(was["weights"], now["weights"])
        assert np.array_equal(was["state"], now["state"])


def test_rows_count_as_untouched_when_another_history_begins(tmp_path: Path) -> None:
    """Rows of a long history would otherwise lie in the future of the new clock, and never be evicted."""
    spec = replace(SPECS[0], eviction=EvictionSpec(ttl_batches=10))
    tables, share = TableStore([spec], DENSE), Share(0, owned(1, 0), AppliedBatches(), len(INITIAL))
    keys = np.arange(20)
    records = tables.layouts[0].empty(20)
    fields = tables.layouts[0].fields(records)
    fields["key"], fields["pushes"], fields["touched"] = keys, 3, 5000
    tables.load(0, records)
    snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    uri = write_manifest(tmp_path, write_snapshot(snapshot, tables.specs, share, str(tmp_path), Work()))
    fresh = TableStore([spec], DENSE)
    load_partition(CheckpointFiles(uri, IMPATIENT), owned(1, 0), fresh, len(INITIAL), anew=True)
    for number, touched in ((tables, 5000), (fresh, 0)):
        buckets = np.unique(buckets_of(keys))
        assert set(number.marks_of_buckets(0, buckets)[:, 2].tolist()) == {touched}


def test_what_is_pushed_while_a_checkpoint_is_written_is_not_in_it(tmp_path: Path) -> None:
    ((tables, share),) = trained(1, list(range(1000)))
    expected, applied = contents(tables), share.applied.copy()
    snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    counts = np.array([1000, 1000, 64], np.uint32)
    keys = np.concatenate([*[np.arange(500, 1500)] * 2, np.arange(64)])
    tables.push(counts, keys, np.ones(tables.values_per_request(counts), np.float32))
    tables.retire(1, np.arange(20))
    files = write_snapshot(snapshot, tables.specs, share, str(tmp_path), Work())
    rows, loaded = load(write_manifest(tmp_path, files))
    assert rows == expected
    assert loaded.ranges(0) == applied.ranges(0)


def test_a_checkpoint_that_is_not_written_gives_its_changes_back(tmp_path: Path) -> None:
    ((tables, share),) = trained(1, list(range(100)))
    tables.readers.track(Reader.CHECKPOINT)
    tables.push(np.array([2, 0, 0], np.uint32), np.array([7, 8]), np.ones(8, np.float32))
    (tmp_path / "ps-0").touch()  # in the place of a folder
    snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    with pytest.raises(StorageUnreachableError, match="ps-0"):
        write_snapshot(snapshot, tables.specs, share, str(tmp_path), Work(patience_seconds=0))
    assert set(records_of(tables.readers.take(Reader.CHECKPOINT, nullcontext()))) == {7, 8}


def test_a_table_of_several_files_comes_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_PART_BYTES", 4 << 20)
    partitions = trained(2, list(range(400_000)))
    uri = save(partitions, tmp_path)
    assert len(list((tmp_path / "ps-0").glob("table-0-*.rows"))) > 1
    assert load(uri)[0] == {key: record for tables, _ in partitions for key, record in contents(tables).items()}


def test_files_take_the_same_memory_in_turn(tmp_path: Path) -> None:
    uri = save(trained(1, list(range(2000))), tmp_path / "one")
    files = CheckpointFiles(uri)
    keys = [file.key for file in files.manifest.files] * 20
    whole = [files.read(key) for key in keys]
    places = set()
    for content, expected in zip(files.read_all(keys), whole, strict=True):
        assert content.tobytes() == expected
        places.add(address_of(content))
    assert len(places) < len(keys) / 4


def test_the_dense_vector_is_read_back_with_its_untouched_pieces(tmp_path: Path) -> None:
    partitions = trained(1, [1])
    some = TableStore(SPECS, DENSE)
    stepped = np.array([1, 3], dtype=np.int64)
    some.push(np.array([0, 0, 2], dtype=np.uint32), stepped, np.ones(2 * DENSE.initial.shape[1], dtype=np.float32))
    files = CheckpointFiles(save([(some, partitions[0][1])], tmp_path))
    values = read_dense(files, files.partitions(some.specs, len(INITIAL)), INITIAL)
    changed = np.flatnonzero(values != INITIAL) // DENSE.initial.shape[1]
    assert set(changed.tolist()) == {1, 3}


def damage_cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_altered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def damage_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [damage_cut_short, damage_altered, damage_longer, Path.unlink])
@pytest.mark.parametrize("name", ["table-0-0.rows", "dense-0.rows", "applied.json", "partition.json"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    uri = save(trained(2, list(range(50))), tmp_path)
    damage(tmp_path / "ps-1" / name)
    with pytest.raises(DamagedCheckpointError, match=f"ps-1/{name}"):
        load(uri)


def test_a_checkpoint_without_its_manifest_is_refused(tmp_path: Path) -> None:
    uri = save(trained(1, [1]), tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load(uri)


@pytest.mark.parametrize(
    "other",
    [TableStore(SPECS[:1], DENSE), TableStore(SPECS, DensePieces.of(INITIAL, OptimizerSpec()))],
    ids=["tables", "dense optimizer"],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: TableStore) -> None:
    uri = save(trained(1, [1]), tmp_path)
    with pytest.raises(DamagedCheckpointError, match="another model"):
        load_partition(CheckpointFiles(uri), owned(1, 0), other, len(INITIAL))


def test_a_part_that_counts_too_many_rows_takes_no_more_memory_than_its_files(tmp_path: Path) -> None:
    [(before, share)] = trained(1, list(range(5000)))
    uri = save([(before, share)], tmp_path)
    manifest = CheckpointFiles(uri).manifest
    alter_partition(tmp_path, '"rows": 5000', '"rows": 20000000')
    tables = store()
    load_partition(CheckpointFiles(uri, IMPATIENT), owned(1, 0), tables, len(INITIAL))
    assert contents(tables) == contents(before)
    assert tables.allocated_bytes < before.allocated_bytes + 4 * manifest.total_bytes


def test_a_part_without_dense_parameters_is_refused_although_its_checksum_matches(tmp_path: Path) -> None:
    """Whoever counts their pieces would divide by zero."""
    uri = save(trained(1, [1]), tmp_path)
    alter_partition(tmp_path, f'"parameters": {len(INITIAL)}', '"parameters": 0')
    with pytest.raises(DamagedCheckpointError, match=r"ps-0/partition\.json does not have the expected form"):
        server_history(CheckpointFiles(uri), 0)


def alter_partition(folder: Path, before: str, after: str) -> None:
    """Replaces a part of ps-0/partition.json, and its checksum in the manifest."""
    part = folder / "ps-0/partition.json"
    assert before in part.read_text()
    part.write_text(part.read_text().replace(before, after))
    content = part.read_bytes()
    altered = CheckpointFile(path="ps-0/partition.json", bytes=len(content), crc32=zlib.crc32(content))
    files = CheckpointFiles(str(folder)).manifest.files
    write_manifest(folder, [altered if file.path == altered.path else file for file in files])


class Failing:
    """Makes operations of one kind on local files fail: the first `times` of them for each file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        monkeypatch.setattr(work, "_FIRST_PAUSE", 0.001)
        self.left: dict[str, int] = {}
        self.times = times
        self.failures = 0

    def fail(self, path: str) -> None:
        left = self.left.setdefault(path, self.times)
        if left:
            self.left[path] = left - 1
            self.failures += 1
            raise OSError(errno.EIO, "Input/output error", path)


def reads_fail(monkeypatch: pytest.MonkeyPatch, times: int) -> Failing:
    failing, opened = Failing(monkeypatch, times), LocalFileSystem.open

    def open_file(self: LocalFileSystem, path: str, *arguments: object, **options: object) -> object:
        failing.fail(path)
        return opened(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    return failing


def test_reading_goes_on_after_errors_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = trained(2, list(range(50)))
    uri = save(partitions, tmp_path)
    failing, progress = reads_fail(monkeypatch, 3), Work()
    rows, _ = load(uri, progress=progress)
    assert failing.failures > 20
    assert rows == {key: record for tables, _ in partitions for key, record in contents(tables).items()}
    assert progress.problem == ""
    assert progress.moved_bytes > 0


class Trickling:
    """A file that yields a few bytes at a time, and cannot read into memory, as some file systems of fsspec."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 777))


class TricklingInto(Trickling):
    """The same of a file that can."""

    def readinto(self, target: memoryview) -> int:
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)


@pytest.mark.parametrize("kind", [Trickling, TricklingInto])
def test_a_storage_may_give_a_file_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Trickling]
) -> None:
    partitions = trained(2, list(range(500)))
    uri, opened = save(partitions, tmp_path), LocalFileSystem.open
    monkeypatch.setattr(LocalFileSystem, "open", lambda *arguments: kind(opened(*arguments)))
    assert load(uri)[0] == {key: record for tables, _ in partitions for key, record in contents(tables).items()}
    damage_longer(tmp_path / "ps-1/table-0-0.rows")
    with pytest.raises(DamagedCheckpointError, match=r"ps-1/table-0-0\.rows"):
        load(uri)


def test_a_file_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = save(trained(1, [1]), tmp_path)
    opened, missing = LocalFileSystem.open, 3

    def open_file(self: LocalFileSystem, path: str, *arguments: object, **options: object) -> object:
        nonlocal missing
        missing -= 1
        if missing >= 0:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return opened(self, path, *arguments, **options)

    monkeypatch.setattr(work, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    assert len(load(uri, progress=Work())[0]) == 2 + DENSE_PIECES


def test_a_storage_that_stays_away_is_unreachable_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = save(trained(1, [1]), tmp_path)
    reads_fail(monkeypatch, 10**9)
    progress = Work(patience_seconds=0.05)
    with pytest.raises(StorageUnreachableError, match="Input/output error"):
        load(uri, progress=progress)
    assert "trying again" in progress.problem


@pytest.mark.parametrize("newer", [True, False])
def test_a_checkpoint_that_another_job_removes_while_it_is_loaded_is_told_from_a_volume_that_is_away(
    newer: bool, tmp_path: Path
) -> None:
    uri = save(trained(1, [1, 2]), tmp_path / "00000002")
    save(trained(1, [1, 2]), tmp_path / ("00000003" if newer else "00000001"))
    files = CheckpointFiles(uri, Work(patience_seconds=0))
    shutil.rmtree(tmp_path / "00000002")
    expected: type[Exception] = DamagedCheckpointError if newer else StorageUnreachableError
    with pytest.raises(expected, match=r"was removed|is missing"):
        files.read("ps-0/applied.json")


class LibraryError(Exception):
    """An error of the library behind a file system; botocore's, for example, are not OSErrors."""


class ClosedFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec is untyped
    async def _cat_file(self, *arguments: object, **options: object) -> bytes:
        raise RuntimeError("Session is closed")


def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("operation", "tries"),
    [
        pytest.param(partial(fails, LibraryError("no")), 3, id="library"),
        pytest.param(partial(fails, OSError("no")), 3, id="system"),
        pytest.param(lambda: ClosedFileSystem().cat_file("path"), 3, id="file system"),
        pytest.param(partial(fails, RuntimeError("no")), 1, id="defect"),
    ],
)
def test_errors_of_the_storage_are_told_from_defects(
    operation: Callable[[], None], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_FIRST_PAUSE", 0.001)
    tried = 0

    def try_twice() -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            operation()

    with suppress(RuntimeError):
        Work().patiently("the folder", try_twice)
    assert tried == tries


@pytest.mark.parametrize(
    ("error", "of_command", "of_server"),
    [
        pytest.param(PermissionError(errno.EACCES, "Permission denied", "/there/rows"), 1, 3, id="local"),
        pytest.param(PermissionError("Access Denied"), 3, 3, id="store"),
    ],
)
def test_a_command_does_not_wait_for_permission_to_read_a_local_file(
    error: Exception, of_command: int, of_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As s3fs, the libraries of stores do not name the file in their errors."""
    monkeypatch.setattr(work, "_FIRST_PAUSE", 0.001)
    for progress, tries in ((Work(missing_seconds=0), of_command), (Work(), of_server)):
        tried: list[Exception] = []

        def try_twice(tried: list[Exception] = tried) -> None:
            tried.append(error)
            if len(tried) < 3:
                raise error

        with suppress(StorageUnreachableError):
            progress.patiently("the folder", try_twice)
        assert len(tried) == tries


@pytest.mark.parametrize(("away", "is_over"), [(590.0, False), (660.0, True)])
def test_a_storage_may_be_away_for_ten_minutes(
    away: float, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for writing and for reading, by a clock of the test."""
    now, there = 0.0, 0.0
    progress = Work()

    def wait(seconds: float | None = None) -> bool:
        nonlocal now
        now += seconds or 0.0
        return False

    def open_file(self: LocalFileSystem, path: str, *arguments: object, **options: object) -> object:
        if now < there:
            raise OSError(errno.EHOSTUNREACH, "No route to host", path)
        return opened(self, path, *arguments, **options)

    def fsync(descriptor: int) -> None:
        if now < there:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = LocalFileSystem.open
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(progress._abandoned, "wait", wait)
    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    monkeypatch.setattr(os, "fsync", fsync)
    partitions = trained(1, [1, 2, 3])
    for call in (lambda: save(partitions, tmp_path, progress), lambda: load(str(tmp_path), progress=progress)):
        there = now + away
        if is_over:
            with pytest.raises(StorageUnreachableError, match=r"No space left|No route"):
                call()
            there = now
            save(partitions, tmp_path, progress)
        else:
            call()
    assert load(str(tmp_path))[0] == contents(partitions[0][0])


def test_work_that_is_abandoned_ends_although_the_storage_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = save(trained(1, [1]), tmp_path)
    reads_fail(monkeypatch, 10**9)
    progress = Work()
    progress.abandon()
    with pytest.raises(AbandonedError):
        load(uri, progress=progress)


def test_writing_goes_on_after_errors_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, 2)
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        failing.fail(os.readlink(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    partitions = trained(1, list(range(50)))
    uri = save(partitions, tmp_path)
    assert failing.failures >= 10
    assert load(uri)[0] == contents(partitions[0][0])


def test_all_files_and_their_folders_are_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.readlink(f"/proc/self/fd/{descriptor}")))
    folder = tmp_path / "checkpoints" / "00000001"
    save(trained(1, [1, 2]), folder)
    written = {str(file) for file in (folder / "ps-0").iterdir()}
    assert written | {str(folder / "ps-0"), str(folder), str(folder.parent)} <= flushed
