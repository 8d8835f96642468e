"""Checkpoints against parameter servers that fail at every step, and what is left behind."""

import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fake_ps import FakePs, FaultError

from emberscale_api.checkpoint import CheckpointManifest
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.checkpoints import CheckpointFolder


def complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/manifest.json"))


def manifest(place: Path) -> CheckpointManifest:
    return CheckpointManifest.from_json(place.read_text(), str(place))


def snapshot_of(server: FakePs, place: Path) -> dict[int, set[int]]:
    """Returns the batches in a server's snapshot for a checkpoint."""
    return next(applied for uri, applied in server.snapshots.values() if Path(uri) == place.parent)


def after(calls: int, error: FaultError) -> Callable[[], None]:
    """Returns a fault of the first `calls` calls."""
    made: list[None] = []

    def fault() -> None:
        made.append(None)
        if len(made) <= calls:
            raise error

    return fault


def test_checkpoints_are_taken_behind_training_and_only_the_newest_kept(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.2, "keep": 2})
    cluster.start_master()
    cluster.start_servers()
    last = threading.Event()
    for index in range(2):
        cluster.start_worker(index, records=2000, pace=0.01, last=last)
    cluster.until(lambda status: status.checkpoint >= "00000002", "the second checkpoint; the last is the third")
    last.set()
    status = cluster.completes()
    places = complete(cluster.checkpoints)
    assert len(places) == 2
    assert places[-1].parent.name == status.checkpoint
    assert [ps.applied for ps in cluster.servers] == [{0: set(range(200))}] * 2
    assert sum(ps.repeated for ps in cluster.servers) == 0


def test_the_manifest_says_what_every_server_had_applied_at_the_barrier(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.3, "keep": 100})
    cluster.start_master()
    cluster.start_servers()
    last = threading.Event()
    for index in range(2):
        cluster.start_worker(index, records=1500, pace=0.01, last=last)
    cluster.until(lambda status: status.checkpoint, "a checkpoint")
    last.set()
    cluster.until_phase(pb.COMPLETE)
    places = complete(cluster.checkpoints)
    assert len(places) > 1
    for place in places:
        found = manifest(place)
        held = [snapshot_of(ps, place).get(0, set()) for ps in cluster.servers]  # the first may precede all batches
        said = {batch for entry in found.applied for first, stop in entry.ranges for batch in range(first, stop)}
        assert held == [said, said]
        assert (found.ps_count, found.batch_size, found.training_records) == (2, 10, 1500)
        assert {file.path for file in found.files} == {"ps-0/applied.json", "ps-1/applied.json"}
        assert [(file.uri, file.bytes) for file in found.training_files] == [("/data/day_0", 1 << 20)]


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> threading.Condition:
    """Is notified of every checkpoint that is removed after it was given up."""
    told, discard = threading.Condition(), CheckpointFolder.discard

    def tell(folder: CheckpointFolder, checkpoint: str) -> None:
        discard(folder, checkpoint)
        with told:
            told.notify_all()

    monkeypatch.setattr(CheckpointFolder, "discard", tell)
    return told


@pytest.mark.parametrize("step", ["Hold", "Settle", "Snapshot", "GetSaved"])
def test_a_server_that_fails_at_a_step_leaves_no_checkpoint_and_training_goes_on(
    cluster: Cluster, discarded: threading.Condition, step: str
) -> None:
    cluster.configure(checkpoint={"interval": 0.2})
    cluster.start_master()
    cluster.start_servers()
    failing = cluster.servers[1]
    failing.faults[step] = after(1000, FaultError(grpc.StatusCode.INTERNAL, "the disk is full"))
    cluster.start_worker(0, records=600, pace=0.01)
    cluster.until(lambda status: "the disk is full" in status.message, "the trouble in the status")
    assert complete(cluster.checkpoints) == []

    status = cluster.until_phase(pb.SAVING)

    assert failing.applied == {0: set(range(60))}
    for server in cluster.servers:
        server.until(lambda: "Resume" in server.steps, "the end of the barrier")  # noqa: B023
    assert complete(cluster.checkpoints) == []
    with discarded:
        assert discarded.wait_for(lambda: len(list(cluster.checkpoints.glob("*"))) <= 1, 60), "what was given up stays"
    del failing.faults[step]
    status = cluster.completes()
    assert complete(cluster.checkpoints)[-1].parent.name == status.checkpoint


def test_a_place_that_cannot_be_written_is_told_by_its_uri_and_tried_again(cluster: Cluster) -> None:
    blocked = cluster.folder / "a-file"
    blocked.write_text("not a folder")
    cluster.configure(checkpoint={"uri": str(blocked / "checkpoints")})
    cluster.start_master()
    cluster.start_servers()
    status = cluster.until(lambda status: status.reason == "CheckpointUnreachable", "the trouble in the status")
    assert str(blocked) in status.message
    blocked.unlink()
    cluster.start_worker(0, records=50)
    cluster.completes()


def test_a_batch_that_only_some_servers_have_is_settled_before_the_snapshot(cluster: Cluster) -> None:
    """A live worker's push has reached only one server when pushes are held; the barrier lets it reach the other."""
    cluster.configure(checkpoint={"interval": 0.2, "keep": 50}, worker={"replicas": 1})
    cluster.start_master()
    cluster.start_servers()
    first, second = cluster.servers
    first.faults["Hold"] = lambda: first.until(lambda: len(first.applied.get(0, ())) > 3, "some batches")
    last = threading.Event()
    cluster.start_worker(0, records=1000, pace=0.005, last=last)
    cluster.until(lambda status: status.checkpoint, "a checkpoint")
    last.set()
    cluster.until_phase(pb.COMPLETE)
    places = complete(cluster.checkpoints)
    assert len(places) > 1
    for place in places:
        assert snapshot_of(first, place) == snapshot_of(second, place)


