"""Processes exchange their versions, and learn if they cannot work together."""

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from structlog.testing import capture_logs

from emberscale_api import compatibility
from emberscale_api.compatibility import LINK_VERSION, VERSION, version_problem
from emberscale_api.rpc import token as token_module
from emberscale_api.rpc.token import CallerVersions, TokenCheck, call_metadata, open_channel
from emberscale_api.wire import HEADER_BYTES, Header, Kind, WireError


@pytest.mark.parametrize("spoken", ["", f"{LINK_VERSION}/{VERSION}", f"{LINK_VERSION}/99.1", str(LINK_VERSION)])
def test_neighbours_work_together(spoken: str) -> None:
    assert version_problem(spoken) is None


def test_a_version_that_is_too_far_is_told_what_to_do() -> None:
    problem = version_problem(f"{LINK_VERSION + 1}/99.1")
    assert problem is not None
    assert VERSION in problem
    assert "99.1" in problem
    assert "one image" in problem


@pytest.fixture
def address() -> Iterator[str]:
    """A server that echoes every call."""
    handler = grpc.method_handlers_generic_handler(
        "test.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}
    )
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[TokenCheck("secret")])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_every_call_says_the_version_of_its_sender() -> None:
    assert dict(call_metadata("secret"))["emberscale-version"] == f"{LINK_VERSION}/{VERSION}"


def test_a_call_of_another_link_version_is_refused_with_the_reason(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_channel(address, "secret") as channel:
        assert channel.unary_unary("/test.Echo/Echo", bytes, bytes)(b"hello", timeout=60) == b"hello"
    monkeypatch.setattr(token_module, "spoken_version", lambda: f"{LINK_VERSION + 1}/99.1")
    with open_channel(address, "secret") as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/test.Echo/Echo", bytes, bytes)(b"hello", timeout=60)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "99.1" in (refused.value.details() or "")
    assert compatibility.VERSION in (refused.value.details() or "")


def test_a_caller_with_ever_other_versions_fills_neither_memory_nor_log() -> None:
    versions = CallerVersions()
    with capture_logs() as told:
        for number in range(1000):
            metadata = (("emberscale-version", f"{LINK_VERSION}/{number}{'x' * 4096}"),)
            assert versions.problem(SimpleNamespace(invocation_metadata=metadata)) is None
    assert 0 < len(told) <= 16
    assert len(str(told)) < 8192
    assert len(pickle.dumps(versions)) < 8192


def test_a_frame_of_another_version_is_refused_with_the_reason() -> None:
    frame = bytearray(Header(Kind.HELLO).pack())
    assert Header.unpack(frame).kind == Kind.HELLO
    frame[4] += 1
    with pytest.raises(WireError, match="one image"):
        Header.unpack(frame)
    with pytest.raises(WireError, match="not a frame"):
        Header.unpack(bytes(HEADER_BYTES))
