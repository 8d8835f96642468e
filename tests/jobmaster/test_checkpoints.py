"""The folder of checkpoints: what counts as complete, what is refused, what is removed."""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem
from tests.jobmaster.small_job import job

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DamagedCheckpointError, EpochApplied
from emberscale_api.job import TrainingJob
from emberscale_jobmaster.checkpoints import CheckpointFolder, incompatibility
from emberscale_jobmaster.statistics import Tally


def manifest(identifier: str, **changes: Any) -> CheckpointManifest:
    fields: dict[str, Any] = {
        "id": identifier,
        "number": int(identifier),
        "created": datetime.now(UTC),
        "job_uid": "uid",
        "job": job(),
        "ps_count": 1,
        "generation": 3,
        "routing_version": 4,
        "epoch": 1,
        "batch_size": 10,
        "training_records": 100,
        "applied": (EpochApplied(epoch=0, ranges=((0, 4), (6, 10))),),
        "evaluations": (Tally().result(1),),
        "training_files": (),
        "evaluation_files": (),
        "training_seconds": 1.5,
        "files": (CheckpointFile(path="ps-0/rows", bytes=4, crc32=9),),
    }
    return CheckpointManifest(**{**fields, **changes})


def write(folder: CheckpointFolder, place: Path, identifier: str, complete: bool = True) -> None:
    rows = place / identifier / "ps-0" / "rows"
    rows.parent.mkdir(parents=True)
    rows.write_bytes(b"rows")
    if complete:
        folder.write(manifest(identifier))


def complete(folder: CheckpointFolder, identifier: str) -> None:
    """Writes a complete checkpoint without files, on any file system."""
    filesystem, path = fsspec.core.url_to_fs(folder.uri_of(identifier))
    filesystem.makedirs(path, exist_ok=True)
    folder.write(manifest(identifier, files=()))


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(tmp_path))


