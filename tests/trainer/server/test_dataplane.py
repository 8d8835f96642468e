"""The data plane against peers without the token, and in a system without free descriptors or buffers."""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from certificates import certificates
from emberscale_api.certificates import Certificates
from emberscale_api.wire import HEADER_BYTES, MAX_HELLO_BYTES, MAX_PAYLOAD_BYTES, Header, Hello, Kind, Status
from emberscale_trainer.server import dataplane
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.transport import listen
from eventually import eventually
from wire_client import WireClient

SECONDS = 60.0
MEGABYTE = 1 << 20
GARBAGE = b"GET / HTTP/1.1\r\nHost: ps\r\n\r\n".ljust(HEADER_BYTES)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    listener, address = listen(f"unix://{tmp_path}/ps.sock")
    with listener:
        DataPlane(listener, ServerState(), "secret", "i").start()
        yield address


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def dial(address: str, held: ExitStack) -> socket.socket:
    stream = held.enter_context(socket.socket(socket.AF_UNIX))
    stream.settimeout(SECONDS)
    stream.connect(address.removeprefix("unix://"))
    return stream


def answer(stream: socket.socket) -> tuple[Status, str]:
    """Returns the answer that comes before the server hangs up."""
    received = b""
    while data := stream.recv(4096):
        received += data
    header = Header.unpack(received)
    return Status(header.kind), received[HEADER_BYTES:].decode()


def frame(payload: bytes) -> bytes:
    return Header(Kind.HELLO, payload_bytes=len(payload)).pack() + payload


def drip(stream: socket.socket, data: bytes) -> None:
    """Sends one byte at a time."""
    for byte in data:
        stream.sendall(bytes([byte]))
        time.sleep(0.02)


def serving_threads() -> int:
    return sum(thread.name.startswith("connection") for thread in threading.enumerate())


@pytest.mark.parametrize("size", [MAX_HELLO_BYTES + 1, MAX_PAYLOAD_BYTES])
def test_a_stranger_cannot_have_memory_reserved(address: str, held: ExitStack, size: int) -> None:
    before = psutil.Process().memory_info().vms
    strangers = [dial(address, held) for _ in range(20)]
    for stream in strangers:
        stream.sendall(Header(Kind.HELLO, payload_bytes=size).pack())
    for stream in strangers:
        status, reason = answer(stream)
        assert status is Status.REFUSED
        assert "more than 4096" in reason
    grown = psutil.Process().memory_info().vms - before
    assert grown < 4096 * MEGABYTE  # room for stacks and arenas of 20 threads, not for 20 GiB of buffers


@pytest.mark.parametrize(
    "first",
    [
        GARBAGE,
        Header(Kind.PUSH, payload_bytes=0).pack(),
        Header(Kind.HELLO, payload_bytes=3).pack() + b"abc",
        frame(b"\0" * 9 + b"Secret"),
        frame(b"\0" * 8 + b"\x01\xff" + b"secret"),
    ],
    ids=["http", "no hello", "too short", "another token", "no text"],
)
def test_garbage_is_refused_and_hung_up_on(address: str, held: ExitStack, first: bytes) -> None:
    stream = dial(address, held)
    stream.sendall(first)
    assert answer(stream)[0] is Status.REFUSED


def test_who_means_another_process_is_told_to_look_where_that_one_is(address: str, held: ExitStack) -> None:
    stream = dial(address, held)
    stream.sendall(frame(Hello(1, "before", "secret").pack()))
    assert answer(stream)[0] is Status.REFRESH


def test_silent_and_slow_strangers_are_hung_up_on_in_time(
    address: str, held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane, "_STRANGER_SECONDS", 0.3)
    before = serving_threads()
    silent, slow = dial(address, held), dial(address, held)
    hello = frame(Hello(1, "i", "secret").pack())
    began = time.monotonic()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        drip(slow, hello * 20)
    assert time.monotonic() - began < SECONDS
    assert silent.recv(1) == b""
    eventually(lambda: serving_threads() <= before)


def test_a_crowd_of_silent_strangers_costs_little_and_keeps_nobody_out(address: str, held: ExitStack) -> None:
    WireClient(address).close()
    before, threads = psutil.Process().memory_info().rss, serving_threads()
    crowd = [dial(address, held) for _ in range(300)]
    for number in range(3):
        WireClient(address, session=number).close()
    eventually(lambda: serving_threads() - threads <= dataplane._MOST_STRANGERS + 3)
    grown = psutil.Process().memory_info().rss - before
    assert grown < len(crowd) * MEGABYTE / 4, f"{grown / len(crowd):.0f} bytes a peer"
    assert crowd[0].recv(1) == b"", "the first made way"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n" * 8], ids=["silent", "garbage"])
