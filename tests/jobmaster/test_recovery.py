"""A parameter server is lost, or everything but a checkpoint is."""

import queue
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.fake_ps import FakePs, FaultError
from tests.jobmaster.small_job import TOKEN

from emberscale_api.checkpoint import CheckpointManifest, DamagedCheckpointError
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.effects import AssignCall, CallServer
from emberscale_jobmaster.events import Event, ServerFailed
from emberscale_jobmaster.parameter_servers import ServerChannels


def trains_to_the_end(cluster: Cluster, batches: int, epochs: int = 1) -> pb.JobStatus:
    status = cluster.completes()
    for server in cluster.servers:
        assert server.applied == {epoch: set(range(batches)) for epoch in range(epochs)}
    return status


@pytest.mark.parametrize("notice", ["exit", "registration", "silence"])
def test_a_lost_server_takes_all_back_to_the_last_checkpoint(cluster: Cluster, notice: str) -> None:
    is_silent = notice == "silence"  # a busy machine makes live members silent too, and they are lost again
    cluster.configure(checkpoint={"interval": 0.3}, sharding={"leaseTimeout": 1 if is_silent else 60})
    cluster.start_master()
    cluster.start_servers()
    last = threading.Event()
    for index in range(2):
        cluster.start_worker(index, records=1500, pace=0.01, last=last)
    cluster.until(lambda status: status.checkpoint and status.samples > 300, "a checkpoint")
    before = cluster.status()

    lost = cluster.kill_ps(1)
    if notice == "exit":
        cluster.caller().report_exit(lost, 137, "Killed")
    if is_silent:
        cluster.until(lambda status: status.generation > before.generation, "the loss")
    replacement = cluster.start_ps(1)
    last.set()

    status = trains_to_the_end(cluster, batches=150)
    assert status.recoveries >= 1 if is_silent else status.recoveries == 1
    assert status.samples == status.expected_samples == 1500
    loaded = replacement.assigned_from[0]
    assert loaded
    assert loaded in cluster.servers[0].assigned_from if is_silent else loaded == cluster.servers[0].assigned_from[-1]


def test_servers_that_die_while_they_are_assigned_are_waited_for(cluster: Cluster) -> None:
    cluster.start_master()
    second = cluster.start_ps(1)

    def die() -> None:
        cluster.caller().report_exit(pb.Member(role=pb.PS, index=1, incarnation=second.incarnation), 137, "Killed")

    second.faults["Assign"] = die
    first = cluster.start_ps(0)  # both are assigned from now on
    cluster.until(lambda status: status.message == "waiting for ps-1", "the loss")
    cluster.start_ps(1)
    cluster.start_worker(0, records=100)
    trains_to_the_end(cluster, batches=10)
    assert first.applied == {0: set(range(10))}


def test_a_job_resumes_from_its_checkpoint_with_an_empty_redis(cluster: Cluster) -> None:
    cluster.configure(training={"epochs": 2}, checkpoint={"interval": 0.3}, evaluation=40)
    cluster.start_master()
    cluster.start_servers()
    first = cluster.start_worker(0, records=500, evaluation=40, pace=0.01, last=threading.Event())

    def is_in_second_epoch(status: pb.JobStatus) -> bool:
        place = cluster.checkpoints / status.checkpoint / "manifest.json"
        return status.checkpoint != "" and CheckpointManifest.from_json(place.read_text(), str(place)).epoch == 1

    status = cluster.until(is_in_second_epoch, "a checkpoint in the second epoch")
    first.kill()
    cluster.stop_master()
    for index in range(2):
        cluster.kill_ps(index)

    newest = max(cluster.checkpoints.glob("*/manifest.json"))
    trained_before = CheckpointManifest.from_json(newest.read_text(), str(newest)).training_seconds

    cluster.uid = "another-uid"
    cluster.redis_is_empty()
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=500, evaluation=40)

    resumed = trains_to_the_end(cluster, batches=50, epochs=2)
    assert all(Path(ps.assigned_from[0]).name >= status.checkpoint for ps in cluster.servers)
    assert [result.epoch for result in resumed.evaluations] == [1, 2]
    assert resumed.checkpoint > status.checkpoint
    assert resumed.training_seconds >= trained_before > 0