def test_a_manifest_reads_back_as_it_was_written(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000007")
    assert repr(folder.read("00000007").model_copy(update={"seal": 0})) == repr(
        manifest("00000007", created=folder.read("00000007").created)
    )


def test_only_a_folder_with_a_manifest_is_a_checkpoint(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    write(folder, tmp_path, "00000002", complete=False)
    (tmp_path / "notes").mkdir()
    assert folder.complete() == ["00000001"]
    assert folder.folders() == ["00000001", "00000002"]


def increment(folder: CheckpointFolder, place: Path, identifier: str, *bases: str) -> None:
    """Writes a checkpoint with rows in its own folder and in those of earlier checkpoints."""
    write(folder, place, identifier, complete=False)
    files = [CheckpointFile(path="ps-0/rows", bytes=4, crc32=9, checkpoint=base) for base in ("", *bases)]
    folder.write(manifest(identifier, format_version=2, files=tuple(files)))


def test_what_a_checkpoint_builds_on_stays_as_long_as_it_does(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    increment(folder, tmp_path, "00000002", "00000001")
    increment(folder, tmp_path, "00000003", "00000001")
    folder.prune(keep=1)
    assert folder.folders() == ["00000001", "00000003"]
    increment(folder, tmp_path, "00000004", "00000001", "00000003")
    folder.prune(keep=1)
    assert folder.folders() == ["00000001", "00000003", "00000004"]
    write(folder, tmp_path, "00000005")
    folder.prune(keep=2)
    assert folder.folders() == ["00000001", "00000003", "00000004", "00000005"]
    folder.prune(keep=1)
    assert folder.folders() == ["00000005"]


def test_the_death_of_a_master_that_removes_a_chain_damages_none_that_is_left(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its base, an increment is damaged, and would count among those that stay."""
    write(folder, tmp_path, "00000001")
    increment(folder, tmp_path, "00000002", "00000001")
    increment(folder, tmp_path, "00000003", "00000001", "00000002")
    write(folder, tmp_path, "00000004")
    remove = LocalFileSystem.rm

    def remove_and_die(self: LocalFileSystem, path: str, recursive: bool = False) -> None:
        remove(self, path, recursive=recursive)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalFileSystem, "rm", remove_and_die)
    while len(folder.folders()) > 1:
        with suppress(KeyboardInterrupt):
            folder.prune(keep=1)
        for identifier in folder.complete():
            folder.read(identifier)


def test_a_checkpoint_whose_manifest_is_damaged_is_not_counted_among_those_that_stay(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    for identifier in ("00000001", "00000002", "00000003"):
        write(folder, tmp_path, identifier)
    (tmp_path / "00000002" / "manifest.json").write_text("{}")
    folder.prune(keep=2)
    assert folder.folders() == ["00000001", "00000003"]


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_damage_to_what_a_checkpoint_builds_on_refuses_it(
    folder: CheckpointFolder, tmp_path: Path, damage: str
) -> None:
    write(folder, tmp_path, "00000001")
    increment(folder, tmp_path, "00000002", "00000001")
    assert folder.read("00000002").builds_on == ("00000001",)
    rows = tmp_path / "00000001" / "ps-0" / "rows"
    if damage == "removed":
        rows.unlink()
    else:
        rows.write_bytes(b"ro")
    problem = r"00000001/ps-0/rows: (is missing|has 2 bytes)"
    with pytest.raises(DamagedCheckpointError, match=problem):
        folder.read("00000002")
    with pytest.raises(DamagedCheckpointError, match=problem):
        increment(folder, tmp_path, "00000003", "00000001")
    assert folder.complete() == ["00000001", "00000002"]


def test_where_nothing_was_written_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointFolder(str(tmp_path / "nowhere")).complete() == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text.replace('"epoch": 1', '"epoch": 0'), "altered after it was written"),
        (lambda text: text[: len(text) // 2], "manifest.json"),
        (lambda text: text.replace('"ps_count": 1', '"ps_count": "many"'), "ps_count"),
        (
            lambda text: text.replace('"format_version": 1', '"format_version": 5'),
            "has format 5, and .* up to 4: use the",
        ),
    ],
)
def test_a_manifest_that_was_altered_is_refused_by_name(
    folder: CheckpointFolder, tmp_path: Path, damage: Any, complaint: str
) -> None:
    write(folder, tmp_path, "00000001")
    place = tmp_path / "00000001" / "manifest.json"
    damaged = damage(place.read_text())
    assert damaged != place.read_text()
    place.write_text(damaged)
    with pytest.raises(DamagedCheckpointError, match=complaint) as raised:
        folder.read("00000001")
    assert "00000001" in str(raised.value)


def test_a_manifest_of_empty_batches_is_refused_although_its_seal_matches(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    """Whoever counts its samples would divide by zero."""
    write(folder, tmp_path, "00000001", complete=False)
    empty = manifest("00000001").model_copy(update={"batch_size": 0})
    (tmp_path / "00000001" / "manifest.json").write_text(empty.to_json())
    with pytest.raises(DamagedCheckpointError, match=r"00000001/manifest\.json: batch_size"):
        folder.read("00000001")


@pytest.mark.parametrize("path", ["../00000001/ps-0/partition.json", "/etc/hosts", "ps-0/../../run.json"])
def test_a_manifest_that_lists_files_outside_of_its_folder_is_refused(
    folder: CheckpointFolder, tmp_path: Path, path: str
) -> None:
    write(folder, tmp_path, "00000002", complete=False)
    outside = CheckpointFile.model_construct(path=path, bytes=1, crc32=0, checkpoint="")
    altered = manifest("00000002").model_copy(update={"files": (outside,)})
    (tmp_path / "00000002" / "manifest.json").write_text(altered.to_json())
    with pytest.raises(DamagedCheckpointError, match=r"00000002/manifest\.json: files"):
        folder.read("00000002")


@pytest.mark.parametrize("version", [2, 4])
def test_quantised_weights_of_an_earlier_format_are_refused_by_name(
    folder: CheckpointFolder, tmp_path: Path, version: int
) -> None:
    """Their records are no blocks. A master may be newer than the servers whose files its manifest lists."""
    files = (CheckpointFile(path="ps-0/table-0-0.q4", bytes=4, crc32=9),)
    (tmp_path / "00000001").mkdir()
    folder.write(manifest("00000001", format_version=version, files=files))
    with pytest.raises(DamagedCheckpointError, match=r"00000001/manifest.json: .* before format 4, .* exact weights"):
        folder.read("00000001")


def test_a_truncated_file_is_refused_by_name(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    (tmp_path / "00000001" / "ps-0" / "rows").write_bytes(b"ro")
    with pytest.raises(DamagedCheckpointError, match="00000001/ps-0/rows: has 2 bytes, and should have 4"):
        folder.read("00000001")
    (tmp_path / "00000001" / "ps-0" / "rows").unlink()
    with pytest.raises(DamagedCheckpointError, match="00000001/ps-0/rows: is missing"):
        folder.read("00000001")


def test_a_checkpoint_that_was_renamed_is_refused(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    (tmp_path / "00000001").rename(tmp_path / "00000002")
    with pytest.raises(DamagedCheckpointError, match="is the manifest of checkpoint 00000001"):
        folder.read("00000002")


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_manifest_that_comes_after_its_checkpoint_was_removed_completes_nothing(scheme: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(f"{scheme}{tmp_path}")
    filesystem, root = fsspec.core.url_to_fs(folder.uri)
    filesystem.makedirs(f"{root}/00000001/ps-0")
    filesystem.pipe_file(f"{root}/00000001/ps-0/rows", b"rows")
    folder.delete("00000001")
    with pytest.raises(FileNotFoundError):
        folder.write(manifest("00000001"))
    assert folder.folders() == []


def test_a_write_that_hung_completes_no_checkpoint_with_what_the_next_attempt_has_begun_to_write(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, tmp_path, "00000001", complete=False)
    hung = threading.Thread(target=folder.write, args=(manifest("00000001"),), daemon=True)
    hangs, goes_on, found = threading.Event(), threading.Event(), []
    opened, flushed = Path.open, os.fsync

    def flush(descriptor: int) -> None:
        if threading.current_thread() is hung:
            hangs.set()
            goes_on.wait()
        flushed(descriptor)

    def open_file(path: Path, *arguments: Any, **options: Any) -> Any:
        file = opened(path, *arguments, **options)
        if hangs.is_set() and arguments == ("wb",):
            goes_on.set()
            hung.join()
            found.append(folder.read("00000001").id)
        return file

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "open", open_file)
    hung.start()
    hangs.wait()
    folder.write(manifest("00000001"))
    assert found == ["00000001"]
    assert folder.complete() == ["00000001"]
    assert [entry.name for entry in (tmp_path / "00000001").iterdir() if entry.is_file()] == ["manifest.json"]


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_of_two_masters_that_complete_a_checkpoint_of_one_id_the_first_does(scheme: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(f"{scheme}{tmp_path}")
    complete(folder, "00000001")
    folder.write(manifest("00000001", files=()))  # the answer to the first attempt was lost
    with pytest.raises(FileExistsError, match=r"00000001/manifest\.json was written by another master"):
        folder.write(manifest("00000001", files=(), job_uid="other"))
    assert folder.read("00000001").job_uid == "uid"


def test_a_manifest_whose_answer_was_lost_is_there_however_the_store_refuses_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some S3-compatible stores do not say which condition failed, and s3fs raises EINVAL."""
    create = MemoryFileSystem.pipe_file

    def pipe_file(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        try:
            create(self, path, value, mode, **options)
        except FileExistsError:
            raise OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold") from None

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    folder = CheckpointFolder("memory://lost-answer")
    complete(folder, "00000001")
    folder.write(manifest("00000001", files=()))
    with pytest.raises(FileExistsError, match="written by another master"):
        folder.write(manifest("00000001", files=(), job_uid="other"))


def test_a_store_that_refuses_the_manifest_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe_file(self: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        raise OSError(errno.EBUSY, "Slow Down")

    folder = CheckpointFolder("memory://busy")
    folder._filesystem.makedirs(f"{folder._root}/00000001")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(OSError, match="Slow Down"):
        folder.write(manifest("00000001", files=()))


def test_a_manifest_of_which_a_part_was_written_is_written_again_on_a_store_that_writes_no_file_whole() -> None:
    folder = CheckpointFolder("memory://torn")
    whole = manifest("00000001", files=())
    text = whole.to_json().encode()
    for part in (b"", text[:1], text[: len(text) // 2], text[:-1]):
        folder._filesystem.pipe_file(f"{folder._root}/00000001/manifest.json", part)
        folder.write(whole)
        assert folder.read("00000001") == CheckpointManifest.from_json(text, "whole")


def test_the_newest_stay_and_what_is_older_goes(folder: CheckpointFolder, tmp_path: Path) -> None:
    for number in range(1, 7):
        write(folder, tmp_path, f"{number:08d}", complete=number not in (2, 6))
    folder.prune(keep=2)
    assert folder.folders() == ["00000004", "00000005", "00000006"]


def test_damaged_ones_are_not_among_those_kept(folder: CheckpointFolder, tmp_path: Path) -> None:
    for number in range(1, 5):
        write(folder, tmp_path, f"{number:08d}")
    folder.prune(keep=2, damaged={"00000003"})
    assert folder.folders() == ["00000002", "00000004"]


def test_what_a_damaged_newer_one_builds_on_stays(folder: CheckpointFolder, tmp_path: Path) -> None:
    """A job that has yet to learn of the damage builds on the same base."""
    for number in (1, 2):
        write(folder, tmp_path, f"{number:08d}")
    write(folder, tmp_path, "00000003", complete=False)
    own = CheckpointFile(path="ps-0/rows", bytes=4, crc32=9)
    base = own.model_copy(update={"checkpoint": "00000001"})
    folder.write(manifest("00000003", files=(own, base), format_version=2))
    folder.prune(keep=1, damaged={"00000003"})
    assert folder.folders() == ["00000001", "00000002", "00000003"]
    folder.prune(keep=1)
    assert folder.folders() == ["00000001", "00000003"]


def test_a_checkpoint_stays_when_the_storage_does_not_say_whether_it_is_complete(
    folder: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems take a path that they cannot look up for one that does not exist."""
    write(folder, tmp_path, "00000001")

    def info(self: LocalFileSystem, path: str, **options: Any) -> dict[str, Any]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "info", info)
        with pytest.raises(OSError, match="tale"):
            folder.discard("00000001")
        with pytest.raises(OSError, match="tale"):
            folder.complete()
    assert folder.read("00000001").number == 1


def test_a_file_with_the_name_of_a_checkpoint_is_none(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    (tmp_path / "00000002").write_text("not a folder")
    assert folder.complete() == ["00000001"]


def test_a_deleted_checkpoint_is_gone_whether_or_not_it_was_complete(folder: CheckpointFolder, tmp_path: Path) -> None:
    write(folder, tmp_path, "00000001")
    write(folder, tmp_path, "00000002", complete=False)
    for number in (1, 2, 3):
        folder.delete(f"{number:08d}")
    assert list(tmp_path.iterdir()) == []


def test_any_fsspec_uri_will_do() -> None:
    folder = CheckpointFolder("memory://checkpoints-of-a-test")
    assert folder.complete() == []
    complete(folder, "00000001")
    assert folder.read("00000001").number == 1
    folder.delete("00000001")
    assert folder.complete() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"training": {"batchSize": 20}}, "spec.training.batchSize"),
        ({"training": {"seed": 4}}, "spec.training.seed"),
        ({"data": {"shuffling": {"enabled": False}}}, "spec.data.shuffling.enabled"),
        ({"model": {"embeddings": {"dimension": 8}}}, "spec.model.embeddings.dimension"),
        ({"model": {"architecture": None, "entrypoint": "a:b"}}, "spec.model.architecture, spec.model.entrypoint"),
        ({"optimizers": {"sparse": {"type": "Adam"}}}, "spec.optimizers.sparse.type"),
    ],
)
def test_what_would_change_the_meaning_of_a_checkpoint_is_named(change: dict[str, Any], field: str) -> None:
    problem = incompatibility(manifest("00000001"), job(**change))
    assert problem == f"{field} must stay as it was when the checkpoint was taken"


def test_columns_that_mean_something_else_are_no_way_to_go_on() -> None:
    def over(**changes: Any) -> TrainingJob:
        columns = {"label": "y", "dense": ["a", "b"], "categorical": ["u"], **changes}
        return job(data={"train": ["x.parquet"], "format": "Parquet", "columns": columns})

    saved = manifest("00000001", job=over())
    assert incompatibility(saved, over()) == ""
    assert "spec.data.columns.dense must stay" in incompatibility(saved, over(dense=["b", "a"]))
    assert "spec.data.columns.denseTransform must" in incompatibility(saved, over(denseTransform="Log1p"))


def test_more_epochs_servers_and_workers_are_no_obstacle() -> None:
    changed = job(training={"epochs": 5}, ps={"replicas": 7}, worker={"replicas": 9})
    assert incompatibility(manifest("00000001"), changed) == ""


def test_another_jobs_checkpoint_is_not_overwritten() -> None:
    other = TrainingJob.model_validate({**job().model_dump(), "metadata": {"name": "other"}})
    assert "it belongs to job other" in incompatibility(manifest("00000001", job=other), job())


class RememberingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """In memory; caches its answers until it is told to forget them, as file systems of object stores do."""

    protocol = "remembering"
    store: dict[str, Any] = {}  # noqa: RUF012  # as MemoryFileSystem has it
    pseudo_dirs = [""]  # noqa: RUF012
    seen: dict[str, Any] = {}  # noqa: RUF012

    def info(self, path: str, **options: Any) -> Any:
        if path not in self.seen:
            self.seen[path] = super().info(path, **options)
        return self.seen[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


fsspec.register_implementation("remembering", RememberingFileSystem, clobber=True)


def test_nothing_builds_on_a_file_that_was_there_the_last_time() -> None:
    RememberingFileSystem.store.clear()
    folder = CheckpointFolder("remembering://checkpoints")
    for identifier in ("00000001", "00000002", "00000003"):
        folder_of = fsspec.core.url_to_fs(folder.uri_of(identifier))
        folder_of[0].pipe_file(f"{folder_of[1]}/ps-0/rows", b"rows")
    base = (CheckpointFile(path="ps-0/rows", bytes=4, crc32=9, checkpoint="00000001"),)
    folder.write(manifest("00000002", files=base, format_version=2))
    folder.write(manifest("00000001"))
    (lost,) = [path for path in RememberingFileSystem.store if path.endswith("00000001/ps-0/rows")]
    del RememberingFileSystem.store[lost]
    with pytest.raises(DamagedCheckpointError, match="00000001/ps-0/rows: is missing"):
        folder.write(manifest("00000003", files=base, format_version=2))


class CountingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """In memory; counts the requests that a store of objects would get, and fails those that `fails` names."""

    protocol = "counting"
    store: dict[str, Any] = {}  # noqa: RUF012  # as MemoryFileSystem has it
    pseudo_dirs = [""]  # noqa: RUF012
    requests = 0
    fails: frozenset[str] = frozenset()

    @classmethod
    def asked(cls, what: str) -> None:
        cls.requests += 1
        if what in cls.fails:
            raise OSError(errno.EIO, "the store has an error")

    def info(self, path: str, **options: Any) -> Any:
        self.asked("info")
        return super().info(path, **options)

    def ls(self, path: str, **options: Any) -> Any:
        self.asked("ls")
        return super().ls(path, **options)

    def find(self, path: str, **options: Any) -> Any:
        self.asked("find")
        return super().find(path, **options)

    def cat_file(self, path: str, **options: Any) -> Any:
        self.asked("cat_file")
        return super().cat_file(path, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        self.asked("pipe_file")
        return super().pipe_file(path, value, mode, **options)


class WalkingFileSystem(CountingFileSystem):
    """Lists folder by folder and leaves out those whose listing fails, as many file systems of fsspec do."""

    protocol = "walking"

    def find(self, path: str, **options: Any) -> Any:
        return AbstractFileSystem.find(self, path, **options)


fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
fsspec.register_implementation("walking", WalkingFileSystem, clobber=True)


@pytest.fixture(params=["counting", "walking"])
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CheckpointFolder:
    """A folder in memory with checkpoint 1, which has 500 files of 5 servers, and the files of one that adds 5."""
    CountingFileSystem.store.clear()
    monkeypatch.setattr(CountingFileSystem, "requests", 0)
    monkeypatch.setattr(CountingFileSystem, "fails", frozenset())
    folder = CheckpointFolder(f"{request.param}://checkpoints")
    for identifier, count in (("00000001", 100), ("00000002", 1)):
        for server, number in product(range(5), range(count)):
            folder._filesystem.pipe_file(f"{folder._root}/{identifier}/ps-{server}/rows-{number}", b"rows")
    folder.write(manifest("00000001", ps_count=5, files=listed(100)))
    return folder


def listed(count: int, checkpoint: str = "") -> tuple[CheckpointFile, ...]:
    """The files of 5 servers, `count` of each."""
    return tuple(
        CheckpointFile(path=f"ps-{server}/rows-{number}", bytes=4, crc32=9, checkpoint=checkpoint)
        for server, number in product(range(5), range(count))
    )


def incremental(**changes: Any) -> CheckpointManifest:
    """The manifest of a checkpoint that builds on all files of checkpoint 1."""
    files = (*listed(1), *listed(100, "00000001"))
    return manifest("00000002", ps_count=5, format_version=2, files=files, **changes)


def requests(call: Callable[[], object]) -> int:
    before = CountingFileSystem.requests
    call()
    return CountingFileSystem.requests - before


def test_a_checkpoint_takes_no_more_requests_than_it_has_folders_and_a_few(stored: CheckpointFolder) -> None:
    assert requests(lambda: stored.read("00000001")) <= 5 + 3
    assert requests(lambda: stored.write(incremental())) <= 5 + 5
    assert requests(lambda: stored.read("00000002")) <= 2 * 5 + 4


def test_a_missing_folder_is_found_without_a_request_for_each_of_its_files(stored: CheckpointFolder) -> None:
    for path in [path for path in CountingFileSystem.store if "00000001/ps-3/" in path]:
        del CountingFileSystem.store[path]

    def read() -> None:
        with pytest.raises(DamagedCheckpointError, match="00000001/ps-3/rows-0: is missing"):
            stored.read("00000001")

    assert requests(read) <= 5 + 4


@pytest.mark.parametrize("fails", [{"find", "ls"}, {"find", "ls", "info"}, {"ls", "info"}])
def test_a_store_that_cannot_be_listed_damages_no_checkpoint(
    stored: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, fails: set[str]
) -> None:
    monkeypatch.setattr(CountingFileSystem, "fails", frozenset(fails))
    for call in (lambda: stored.read("00000001"), lambda: stored.write(incremental())):
        with suppress(OSError):  # raised where the file system says so, and passes
            call()
    monkeypatch.setattr(CountingFileSystem, "fails", frozenset())
    assert stored.read("00000001").number == 1


def test_a_file_that_a_listing_leaves_out_is_not_missing(
    stored: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(stored._filesystem), "find", lambda *_, **__: {})
    assert stored.read("00000001").number == 1
