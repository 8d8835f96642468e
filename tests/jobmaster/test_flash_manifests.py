"""The manifest of the newest flash checkpoint, against a real Redis: who may replace it, and when."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.jobmaster.small_job import job
from tests.jobmaster.test_checkpoints import manifest

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest
from emberscale_api.compatibility import FlashKeys
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_jobmaster.effects import FindCheckpoint, WriteManifest
from emberscale_jobmaster.events import CheckpointFound, Event, ManifestWritten, StorageFailed
from emberscale_jobmaster.flash_manifests import FlashManifests, FlashOutOfReachError
from emberscale_jobmaster.operations import Image
from emberscale_jobmaster.storage import CheckpointStorage
from emberscale_jobmaster.store import DeposedError
from emberscale_trainer.checkpoint import FlashUnusableError
from eventually import unwrap
from flash_checkpoints import Trained, complete, files_in, files_of, restored_once_complete
from redis_process import FlashServer

UID = "job"
KEYS = FlashKeys.of(UID)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlashServer]:
    with FlashServer(tmp_path_factory.mktemp("flash")) as server:
        yield server


@pytest.fixture
def server(running: FlashServer) -> FlashServer:
    running.client.flushall()
    return running


def checkpoint(number: int, *names: str) -> CheckpointManifest:
    """A flash checkpoint that consists of these files."""
    files = tuple(CheckpointFile(path=f"ps-0/{name}", bytes=1, crc32=0) for name in names)
    return manifest(f"{number:08d}", files=files).model_copy(update={"id": f"flash-{number:08d}"})


def nobody_else() -> None:
    """This master was not deposed."""


def newest(server: FlashServer) -> str:
    return unwrap(FlashManifests(server.url, UID).newest()).id


def test_a_manifest_replaces_the_one_before_and_removes_what_only_that_lists(server: FlashServer) -> None:
    for name in ("a.rows", "b.rows", "c.rows"):
        server.client.set(KEYS.of_file("", f"ps-0/{name}"), b"x")
    manifests = FlashManifests(server.url, UID)
    first, second = checkpoint(1, "a.rows", "b.rows"), checkpoint(2, "b.rows", "c.rows")
    assert manifests.write(first, nobody_else) is None
    before = unwrap(manifests.write(second, nobody_else))
    assert before.id == first.id
    manifests.remove_replaced(before, second)
    assert newest(server) == "flash-00000002"
    left = {key for key in server.client.scan_iter() if key.endswith(b".rows")}
    assert left == {KEYS.of_file("", f"ps-0/{name}").encode() for name in ("b.rows", "c.rows")}


def test_an_older_checkpoint_does_not_replace_a_newer_one(server: FlashServer) -> None:
    manifests = FlashManifests(server.url, UID)
    manifests.write(checkpoint(5), nobody_else)
    with pytest.raises(FlashOutOfReachError, match="flash-00000005"):
        manifests.write(checkpoint(4), nobody_else)
    assert newest(server) == "flash-00000005"


def test_a_master_that_is_overtaken_between_its_look_and_its_write_writes_nothing(server: FlashServer) -> None:
    """It was paused there; when it resumes, its successor has completed a newer checkpoint."""
    server.client.set(KEYS.of_file("", "ps-0/a.rows"), b"x")
    old, new = FlashManifests(server.url, UID), FlashManifests(server.url, UID)
    new.write(checkpoint(4, "a.rows"), nobody_else)
    with pytest.raises(FlashOutOfReachError, match="meanwhile"):
        old.write(checkpoint(5), lambda: new.write(checkpoint(6, "a.rows"), nobody_else))
    assert newest(server) == "flash-00000006"
    assert server.client.exists(KEYS.of_file("", "ps-0/a.rows"))


def test_a_master_learns_that_it_is_deposed_after_it_has_looked(server: FlashServer) -> None:
    """This holds even if its number is larger: Redis lost the end of the ledger, so numbers repeat."""

    def deposed() -> None:
        raise DeposedError("another master has started")

    manifests = FlashManifests(server.url, UID)
    manifests.write(checkpoint(5), nobody_else)
    with pytest.raises(DeposedError):
        manifests.write(checkpoint(6), deposed)
    assert newest(server) == "flash-00000005"


def test_a_garbled_manifest_is_replaced(server: FlashServer) -> None:
    server.client.set(KEYS.manifest, b"garbage")
    FlashManifests(server.url, UID).write(checkpoint(1), nobody_else)
    assert newest(server) == "flash-00000001"


def test_what_servers_have_left_that_are_gone_does_not_keep_redis_full(tmp_path: Path) -> None:
    keys, room = list(range(100_000)), 15 << 20  # the rows take 14.4 MB
    with FlashServer(tmp_path / "redis", maxmemory=20 << 20) as small:
        three = [Trained(small.url, index, 3, room, f"1-{index}") for index in range(3)]
        files = []
        for one in three:
            one.push(keys)
            files += one.save("flash-00000001")
        complete(small, "flash-00000001", 3, files)
        manifests = FlashManifests(small.url, UID)
        manifests.sweep((1, 2))
        assert files_in(small) == files_of("flash-00000001", files), "the manifest names them"

        alone = Trained(small.url, 0, 1, room, "2-0")
        alone.push(keys)
        for number in (2, 3):
            with pytest.raises(FlashUnusableError, match="full"):
                alone.save(f"flash-{number:08d}")
        manifests.sweep((1, 2))
        assert restored_once_complete(small, "flash-00000004", alone.save("flash-00000004")) == alone.contents()


class Ledger:
    """The master's store: `meanwhile` happens while it confirms that no other master has started."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = nobody_else

    def confirm(self) -> None:
        self.meanwhile()


