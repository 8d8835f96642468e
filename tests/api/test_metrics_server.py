"""The server of metrics answers whoever asks, and strangers that hold its connections take little of the process."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from emberscale_api.metrics_server import start_metrics_server
from eventually import eventually


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("emberscale_one", "One", registry=registry).set(1)
    server = start_metrics_server(0, "127.0.0.1", registry)
    yield server.server_port
    server.shutdown()
    server.server_close()


def ask(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        return str(reply.read().decode())


def test_metrics_are_served(port: int) -> None:
    assert "emberscale_one 1.0" in ask(port)


@pytest.mark.parametrize("accept", ["text/plain; version=new", "application/openmetrics-text; version=1.x"])
def test_who_asks_for_a_format_that_makes_no_sense_gets_the_usual_one(
    port: int, accept: str, capfd: pytest.CaptureFixture[str]
) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert "emberscale_one 1.0" in reply.read().decode()
    assert capfd.readouterr().err == "", "strangers do not fill the log"


def test_connections_that_are_held_take_few_threads_and_hold_up_nobody(port: int) -> None:
    before = threading.active_count()
    with ExitStack() as held:
        for _ in range(100):
            stranger = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            stranger.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert "emberscale_one 1.0" in ask(port)
        eventually(lambda: threading.active_count() - before <= 40, "threads of closed connections end")
    eventually(lambda: threading.active_count() - before <= 0, "all threads end")


def test_a_port_that_is_taken_is_told(port: int) -> None:
    with pytest.raises(OSError, match="in use"):
        start_metrics_server(port, "127.0.0.1", CollectorRegistry())


def test_an_address_of_ipv6_is_served() -> None:
    try:
        server = start_metrics_server(0, "::1", CollectorRegistry())
    except OSError:
        pytest.skip("there is no IPv6 here")
    assert server.server_port
    server.shutdown()
    server.server_close()
