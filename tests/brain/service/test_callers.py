"""A job's token opens only the calls about the job."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from brain_process import BrainProcess
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import brain_pb2_grpc
from emberscale_api.rpc.token import JobClaims, job_token, open_channel
from emberscale_brain.service.server import problem_of

METHODS = pb.DESCRIPTOR.services_by_name["Brain"].methods
OF_ONE_JOB = [method for method in METHODS if "job_uid" in method.input_type.fields_by_name]


def outcome(call: Any, request: Any) -> grpc.StatusCode:
    try:
        call(request, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def request_for(method: Any, job_uid: str) -> Any:
    """Returns a request of a call, about the job if the call has one."""
    request = getattr(pb, method.input_type.name)()
    if "job_uid" in method.input_type.fields_by_name:
        request.job_uid = job_uid
    if "owner" in method.input_type.fields_by_name:
        request.owner = "ann"
    return request


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, submission: Callable[..., pb.SubmitJobRequest]) -> Iterator[str]:
    """A brain that knows two jobs; its key is `a-token`."""
    folder = tmp_path_factory.mktemp("brain")
    (folder / "token").write_text("a-token")
    settings = (f"database=sqlite:///{folder / 'brain.db'}", "cluster.cpu=100", "planning.interval=1h")
    brain = BrainProcess(folder / "token", folder / "log", settings)
    try:
        for job in ("mine", "theirs"):
            brain.stub.SubmitJob(submission(job), timeout=60)
        yield brain.address
    finally:
        brain.stop()


def test_another_jobs_calls_are_refused_whichever_they_are(address: str) -> None:
    assert {"SubmitJob", "GetPlan"} <= {method.name for method in METHODS}
    with open_channel(address, job_token("a-token", JobClaims("mine", "ann"))) as channel:
        stub = brain_pb2_grpc.BrainStub(channel)
        for method in METHODS:
            said = outcome(getattr(stub, method.name), request_for(method, "theirs"))
            assert said is grpc.StatusCode.PERMISSION_DENIED, method.name


def test_a_call_whose_request_names_no_job_is_closed_to_jobs() -> None:
    problem = problem_of(pb.Shape(), JobClaims("mine", "ann"))
    assert problem == "a job's token does not authorize this call, which concerns more than the job"


def test_a_job_does_what_is_its_own(address: str, submission: Callable[..., pb.SubmitJobRequest]) -> None:
    with open_channel(address, job_token("a-token", JobClaims("mine", "ann"))) as channel:
        stub = brain_pb2_grpc.BrainStub(channel)
        assert outcome(stub.SubmitJob, submission("mine")) is grpc.StatusCode.OK
        assert outcome(stub.GetPlan, pb.GetPlanRequest(job_uid="mine")) is grpc.StatusCode.OK
        assert "GetPlan" in [method.name for method in OF_ONE_JOB]
        for method in OF_ONE_JOB:
            said = outcome(getattr(stub, method.name), request_for(method, "mine"))
            assert said not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), method.name


def test_a_job_cannot_be_counted_against_the_quota_of_another_namespace(
    address: str, submission: Callable[..., pb.SubmitJobRequest]
) -> None:
    with open_channel(address, job_token("a-token", JobClaims("mine", "ann"))) as channel:
        stub = brain_pb2_grpc.BrainStub(channel)
        assert outcome(stub.SubmitJob, submission("mine", owner="bob")) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("token", ["", "job.", "job.e30.", job_token("another", JobClaims("mine", "ann"))])
def test_a_token_that_the_key_has_not_signed_opens_nothing(address: str, token: str) -> None:
    with open_channel(address, token) as channel:
        stub = brain_pb2_grpc.BrainStub(channel)
        assert len(METHODS) > 1
        for method in METHODS:
            said = outcome(getattr(stub, method.name), request_for(method, "mine"))
            assert said is grpc.StatusCode.UNAUTHENTICATED, method.name


@pytest.mark.parametrize(
    ("token", "refusal"),
    [
        ("a guess", grpc.StatusCode.UNAUTHENTICATED),
        (job_token("a-token", JobClaims("mine", "ann")), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_large_request_is_not_held(address: str, token: str, refusal: grpc.StatusCode) -> None:
    """One of a stranger is not read at all."""
    with open_channel(address, token) as channel:
        call = channel.unary_unary("/emberscale.v1alpha1.Brain/GetPlan", bytes, bytes)
        assert outcome(call, bytes(16 << 20)) is refusal
