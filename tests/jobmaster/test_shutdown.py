import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.driven import Driven

from emberscale_api.frozen import replace
from emberscale_api.job.roles import Role
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.events import HeartbeatReceived
from emberscale_jobmaster.status import job_status


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


def test_a_server_that_is_replaced_after_the_jobs_end_hides_no_rows() -> None:
    driven = Driven(servers=1)
    driven.start()
    driven.train_all()
    driven.pass_time(5)
    served = driven.state.seen.sightings["ps-0"].server
    assert served is not None
    last = replace(served, rows={"C1": 7})
    driven.tell(HeartbeatReceived(now=driven.now, member=driven.ps[0].member, served=last))
    assert driven.job.over

    late = driven.join(Role.PS, 0)
    driven.tell(HeartbeatReceived(now=driven.now, member=late, served=replace(served, rows={"C1": 0})))
    assert dict(job_status(driven.job, driven.state.seen, driven.spec, driven.now).rows) == {"C1": 7}
