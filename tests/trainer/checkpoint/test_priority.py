"""Saves of priority rows: which rows they hold, and what a lost server loads from them."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from emberscale_api.job import AdmissionSpec, InitializerSpec, OptimizerSpec, OptimizerType, RecoveryPriority, TableSpec
from emberscale_trainer.checkpoint import (
    AbandonedError,
    ChainWriter,
    CheckpointFiles,
    PriorityWriter,
    Share,
    Work,
    load_partition,
    load_priority_rows,
    owned_rows,
    read_records,
)
from emberscale_trainer.checkpoint.choosing import First, SampledKeys, SavedValues, among
from emberscale_trainer.checkpoint.files import PartitionFile
from emberscale_trainer.partition import AppliedBatches, Ownership, buckets_of
from emberscale_trainer.table import DensePieces, Reader, RowLayout, TableStore, keys_of
from examples import examples
from master_stand_in import owned, write_manifest
from snapshots import all_records_of

SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.1), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, OptimizerSpec(type=OptimizerType.SGD), InitializerSpec(), seed=3),
)
DENSE = DensePieces.of(np.arange(100, dtype=np.float32), OptimizerSpec(type=OptimizerType.SGD))
KEYS = np.arange(80, dtype=np.int64)
EACH = (RecoveryPriority.MFU, RecoveryPriority.SSU, RecoveryPriority.SCAR)
COMPARING = pytest.mark.parametrize("server", [RecoveryPriority.MFU, RecoveryPriority.SCAR], indirect=True)
SAMPLING = pytest.mark.parametrize("server", [RecoveryPriority.SSU], indirect=True)

Contents = dict[tuple[int, int], bytes]


class Server:
    """A parameter server without a process, which saves its rows below a folder."""

    def __init__(
        self, folder: Path, priority: RecoveryPriority, owns: Ownership, index: int = 0, tracked: bool = False
    ) -> None:
        self.folder, self.owned, self.index, self.tracked = folder, owns, index, tracked
        self.tables = TableStore(SPECS, DENSE)
        self.chains, self.priority = ChainWriter(), PriorityWriter(priority)
        self.number, self.saves, self.newest, self.base = 0, list[str](), "", ""

    def push(self, keys: Sequence[int], gradient: float = 1.0) -> None:
        mine = np.array([key for key in sorted(keys) if self.owned.buckets[buckets_of(np.array([key]))[0]]], np.int64)
        pieces = np.flatnonzero(self.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], np.uint32)
        asked = np.concatenate([mine, mine, pieces])
        self.tables.push(counts, asked, np.full(self.tables.values_per_request(counts), gradient, np.float32))
        if self.priority.watch is not None:
            self.priority.watch(self.tables, counts, asked)

    @property
    def share(self) -> Share:
        return Share(self.index, self.owned, AppliedBatches(), 100, owned_rows(self.tables, self.owned))

    def checkpoint(self, *, fails: bool = False) -> str:
        self.number += 1
        folder = self.folder / f"{self.number:08}"
        since = self.base if self.tracked else ""
        draft = self.chains.begin(self.tables, nullcontext(), self.owned, tracked=self.tracked, since=since)
        self.priority.forget(draft.snapshot.retired)
        self.priority.checkpoint_begins(self.tables, f"{folder}/", whole=draft.before is None)
        seen = self.priority.note
        if fails:
            draft.snapshot.give_back()
            return ""
        files = self.chains.write(draft, self.tables.specs, self.share, str(folder), Work(), seen=seen)
        write_manifest(folder, files, id=folder.name, number=self.number)
        self.saves, self.newest, self.base = [], folder.name, folder.name
        return str(folder)

    def save(self, *, counts: bool = True) -> CheckpointFiles:
        """Saves priority rows; `counts`: the master learns of the save."""
        self.number += 1
        folder = self.folder / f"priority-{self.number:08}"
        snapshot = self.priority.begin(self.tables, nullcontext(), self.newest)
        files = self.priority.write(snapshot, self.tables.specs, self.share, str(folder), Work())
        write_manifest(folder, files, id=folder.name, number=self.number, partial_rows="00000001", format_version=3)
        if counts:
            self.saves.append(str(folder))
            self.newest = folder.name
        return CheckpointFiles(str(folder))

    def contents(self) -> Contents:
        snapshot = self.tables.readers.snapshot(Reader.FLASH, nullcontext())
        found = all_records_of(snapshot, len(self.tables.specs))
        snapshot.commit()
        return found


def keys_in(files: CheckpointFiles, table: int = 0) -> set[int]:
    part = files.parse("ps-0/partition.json", PartitionFile)
    return {int(key) for records in read_records(files, part, part.tables[table]) for key in keys_of(records)}


@pytest.fixture(params=EACH)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Server:
    server = Server(tmp_path, request.param, owned(1, 0))
    server.push(KEYS.tolist())
    server.checkpoint()
    return server


def test_what_changed_most_since_the_checkpoint_is_saved(server: Server) -> None:
    for _ in range(11):
        server.push(range(10, 20))
    server.push(range(30, 40), gradient=1e-3)  # SSU does not sample this push
    saved = server.save()
    assert keys_in(saved, 0) == keys_in(saved, 1) == set(range(10, 20)), "an eighth of 80 rows"
    assert saved.manifest.format_version == 3
    assert not any("dense" in file.path for file in saved.manifest.files)


@COMPARING
def test_a_row_that_was_saved_begins_anew_and_one_that_was_left_out_comes_next(server: Server) -> None:
    for _ in range(6):
        server.push(range(10, 20))
    for _ in range(4):
        server.push(range(30, 40))
    first = keys_in(server.save())
    server.push([10])
    second = keys_in(server.save())
    assert (first, second) == (set(range(10, 20)), set(range(30, 40)))


@SAMPLING
def test_a_sample_begins_anew_after_a_save_and_what_it_left_out_waits_for_another_push(server: Server) -> None:
    for _ in range(6):
        server.push(range(10, 20))
    for _ in range(4):
        server.push(range(30, 40))
    first = keys_in(server.save())
    assert len(first) == 10
    assert first < {*range(10, 20), *range(30, 40)}
    server.push([10, 50])
    assert keys_in(server.save()) == {10, 50}


def test_a_checkpoint_saves_all_rows(server: Server) -> None:
    for _ in range(4):
        server.push(range(10, 20))
    server.checkpoint()
    assert keys_in(server.save()) == set()


@COMPARING
def test_rows_of_a_save_that_does_not_count_come_first_again(server: Server) -> None:
    for _ in range(6):
        server.push(range(10, 20))
    server.save(counts=False)
    for _ in range(4):
        server.push(range(30, 40))
    for _ in range(2):
        server.push(range(10, 20))
    assert keys_in(server.save()) == set(range(10, 20))
    assert keys_in(server.save()) == set(range(30, 40))


@SAMPLING
def test_sampled_rows_of_a_save_that_does_not_count_can_be_saved_after_another_push(server: Server) -> None:
    for _ in range(6):
        server.push(range(10, 20))
    assert keys_in(server.save(counts=False)) == set(range(10, 20))
    for _ in range(2):
        server.push(range(5, 15))
    assert keys_in(server.save()) == set(range(5, 15))


@COMPARING
def test_rows_that_a_checkpoint_was_to_have_that_failed_come_first(server: Server) -> None:
    for _ in range(4):
        server.push(range(10, 15))
    server.save()
    for _ in range(8):
        server.push(range(20, 30))
    server.checkpoint(fails=True)
    assert keys_in(server.save()) == set(range(20, 30))


@SAMPLING
def test_a_checkpoint_that_fails_ends_a_sample_and_later_pushes_are_sampled(server: Server) -> None:
    for _ in range(6):
        server.push(range(20, 30))
    server.checkpoint(fails=True)
    for _ in range(2):
        server.push(range(25, 35))
    assert keys_in(server.save()) == set(range(25, 35))


@pytest.mark.parametrize("priority", [RecoveryPriority.MFU, RecoveryPriority.SCAR])
@pytest.mark.parametrize("tracked", [True, False])
def test_what_is_noted_of_rows_goes_with_them(tmp_path: Path, priority: RecoveryPriority, tracked: bool) -> None:
    server = Server(tmp_path, priority, owned(1, 0), tracked=tracked)
    for number in range(30):
        keys = np.arange(100 * number, 100 * number + 100)
        server.push(keys.tolist())
        if number % 4:
            server.save()
        else:
            server.checkpoint()
        for table in range(2):
            server.tables.retire(table, keys)
    assert 0 < len(server.priority._saved[0]) <= 500


def test_a_table_that_nothing_pushed_has_no_file(tmp_path: Path) -> None:
    server = Server(tmp_path, RecoveryPriority.MFU, owned(1, 0))
    saved = server.save()
    assert [file.path for file in saved.manifest.files] == ["ps-0/partition.json"]


def test_a_server_that_was_in_no_checkpoint_chooses_from_all_rows(tmp_path: Path) -> None:
    server = Server(tmp_path, RecoveryPriority.MFU, owned(1, 0))
    server.push(KEYS.tolist())
    server.push(range(10))
    assert keys_in(server.save()) == set(range(10))


def test_only_a_sample_of_pushes_has_to_see_them() -> None:
    watching = [one for one in RecoveryPriority if PriorityWriter(one).watch is not None]
    assert watching == [RecoveryPriority.SSU]


def test_rows_count_as_examined_before_the_first_is_written(server: Server) -> None:
    server.push(range(10, 20))
    snapshot, work = server.priority.begin(server.tables, nullcontext(), server.newest), Work()
    work.abandon()
    with pytest.raises(AbandonedError):
        server.priority.write(snapshot, server.tables.specs, server.share, str(server.folder / "late"), work)
    assert (work.examined_rows, work.moved_bytes) == (10, 0)
    assert snapshot.ended


def test_a_checkpoint_that_begins_ends_a_save(server: Server) -> None:
    server.push(range(10, 20))
    snapshot = server.priority.begin(server.tables, nullcontext(), server.newest)
    server.checkpoint()
    with pytest.raises(AbandonedError):
        server.priority.write(snapshot, server.tables.specs, server.share, str(server.folder / "late"), Work())


def test_tables_with_admission_are_told_apart_from_their_sketches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted = TableSpec(
        0, "C1", 0, 4, OptimizerSpec(), InitializerSpec(), seed=3, admission=AdmissionSpec(min_count=2)
    )
    monkeypatch.setitem(globals(), "SPECS", (admitted, SPECS[1]))
    server = Server(tmp_path, RecoveryPriority.SSU, owned(1, 0))
    for _ in range(2):
        server.push(KEYS.tolist())
    base = server.checkpoint()
    for _ in range(4):
        server.push([7])
    server.save()
    files = [file.path for file in CheckpointFiles(server.saves[0]).manifest.files]
    assert files == ["ps-0/table-0-0.rows", "ps-0/table-1-0.rows", "ps-0/partition.json"]
    restored = TableStore(SPECS, DENSE)
    load_partition(CheckpointFiles(base), server.owned, restored, 100)
    load_priority_rows(CheckpointFiles(server.saves[0]), server.owned, restored, 100)


Step = tuple[str, list[int]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True)),
        st.tuples(st.just("retire"), st.lists(st.integers(0, 60), min_size=1, max_size=3, unique=True)),
        st.tuples(st.sampled_from(["save", "checkpoint"]), st.just(list[int]())),
    ),
    max_size=25,
)


@settings(max_examples=examples(30))
@given(st.sampled_from(EACH), STEPS)
def test_a_lost_server_gets_each_row_as_it_was_saved_last(
    tmp_path_factory: pytest.TempPathFactory, priority: RecoveryPriority, steps: list[Step]
) -> None:
    """One server loads what two saved: rows of the checkpoint, and over them those of each save."""
    folder = tmp_path_factory.mktemp("job")
    servers = [Server(folder / str(index), priority, owned(2, index)) for index in range(2)]
    for server in servers:
        server.index = 0  # both may be server 0, since each has its own folder
        server.push(list(range(40)))
        base, expected = server.checkpoint(), server.contents()
        for what, keys in steps:
            match what:
                case "push":
                    server.push(keys)
                case "retire":
                    server.tables.retire(0, np.array(sorted(keys), np.int64))
                case "checkpoint":
                    base, expected = server.checkpoint(), server.contents()
                case "save":
                    rows, now = server.tables.rows(), server.contents()
                    saved = server.save()
                    for table in range(2):
                        chosen = keys_in(saved, table)
                        assert len(chosen) <= -(-rows[SPECS[table].name] // 8)
                        expected |= {(table, key): now[table, key] for key in chosen}
        restored = TableStore(SPECS, DENSE)
        load_partition(CheckpointFiles(base), server.owned, restored, 100)
        for save in server.saves:
            load_priority_rows(CheckpointFiles(save), server.owned, restored, 100)
        found = all_records_of(restored.readers.snapshot(Reader.FLASH, nullcontext()), 3)
        assert found == expected
        nothing = TableStore(SPECS, DENSE)
        for save in server.saves:
            load_priority_rows(CheckpointFiles(save), Ownership.of_nothing(), nothing, 100)
        assert not any(nothing.rows().values())


SOME = st.lists(st.integers(0, 9), max_size=5)


@given(st.lists(st.tuples(st.sampled_from(["note", "note", "note", "forget", "of"]), SOME), max_size=100))
def test_the_value_of_a_row_is_the_one_that_was_noted_last(steps: list[tuple[str, list[int]]]) -> None:
    saved, expected = SavedValues(np.uint32, 1), dict[int, int]()
    for number, (what, listed) in enumerate(steps, start=1):
        keys = np.array(listed, np.int64)
        match what:
            case "note":
                saved.note(keys, np.full((len(keys), 1), number, np.uint32))
                expected |= dict.fromkeys(listed, number)
            case "forget":
                saved.forget(keys)
                expected = {key: value for key, value in expected.items() if key not in listed}
            case "of":
                assert saved.of(keys)[:, 0].tolist() == [expected.get(key, 0) for key in listed]
    assert len(saved) == len(expected)
    assert saved.of(np.arange(10, dtype=np.int64))[:, 0].tolist() == [expected.get(key, 0) for key in range(10)]


def test_what_waits_to_be_merged_takes_no_more_than_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are merged only when their number has doubled, not with each chunk."""
    merges, merge = list[int](), SavedValues._merge

    def counted(saved: SavedValues) -> None:
        merges.append(saved._waiting)
        merge(saved)

    monkeypatch.setattr(SavedValues, "_merge", counted)
    saved, keys = SavedValues(np.uint32, 1), np.random.default_rng(1).permutation(1 << 20)
    for chunk in np.split(keys, 1 << 10):
        saved.note(chunk, np.ones((len(chunk), 1), np.uint32))
        assert saved._waiting <= max(1 << 16, len(saved._keys))
    assert len(saved) == len(keys)
    assert len(merges) <= 6, "of 1,024 chunks"


