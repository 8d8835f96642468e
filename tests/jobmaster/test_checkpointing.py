"""Cuts against parameter servers that fail at every step, and what is left behind."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fakes import FaultError, wait_for

from emberscale_api.checkpoint import CheckpointManifest
from emberscale_api.rpc import master_pb2 as pb


def complete(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/manifest.json"))


def manifest(place: Path) -> CheckpointManifest:
    return CheckpointManifest.from_json(place.read_text(), str(place))


def after(calls: int, error: FaultError) -> Callable[[], None]:
    """A fault of the first `calls` calls."""
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
    for index in range(2):
        cluster.start_worker(index, records=2000, pace=0.01)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert status.phase == pb.COMPLETE, status.message
    places = complete(cluster.checkpoints)
    assert len(places) == 2
    assert places[-1].parent.name == status.checkpoint
    assert int(status.checkpoint) > 3
    assert [ps.applied for ps in cluster.servers] == [{0: set(range(200))}] * 2
    assert sum(ps.repeated for ps in cluster.servers) == 0


def test_the_manifest_says_what_every_server_had_applied_at_the_cut(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.3, "keep": 100})
    cluster.start_master()
    cluster.start_servers()
    for index in range(2):
        cluster.start_worker(index, records=1500, pace=0.01)
    cluster.until_phase(pb.COMPLETE)
    places = complete(cluster.checkpoints)
    assert len(places) > 1
    for place in places:
        found = manifest(place)
        held = [ps.cuts[found.cut][1].get(0, set()) for ps in cluster.servers]
        said = {batch for entry in found.applied for first, stop in entry.ranges for batch in range(first, stop)}
        assert held == [said, said]
        assert (found.ps_count, found.batch_size, found.training_records) == (2, 10, 1500)
        assert {file.path for file in found.files} == {"ps-0/applied.json", "ps-1/applied.json"}
        assert [(file.uri, file.bytes) for file in found.training_files] == [("/data/day_0", 1 << 20)]


@pytest.mark.parametrize("step", ["Freeze", "Cut", "AwaitSaved"])
def test_a_server_that_fails_at_a_step_leaves_no_checkpoint_and_training_goes_on(cluster: Cluster, step: str) -> None:
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
    assert "Thaw" in failing.steps
    assert "Thaw" in cluster.servers[0].steps
    assert complete(cluster.checkpoints) == []
    assert list(cluster.checkpoints.glob("*")) in ([], [*cluster.checkpoints.glob("*")][:1])
    del failing.faults[step]
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert status.phase == pb.COMPLETE, status.message
    assert [place.parent.name for place in complete(cluster.checkpoints)] == [status.checkpoint]


def test_a_job_whose_model_cannot_be_saved_fails_and_says_why(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    for server in cluster.servers:
        server.faults["AwaitSaved"] = after(1000, FaultError(grpc.StatusCode.INTERNAL, "the disk is full"))
    cluster.start_worker(0, records=50)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.reason) == (pb.FAILED, "CheckpointFailed")
    assert "the disk is full" in status.message
    assert complete(cluster.checkpoints) == []


def test_a_place_that_cannot_be_written_fails_the_job_by_its_uri(cluster: Cluster) -> None:
    blocked = cluster.folder / "a-file"
    blocked.write_text("not a folder")
    cluster.configure(checkpoint={"uri": str(blocked / "checkpoints")})
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=50)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert status.phase == pb.FAILED
    assert str(blocked) in status.message


def test_a_batch_that_only_some_servers_have_is_settled_before_the_cut(cluster: Cluster) -> None:
    """The push of a live worker has reached one server when pushes are held; the cut lets it through to the other."""
    cluster.configure(checkpoint={"interval": 0.2, "keep": 50}, worker={"replicas": 1})
    cluster.start_master()
    cluster.start_servers()
    first, second = cluster.servers
    first.faults["Freeze"] = lambda: wait_for(lambda: len(first.applied.get(0, ())) > 3, "some batches")
    cluster.start_worker(0, records=1000, pace=0.005)
    cluster.until_phase(pb.COMPLETE)
    for place in complete(cluster.checkpoints):
        number = manifest(place).cut
        assert first.cuts[number][1] == second.cuts[number][1]


def test_no_server_stays_frozen_after_a_cut_that_was_given_up(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"interval": 0.2})
    cluster.start_master()
    cluster.start_servers()
    cluster.servers[1].faults["Cut"] = after(2, FaultError(grpc.StatusCode.FAILED_PRECONDITION, "not settled"))
    cluster.start_worker(0, records=800, pace=0.005)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert status.phase == pb.COMPLETE, status.message
    assert [ps.frozen for ps in cluster.servers] == [None, None]


def test_without_a_place_for_checkpoints_a_job_completes_all_the_same(cluster: Cluster) -> None:
    cluster.configure(checkpoint={"uri": None})
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=50)
    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)
    assert (status.phase, status.checkpoint) == (pb.COMPLETE, "")
