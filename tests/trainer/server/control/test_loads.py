"""A parameter server loads what the master assigns: how long it tries, and what the master hears of it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from fsspec.implementations.local import LocalFileSystem
from tests.trainer.server.control.conftest import CONTEXT, SECONDS, RefusedError, Server

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError
from emberscale_api.wire import Status
from emberscale_trainer.checkpoint import AbandonedError, Work, work
from emberscale_trainer.server.background import Background
from master_stand_in import checkpoint_manifest
from trained_run import TrainedRun


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Storage whose reads hang until the event is set."""
    released, opened = threading.Event(), LocalFileSystem.open

    def open_file(self: LocalFileSystem, path: str, *arguments: object, **options: object) -> object:
        released.wait(SECONDS)
        return opened(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    yield released
    released.set()


def test_an_assignment_from_nothing_serves(server: Server) -> None:
    reply = server.assign()
    assert reply.done
    assert dict(reply.rows) == {"user": 0, "item/id": 0}
    assert server.assign().done, "asked again, it attaches"
    assert server.push(0) is Status.OK
    with pytest.raises(RefusedError, match="ABORTED: the rows of generation 1 have trained on"):
        server.assign()
    assert server.state.core.known == (1, 1)


def test_the_master_hears_which_file_of_a_checkpoint_is_damaged(server: Server, tmp_path: Path) -> None:
    server.assign()
    server.push(0)
    server.hold()
    server.settle()
    server.snapshot(tmp_path)
    files = [CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in server.saved().files]
    (tmp_path / "manifest.json").write_text(checkpoint_manifest(files).to_json())
    damaged = tmp_path / "ps-0" / "applied.json"
    damaged.write_bytes(damaged.read_bytes()[::-1])
    with pytest.raises(RefusedError, match="checksum"):
        server.assign(2, str(tmp_path))
    assert CONTEXT.metadata == {"emberscale-damaged-file-bin": str(damaged).encode()}


def test_what_a_failed_load_still_reads_is_given_up() -> None:
    def load(work: Work) -> None:
        raise DamagedCheckpointError("a bit flipped")

    loading = Background("load", load)
    with pytest.raises(DamagedCheckpointError):
        loading.result(SECONDS)
    with pytest.raises(AbandonedError):
        loading.work.pause(SECONDS)


def test_a_load_that_hangs_is_told_of_in_time_and_given_up_for_a_later_assignment(
    server: Server, storage: threading.Event, tmp_path: Path
) -> None:
    storage.set()
    run = TrainedRun(tmp_path / "run")
    server.job = run.job
    uri = str(run.checkpoint(1))
    storage.clear()
    reply = server.assign(1, uri, wait=0.05)
    assert not reply.done
    assert server.assign(2, "", wait=SECONDS).done
    assert server.push(0, generation=2) is Status.OK
    storage.set()
    assert server.assign(3, uri).done
    with pytest.raises(RefusedError, match="ABORTED"):
        server.assign(1, uri)


def test_a_load_for_which_there_was_no_thread_begins_when_it_is_asked_for_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.assign(1).done

    def start(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            server.assign(2)
    assert server.assign(2).done
    assert server.push(0, generation=2) is Status.OK


def test_a_load_goes_on_after_errors_that_pass_and_says_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainedRun(tmp_path / "run")
    server.job = run.job
    uri = str(run.checkpoint(1))
    broken, opened = threading.Event(), LocalFileSystem.open
    broken.set()

    def open_file(self: LocalFileSystem, path: str, *arguments: object, **options: object) -> object:
        if broken.is_set():
            raise TimeoutError("the storage does not answer")
        return opened(self, path, *arguments, **options)

    monkeypatch.setattr(work, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(LocalFileSystem, "open", open_file)
    reply = server.assign(1, uri, wait=0)
    while "does not answer; trying again" not in reply.problem:
        reply = server.assign(1, uri, wait=0.01)
    assert not reply.done
    broken.clear()
    reply = server.assign(1, uri)
    assert reply.done
    assert reply.problem == ""
    assert reply.rows["user"] == 3000
