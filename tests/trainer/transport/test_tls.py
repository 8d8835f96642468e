"""Frames over TLS: what arrives, which peers are let in, and that a silent peer keeps nobody waiting for ever."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from certificates import certificates
from emberscale_api.certificates import Certificates
from emberscale_api.wire import Header, Hello, Kind, Status
from emberscale_trainer.server import dataplane
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import Connection, ConnectionLostError, accept_connection, listen, open_connection

SECONDS = 60.0
GREETING = Hello(0, "i", "secret").pack()
HELLO = Header(Kind.HELLO, payload_bytes=len(GREETING))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """Resources that are closed after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ends(ours: Certificates, held: ExitStack) -> tuple[Connection, Connection]:
    """The client's and the server's end of a connection."""
    listener, address = listen("tcp://127.0.0.1:0")
    with listener, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(accept, listener, ours)
        client = open_connection(address, ours.client_context, SECONDS)
        server = accepted.result(SECONDS)
    held.callback(client.close)
    held.callback(server.close)
    return client, server


@pytest.fixture
def server(ours: Certificates, held: ExitStack) -> str:
    """The address of a data plane with certificates; the job's token is `secret`."""
    listener, address = listen("tcp://127.0.0.1:0")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i", ours.server_context).start()
    return address


def accept(listener: socket.socket, ours: Certificates) -> Connection:
    """Accepts the next connection; returns the server's end after the handshake."""
    connection = accept_connection(listener.accept()[0], ours.server_context)
    connection.handshake(SECONDS)
    connection.trust()
    return connection


def greet(connection: Connection) -> int:
    """Sends HELLO; returns the status of the answer."""
    connection.send(HELLO, [GREETING])
    return connection.receive_header().kind


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [16_383], [16_384], [5, 16_328, 16_384, 0, 3], [1 << 20, 7, (1 << 20) + 3], [48 << 20]],
    ids=["none", "one", "below-a-record", "a-record", "mixed", "large", "very-large"],
)
def test_frames_arrive_as_they_were_sent_in_both_directions(
    ends: tuple[Connection, Connection], sizes: list[int]
) -> None:
    random = np.random.default_rng(1)
    parts = [random.integers(0, 256, size, np.uint8) for size in sizes]
    header = Header(Kind.PUSH, batch=7, payload_bytes=sum(sizes))
    with ThreadPoolExecutor(1) as thread:
        for sender, receiver in (ends, ends[::-1], ends):
            sent = thread.submit(sender.send, header, parts)
            received, payload = receiver.receive()
            sent.result(SECONDS)
            assert received == header
            np.testing.assert_array_equal(payload, np.concatenate([np.empty(0, np.uint8), *parts]))
    client, server = ends
    assert client.sent_bytes == server.received_bytes
    assert client.received_bytes == server.sent_bytes


def test_what_travels_is_encrypted(ours: Certificates) -> None:
    listener, address = listen("tcp://127.0.0.1:0")
    seen = bytearray()

    def relay(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # either end may close first
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)

    with listener, socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(4) as threads:
        host, port = address.removeprefix("tcp://").split(":")

        def middle() -> None:
            with proxy.accept()[0] as inner, socket.create_connection((host, int(port))) as outer:
                back = threads.submit(relay, outer, inner)
                relay(inner, outer)
                back.result(SECONDS)

        between = threads.submit(middle)
        accepted = threads.submit(accept, listener, ours)
        client = open_connection(f"tcp://127.0.0.1:{proxy.getsockname()[1]}", ours.client_context, SECONDS)
        server = accepted.result(SECONDS)
        client.send(HELLO, [GREETING])
        assert server.receive()[1].tobytes() == GREETING
        client.close()
        server.close()
        between.result(SECONDS)
    assert len(seen) > 500
    assert b"secret" not in seen


def test_a_peer_that_goes_in_the_middle_of_a_frame_is_noticed(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    client.send(Header(Kind.PUSH, payload_bytes=100), [b"x" * 50])
    client.close()
    with pytest.raises(ConnectionLostError):
        server.receive()
    with pytest.raises(ConnectionLostError):
        server.send(Header(Status.OK, payload_bytes=64 << 20), [bytes(64 << 20)])


def test_closing_an_end_wakes_the_thread_that_waits_on_it(ends: tuple[Connection, Connection]) -> None:
    client, _ = ends
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        client.receive()

    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        assert begun.wait(SECONDS)
        client.close()
        with pytest.raises(ConnectionLostError):
            waiting.result(SECONDS)


def test_a_data_plane_with_certificates_lets_in_who_knows_the_token(server: str, ours: Certificates) -> None:
    assert greet(open_connection(server, ours.client_context, SECONDS)) == Status.OK
    stranger = open_connection(server, ours.client_context, SECONDS)
    stranger.send(HELLO, [GREETING.replace(b"secret", b"guess!")])
    assert stranger.receive_header().kind == Status.REFUSED


def test_a_data_plane_of_another_authority_is_not_told_the_token(server: str, theirs: Certificates) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        open_connection(server, theirs.client_context, SECONDS)


def test_a_client_without_tls_is_turned_away(server: str, ours: Certificates) -> None:
    with pytest.raises(ConnectionLostError):
        greet(open_connection(server, None, SECONDS))
    assert greet(open_connection(server, ours.client_context, SECONDS)) == Status.OK


def test_a_client_with_tls_says_that_the_server_has_none(ours: Certificates, held: ExitStack) -> None:
    listener, address = listen("tcp://127.0.0.1:0")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i").start()
    with pytest.raises(ssl.SSLError, match="WRONG_VERSION_NUMBER"):
        open_connection(address, ours.client_context, SECONDS)
    assert greet(open_connection(address, None, SECONDS)) == Status.OK


def test_a_unix_socket_stays_plain(ours: Certificates, held: ExitStack, tmp_path: Path) -> None:
    listener, address = listen(f"unix://{tmp_path}/ps.sock")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i", ours.server_context).start()
    for context in (ours.client_context, None):
        connection = open_connection(address, context, SECONDS)
        assert type(connection) is Connection
        assert greet(connection) == Status.OK


def test_a_peer_that_dies_in_the_handshake_holds_up_nobody(server: str, ours: Certificates) -> None:
    host, port = server.removeprefix("tcp://").split(":")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ours.client_context.wrap_bio(incoming, outgoing, server_hostname="emberscale")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    with socket.create_connection((host, int(port))) as dying:
        dying.sendall(outgoing.read()[:100])
    assert greet(open_connection(server, ours.client_context, SECONDS)) == Status.OK


def test_a_peer_that_says_nothing_holds_up_nobody_and_is_hung_up_on(
    server: str, ours: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane, "_STRANGER_SECONDS", 3.0)
    host, port = server.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as silent:
        assert greet(open_connection(server, ours.client_context, SECONDS)) == Status.OK
        silent.settimeout(SECONDS)
        assert silent.recv(1) == b""


def test_a_server_that_says_nothing_is_given_up_in_time(ours: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            open_connection(f"tcp://127.0.0.1:{silent.getsockname()[1]}", ours.client_context, 0.3)
        assert time.monotonic() - begun < SECONDS
