"""The checkpoint folder at the master's edge: a call that hangs blocks no other, and a passing error is no damage."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.jobmaster.driven import Driven
from tests.jobmaster.scenario import describe
from tests.jobmaster.small_job import job
from tests.jobmaster.test_checkpoints import complete, manifest

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_api.origin import RefusedCheckpoint
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_jobmaster.effects import (
    DeleteCheckpoint,
    FindCheckpoint,
    InitialWanted,
    PruneCheckpoints,
    WriteManifest,
)
from emberscale_jobmaster.events import CheckpointFound, Event, ManifestWritten, PruningDone, StorageFailed
from emberscale_jobmaster.initial import InitialFolder
from emberscale_jobmaster.operations import Image
from emberscale_jobmaster.storage import CheckpointStorage
from emberscale_jobmaster.store import DeposedError
from eventually import unwrap


class LibraryError(Exception):
    """Stands for the error of a library behind a file system."""


class MoodyFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """In memory; a call hangs or fails if the test says so."""

    protocol = "moody"
    store: dict[str, Any] = {}  # noqa: RUF012  # as MemoryFileSystem has it
    pseudo_dirs = [""]  # noqa: RUF012
    moods: dict[str, Any] = {}  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._mood("write")
        super().pipe_file(path, value, mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._mood("read")
        content: bytes = super().cat_file(path, start, end, **options)
        return content

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._mood("list")
        return super().ls(path, detail, **options)

    def _mood(self, call: str) -> None:
        mood = self.moods.get(call)
        if isinstance(mood, threading.Event):
            mood.wait(30)
        elif mood is not None:
            raise mood


fsspec.register_implementation("moody", MoodyFileSystem, clobber=True)


class NoStore:
    """Nobody deposes this master."""

    def confirm(self) -> None:
        pass


class Stored:
    """A storage, and the events that it reports."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.folder = CheckpointFolder("moody://checkpoints")
        store: Any = NoStore()
        self.storage = CheckpointStorage(self.folder, job(), "uid", store, self.events.put, now=lambda: 1.0)

    def event(self) -> Event:
        return self.events.get(timeout=60)


@pytest.fixture
def stored() -> Iterator[Stored]:
    MoodyFileSystem.store.clear()
    MoodyFileSystem.pseudo_dirs[:] = [""]
    MoodyFileSystem.moods.clear()
    yield Stored()
    for mood in MoodyFileSystem.moods.values():
        if isinstance(mood, threading.Event):
            mood.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint-storage":  # what hung would write into the next test's folder
            thread.join(60)


def write(checkpoint: str = "00000001", serial: int = 1) -> WriteManifest:
    filesystem, path = fsspec.core.url_to_fs(f"moody://checkpoints/{checkpoint}")
    filesystem.makedirs(path, exist_ok=True)
    return WriteManifest(
        operation=1,
        serial=serial,
        checkpoint=checkpoint,
        image=Image(0, (), 1.5, 2, 3),
        servers=1,
        applied={0: ((0, 4),)},
        files=(CheckpointFile(path="ps-0/rows", bytes=4, crc32=9),),
        training_records=40,
        training_files=(("/day", 5),),
        evaluation_files=(),
    )


def test_a_call_that_hangs_holds_up_no_other(stored: Stored) -> None:
    MoodyFileSystem.moods["write"] = threading.Event()
    stored.storage.start(write())
    stored.storage.start(PruneCheckpoints(operation=2, serial=2, keep=1, damaged=()))
    stored.storage.start(FindCheckpoint(operation=3, serial=3, refused=()))
    told = {type(stored.event()), type(stored.event())}
    assert told == {PruningDone, CheckpointFound}
    MoodyFileSystem.moods["write"].set()
    assert stored.event() == ManifestWritten(now=1.0, operation=1, serial=1)


