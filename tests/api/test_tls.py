"""gRPC with TLS, without, and between both: which calls get through, and the errors of the others."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from certificates import certificates
from emberscale_api.certificates import Certificates
from emberscale_api.rpc import tls
from emberscale_api.rpc.token import CHANNEL_OPTIONS, TokenCheck, open_channel
from emberscale_brain.service.server import CallerCheck

TOKEN = "secret"
SECONDS = 60.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls") / "theirs")


def same(request: bytes, context: object) -> bytes:
    return request


async def same_soon(request: bytes, context: object) -> bytes:
    return request


def echo(answer: Callable[..., Any]) -> Any:
    handler = grpc.unary_unary_rpc_method_handler(answer)
    return grpc.method_handlers_generic_handler("test.Echo", {"Say": handler})


@contextmanager
def threaded_server(shown: Certificates | None) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), interceptors=[TokenCheck(TOKEN)])
    server.add_generic_rpc_handlers((echo(same),))
    port = tls.bind(server, "127.0.0.1:0", shown)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def asyncio_server(shown: Certificates | None) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=[CallerCheck(TOKEN)])
        server.add_generic_rpc_handlers((echo(same_soon),))
        port = tls.bind(server, "127.0.0.1:0", shown)
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(SECONDS)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def say(address: str, authority: bytes | None, token: str = TOKEN) -> bytes:
    with open_channel(address, token, authority) as channel:
        answer: bytes = channel.unary_unary("/test.Echo/Say", None, None)(b"hello", timeout=SECONDS)
        return answer


def refusal(address: str, authority: bytes | None, token: str = TOKEN) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        say(address, authority, token)
    return raised.value.code(), raised.value.details() or ""


def problem(address: str, authority: bytes | None) -> str | None:
    """Returns the problem that both the blocking and the asynchronous check report."""
    said = tls.handshake_problem(address, authority, "SETTING")
    assert asyncio.run(tls.handshake_problem_async(address, authority, "SETTING")) == said
    return said


@pytest.mark.parametrize("serve", [threaded_server, asyncio_server])
@pytest.mark.parametrize("secure", [True, False])
def test_those_of_one_mind_talk_and_still_need_the_token(serve: Any, secure: bool, ours: Certificates) -> None:
    authority = ours.authority if secure else None
    with serve(ours if secure else None) as address:
        assert say(address, authority) == b"hello"
        assert refusal(address, authority, "another")[0] is grpc.StatusCode.UNAUTHENTICATED
        assert problem(address, authority) is None


@pytest.mark.parametrize("serve", [threaded_server, asyncio_server])
def test_a_server_of_another_authority_is_not_talked_to(serve: Any, ours: Certificates, theirs: Certificates) -> None:
    with serve(theirs) as address:
        code, words = refusal(address, ours.authority)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "CERTIFICATE_VERIFY_FAILED" in words
        said = problem(address, ours.authority)
    assert said == f"{address} presents a certificate that SETTING does not verify: self-signed certificate"


@pytest.mark.parametrize("serve", [threaded_server, asyncio_server])
def test_a_plain_client_is_refused_by_a_server_with_tls_and_can_be_told_why(serve: Any, ours: Certificates) -> None:
    with serve(ours) as address:
        assert refusal(address, None)[0] is grpc.StatusCode.UNAVAILABLE
        assert problem(address, None) == f"{address} requires TLS, but SETTING is not set"


@pytest.mark.parametrize("serve", [threaded_server, asyncio_server])
def test_a_client_with_tls_sends_a_plain_server_nothing_and_can_be_told_why(serve: Any, ours: Certificates) -> None:
    with serve(None) as address:
        assert refusal(address, ours.authority)[0] is grpc.StatusCode.UNAVAILABLE
        said = problem(address, ours.authority) or ""
    assert said.startswith(f"{address} has no TLS, but SETTING asks for it")


def test_a_client_on_asyncio_verifies_as_the_others_do(ours: Certificates, theirs: Certificates) -> None:
    async def ask(address: str, authority: bytes | None) -> Any:
        async with tls.connect_async(address, authority, CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary("/test.Echo/Say", None, None)
            return await call(b"hello", metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=SECONDS)

    with threaded_server(ours) as address:
        assert asyncio.run(ask(address, ours.authority)) == b"hello"
        for authority in (theirs.authority, None):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                asyncio.run(ask(address, authority))
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    with threaded_server(None) as address:
        assert asyncio.run(ask(address, None)) == b"hello"


def test_old_versions_of_tls_are_not_spoken_on_sockets(ours: Certificates) -> None:
    for context in (ours.server_context, ours.client_context):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_who_is_away_has_no_problem_with_tls(ours: Certificates) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert problem(address, ours.authority) is None
        assert problem(address, None) is None


def test_who_says_nothing_is_given_up_in_time(
    ours: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tls, "_PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert problem(f"127.0.0.1:{silent.getsockname()[1]}", ours.authority) is None