class Storage:
    """A storage with both tiers, and the events that it reports."""

    def __init__(self, server: FlashServer, folder: Path) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.ledger = Ledger()
        store: Any = self.ledger
        self.storage = CheckpointStorage(
            CheckpointFolder(str(folder)),
            job(),
            UID,
            store,
            self.events.put,
            lambda: 1.0,
            FlashManifests(server.url, UID),
        )

    def does(self, effect: WriteManifest | FindCheckpoint) -> Event:
        self.storage.start(effect)
        return self.events.get(timeout=60)


def writes(number: int, operation: int) -> WriteManifest:
    return WriteManifest(
        operation=operation,
        serial=operation,
        checkpoint=f"flash-{number:08d}",
        image=Image(0, (), 1.5, 2, 3),
        servers=1,
        applied={0: ((0, 4),)},
        files=(CheckpointFile(path="ps-0/rows", bytes=4, crc32=9),),
        training_records=40,
        training_files=(),
        evaluation_files=(),
    )


def finds(operation: int, known: str = "") -> FindCheckpoint:
    return FindCheckpoint(operation=operation, serial=operation, refused=(), flash=known)


def test_a_manifest_that_is_late_for_a_restore_is_not_written(server: FlashServer, tmp_path: Path) -> None:
    """A parameter server dies at the moment of the write: the checkpoint that the restore found stays until loaded."""
    storage = Storage(server, tmp_path)
    assert isinstance(storage.does(writes(1, operation=1)), ManifestWritten)
    found = storage.does(finds(3, "flash-00000001"))
    assert isinstance(found, CheckpointFound)
    assert unwrap(found.source).checkpoint == "flash-00000001"
    late = storage.does(writes(2, operation=2))
    assert isinstance(late, StorageFailed)
    assert newest(server) == "flash-00000001"
    assert isinstance(storage.does(writes(4, operation=4)), ManifestWritten)


def test_a_restore_waits_for_the_manifest_that_is_being_written(
    server: FlashServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(server, tmp_path)
    storage.does(writes(1, operation=1))
    looks, goes_on = threading.Event(), threading.Event()

    def pauses() -> None:
        looks.set()
        assert goes_on.wait(60)

    storage.ledger.meanwhile = pauses
    storage.storage.start(writes(2, operation=2))
    assert looks.wait(60)
    turn, wanted = storage.storage._flash_turn, threading.Event()

    @contextmanager
    def told() -> Iterator[None]:
        wanted.set()
        with turn:
            yield

    monkeypatch.setattr(storage.storage, "_flash_turn", told())
    storage.storage.start(finds(3, "flash-00000001"))
    assert wanted.wait(60)
    assert storage.events.empty()
    goes_on.set()
    events = [storage.events.get(timeout=60), storage.events.get(timeout=60)]
    [found] = [event for event in events if isinstance(event, CheckpointFound)]
    assert unwrap(found.source).checkpoint == "flash-00000002"
    assert any(isinstance(event, ManifestWritten) for event in events)
