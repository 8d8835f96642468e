import grpc
import pytest
from tests.jobmaster.conftest import Cluster

from emberscale_api.rpc import master_pb2 as pb


def test_a_master_ends_when_it_is_told_but_not_before_its_job_is_over(cluster: Cluster) -> None:
    process = cluster.start_master_process()
    cluster.start_servers()
    operator = cluster.caller()
    with pytest.raises(grpc.RpcError) as refused:
        operator.stub.Shutdown(pb.ShutdownRequest(), timeout=60, wait_for_ready=True)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    cluster.start_worker(0, records=50)
    cluster.until_phase(pb.COMPLETE)
    operator.stub.Shutdown(pb.ShutdownRequest(), timeout=60)
    assert process.wait(timeout=60) == 0