def test_an_hour_of_a_stranger_that_comes_again_and_again_costs_nothing_that_stays(
    address: str, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """The server hangs up after 5 s, so a stranger makes 720 connections in an hour.

    The process may also grow once for another reason, so only one of three hours must cost less than a megabyte: if
    every connection left something behind, each hour would cost more.
    """

    def stay(times: int) -> None:
        for _ in range(times):
            with socket.socket(socket.AF_UNIX) as stream, suppress(ConnectionError):  # the server may hang up at once
                stream.settimeout(SECONDS)
                stream.connect(address.removeprefix("unix://"))
                stream.sendall(sent)
                while stream.recv(4096):
                    pass

    monkeypatch.setattr(dataplane, "_STRANGER_SECONDS", 0.005)
    threads = serving_threads()
    stay(50)  # so that one-time allocations are made

    def hour() -> int:
        before = psutil.Process().memory_info().rss
        stay(3600 // 5)
        eventually(lambda: serving_threads() <= threads)
        return psutil.Process().memory_info().rss - before

    assert any(hour() < MEGABYTE for _ in range(3))


def test_a_stranger_that_comes_again_and_again_is_logged_ever_less(address: str, held: ExitStack) -> None:
    with capture_logs() as logs:
        for _ in range(100):
            with dial(address, held) as stream:
                stream.sendall(GARBAGE)
                answer(stream)
        dial(address, held).close()
        eventually(lambda: any(entry["event"] == "no_hello" for entry in logs), "another thing is told by itself")
    told = [entry for entry in logs if entry["event"] == "connection_refused"]
    assert [entry["attempts"] for entry in told] == [1, 2, 4, 8, 16, 32, 64]
    assert {entry["host"] for entry in told} == {"localhost"}


def test_each_host_is_logged_and_more_hosts_than_are_remembered_count_as_one(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane, "_MOST_HOSTS", 2)
    listener, address = listen("tcp://127.0.0.1:0")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i").start()
    port = int(address.rpartition(":")[2])
    with capture_logs() as logs:
        for number in [2, 3, 4, 5, 6, 2, 3]:
            with socket.create_connection(("127.0.0.1", port), SECONDS, (f"127.0.0.{number}", 0)) as stream:
                stream.sendall(GARBAGE)
                answer(stream)
    told = [(entry["host"], entry["attempts"]) for entry in logs]
    first = [("127.0.0.2", 1), ("127.0.0.3", 1), ("127.0.0.4", 1), ("127.0.0.5", 2)]
    assert told == [*first, ("127.0.0.2", 2), ("127.0.0.3", 2)]


def test_over_tls_strangers_are_no_dearer(held: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataplane, "_STRANGER_SECONDS", 0.3)
    ours: Certificates = certificates(tmp_path / "ours")
    listener, address = listen("tcp://127.0.0.1:0")
    held.callback(listener.close)
    before = serving_threads()
    DataPlane(listener, ServerState(), "secret", "i", ours.server_context).start()
    host, port = address.removeprefix("tcp://").split(":")
    silent = [held.enter_context(socket.create_connection((host, int(port)), SECONDS)) for _ in range(80)]
    garbage = held.enter_context(socket.create_connection((host, int(port)), SECONDS))
    garbage.sendall(os.urandom(100_000))
    for stream in silent:
        assert stream.recv(1) == b""
    eventually(lambda: serving_threads() <= before)


class FailingListener:
    """A listening socket whose first accepts fail, as they do without free descriptors or when a peer gives up."""

    def __init__(self, listener: socket.socket, errors: list[int]) -> None:
        self._listener = listener
        self._errors = errors

    def accept(self) -> tuple[socket.socket, object]:
        if self._errors:
            raise OSError(self._errors.pop(0), "refused by the test")
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()


def test_the_acceptor_survives_errors_that_pass(tmp_path: Path) -> None:
    listener, address = listen(f"unix://{tmp_path}/ps.sock")
    with listener:
        failing = FailingListener(listener, [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE, errno.ENOBUFS])
        DataPlane(failing, ServerState(), "secret", "i").start()  # type: ignore[arg-type]  # it has all that is used
        WireClient(address).close()
