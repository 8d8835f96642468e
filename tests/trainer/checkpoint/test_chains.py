"""Checkpoints that build on earlier ones: what is written, what is restored, and what a failed one leaves behind."""

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DamagedCheckpointError, weight_bits_of
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import DENSE_PIECES
from emberscale_trainer.checkpoint import (
    AbandonedError,
    ChainDraft,
    ChainWriter,
    CheckpointFiles,
    Share,
    StorageUnreachableError,
    Work,
    load_partition,
    owned_rows,
    read_dense,
    read_records,
)
from emberscale_trainer.checkpoint.files import PartitionFile
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, PackedRows, Reader, RowLayout, TableStore, keys_of
from examples import examples
from master_stand_in import owned, write_manifest
from packed_rows import unpacked
from snapshots import all_records_of, records_of, rows_of_bucket

ADAGRAD = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.1)
SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, ADAGRAD, InitializerSpec(), seed=3),
)
INITIAL = np.arange(1000, dtype=np.float32)
DENSE = DensePieces.of(INITIAL, ADAGRAD)
SPECS_WITH_DENSE = (*SPECS, DENSE.table(len(SPECS)))
DENSE_STRIDE = RowLayout.of(SPECS_WITH_DENSE[-1]).stride

Contents = dict[tuple[int, int], bytes]
Base = Literal["none", "oldest", "newest"]
Fate = Literal["complete", "lost", "abandoned", "unwritable"]


class Server:
    """A parameter server without a process."""

    def __init__(self, servers: int, index: int) -> None:
        self.index = index
        self.tables = TableStore(SPECS, DENSE)
        self.owned = owned(servers, index)
        self.writer = ChainWriter()

    def push(self, keys: list[int]) -> None:
        distinct = np.unique(np.array(keys, np.int64))
        mine = distinct[self.owned.buckets[buckets_of(distinct)]]
        pieces = np.flatnonzero(self.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], np.uint32)
        gradients = np.ones(self.tables.values_per_request(counts), np.float32)
        self.tables.push(counts, np.concatenate([mine, mine, pieces]), gradients)

    def contents(self) -> Contents:
        snapshot = self.tables.readers.snapshot(Reader.FLASH, nullcontext())
        found = all_records_of(snapshot, 3)
        snapshot.commit()
        return found

    def begin(self, since: str, tracked: bool = True) -> tuple[ChainDraft, Share]:
        draft = self.writer.begin(self.tables, nullcontext(), self.owned, tracked=tracked, since=since)
        return draft, Share(self.index, self.owned, AppliedBatches(), len(INITIAL), owned_rows(self.tables, self.owned))

    def write(
        self, begun: tuple[ChainDraft, Share], folder: Path | str, weight_bits: int = 0, work: Work | None = None
    ) -> list[CheckpointFile]:
        draft, share = begun
        work = Work(patience_seconds=0) if work is None else work
        return self.writer.write(draft, self.tables.specs, share, str(folder), work, weight_bits)


class Job:
    """Some servers, and a master that takes checkpoints and removes folders that no complete one needs."""

    def __init__(self, folder: Path, servers: int) -> None:
        self.folder = folder
        self.servers = [Server(servers, index) for index in range(servers)]
        self.number = 0
        self.complete: list[str] = []

    def push(self, keys: list[int]) -> None:
        for server in self.servers:
            server.push(keys)

    def retire(self, keys: list[int]) -> None:
        for server in self.servers:
            server.tables.retire(0, np.unique(np.array(keys, np.int64)))

    def move(self, key: int, meanwhile: Base | None = None) -> None:
        """Moves the bucket of a key, and a piece of the dense vector, to the next server.

        `meanwhile`: takes a checkpoint on this base after the copy and before the switch.
        """
        bucket, piece = int(buckets_of(np.array([key]))[0]), key % DENSE_PIECES
        source = next(server for server in self.servers if server.owned.buckets[bucket])
        target = self.servers[(source.index + 1) % len(self.servers)]
        if source is target:
            return
        for table in range(2):
            target.tables.load(table, rows_of_bucket(source.tables, table, bucket))
        if owns_piece := bool(source.owned.pieces[piece]):
            rows = records_of(source.tables.readers.snapshot(Reader.FLASH, nullcontext()), 2)
            target.tables.load(2, np.frombuffer(rows.get(piece, b""), np.uint8).reshape(-1, DENSE_STRIDE))
        if meanwhile is not None:
            self.save(meanwhile)
        source.owned.buckets[bucket], target.owned.buckets[bucket] = False, True
        for table in range(2):
            source.tables.remove_bucket(table, bucket)
        if owns_piece:
            source.owned.pieces[piece], target.owned.pieces[piece] = False, True
            source.tables.retire(2, np.array([piece]))

    def save(self, base: Base = "none", fate: Fate = "complete", tracked: bool = True, weight_bits: int = 0) -> Path:
        self.number += 1
        folder = self.folder / f"{self.number:08}"
        since = ""
        if self.complete and base != "none":
            manifest = CheckpointFiles(str(self.folder / self.complete[-1])).manifest
            since = manifest.builds_on[0] if base == "oldest" and manifest.builds_on else manifest.id
        begun = [server.begin(since, tracked) for server in self.servers]
        if fate == "abandoned":
            begun.pop()
        if fate == "unwritable":
            folder.mkdir()
            (folder / "ps-0").touch()  # in the place of a folder
        files: list[CheckpointFile] = []
        for server, one in zip(self.servers, begun, strict=False):
            with suppress(StorageUnreachableError):
                files += server.write(one, folder, weight_bits)
        if fate != "complete":
            shutil.rmtree(folder, ignore_errors=True)
            return folder
        write_manifest(folder, files, id=folder.name, number=self.number, ps_count=len(self.servers))
        self.complete.append(folder.name)
        needed = {folder.name, *CheckpointFiles(str(folder)).manifest.builds_on}
        for old in self.folder.iterdir():
            if old.name not in needed:
                shutil.rmtree(old)
        return folder

    def contents(self) -> Contents:
        return {key: row for server in self.servers for key, row in server.contents().items()}