def test_where_everything_hangs_further_calls_fail_at_once(stored: Stored) -> None:
    MoodyFileSystem.moods["write"] = threading.Event()
    for serial in range(32):
        stored.storage.start(write(serial=serial))
    stored.storage.start(write(serial=99))
    event = stored.event()
    assert isinstance(event, StorageFailed)
    assert event.serial == 99
    assert "earlier calls have not returned" in event.problem


class NoCredentialsError(Exception):
    """Named like botocore's error; botocore is not among the project's packages."""


def test_missing_credentials_are_told_with_what_to_do(stored: Stored) -> None:
    MoodyFileSystem.moods["list"] = NoCredentialsError("Unable to locate credentials")
    stored.storage.start(FindCheckpoint(operation=1, serial=1, refused=()))
    event = stored.event()
    assert isinstance(event, StorageFailed)
    assert event.lacks_credentials
    assert event.problem == (
        "spec.checkpoint.uri (moody://checkpoints) cannot be used: NoCredentialsError: Unable to locate credentials; "
        "give all roles credentials of the store, in a TrainingJob by env or serviceAccountName"
    )


def test_a_job_without_credentials_fails_before_it_begins_and_later_waits() -> None:
    def without_credentials(*, trained: bool) -> Driven:
        driven = Driven()
        if trained:
            driven.start()
            driven.train(4)
            driven.kill(Role.PS, 1)
        driven.storage.behaviour = "lacks credentials"
        driven.join(Role.PS, 1) if trained else driven.start()
        return driven

    new = without_credentials(trained=False)
    new.pass_time(20)
    assert new.job.outcome is None, "credentials may come late"
    new.pass_time(20)
    assert unwrap(new.job.outcome).reason == "CredentialsMissing"
    late = without_credentials(trained=False)
    late.pass_time(20)
    late.storage.behaviour = "works"
    late.pass_time(20)
    assert late.job.routing.ready
    old = without_credentials(trained=True)
    old.pass_time(60)
    assert old.job.outcome is None
    old.storage.behaviour = "works"
    old.pass_time(60)
    old.train_all()
    old.pass_time(5)
    assert "Completed" in describe(old)


