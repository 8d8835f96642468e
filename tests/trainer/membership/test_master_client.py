"""A member that cannot reach its master: how long it tries, and what it reports."""

import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from certificates import certificates
from emberscale_api.certificates import Certificates
from emberscale_api.rpc import master_pb2, master_pb2_grpc, tls
from emberscale_api.rpc.token import TokenCheck
from emberscale_trainer.membership import JobOverError, MasterClient, NoHandshakeError
from identities import identity_of


@contextmanager
def master(shown: Certificates | None, token: str = "") -> Iterator[str]:
    """A server without methods: a caller that gets through is answered UNIMPLEMENTED."""
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[TokenCheck(token)] if token else [])
    port = tls.bind(server, "127.0.0.1:0", shown)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def member(address: str, given: Certificates | None) -> MasterClient:
    return MasterClient(identity_of("ps", address, certificates=given))


@pytest.mark.parametrize("secure", [True, False])
def test_a_member_and_a_master_of_one_mind_talk(tmp_path: Path, secure: bool) -> None:
    shown = certificates(tmp_path / "tls") if secure else None
    with master(shown) as address, pytest.raises(grpc.RpcError) as raised:
        member(address, shown).register()
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_member_without_certificates_is_told_that_its_master_has_some(tmp_path: Path) -> None:
    with master(certificates(tmp_path / "tls")) as address, pytest.raises(NoHandshakeError) as raised:
        member(address, None).register()
    assert str(raised.value) == f"the master at {address} requires TLS, but EMBERSCALE_TLS_FOLDER is not set"


def test_a_member_with_certificates_is_told_that_its_master_has_none(tmp_path: Path) -> None:
    with master(None) as address, pytest.raises(NoHandshakeError, match="has no TLS, but EMBERSCALE_TLS_FOLDER"):
        member(address, certificates(tmp_path / "tls")).register()


def test_a_member_is_told_that_its_master_is_of_another_authority(tmp_path: Path) -> None:
    with (
        master(certificates(tmp_path / "theirs")) as address,
        pytest.raises(NoHandshakeError, match="a certificate that EMBERSCALE_TLS_FOLDER does not verify"),
    ):
        member(address, certificates(tmp_path / "ours")).register()


def test_a_member_is_told_that_its_master_has_another_token() -> None:
    """A node may still mount a Secret that was deleted, so this is no fault of the job."""
    with master(None, token="another") as address, pytest.raises(NoHandshakeError) as raised:
        member(address, None).register()
    assert str(raised.value) == f"the master at {address} refuses: the call carries no valid token of this job"


def test_a_member_that_is_told_to_end_waits_for_its_master_no_longer() -> None:
    stopping = threading.Event()
    threading.Timer(0.3, stopping.set).start()
    with pytest.raises(JobOverError):
        member("127.0.0.1:1", None).register(stopping=stopping)


class Drains(master_pb2_grpc.MasterServicer):
    """Answers drains from a list: whether the server may go, or the code of a refusal."""

    def __init__(self, *answers: bool | grpc.StatusCode) -> None:
        self.answers = deque(answers)

    def Drain(self, request: master_pb2.DrainRequest, context: grpc.ServicerContext) -> master_pb2.DrainReply:
        assert (request.index, request.incarnation) == (0, "1")
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "refused")
        return master_pb2.DrainReply(may_go=answer)


@pytest.mark.parametrize(
    ("answers", "goes"),
    [
        ([True], True),
        ([False, False, True], True),
        ([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, True], True),
        ([grpc.StatusCode.FAILED_PRECONDITION, True], False),
    ],
)
def test_a_server_that_is_told_to_end_asks_until_it_may_go(answers: list[bool | grpc.StatusCode], goes: bool) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    port = tls.bind(server, "127.0.0.1:0", None)
    master_pb2_grpc.add_MasterServicer_to_server(Drains(*answers), server)  # type: ignore[abstract]  # one call
    server.start()
    assert member(f"127.0.0.1:{port}", None).leave(600) is goes
    server.stop(None).wait()


def test_a_server_waits_for_a_master_that_is_away_for_a_part_of_its_time_only() -> None:
    assert not member("127.0.0.1:1", None).leave(2)


class Closing:
    """A method of the master; the member is told to end just before the call."""

    def __init__(self, client: MasterClient) -> None:
        self._client = client

    def future(self, request: Any, timeout: float) -> Any:
        self._client.close()
        return self._client.stub.Register.future(request, timeout=timeout)


def test_a_member_that_is_told_to_end_between_two_steps_of_a_call_ends_without_an_error() -> None:
    client = member("127.0.0.1:1", None)
    with pytest.raises(JobOverError):
        client.call(cast(Any, Closing(client)), master_pb2.RegisterRequest(member=client.member))


def test_a_call_ends_once_the_member_is_told_to_end_though_its_master_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = member(f"127.0.0.1:{silent.getsockname()[1]}", None)
        threading.Timer(0.3, client.close).start()
        with pytest.raises(JobOverError):
            client.call(client.stub.Register, master_pb2.RegisterRequest(member=client.member), waits=600)