def files_of(folder: Path | str, work: Work | None = None) -> CheckpointFiles:
    return CheckpointFiles(str(folder), Work(patience_seconds=0, missing_seconds=0) if work is None else work)


def restored(folder: Path | str, servers: int, work: Work | None = None) -> Contents:
    """Returns the rows of `servers` servers after they load a checkpoint."""
    rows: Contents = {}
    for index in range(servers):
        server = Server(servers, index)
        load_partition(files_of(folder, work), server.owned, server.tables, len(INITIAL))
        rows |= server.contents()
    return rows


def read_once(folder: Path) -> Contents:
    """Returns the rows that a reader of the tables finds; each must come once."""
    files = files_of(folder)
    rows: Contents = {}
    for part in files.partitions(SPECS_WITH_DENSE, len(INITIAL)):
        for number, table in enumerate(part.stored):
            found = [record for records in read_records(files, part, table) for record in records.copy()]
            keys = [(number, int(keys_of(record[None])[0])) for record in found]
            assert len(keys) == len(set(keys)) == table.rows
            assert not rows.keys() & set(keys)
            rows |= {key: record.tobytes() for key, record in zip(keys, found, strict=True)}
    return rows


some_keys = st.lists(st.integers(0, 40), min_size=1, max_size=12)
steps = st.one_of(
    st.tuples(st.just("push"), some_keys),
    st.tuples(st.just("retire"), some_keys),
    st.tuples(st.just("move"), st.integers(0, 40), st.sampled_from([None, "none", "oldest", "newest"])),
    st.tuples(
        st.just("save"),
        st.sampled_from(["none", "oldest", "newest", "newest"]),
        st.sampled_from(["complete", "complete", "complete", "lost", "abandoned", "unwritable"]),
        st.booleans() | st.just(True),
    ),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(steps, max_size=25), st.integers(1, 3), st.integers(1, 3))
def test_a_chain_restores_exactly_what_was_there_at_its_last_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[object, ...]], servers: int, readers: int
) -> None:
    job = Job(tmp_path_factory.mktemp("checkpoints"), servers)
    for name, *arguments in [*story, ("push", [1, 2]), ("save", "newest", "complete", True)]:
        done = getattr(job, str(name))(*arguments)
        if name == "save" and job.complete and done.name == job.complete[-1]:
            expected = job.contents()
            assert restored(done, readers) == expected
            assert read_once(done) == expected


def manifest_of(folder: Path) -> CheckpointManifest:
    return CheckpointFiles(str(folder)).manifest


def row_bytes(manifest: CheckpointManifest) -> int:
    """Returns the bytes of rows that were written for a checkpoint."""
    return sum(file.bytes for file in manifest.files if not file.checkpoint and file.path.endswith(".rows"))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path, 2)
    job.push(list(range(1000)))
    job.save()
    return job


def test_an_increment_holds_what_changed_and_names_what_it_builds_on(job: Job) -> None:
    job.push([3])
    second = manifest_of(job.save("newest"))
    assert (second.format_version, second.builds_on) == (2, ("00000001",))
    assert row_bytes(second) < row_bytes(manifest_of(job.folder / "00000001")) / 4
    job.push([4])
    third = manifest_of(job.save("oldest"))
    assert third.builds_on == ("00000001",)
    assert row_bytes(third) > row_bytes(second)
    job.push([5])
    fourth = manifest_of(job.save("newest"))
    assert fourth.builds_on == ("00000001", "00000003")
    assert row_bytes(fourth) == row_bytes(second)