@pytest.mark.parametrize("call", ["list", "read"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(stored: Stored, call: str) -> None:
    complete(stored.folder, "00000001")
    MoodyFileSystem.moods[call] = OSError("503 Slow Down")
    stored.storage.start(FindCheckpoint(operation=1, serial=1, refused=()))
    event = stored.event()
    assert isinstance(event, StorageFailed)
    assert event.problem == "spec.checkpoint.uri (moody://checkpoints) cannot be used: OSError: 503 Slow Down"
    MoodyFileSystem.moods.clear()
    stored.storage.start(FindCheckpoint(operation=1, serial=2, refused=()))
    found = stored.event()
    assert isinstance(found, CheckpointFound)
    assert (unwrap(found.source).checkpoint, found.damaged) == ("00000001", {})


def test_the_newest_sound_checkpoint_is_found_and_damaged_ones_are_named(stored: Stored) -> None:
    for number in (1, 2, 3, 4):
        complete(stored.folder, f"{number:08d}")
    filesystem, root = fsspec.core.url_to_fs("moody://checkpoints")
    path = f"{root}/00000003/manifest.json"
    filesystem.pipe_file(path, filesystem.cat_file(path).replace(b'"epoch": 1', b'"epoch": 2', 1))
    stored.storage.start(FindCheckpoint(operation=1, serial=1, refused=("00000004",)))
    found = stored.event()
    assert isinstance(found, CheckpointFound)
    assert (unwrap(found.source).checkpoint, found.newest, list(found.damaged)) == ("00000002", 4, ["00000003"])


def test_a_save_of_priority_rows_counts_for_the_newest_number_and_is_no_checkpoint(stored: Stored) -> None:
    complete(stored.folder, "00000001")
    filesystem, path = fsspec.core.url_to_fs("moody://checkpoints/priority-00000007")
    filesystem.makedirs(path)
    stored.storage.start(FindCheckpoint(operation=1, serial=1, refused=()))
    found = stored.event()
    assert isinstance(found, CheckpointFound)
    assert (unwrap(found.source).checkpoint, found.newest) == ("00000001", 7)


def test_a_manifest_reads_back_with_everything_that_the_master_knew(stored: Stored) -> None:
    stored.storage.start(write("00000007"))
    stored.event()
    filesystem, root = fsspec.core.url_to_fs("moody://checkpoints")
    text = filesystem.cat_file(f"{root}/00000007/manifest.json")
    found = type(manifest("00000007")).from_json(text, "it")
    assert (found.id, found.number, found.generation, found.routing_version) == ("00000007", 7, 2, 3)
    assert [(entry.epoch, entry.ranges) for entry in found.applied] == [(0, ((0, 4),))]
    assert [(file.path, file.bytes, file.crc32) for file in found.files] == [("ps-0/rows", 4, 9)]


def test_servers_of_an_earlier_version_quantise_no_checkpoint_that_nobody_could_read(stored: Stored) -> None:
    file = CheckpointFile(path="ps-0/table-0-0.q4", bytes=4, crc32=9)
    stored.storage.start(replace(write("00000007"), files=(file,)))
    event = stored.event()
    assert isinstance(event, StorageFailed)
    assert "ps-0/table-0-0.q4" in event.problem
    assert "give all processes of the job one image" in event.problem
    assert stored.folder.complete() == []


def test_a_checkpoint_that_came_to_nothing_is_removed(tmp_path: Path) -> None:
    events: queue.Queue[Event] = queue.Queue()
    folder = CheckpointFolder(str(tmp_path))
    (tmp_path / "00000003" / "ps-0").mkdir(parents=True)
    store: Any = NoStore()
    storage = CheckpointStorage(folder, job(), "uid", store, events.put, now=lambda: 1.0)
    storage.start(DeleteCheckpoint("00000003"))
    storage.start(FindCheckpoint(operation=1, serial=1, refused=()))
    found = events.get(timeout=60)
    assert isinstance(found, CheckpointFound)
    assert found.source is None


def test_a_checkpoint_that_is_complete_after_all_stays(tmp_path: Path) -> None:
    """A master wrote its manifest within its last second, and the state of that second is lost."""
    events: queue.Queue[Event] = queue.Queue()
    folder = CheckpointFolder(str(tmp_path))
    complete(folder, "00000003")
    store: Any = NoStore()
    storage = CheckpointStorage(folder, job(), "uid", store, events.put, now=lambda: 1.0)
    storage.start(DeleteCheckpoint("00000003"))
    for thread in threading.enumerate():
        if thread.name == "checkpoint-storage":
            thread.join(60)
    assert folder.complete() == ["00000003"]


@pytest.mark.parametrize("effect", [PruneCheckpoints(1, 1, keep=1, damaged=()), DeleteCheckpoint("00000001")])
def test_a_master_that_was_deposed_removes_nothing(tmp_path: Path, effect: PruneCheckpoints | DeleteCheckpoint) -> None:
    """It may have slept since it decided to; its successor may know by now that the newest checkpoint is damaged."""

    class Deposed:
        def confirm(self) -> None:
            raise DeposedError("another master has started")

    folder = CheckpointFolder(str(tmp_path))
    (tmp_path / "00000001" / "ps-0").mkdir(parents=True)
    complete(folder, "00000002")
    store: Any = Deposed()
    storage = CheckpointStorage(folder, job(), "uid", store, lambda _: None, now=lambda: 1.0)
    storage.start(effect)
    for thread in threading.enumerate():
        if thread.name == "checkpoint-storage":
            thread.join(60)
    assert folder.folders() == ["00000001", "00000002"]


class TestAnotherJobsCheckpoints:
    """`spec.checkpoint.initialFrom`, in a folder where checkpoints are complete but have no files."""

    def storage(self, own: str | None = "moody://own") -> tuple[CheckpointStorage, "queue.Queue[Event]"]:
        events: queue.Queue[Event] = queue.Queue()
        store: Any = NoStore()
        this = job(checkpoint={"initialFrom": {"uri": "moody://checkpoints"}})
        folder = None if own is None else CheckpointFolder(own)
        initial = InitialFolder.of(this)
        return CheckpointStorage(folder, this, "uid", store, events.put, lambda: 1.0, None, initial), events

    def found(self, wanted: InitialWanted | None, own: str | None = "moody://own") -> Event:
        storage, events = self.storage(own)
        storage.start(FindCheckpoint(operation=1, serial=1, refused=(), initial=wanted))
        return events.get(timeout=60)

    @pytest.mark.parametrize("own", ["moody://own", None])
    def test_a_job_without_a_checkpoint_starts_from_another_jobs(self, stored: Stored, own: str | None) -> None:
        complete(stored.folder, "00000004")
        event = self.found(InitialWanted(), own)
        assert isinstance(event, CheckpointFound)
        source = unwrap(event.source)
        assert (source.checkpoint, source.initial, source.anew) == ("moody://checkpoints/00000004", True, True)
        assert source.own_checkpoint == ""

    def test_a_checkpoint_that_was_refused_before_is_not_reported_again(self, stored: Stored) -> None:
        for identifier in ("00000004", "00000005", "00000006"):
            complete(stored.folder, identifier)
        filesystem, path = fsspec.core.url_to_fs("moody://checkpoints/00000005/manifest.json")
        filesystem.pipe_file(path, b"{}")
        event = self.found(InitialWanted(refused={"moody://checkpoints/00000006": RefusedCheckpoint("a bit flipped")}))
        assert isinstance(event, CheckpointFound)
        assert unwrap(event.source).checkpoint == "moody://checkpoints/00000004"
        assert list(event.damaged) == ["moody://checkpoints/00000005"]

    def test_only_a_restore_takes_it(self, stored: Stored) -> None:
        complete(stored.folder, "00000004")
        event = self.found(None)
        assert isinstance(event, CheckpointFound)
        assert event.source is None

    def test_its_own_checkpoint_wins_even_if_it_is_damaged(self, stored: Stored) -> None:
        complete(stored.folder, "00000004")
        own = CheckpointFolder("moody://own")
        complete(own, "00000002")
        filesystem, path = fsspec.core.url_to_fs("moody://own/00000002/manifest.json")
        filesystem.pipe_file(path, b"{}")
        event = self.found(InitialWanted())
        assert isinstance(event, CheckpointFound)
        assert event.source is None
        assert list(event.damaged) == ["00000002"]

    def test_what_keeps_the_job_from_it_is_told(self, stored: Stored) -> None:
        event = self.found(InitialWanted())
        assert isinstance(event, CheckpointFound)
        assert event.unusable == "spec.checkpoint.initialFrom.uri: moody://checkpoints holds no complete checkpoint"

    @pytest.mark.parametrize("kind", [OSError, LibraryError])
    def test_a_folder_that_cannot_be_read_is_named(self, stored: Stored, kind: type[Exception]) -> None:
        complete(stored.folder, "00000004")
        MoodyFileSystem.moods["read"] = kind("503 Slow Down")
        event = self.found(InitialWanted())
        assert isinstance(event, StorageFailed)
        assert event.problem == (
            f"spec.checkpoint.initialFrom.uri (moody://checkpoints) cannot be used: {kind.__name__}: 503 Slow Down"
        )

    def test_a_defect_ends_the_job_in_one_line_and_leaves_its_traceback_in_the_log(
        self, stored: Stored, capsys: pytest.CaptureFixture[str]
    ) -> None:
        complete(stored.folder, "00000004")
        MoodyFileSystem.moods["read"] = KeyError("applied")
        event = self.found(InitialWanted())
        assert isinstance(event, CheckpointFound)
        assert event.unusable == (
            "spec.checkpoint.initialFrom.uri (moody://checkpoints) cannot be used: KeyError: 'applied'; this is a "
            "defect: report it with the log of the master"
        )
        logged = capsys.readouterr()
        assert "Traceback" in logged.out + logged.err
