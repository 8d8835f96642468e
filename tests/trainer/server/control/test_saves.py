"""A parameter server saves what a barrier settled, to a folder or to Redis, behind the training."""

import threading
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.trainer.server.control.conftest import CONTEXT, SECONDS, RefusedError, Server, barrier, ranges

from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Status
from emberscale_trainer.checkpoint import work
from emberscale_trainer.server.saves import FlashStore
from redis_process import FlashServer
from trained_run import TrainedRun


def test_a_checkpoint_is_saved_behind_the_training_and_loaded(server: Server, tmp_path: Path) -> None:
    run = TrainedRun(tmp_path / "run")
    server.job = run.job
    uri = str(run.checkpoint(1))
    reply = server.assign(2, uri)
    assert reply.done
    assert reply.loaded_bytes > 0
    assert reply.rows["user"] == 3000
    assert server.push(0, generation=2) is Status.OK
    server.hold(generation=2)
    server.settle(generation=2)
    assert ranges(server.snapshot(tmp_path / "new", generation=2)) == [[0, 1]]
    saved = server.saved(generation=2)
    assert saved.done
    assert saved.written_bytes == sum(file.bytes for file in saved.files)
    assert {Path(file.path).parent.name for file in saved.files} == {"ps-0"}


def test_saves_of_limited_bandwidth_share_it_and_others_do_not_wait(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def await_turn(_: work.Work, seconds: float) -> float:
        waits.append(seconds)
        return seconds

    monkeypatch.setattr(work.Work, "await_turn", await_turn)
    server.assign()
    longest, written = [], []
    for number, rate in enumerate((1, 0, 1), start=1):
        server.push(number)
        server.hold(number)
        server.settle(number)
        server.snapshot(tmp_path / f"{number:08}", number, bytes_per_second=rate)
        saved = server.saved(number)
        assert saved.done
        longest.append(max(waits, default=0.0))
        written.append(saved.written_bytes)
        waits.clear()
    assert 0.0 < longest[0] < written[0]
    assert longest[1] == 0.0
    assert longest[2] > written[0]


def test_a_save_of_limited_bandwidth_goes_on_at_full_speed_once_the_master_asks_for_that(
    server: Server, tmp_path: Path
) -> None:
    server.assign()
    server.push(0)
    server.hold()
    server.settle()
    server.snapshot(tmp_path / "one", bytes_per_second=1)
    assert not server.saved(wait=0).done
    assert server.saved(at_full_speed=True).done


def test_a_snapshot_holds_what_was_settled_and_its_answer_can_be_asked_for_again(
    server: Server, tmp_path: Path
) -> None:
    server.assign()
    server.push(0)
    assert server.hold() == [[0, 1]]
    pushed: list[Status] = []
    pushes = [threading.Thread(target=lambda batch=batch: pushed.append(server.push(batch))) for batch in (1, 2)]
    for thread in pushes:
        thread.start()
    assert server.settle(batches=(2,), wait=SECONDS) == [[0, 1, 2, 3]]
    assert ranges(server.snapshot(tmp_path / "one")) == [[0, 1, 2, 3]]
    for thread in pushes:
        thread.join(SECONDS)
    assert pushed == [Status.OK, Status.OK]
    assert ranges(server.snapshot(tmp_path / "one")) == [[0, 1, 2, 3]]
    assert server.saved().done


def test_the_master_hears_what_to_do_about_a_full_redis(tmp_path: Path) -> None:
    with FlashServer(tmp_path, maxmemory=1) as small:
        server = Server(FlashStore(small.url, "job-uid"))
        server.assign()
        server.push(0)
        server.hold()
        server.settle()
        request = master_pb2.SnapshotRequest(barrier=barrier(1), uri="flash-00000001", flash_bytes=1 << 30)
        server.control.Snapshot(request, CONTEXT)
        with pytest.raises(RefusedError, match=r"or lower spec\.checkpoint\.flash\.maxBytes") as full:
            server.saved()
        assert full.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_save_that_hangs_is_told_of_in_time_and_given_up_for_a_later_snapshot(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.assign()
    server.push(0)
    released = threading.Event()

    def open_file(self: MemoryFileSystem, path: str, *arguments: object, **options: object) -> NoReturn:
        released.wait(SECONDS)
        raise TimeoutError("the storage does not answer")

    monkeypatch.setattr(MemoryFileSystem, "open", open_file)
    server.hold()
    server.settle()
    server.snapshot("memory://checkpoints/one")
    assert not server.saved(wait=0.05).done
    server.hold(2)
    server.settle(2)
    server.snapshot(tmp_path / "two", 2)
    assert server.saved(2).done
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        server.saved(1)
    released.set()


def test_a_resume_gives_up_the_snapshot_of_its_barrier_and_no_later_one(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.assign()
    server.push(0)
    asked, released = threading.Event(), threading.Event()

    def open_file(self: MemoryFileSystem, path: str, *arguments: object, **options: object) -> NoReturn:
        asked.set()
        released.wait(SECONDS)
        raise TimeoutError("the storage does not answer")

    monkeypatch.setattr(MemoryFileSystem, "open", open_file)
    server.hold(2)
    server.settle(2)
    server.snapshot("memory://checkpoints/one", 2)
    assert asked.wait(SECONDS)
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(1)), CONTEXT)
    assert not server.saved(2, wait=0).done, "it goes on"
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(2)), CONTEXT)
    released.set()
    with pytest.raises(RefusedError, match="ABORTED"):
        server.saved(2)
    server.hold(3)
    server.settle(3)
    server.snapshot(tmp_path / "two", 3)
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(2)), CONTEXT)
    assert server.saved(3).done