@pytest.mark.parametrize("step", ["Settle", "Snapshot"])
def test_a_barrier_into_which_a_push_slips_is_void(cluster: Cluster, step: str) -> None:
    """One server releases the barrier and applies a push, while the other still holds."""
    cluster.configure(checkpoint={"interval": 0.2, "keep": 50}, worker={"replicas": 1})
    cluster.start_master()
    cluster.start_servers()
    first, second = cluster.servers
    slipped: list[int] = []

    def slip() -> None:
        if len(slipped) < 2:
            slipped.append(len(slipped))
            first.lapse()
            batch = max(first.applied.get(0, {0})) + 1
            first.apply(0, batch)

    second.faults[step] = slip
    cluster.start_worker(0, records=1000, pace=0.03)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.samples) == (pb.COMPLETE, 1000), status.message
    assert len(slipped) == 2
    for place in complete(cluster.checkpoints):
        assert snapshot_of(first, place) == snapshot_of(second, place)


@pytest.mark.parametrize("step", ["Hold", "Settle", "Snapshot"])
def test_an_answer_that_comes_after_the_barrier_lapsed_counts_for_nothing(cluster: Cluster, step: str) -> None:
    cluster.configure(checkpoint={"interval": 0.2, "keep": 50}, worker={"replicas": 1})
    cluster.start_master()
    cluster.start_servers()
    first, second = cluster.servers
    second.after[step] = lapses_twice(first)
    cluster.start_worker(0, records=1000, pace=0.03)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.samples) == (pb.COMPLETE, 1000), status.message
    for place in complete(cluster.checkpoints):
        assert snapshot_of(first, place) == snapshot_of(second, place)


def lapses_twice(server: FakePs) -> Callable[[], None]:
    """Lets a server's barrier lapse the first two times, and waits until a push gets through."""
    calls: list[None] = []

    def lapse() -> None:
        with server.lock:
            calls.append(None)
            server.lock.notify_all()
            if len(calls) <= 2:
                before = len(server.applied.get(0, ()))
                server.lapse()
                server.until(lambda: len(server.applied.get(0, ())) > before or len(calls) > 2, "a push", 20.0)

    return lapse


def test_no_server_holds_pushes_after_a_checkpoint_that_was_given_up(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.2})
    cluster.start_master()
    cluster.start_servers()
    cluster.servers[1].faults["Snapshot"] = after(2, FaultError(grpc.StatusCode.FAILED_PRECONDITION, "not held"))
    cluster.start_worker(0, records=800, pace=0.005)
    cluster.completes()
    assert [ps.holds for ps in cluster.servers] == [False, False]


def test_without_a_place_for_checkpoints_a_job_completes_all_the_same(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"uri": None})
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=50)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.checkpoint) == (pb.COMPLETE, "")


def test_checkpoints_at_the_interval_are_quantised_and_the_last_one_is_exact(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.2, "keep": 100, "quantization": 4})
    cluster.start_master()
    cluster.start_servers()
    last = threading.Event()
    cluster.start_worker(0, records=800, pace=0.01, last=last)
    cluster.until(lambda status: status.checkpoint, "a checkpoint at the interval")
    last.set()
    cluster.completes()
    *periodic, final = map(manifest, complete(cluster.checkpoints))
    assert periodic
    assert {(one.weight_bits, one.format_version) for one in periodic} == {(4, 4)}
    assert (final.weight_bits, final.format_version) == (0, 1)


def test_after_more_restores_than_its_bits_allow_a_job_takes_eight(cluster: Cluster) -> None:
    """This holds even after the ledger is lost: the manifest counts the restores of its rows."""
    cluster.configure(checkpoint={"interval": 0.2, "keep": 100, "quantization": "Auto"})
    cluster.start_master()
    cluster.start_servers()
    worker = cluster.start_worker(0, records=2000, pace=0.01, last=threading.Event())
    cluster.until(lambda status: status.checkpoint, "a checkpoint")
    cluster.caller().report_exit(cluster.kill_ps(1), 137, "Killed")
    cluster.start_ps(1)
    cluster.until(lambda _: bool(cluster.servers[0].assigned_from[-1]), "the restore")
    before = Path(cluster.servers[0].assigned_from[-1])
    assert (manifest(before / "manifest.json").weight_bits, manifest(before / "manifest.json").restores) == (2, {})
    cluster.until(lambda status: status.checkpoint > before.name, "a checkpoint after it")
    worker.kill()
    cluster.stop_master()
    for index in range(2):
        cluster.kill_ps(index)
    cluster.uid = "another-uid"
    cluster.redis_is_empty()
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=2000, pace=0.005)
    cluster.completes()
    found = [manifest(place) for place in complete(cluster.checkpoints)]
    assert {one.weight_bits for one in found if one.id <= before.name} == {2}
    assert {one.weight_bits for one in found[:-1] if one.id > before.name} == {8}
    assert (found[-1].weight_bits, found[-1].restores) == (0, {2: 1, 8: 1})
