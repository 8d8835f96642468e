import threading

from tests.jobmaster.conftest import Cluster

from emberscale_api.checkpoint import CheckpointManifest
from emberscale_api.rpc import master_pb2 as pb


def suspend(cluster: Cluster) -> str:
    return cluster.caller().stub.Suspend(pb.SuspendRequest(), timeout=60).checkpoint


def test_a_suspended_job_rests_at_a_checkpoint_of_now_and_goes_on_from_it(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    last = threading.Event()
    workers = [cluster.start_worker(index, records=1000, pace=0.01, last=last) for index in range(2)]
    cluster.until(lambda status: status.samples > 200, "some progress")

    checkpoint = suspend(cluster)

    status = cluster.status()
    assert status.phase == pb.SUSPENDED
    assert status.checkpoint == checkpoint != ""
    held = CheckpointManifest.from_json((cluster.checkpoints / checkpoint / "manifest.json").read_bytes(), checkpoint)
    (applied,) = held.applied
    assert status.samples == held.batch_size * sum(stop - start for start, stop in applied.ranges)
    for worker in workers:
        worker.join()
    cluster.stop_master()
    for index in range(2):
        cluster.kill_ps(index)
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=1000)
    cluster.completes()
    assert all(ps.assigned_from == [str(cluster.checkpoints / checkpoint)] for ps in cluster.servers)
    assert all(ps.applied == {0: set(range(100))} for ps in cluster.servers)


def test_a_job_that_has_not_begun_is_suspended_at_once(cluster: Cluster) -> None:
    cluster.start_master()
    assert suspend(cluster) == ""
    assert cluster.status().phase == pb.SUSPENDED


def test_a_job_that_is_over_stays_what_it_is(cluster: Cluster) -> None:
    cluster.start_master()
    cluster.start_servers()
    cluster.start_worker(0, records=50)
    done = cluster.until_phase(pb.COMPLETE)
    assert suspend(cluster) == done.checkpoint
    assert cluster.status().phase == pb.COMPLETE