@given(SOME, SOME.map(lambda keys: sorted({*keys})))
def test_keys_are_told_that_are_in_a_list(keys: list[int], listed: list[int]) -> None:
    found = among(np.array(keys, np.int64), np.array(listed, np.int64))
    assert found.tolist() == [key in listed for key in keys]


@given(st.integers(0, 2500), st.lists(st.integers(0, 3000), max_size=6), st.integers(0, 99))
def test_the_records_with_the_highest_scores_are_kept_in_little_more_memory(
    most: int, sizes: list[int], seed: int
) -> None:
    layout, random = RowLayout.of(SPECS[0]), np.random.default_rng(seed)
    first, given_scores = First(most, layout), np.zeros(0)
    for size in sizes:
        scores = random.integers(-2, 50, size).astype(np.float64)
        records = layout.empty(size)
        layout.fields(records)["weights"][:, 0] = scores
        first.add(records, scores)
        given_scores = np.concatenate([given_scores, scores])
    expected = np.sort(given_scores[given_scores > 0])[::-1][:most]
    kept = layout.fields(np.ascontiguousarray(first.records()))["weights"][:, 0]
    assert np.sort(kept)[::-1].tolist() == expected.tolist()
    assert len(first._records) <= most + max(1024, most // 8)


def test_a_sample_keeps_so_many_keys_and_begins_anew() -> None:
    sampled = SampledKeys(seed=1)
    kept_between = 0
    for first in range(0, 200_000, 1000):
        if sampled.add(np.arange(first, first + 1000)):
            sampled.keep(50)
            kept_between += 1
    assert 0 < kept_between <= 3, "of 200 pushes"
    kept = sampled.take(50)
    assert len(kept) == 50
    assert kept.tolist() == sorted({*kept.tolist()})
    assert not len(sampled.take(50))
