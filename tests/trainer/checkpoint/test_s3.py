"""Chains of checkpoints in a bucket of a real S3 server, with the failures of such servers and their networks.

s3fs and moto conflict with packages of the environment, so `make test-s3` installs them beside it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import numpy as np
import pytest
from tests.trainer.checkpoint.test_chain_damage import MODES, Life
from tests.trainer.checkpoint.test_chains import Server, files_of, restored

from emberscale_api.checkpoint import DamagedCheckpointError
from emberscale_api.job import IncrementalMode
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_trainer.checkpoint import StorageUnreachableError, Work, work
from emberscale_trainer.checkpoint.work import PATIENCE_SECONDS
from eventually import eventually
from master_stand_in import checkpoint_manifest

s3fs = pytest.importorskip("s3fs", reason="make test-s3 installs s3fs")
pytest.importorskip("moto", reason="make test-s3 installs moto")
from s3_server import BUCKET, S3Server  # noqa: E402  # which needs moto

CASES = int(os.environ.get("EMBERSCALE_DAMAGE_CASES", "6"))
KEYS = 40
STEP = 5


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    found = S3Server()
    yield found
    found.go_away()


@pytest.fixture
def place(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URI of an empty folder. The S3 client does not retry: the product does."""
    options = {
        "endpoint_url": server.url,
        "key": "k",
        "secret": "s",
        "config_kwargs": {"retries": {"total_max_attempts": 1}},
    }
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(work, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(work, "_LONGEST_PAUSE", 0.05)
    filesystem = fsspec.filesystem("s3")
    if not filesystem.exists(BUCKET):
        filesystem.mkdir(BUCKET)
    yield f"s3://{BUCKET}/{request.node.name}"
    server.faults.none()


def until_done(call: Callable[[], Any]) -> None:
    """Makes a call of the master to the storage, and repeats it as long as the storage fails."""
    Work().patiently("the folder", call)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_chain_restores_exactly_whatever_fails_on_the_way(place: str, server: S3Server, seed: int) -> None:
    random = np.random.default_rng(seed)
    life = Life(place, MODES[seed % len(MODES)], patience=PATIENCE_SECONDS)
    for _ in range(5):
        life.push(random.integers(0, KEYS, 6).tolist())
        server.faults.at_random(random, share=0.08)
        save(life)
        server.faults.none()
        assert life.newest() == (f"{life.number:08}", {})
    assert server.faults.seen


def save(life: Life) -> None:
    """Saves as `Life.save` does, and retries each step of the master as a whole."""
    write, prune = life.folder.write, life.folder.prune
    folder = life.folder
    folder.write = lambda manifest: until_done(lambda: write(manifest))  # type: ignore[method-assign]
    folder.prune = lambda keep, damaged=(): until_done(lambda: prune(keep, damaged))  # type: ignore[method-assign]
    try:
        life.save()
    finally:
        folder.write, folder.prune = write, prune  # type: ignore[method-assign]


def test_a_death_at_any_request_loses_nothing_of_the_newest_complete_checkpoint(place: str, server: S3Server) -> None:
    """The process dies once at every fifth request of a checkpoint, and of the removal of earlier ones."""
    life, random, newest = Life(place, IncrementalMode.ONE_SHOT, keep=1), np.random.default_rng(7), ""
    dead = 0
    while True:
        life.push(random.integers(0, KEYS, 5).tolist())
        server.faults.after(dead)
        try:
            life.save()
        except Exception:  # noqa: BLE001  # the library behind S3 has errors of its own
            server.faults.none()
            after, refused = life.newest()
            assert not refused
            assert after in (newest, f"{life.number:08}")
            life.all_die(after)
        else:
            break
        life.push(random.integers(0, KEYS, 5).tolist())
        life.save()
        newest = f"{life.number:08}"
        dead += STEP
    assert dead > 5 * STEP


def test_writing_and_reading_go_on_when_the_store_comes_back(place: str, server: S3Server) -> None:
    one = Server(1, 0)
    one.push(list(range(KEYS)))
    expected = one.contents()
    folder, begun = f"{place}/00000001", one.begin("")
    written = while_away(server, lambda progress: one.write(begun, folder, work=progress))
    CheckpointFolder(place).write(checkpoint_manifest(written))
    assert while_away(server, lambda progress: restored(folder, 2, progress)) == expected


def while_away(server: S3Server, call: Callable[[Work], Any]) -> Any:
    """Begins a call while the server is away; returns its result."""
    progress, found = Work(), []
    server.go_away()
    caller = threading.Thread(target=lambda: found.append(call(progress)))
    caller.start()
    eventually(lambda: "trying again" in progress.problem)
    server.come_back()
    caller.join()
    assert progress.problem == ""
    return found[0]


def test_a_store_that_stays_away_is_unreachable_and_not_damaged(place: str, server: S3Server) -> None:
    life = Life(place, IncrementalMode.ONE_SHOT)
    life.save()
    server.go_away()
    try:
        with pytest.raises(StorageUnreachableError, match=r"00000001/manifest\.json"):
            restored(life.folder.uri_of("00000001"), 1, Work(patience_seconds=0.2))
        with pytest.raises(StorageUnreachableError, match="00000002/ps-0/"):
            life.save()
    finally:
        server.come_back()
    assert life.newest() == ("00000001", {})


def test_a_changed_byte_refuses_what_needs_it_and_nothing_else(place: str) -> None:
    life = Life(place, IncrementalMode.CONSECUTIVE, keep=3)
    for keys in ([1, 2, 3], [4], [5]):
        life.push(keys)
        life.save()
    filesystem = fsspec.filesystem("s3")
    newest = files_of(life.folder.uri_of("00000003")).manifest
    own = next(file for file in newest.files if not file.checkpoint and file.path.endswith(".rows"))
    victim = f"{life.folder.uri_of('00000003')}/{own.path}"
    content = bytearray(filesystem.cat_file(victim))
    content[len(content) // 2] ^= 4
    filesystem.pipe_file(victim, bytes(content))
    found, refused = life.newest()
    assert found == "00000002"
    assert victim in refused["00000003"]


def test_of_two_masters_that_complete_a_checkpoint_of_one_id_the_first_does(place: str) -> None:
    folder = CheckpointFolder(place)
    fsspec.filesystem("s3").pipe_file(f"{place}/00000001/ps-0/applied.json", b"{}")
    folder.write(checkpoint_manifest(job_uid="one"))
    folder.write(checkpoint_manifest(job_uid="one"))  # the answer to the first attempt was lost
    with pytest.raises(FileExistsError, match=r"00000001/manifest\.json was written by another"):
        CheckpointFolder(place).write(checkpoint_manifest(job_uid="other"))
    assert folder.read("00000001").job_uid == "one"


def test_a_store_without_conditions_gets_the_manifest_all_the_same(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = fsspec.filesystem("s3")
    filesystem.pipe_file(f"{place}/00000001/ps-0/applied.json", b"{}")
    call = type(filesystem)._call_s3

    async def refusing(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if "IfNoneMatch" in options:
            raise OSError(38, "A header you provided implies functionality that is not implemented")
        return await call(self, method, *arguments, **options)

    monkeypatch.setattr(type(filesystem), "_call_s3", refusing)
    CheckpointFolder(place).write(checkpoint_manifest())
    assert CheckpointFolder(place).complete() == ["00000001"]


def test_a_truncated_object_is_refused_by_name(place: str) -> None:
    life = Life(place, IncrementalMode.ONE_SHOT)
    life.push([1])
    life.save()
    victim = f"{life.folder.uri_of('00000001')}/ps-0/partition.json"
    fsspec.filesystem("s3").pipe_file(victim, b"{}")
    with pytest.raises(DamagedCheckpointError, match=r"ps-0/partition\.json: has 2 bytes"):
        life.folder.read("00000001")