def test_keys_that_were_retired_do_not_come_back(job: Job) -> None:
    job.retire(list(range(500)))
    job.push([7])
    folder = job.save("newest")
    assert len(list(folder.glob("ps-*/table-0-*.keys"))) == 2
    assert {key for table, key in restored(folder, 1) if table == 0} == {7, *range(500, 1000)}


def test_a_checkpoint_that_was_never_completed_leaves_nothing_out(job: Job) -> None:
    job.push([3])
    job.save("newest", "lost")
    job.push([4])
    assert restored(job.save("newest"), 1) == job.contents()


def test_without_knowing_what_changed_all_rows_are_written(job: Job) -> None:
    server = job.servers[0]
    server.tables, before = TableStore(SPECS, DENSE), server.tables
    for table in range(3):
        for row in records_of(before.readers.snapshot(Reader.FLASH, nullcontext()), table).values():
            server.tables.load(table, np.frombuffer(row, np.uint8).reshape(1, -1))
    manifest = manifest_of(job.save("newest"))
    assert manifest.builds_on == ("00000001",)
    assert all(not file.checkpoint for file in manifest.files if file.path.startswith("ps-0/"))
    assert restored(job.folder / manifest.id, 1) == job.contents()


@pytest.mark.parametrize("meanwhile", ["none", "newest"])
def test_rows_that_were_copied_before_a_checkpoint_and_owned_after_it_are_in_the_next(
    job: Job, meanwhile: Base
) -> None:
    job.move(3, meanwhile)
    job.save("newest")
    assert restored(job.save("newest"), 1) == job.contents()


def test_a_later_snapshot_ends_an_earlier_one_that_is_still_written(job: Job) -> None:
    job.push([3])
    server = job.servers[0]
    late = server.begin("00000001")
    server.begin("00000001")
    with pytest.raises(AbandonedError):
        server.write(late, job.folder / "00000009")


@pytest.mark.parametrize("damage", ["removed", "cut", "altered"])
def test_damage_to_what_a_checkpoint_builds_on_is_named(job: Job, damage: str) -> None:
    job.push([3])
    folder = job.save("newest")
    victim = job.folder / "00000001" / "ps-0" / "table-0-0.rows"
    content = victim.read_bytes()
    match damage:
        case "removed":
            victim.unlink()
        case "cut":
            victim.write_bytes(content[:-1])
        case _:
            victim.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    with pytest.raises(DamagedCheckpointError, match=r"00000001/ps-0/table-0-0\.rows"):
        restored(folder, 1)


def test_the_dense_vector_of_a_chain_is_the_last_one(job: Job) -> None:
    before = read_dense(files_of(job.folder / "00000001"), partitions(job.folder / "00000001"), INITIAL)
    job.push([3])
    folder = job.save("newest")
    after = read_dense(files_of(folder), partitions(folder), INITIAL)
    assert np.all(after < before)


def partitions(folder: Path) -> list[PartitionFile]:
    return files_of(folder).partitions(SPECS_WITH_DENSE, len(INITIAL))


def test_the_files_of_one_chain_may_store_weights_in_different_bits(job: Job) -> None:
    """A row is as precise as the last file that holds it: 2 bits in the base, 8 bits or all in the increments."""
    job.save(weight_bits=2)
    job.push([3])
    job.save("newest", weight_bits=8)
    job.push([5])
    folder = job.save("newest")
    manifest = CheckpointFiles(str(folder)).manifest
    assert {weight_bits_of(file.path) for file in manifest.files if "table-0" in file.path} >= {0, 2, 8}
    assert manifest.weight_bits == 2
    written = {3: 8, 5: 0}
    saved, found = job.contents(), restored(folder, 2)
    assert found.keys() == saved.keys()
    for (table, key), record in found.items():
        row = np.frombuffer(saved[table, key], np.uint8)[None].copy()
        if table < len(SPECS) and (bits := written.get(key, 2)):
            packed = PackedRows.of(RowLayout.of(SPECS[table]), bits)
            row = unpacked(packed, packed.pack(row))
        assert record == row.tobytes(), (table, key)


def test_the_reader_in_the_documentation_reads_a_chain(job: Job) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    job.retire(list(range(500)))
    job.push([7])
    job.save("newest")
    job.push([8])
    folder = job.save("newest")
    for number, spec in enumerate(SPECS):
        layout = RowLayout.of(spec)
        expected = {
            key: layout.fields(np.frombuffer(row, np.uint8).reshape(1, -1))["weights"][0]
            for (table, key), row in job.contents().items()
            if table == number
        }
        found = names["rows_of"](str(folder), number)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], weights) for key, weights in expected.items())
