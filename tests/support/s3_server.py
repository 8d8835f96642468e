"""A real S3 server (moto's, over HTTP) for tests, which can refuse, cut and delay requests, or go away."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from numpy.random import Generator
from werkzeug.serving import BaseWSGIServer, make_server

BUCKET = "checkpoints"


class Fault(StrEnum):
    """What goes wrong with a request."""

    BUSY = "503 without an effect"
    BROKEN = "500 without an effect"
    DROPPED = "the connection ends before the request has an effect"
    UNANSWERED = "the request has its effect, and the connection ends before the answer"
    CUT = "the connection ends in the middle of the answer"


_ERRORS = {Fault.BUSY: ("503 Slow Down", b"SlowDown"), Fault.BROKEN: ("500 Internal Error", b"InternalError")}


@dataclass
class Faults:
    """`choose(method, path)` returns the fault of a request, or None."""

    choose: Callable[[str, str], Fault | None] = lambda method, path: None
    seen: list[Fault] = field(default_factory=list)
    requests: int = 0

    def at_random(self, random: Generator, share: float) -> None:
        """Gives this share of the requests a random fault."""
        kinds = list(Fault)

        def choose(method: str, path: str) -> Fault | None:
            return kinds[random.integers(len(kinds))] if random.random() < share else None

        self.choose = choose

    def after(self, requests: int) -> None:
        """Carries out this many more requests, and none after them."""
        last = self.requests + requests
        self.choose = lambda method, path: Fault.DROPPED if self.requests > last else None

    def none(self) -> None:
        """Ends all faults."""
        self.choose = lambda method, path: None


class S3Server:
    """Listens on a port of this machine; its objects survive while it is away."""

    def __init__(self) -> None:
        self.faults = Faults()
        self._turn = threading.Lock()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = self._listen(0)
        self._port = self._server.port

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self._port}"

    def _listen(self, port: int) -> BaseWSGIServer:
        server = make_server("127.0.0.1", port, self._serve, threaded=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    def go_away(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()

    def come_back(self) -> None:
        """Listens again on the same port."""
        self._server = self._listen(self._port)

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._turn:
            self.faults.requests += 1
            fault = self.faults.choose(method, path)
            if fault is not None:
                self.faults.seen.append(fault)
        connection: socket.socket = environ["werkzeug.socket"]
        if fault is Fault.DROPPED:
            return _ended(connection)
        if fault in _ERRORS:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, code = _ERRORS[fault]
            start_response(status, [("Content-Type", "application/xml")])
            body = b"<?xml version='1.0'?><Error><Code>" + code + b"</Code><Message>no</Message></Error>"
            return [] if method == "HEAD" else [body]
        answer: Iterable[bytes] = self._application(environ, start_response)
        if fault is Fault.UNANSWERED:
            list(answer)
            return _ended(connection)
        return _half(list(answer), connection) if fault is Fault.CUT else answer


def _ended(connection: socket.socket) -> list[bytes]:
    connection.shutdown(socket.SHUT_RDWR)
    return []


def _half(answer: list[bytes], connection: socket.socket) -> Iterator[bytes]:
    content = b"".join(answer)
    yield content[: len(content) // 2]
    connection.shutdown(socket.SHUT_RDWR)