def stopped_with_checkpoints(cluster: Cluster, wanted: int) -> list[Path]:
    """Trains until there are enough checkpoints, stops everything, and returns the checkpoints' folders."""
    cluster.configure(checkpoint={"interval": 0.2, "keep": wanted})
    cluster.start_master()
    cluster.start_servers()
    worker = cluster.start_worker(0, records=5000, pace=0.005, last=threading.Event())
    cluster.until(lambda status: status.checkpoint >= f"{wanted + 1:08d}", "checkpoints")
    cluster.stop_master()
    worker.kill()
    for index in range(2):
        cluster.kill_ps(index)
    cluster.redis_is_empty()
    return sorted(place.parent for place in cluster.checkpoints.glob("*/manifest.json"))


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(cluster: Cluster) -> None:
    *_, before, newest = stopped_with_checkpoints(cluster, wanted=2)
    (newest / "ps-1" / "applied.json").write_text("{}")
    cluster.start_master()
    cluster.start_servers()
    cluster.until_phase(pb.RESTORING, pb.PREPARING, pb.TRAINING)
    status = cluster.until(lambda status: status.checkpoint, "the assignment")
    assert status.checkpoint == before.name
    assert any("a damaged checkpoint was skipped" in warning and newest.name in warning for warning in status.warnings)
    assert all(Path(ps.assigned_from[-1]) == before for ps in cluster.servers)


def test_a_checkpoint_that_a_server_refuses_is_not_used_again(cluster: Cluster) -> None:
    *_, before, newest = stopped_with_checkpoints(cluster, wanted=2)
    refused: list[str] = []

    def refuse_once() -> None:
        if not refused:
            refused.append(newest.name)
            raise FaultError(grpc.StatusCode.DATA_LOSS, f"{newest}/ps-1/rows: checksum differs")

    cluster.start_master()
    cluster.start_ps(0)
    second = cluster.start_ps(1, faults={"Assign": refuse_once})
    status = cluster.until(lambda status: status.checkpoint, "the assignment")
    assert status.checkpoint == before.name
    assert [Path(uri) for uri in second.assigned_from] == [before]


def test_a_refusal_reaches_the_master_with_the_damaged_file() -> None:
    server, told = FakePs(0), queue.SimpleQueue[Event]()
    problem = DamagedCheckpointError("s3://b/Größe/00000001/ps-0/rows was altered", "s3://b/Größe/00000001/ps-0/rows")
    server.faults["Assign"] = Mock(side_effect=problem)
    channels = ServerChannels(TOKEN, None, "{}", str, told.put, time.monotonic)
    address = PsAddress(0, server.incarnation, "tcp://a", server.address)
    table = RoutingTable(1, 1, (address,), (0,) * BUCKETS, (0,) * DENSE_PIECES)
    channels.start(CallServer(1, 1, address, AssignCall(table, "s3://b/Größe/00000001", 1.0), 60.0))
    event = told.get(timeout=60)
    channels.forget(())
    server.stop()
    assert isinstance(event, ServerFailed)
    assert (event.code, event.problem, event.damaged_file) == ("DATA_LOSS", str(problem), problem.file)


def test_where_every_checkpoint_is_damaged_the_job_fails_and_names_them(cluster: Cluster) -> None:
    folders = stopped_with_checkpoints(cluster, wanted=2)
    for folder in folders:
        (folder / "manifest.json").write_text("{}")
    cluster.start_master()
    cluster.start_servers()
    status = cluster.until_phase(pb.FAILED)
    assert status.reason == "CheckpointDamaged"
    assert all(folder.name in status.message for folder in folders)


def test_a_checkpoint_of_another_batch_size_is_refused(cluster: Cluster) -> None:
    stopped_with_checkpoints(cluster, wanted=1)
    cluster.configure(training={"batchSize": 20})
    cluster.start_master()
    cluster.start_servers()
    status = cluster.until_phase(pb.FAILED)
    assert status.reason == "CheckpointIncompatible"
    assert "spec.training.batchSize must stay" in status.message


def test_data_that_changed_since_the_checkpoint_is_refused(cluster: Cluster) -> None:
    stopped_with_checkpoints(cluster, wanted=1)
    cluster.start_master()
    cluster.start_servers()
    worker = cluster.caller()
    worker.register()
    task = worker.acquire().task
    files = [pb.DataFile(uri="/data/day_0", bytes=3)]
    index = worker.acquire(pb.TaskResult(token=task.token, training_files=files)).task
    worker.acquire(pb.TaskResult(token=index.token, blocks=[pb.Block(length=3, records=5000)]), wait=0)
    status = cluster.until_phase(pb.FAILED)
    assert status.reason == "DataChanged"
    assert "/data/day_0 has 3 bytes, and had 1048576" in status.message


def test_a_model_that_a_server_cannot_make_fails_the_job_at_once(cluster: Cluster) -> None:
    def refuse() -> None:
        raise FaultError(grpc.StatusCode.INVALID_ARGUMENT, "spec.model.entrypoint: own:model: there is no module own")

    cluster.start_master()
    cluster.start_ps(0)
    cluster.start_ps(1, faults={"Assign": refuse})
    status = cluster.until_phase(pb.FAILED)
    assert status.reason == "ModelRefused"
    assert "there is no module own" in status.message
