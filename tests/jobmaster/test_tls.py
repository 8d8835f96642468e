"""A master with certificates, and a brain with another authority."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.jobmaster.conftest import Cluster
from tests.jobmaster.small_job import TOKEN

from brain_process import BrainProcess
from certificates import certificate_folder
from emberscale_api import environment
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc
from emberscale_api.rpc.token import open_channel
from eventually import eventually


@pytest.fixture
def brain(tmp_path: Path) -> Iterator[BrainProcess]:
    token = tmp_path / "brain-token"
    token.write_text(TOKEN)
    database = f"database=sqlite:///{tmp_path / 'brain.db'}"
    process = BrainProcess(token, tmp_path / "brain.log", [database], certificate_folder(tmp_path / "brain-tls"))
    yield process
    process.stop()


def start_master(cluster: Cluster, brain: BrainProcess, **variables: str) -> bytes:
    """Starts a master with its own certificates; returns the authority that signed them."""
    folder = certificate_folder(cluster.folder / "job-tls")
    cluster.variables = {
        environment.TLS_FOLDER: str(folder),
        environment.BRAIN_ADDRESS: brain.address,
        environment.BRAIN_TOKEN: TOKEN,
        **variables,
    }
    cluster.start_master_process()
    return (folder / "ca.crt").read_bytes()


def test_a_master_shows_its_jobs_certificate_and_believes_that_of_the_brain(
    cluster: Cluster, brain: BrainProcess, tmp_path: Path
) -> None:
    brain_authority = (tmp_path / "brain-tls" / "ca.crt").read_text()
    authority = start_master(cluster, brain, **{environment.BRAIN_CA: brain_authority})
    with open_channel(cluster.address, TOKEN, authority) as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        assert stub.GetStatus(pb.GetStatusRequest(), timeout=60, wait_for_ready=True).phase == pb.PENDING
    with open_channel(cluster.address, TOKEN) as plain, pytest.raises(grpc.RpcError) as refused:
        master_pb2_grpc.MasterStub(plain).GetStatus(pb.GetStatusRequest(), timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: brain.knows(cluster.uid), "the brain knows the job")


def test_a_master_without_the_brains_authority_goes_on_and_says_why_it_has_no_brain(
    cluster: Cluster, brain: BrainProcess
) -> None:
    start_master(cluster, brain)
    log = cluster.folder / "master.log"
    said = f"{brain.address} requires TLS, but {environment.BRAIN_CA} is not set"
    eventually(lambda: said in log.read_text(), "the reason")
    assert cluster.master_process.poll() is None


def test_a_master_with_an_authority_of_the_brain_that_is_of_no_use_ends_with_that_line(
    cluster: Cluster, brain: BrainProcess
) -> None:
    start_master(cluster, brain, **{environment.BRAIN_CA: "not PEM"})
    assert cluster.master_process.wait(timeout=60) == environment.UNUSABLE_EXIT_CODE
    said = (cluster.folder / "master.log").read_text()
    assert f"{environment.BRAIN_CA}: contains no PEM certificate" in said
