"""The master's calls to a parameter server, with the messages of gRPC and a folder for checkpoints."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import grpc
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from prometheus_client import CollectorRegistry

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError
from emberscale_api.job import MOST_DOUBLE_PARITY_SERVERS, FaultToleranceStrategy, TrainingJob, resolve_model
from emberscale_api.routing import BUCKETS, DENSE_PIECES, piece_length
from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.checkpoint import AbandonedError, Work, work
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.server import sending
from emberscale_trainer.server.background import Background
from emberscale_trainer.server.control import ParameterServerControl
from emberscale_trainer.server.metrics import ServerMetrics
from emberscale_trainer.server.mover import RowMover
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.saves import FlashStore
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import listen
from eventually import unwrap
from flash_server import FlashServer
from master_stand_in import checkpoint_manifest
from moves import Gate
from trained_run import TrainedRun
from training_jobs import training_job
from waiting import Freed, noted_call

SECONDS = 60.0
COLUMNS = {"label": "y", "dense": ["a"], "categorical": ["user", "item/id"]}


class RefusedError(Exception):
    """A call was answered with an error."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code


class Context:
    """The part of a gRPC context that the methods use."""

    def __init__(self) -> None:
        self.metadata: dict[str, bytes] = {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self.metadata = dict(metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise RefusedError(code, details)


CONTEXT: Any = Context()


def make_job() -> TrainingJob:
    return training_job(
        data={"train": ["x"], "format": "Parquet", "columns": COLUMNS},
        model={"architecture": "DCNv2", "embeddings": {"dimension": 4}},
    )


class Server:
    """The only parameter server of a job, and the master's calls to it."""

    def __init__(self, flash: FlashStore | None = None) -> None:
        self.job = make_job()
        self.state = ServerState()
        self.mover = RowMover(self.state, "secret")
        metrics = ServerMetrics(self.state, self.mover.protection, CollectorRegistry())
        self.control = ParameterServerControl(0, "i", self.state, self.mover, metrics, flash)
        resolved = resolve_model(self.job.spec)
        parameters = len(flat_copy(build_model(self.job.spec.model, resolved, 0)))
        self.length = piece_length(parameters)

    def assign(self, generation: int = 1, checkpoint: str = "", wait: float = SECONDS) -> master_pb2.AssignReply:
        request = master_pb2.AssignRequest(
            routing=self.routing(generation, generation),
            manifest_json=self.job.to_json(),
            checkpoint_uri=checkpoint,
            wait_seconds=wait,
        )
        return self.control.Assign(request, CONTEXT)

    @staticmethod
    def routing(generation: int, version: int) -> master_pb2.Routing:
        return master_pb2.Routing(
            generation=generation,
            version=version,
            servers=[master_pb2.PsEndpoint(index=0, incarnation="i")],
            bucket_owners=[0] * BUCKETS,
            piece_owners=[0] * DENSE_PIECES,
        )

    def push(self, batch: int, generation: int = 1) -> Status:
        keys = np.array([batch, 1000 + batch, 5], np.int64)
        header = Header(Kind.PUSH, generation=generation, version=generation, batch=batch, tables=3)
        status = self.state.push(0, header, np.ones(3, np.uint32), keys, np.ones(8 + self.length, np.float32))
        self.state.complete(0, header)
        return status

    def hold(self, number: int = 1, generation: int = 1) -> list[list[int]]:
        return ranges(
            self.control.Hold(master_pb2.HoldRequest(barrier=barrier(number, generation), version=generation), CONTEXT)
        )

    def settle(self, number: int = 1, batches: tuple[int, ...] = (), wait: float = 0, generation: int = 1) -> Any:
        request = master_pb2.SettleRequest(barrier=barrier(number, generation), wait_seconds=wait)
        for batch in batches:
            request.settle.add(epoch=0, ranges=[batch, batch + 1])
        return ranges(self.control.Settle(request, CONTEXT))

    def snapshot(
        self, uri: Path | str, number: int = 1, generation: int = 1, bytes_per_second: int = 0
    ) -> master_pb2.SnapshotReply:
        request = master_pb2.SnapshotRequest(
            barrier=barrier(number, generation), uri=str(uri), bytes_per_second=bytes_per_second
        )
        return self.control.Snapshot(request, CONTEXT)

    def saved(self, number: int = 1, wait: float = SECONDS, generation: int = 1) -> master_pb2.GetSavedReply:
        request = master_pb2.GetSavedRequest(generation=generation, barrier=number, wait_seconds=wait, incarnation="i")
        return self.control.GetSaved(request, CONTEXT)


def barrier(number: int, generation: int = 1, meant: str = "i") -> master_pb2.Barrier:
    return master_pb2.Barrier(generation=generation, number=number, hold_seconds=SECONDS, incarnation=meant)


def ranges(reply: Any) -> list[list[int]]:
    return [list(epoch.ranges) for epoch in reply.applied]


@pytest.fixture
def server() -> Server:
    return Server()


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
    monkeypatch.setattr(work.Work, "pause", lambda _, seconds: waits.append(seconds))
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


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda server: server.settle(2), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.snapshot("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.settle(1, (7,)), grpc.StatusCode.DEADLINE_EXCEEDED),
        (lambda server: server.hold(2, generation=1), grpc.StatusCode.ABORTED),
        (lambda server: server.hold(2, generation=3), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.saved(1, generation=2), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.assign(1), grpc.StatusCode.ABORTED),
        (lambda server: server.assign(3, "/nowhere/at/all"), grpc.StatusCode.DATA_LOSS),
    ],
)
def test_what_cannot_be_done_has_a_status_of_its_own(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: Any, code: grpc.StatusCode
) -> None:
    monkeypatch.setattr(work, "MISSING_SECONDS", 0.0)
    server.assign(2)
    server.control.Hold(master_pb2.HoldRequest(barrier=barrier(1, 2), version=2), CONTEXT)
    settle = server.settle
    server.settle = lambda *arguments: settle(*arguments, generation=2)  # type: ignore[method-assign, misc]  # a default
    snapshot = server.snapshot
    server.snapshot = lambda uri: snapshot(uri, generation=2)  # type: ignore[method-assign, assignment, misc]  # same
    with pytest.raises(RefusedError) as refused:
        call(server)
    assert refused.value.code is code


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


def test_the_master_hears_what_to_do_about_a_full_redis(tmp_path: Path) -> None:
    small = FlashServer(tmp_path, maxmemory=1)
    try:
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
    finally:
        small.kill()


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


def test_a_switch_adopts_the_next_version(server: Server) -> None:
    server.assign()
    server.hold()
    server.settle()
    server.control.Prepare(
        master_pb2.PrepareRequest(move=1, since=1, routing=server.routing(1, 2), incarnation="i"), CONTEXT
    )
    request = master_pb2.SwitchRequest(barrier=barrier(1), move=1)
    for _ in range(2):
        server.control.Switch(request, CONTEXT)
        assert server.state.core.known == (1, 2)
    assert server.push(0) is Status.MOVED


def test_a_server_with_rows_of_a_bucket_that_returns_is_asked_again(server: Server) -> None:
    server.assign()
    for batch in range(20):
        server.push(batch)
    away, gate = server.routing(1, 2), Gate()
    away.servers.append(master_pb2.PsEndpoint(index=1, incarnation="i1"))
    away.bucket_owners[:] = [1] * BUCKETS
    with server.state.lock:
        server.state.protect_by(gate)
    server.control.Prepare(master_pb2.PrepareRequest(move=1, since=1, routing=away, incarnation="i"), CONTEXT)
    server.hold()
    server.settle()
    server.control.Switch(master_pb2.SwitchRequest(barrier=barrier(1), move=1), CONTEXT)
    assert gate.stopped.wait(SECONDS)
    back = master_pb2.PrepareRequest(move=2, since=2, routing=server.routing(1, 3), incarnation="i")
    assert not server.control.Prepare(back, CONTEXT).done
    gate.open.set()
    back.wait_seconds = SECONDS
    assert server.control.Prepare(back, CONTEXT).done
    assert not sum(server.state.figures().rows.values())


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


def test_what_is_meant_for_the_process_before_is_refused_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    """A successor may take over the address while a call is on its way."""
    control, before = server.control, barrier(1, meant="before")
    routing = server.routing(1, 1)
    routing.servers[0].incarnation = "before"
    assign = master_pb2.AssignRequest(routing=routing, manifest_json=server.job.to_json(), wait_seconds=SECONDS)
    with pytest.raises(RefusedError, match="'before' is meant, and this is 'i'"):
        control.Assign(assign, CONTEXT)
    assert server.state.core.known == (0, 0)
    server.assign()
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.Hold(master_pb2.HoldRequest(barrier=before), CONTEXT)
    assert server.push(0) is Status.OK, "nothing is held"
    server.hold()
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.Settle(master_pb2.SettleRequest(barrier=before), CONTEXT)
    server.settle()
    calls: list[tuple[Any, Any]] = [
        (control.Snapshot, master_pb2.SnapshotRequest(barrier=before, uri=str(tmp_path))),
        (control.Switch, master_pb2.SwitchRequest(barrier=before, move=1)),
        (control.Resume, master_pb2.ResumeRequest(barrier=before)),
    ]
    for call, request in calls:
        with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
            call(request, CONTEXT)
    server.snapshot(tmp_path)
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.GetSaved(master_pb2.GetSavedRequest(generation=1, barrier=1, incarnation="before"), CONTEXT)
    assert server.saved().done


def test_a_server_without_rows_joins_by_a_move_and_knows_what_is_applied(server: Server) -> None:
    prepare = master_pb2.PrepareRequest(
        move=1,
        routing=server.routing(2, 2),
        manifest_json=server.job.to_json(),
        wait_seconds=SECONDS,
        incarnation="i",
    )
    assert server.control.Prepare(prepare, CONTEXT).done
    assert server.state.core.known == (0, 0), "nothing is adopted before the switch"
    assert server.control.Copy(master_pb2.CopyRequest(move=1, incarnation="i"), CONTEXT).ready
    applied = [master_pb2.AppliedBatches(epoch=0, ranges=[0, 3])]
    pulls = [master_pb2.OutstandingPull(session=0, epoch=0, batch=3, batches=1)]
    switch = master_pb2.SwitchRequest(barrier=barrier(1, generation=2), move=1, applied=applied, pulls=pulls)
    for _ in range(2):
        assert ranges(server.control.Switch(switch, CONTEXT)) == [[0, 3]]
    assert server.state.core.known == (2, 2)
    assert server.push(3, generation=2) is Status.OK
    assert server.push(2, generation=2) is Status.REPEATED
    assert server.push(4, generation=2) is Status.REFRESH, "its pull was not handed over"


def test_a_server_that_joins_by_a_later_move_orders_though_the_call_of_the_one_before_is_late(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(move: int) -> None:
        request = master_pb2.PrepareRequest(
            move=move,
            routing=server.routing(2, 1 + move),
            manifest_json=server.job.to_json(),
            wait_seconds=SECONDS,
            incarnation="i",
        )
        with suppress(RefusedError):  # a later move ends an earlier one
            server.control.Prepare(request, CONTEXT)

    later, prepared = threading.Thread(target=prepare, args=(2,)), server.state.prepare

    def held_up(move: int, *arguments: Any, **options: Any) -> Transfer:
        transfer = prepared(move, *arguments, **options)
        if move == 1:
            later.start()
            later.join(0.5)  # it gets as far as it can
        return transfer

    monkeypatch.setattr(server.state, "prepare", held_up)
    prepare(1)
    later.join(SECONDS)
    server.control.Switch(master_pb2.SwitchRequest(barrier=barrier(1, generation=2), move=2), CONTEXT)
    assert server.state.core.known == (2, 3)
    assert server.state.core.orders


def test_parity_is_kept_while_the_master_says_so_where_the_manifest_leaves_it_open(server: Server) -> None:
    def assigned(
        generation: int, parity: int, servers: int = 3, *, no_parity: bool = False, async_parity: bool = False
    ) -> None:
        routing = server.routing(generation, generation)
        routing.servers.extend(
            master_pb2.PsEndpoint(index=index, incarnation=f"i{index}", data_address="127.0.0.1:1")
            for index in range(1, servers)
        )
        routing.bucket_owners[:servers] = range(servers)
        routing.piece_owners[:3] = range(3)
        request = master_pb2.AssignRequest(
            routing=routing,
            manifest_json=server.job.to_json(),
            wait_seconds=SECONDS,
            parity=parity,
            no_parity=no_parity,
            async_parity=async_parity,
        )
        assert server.control.Assign(request, CONTEXT).done

    protection = server.mover.protection
    assigned(1, 0)
    assert protection.group is None
    assigned(2, 1)
    assert unwrap(protection.group).members == (0, 1, 2)
    assert not unwrap(protection.group).is_async
    assigned(3, 0)
    assert protection.group is None
    spec = server.job.spec
    erasure_coding = spec.fault_tolerance.model_copy(update={"strategy": FaultToleranceStrategy.ERASURE_CODING})
    three = spec.ps.model_copy(update={"replicas": 3})
    manifest = spec.model_copy(update={"fault_tolerance": erasure_coding, "ps": three})
    server.job = server.job.model_copy(update={"spec": manifest})
    assigned(4, 0)
    assert protection.group is not None, "as the manifest says"
    assigned(5, 1, async_parity=True)
    assert unwrap(protection.group).is_async
    assigned(6, 0, no_parity=True)
    assert protection.group is None
    assigned(7, 2, servers=MOST_DOUBLE_PARITY_SERVERS + 1)
    assert protection.group is None, "a move may bring more servers than the code tells apart"


def test_a_master_that_does_not_know_async_rebuilds_nothing_from_parity_that_lags(server: Server) -> None:
    routing = server.routing(1, 1)
    routing.servers.add(index=1, incarnation="i1", data_address="127.0.0.1:1")
    routing.bucket_owners[0] = routing.piece_owners[0] = 1
    assign = master_pb2.AssignRequest(
        routing=routing, manifest_json=server.job.to_json(), wait_seconds=SECONDS, parity=1, async_parity=True
    )
    assert server.control.Assign(assign, CONTEXT).done
    routing.version = 2
    prepare = master_pb2.PrepareRequest(
        move=1, since=1, routing=routing, manifest_json=server.job.to_json(), incarnation="i", lost=[1]
    )
    with pytest.raises(RefusedError, match="this master would not know which"):
        server.control.Prepare(prepare, CONTEXT)
    prepare.knows_async_parity = True
    assert server.control.Prepare(prepare, CONTEXT).done


def test_rows_of_before_are_not_kept_by_a_move_whose_receiver_hangs(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job rolls back once the receiver is lost, and the server needs the memory for the rows that it loads."""
    monkeypatch.setattr(sending, "_STALLED_SECONDS", 1e6)
    server.assign()
    server.push(1)
    rows = Freed(segment for table in server.state.tables.slots for segment in table.segments)
    flushes = noted_call(monkeypatch, sending.RowSending, "_flush")
    hanging, address = listen(f"unix://{tmp_path}/hanging.sock")
    with hanging:
        routing = server.routing(1, 2)
        routing.servers.append(master_pb2.PsEndpoint(index=1, incarnation="i1", data_address=address))
        routing.bucket_owners[0] = routing.piece_owners[5] = 1
        server.control.Prepare(master_pb2.PrepareRequest(move=1, since=1, routing=routing, incarnation="i"), CONTEXT)
        assert not server.mover.copy(1, 0).ready
        assert flushes.wait(SECONDS)
        server.assign(generation=2)
        assert rows.wait()


def test_an_abandoned_move_is_not_switched(server: Server) -> None:
    server.assign()
    prepare = master_pb2.PrepareRequest(move=1, since=1, routing=server.routing(1, 2), incarnation="i")
    server.control.Prepare(prepare, CONTEXT)
    server.control.Abandon(master_pb2.AbandonRequest(move=1, incarnation="i"), CONTEXT)
    server.hold()
    server.settle()
    calls: list[tuple[Any, Any]] = [
        (server.control.Prepare, prepare),
        (server.control.Copy, master_pb2.CopyRequest(move=1, incarnation="i")),
        (server.control.HandOver, master_pb2.HandOverRequest(barrier=barrier(1), move=1)),
        (server.control.Switch, master_pb2.SwitchRequest(barrier=barrier(1), move=1)),
    ]
    for call, request in calls:
        with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
            call(request, CONTEXT)
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(1)), CONTEXT)
    assert server.push(0) is Status.OK


def test_a_resume_never_fails(server: Server) -> None:
    for generation in (1, 2):
        server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(5, generation)), CONTEXT)
    server.assign()
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(5)), CONTEXT)
    assert server.push(0) is Status.OK
