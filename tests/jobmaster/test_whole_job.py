from tests.jobmaster.conftest import Cluster

from emberscale_api.rpc import master_pb2 as pb


def test_a_job_trains_every_batch_once_and_completes(cluster: Cluster) -> None:
    cluster.configure(training={"epochs": 2})
    cluster.start_master()
    cluster.start_servers()
    workers = [cluster.start_worker(index, records=403) for index in range(2)]

    status = cluster.until_phase(pb.COMPLETE, pb.FAILED)

    assert status.phase == pb.COMPLETE, status.message
    assert (status.samples, status.expected_samples) == (806, 806)
    for server in cluster.servers:
        assert server.applied == {0: set(range(41)), 1: set(range(41))}
        assert server.repeated == 0
    for worker in workers:
        worker.join()
    assert (cluster.checkpoints / status.checkpoint / "manifest.json").exists()
